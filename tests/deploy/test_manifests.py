"""The shipped manifests: valid, complete, least privileged, and with the code's names."""

import importlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from atoll.api import names
from atoll.cluster.pods import ENDED_BY_KUBELET
from atoll.service import settings
from controllers.page.authorization import PATH as PAGE_PATH
from devcluster import rights
from devcluster.installation import LAST_POLICY
from tests.deploy.api_server import DEPLOY, REPOSITORY, manifests
from tests.kubernetes_schemas import validate

ROLE_KINDS = {"Role", "ClusterRole"}
CONFIGURATIONS = ("scheduler/config.yaml", "scheduler/config-tainted-nodes.yaml")
FILES = sorted(
    str(path.relative_to(DEPLOY))
    for path in DEPLOY.rglob("*.yaml")
    if not any(path.is_relative_to(DEPLOY / folder) for folder in ("chart", "kind", "monitoring"))
    and path.name != "kustomization.yaml"
)
OBJECT_FILES = [file for file in FILES if file not in CONFIGURATIONS]
SERVICE_ACCOUNTS = {f"atoll-{part}" for part in ("scheduler", "webhook", "agent", "controllers")}
POD_OWNERS = {
    (manifest["kind"], manifest["metadata"]["name"]): manifest["spec"]["template"]["spec"]
    for manifest in manifests("*.yaml", "scheduler/deployment.yaml")
    if manifest["kind"] in {"Deployment", "DaemonSet"}
}
NO_SCHEMA = {"CustomResourceDefinition"}
"""Kinds that tests/api checks."""


DOORS = {"atoll-auditor": {"/debug/ledger", "/debug/snapshot"}, "atoll-page-viewer": {PAGE_PATH}}
"""What a role opens that is no object."""


def load(file: str) -> list[dict[str, Any]]:
    """Return the documents of a file under deploy/."""
    return list(yaml.safe_load_all((DEPLOY / file).read_text(encoding="utf-8")))


def rules() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every rule of every role with the role's name."""
    for role in manifests("rbac/**/*.yaml"):
        if role["kind"] in ROLE_KINDS:
            for rule in role["rules"]:
                yield role["metadata"]["name"], rule


@pytest.mark.parametrize("version", ["1.35", "1.37"])
@pytest.mark.parametrize("file", OBJECT_FILES)
def test_manifests_obey_the_published_schemas(file: str, version: str) -> None:
    """Each document is valid, unknown fields included, for the oldest and the newest supported Kubernetes."""
    for manifest in load(file):
        if manifest["kind"] not in NO_SCHEMA:
            validate(manifest, version, strict=True)


def test_kustomization_lists_every_manifest_in_order() -> None:
    """Nothing is forgotten or listed in vain; namespaces, CRDs, roles and policies come before the parts."""
    kustomization = load("kustomization.yaml")[0]
    listed = kustomization["resources"]
    optional = [file for file in FILES if file.startswith(("policies/optional/", "rbac/optional/"))]
    assert sorted(listed) == sorted(set(OBJECT_FILES) - set(optional))
    assert listed[0] == "namespaces.yaml"
    first_part = min(listed.index(file) for file in listed if any(d["kind"] == "Deployment" for d in load(file)))
    before = [file for file in listed if file.startswith(("crds/", "rbac/", "policies/"))]
    assert max(listed.index(file) for file in before) < first_part
    (last, _) = load([file for file in listed if file.startswith("policies/")][-1])
    assert last["metadata"]["name"] == LAST_POLICY
    assert f"`{LAST_POLICY}`" in (REPOSITORY / "docs" / "install.md").read_text()


def test_roles_have_no_wildcards() -> None:
    """Every verb, resource and group of every role is spelled out."""
    for role, rule in rules():
        urls = set(rule.get("nonResourceURLs", ()))
        assert "*" not in {*rule.get("apiGroups", ()), *rule.get("resources", ()), *rule["verbs"], *urls}, role
        assert urls <= DOORS.get(role, set()), role


def test_no_role_leads_to_another_identity() -> None:
    """Nobody of Atoll or its users acts as somebody else, asks for others' tokens, or gives himself more rights."""
    for role, rule in rules():
        assert not {"impersonate", "bind", "escalate", "approve", "sign"} & set(rule["verbs"]), role
        assert not {"serviceaccounts/token", "pods/exec", "pods/attach"} & set(rule.get("resources", ())), role


def test_no_rule_stands_twice() -> None:
    """Each verb on each resource is granted by one rule of a role: without the rule the right is gone."""
    granted = [
        (role, group, resource, verb, name)
        for role, rule in rules()
        for group in rule.get("apiGroups", ("",))
        for resource in rule.get("resources", rule.get("nonResourceURLs", ()))
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", ("",))
    ]
    assert len(granted) == len(set(granted))


def test_no_right_outlives_its_use() -> None:
    """docs/rights.md has every verb of every role of a part, with a function that needs it, as the code is now."""
    assert rights.PAGE.read_text(encoding="utf-8") == rights.rendered(rights.grants())


def test_a_right_that_no_function_needs_is_refused() -> None:
    """The page cannot be written."""
    unneeded = rights.Grant("atoll-agent", "secrets", "list")
    with pytest.raises(rights.UnneededRight, match="atoll-agent may list secrets"):
        rights.rendered([unneeded])


def test_a_function_needs_the_verbs_that_it_sends_to_a_path(tmp_path: Path) -> None:
    """Directly, by a variable, in a loop, through a wrapper and a helper; what only looks like a verb is none."""
    code = """
from atoll.kube import paths
PATH = paths.nodes("n")
TABLE = {("batch", "Job"): Suspendable("jobs"), ("apps", "StatefulSet"): "statefulsets"}
def lease(name):
    return paths.leases("ns", name)
class Part:
    async def read(self, path):
        return await self.client.get(path)
    async def work(self, known):
        await self.client.patch(paths.pods("ns", "p", "status"), known.get("pods"))
        await self.read(PATH)
        path = lease("a")
        await self.client.delete(path)
        for each in (paths.secrets("ns", "s"), paths.gpuclaims("ns", "c")):
            await self.client.create(each, list(known))
"""
    (tmp_path / "part.py").write_text(code)

    found = {(use.function, use.resource, use.verb) for use in rights.uses(tmp_path, root=tmp_path)}

    assert found == {
        ("Part.work", "pods/status", "patch"),
        ("Part.work", "nodes", "get"),
        ("Part.work", "leases.coordination.k8s.io", "delete"),
        ("Part.work", "secrets", "create"),
        ("Part.work", "gpuclaims.gpu.scheduling", "create"),
        ("Suspendable(jobs)", "jobs.batch", "get"),
        ("Suspendable(jobs)", "jobs.batch", "list"),
        ("Suspendable(jobs)", "jobs.batch", "patch"),
        ("statefulsets", "statefulsets.apps", "get"),
    }


def test_every_rule_says_why() -> None:
    """A comment stands right above each rule, or above the rule that it continues."""
    for path in sorted((DEPLOY / "rbac").rglob("*.yaml")):
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines):
            if line.startswith(("  - apiGroups:", "  - nonResourceURLs:")):
                assert lines[number - 1].startswith(("  #", "    verbs:")), f"{path.name}:{number + 1}"


def test_secrets_are_named_except_where_that_is_impossible() -> None:
    """Secrets are read by name; only create, which no role can name, is open, and only to the controllers."""
    for role, rule in rules():
        if "secrets" in rule.get("resources", ()):
            named = set(rule.get("resourceNames", ()))
            assert named <= {names.WEBHOOK_SECRET, names.AUTHORITY_SECRET}, role
            assert named or (rule["verbs"], role) == (["create"], "atoll-controllers-certificates")


def test_bindings_lead_from_a_role_of_ours_or_of_kubernetes_to_a_part() -> None:
    """Every role that a binding names exists, every subject is one of the four ServiceAccounts, nobody is unbound."""
    known = {
        (role["kind"], role["metadata"]["name"]) for role in manifests("rbac/**/*.yaml") if role["kind"] in ROLE_KINDS
    }
    builtin = {
        ("ClusterRole", "system:kube-scheduler"),
        ("ClusterRole", "system:volume-scheduler"),
        ("Role", "extension-apiserver-authentication-reader"),
    }
    subjects = set()
    for binding in manifests("rbac/**/*.yaml"):
        if binding["kind"] in {"RoleBinding", "ClusterRoleBinding"}:
            assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) in known | builtin
            subjects |= {(subject["kind"], subject["namespace"], subject["name"]) for subject in binding["subjects"]}
    homes = dict.fromkeys(SERVICE_ACCOUNTS, names.SYSTEM_NAMESPACE)
    homes["atoll-agent"] = names.HEARTBEAT_NAMESPACE
    assert subjects == {("ServiceAccount", namespace, account) for account, namespace in homes.items()}


def test_only_the_agents_namespace_lets_pods_see_the_machine() -> None:
    """Pod Security restricts every part but the agents, which are alone where it does not."""
    enforced = {
        body["metadata"]["name"]: body["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        for body in load("namespaces.yaml")
    }
    homes = {
        body["metadata"]["name"]: body["metadata"]["namespace"]
        for body in manifests("*.yaml", "scheduler/deployment.yaml")
        if body["kind"] in {"Deployment", "DaemonSet"}
    }
    assert {name: enforced[namespace] for name, namespace in homes.items()} == {
        name: "privileged" if name == "atoll-agent" else "restricted" for name in homes
    }


@pytest.mark.parametrize(("kind", "name"), POD_OWNERS, ids=lambda value: value)
def test_pods_are_confined(kind: str, name: str) -> None:
    """No root, no capability, no writable root file system, an own identity; the agent alone sees the machine."""
    spec = POD_OWNERS[(kind, name)]
    assert spec["serviceAccountName"] == name
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    for container in spec["containers"]:
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"]
        assert not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert "privileged" not in context
        assert container["resources"]["limits"]["memory"]
    is_agent = name == "atoll-agent"
    assert bool(spec.get("hostPID")) == is_agent
    assert any("hostPath" in volume for volume in spec.get("volumes", ())) == is_agent
    assert not spec.get("hostNetwork")


def policy_lists(variable: str) -> Iterator[set[str]]:
    """Yield every CEL list of the policies in which the string `variable` stands."""
    for path in sorted((DEPLOY / "policies").rglob("*.yaml")):
        for manifest in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            for text in re.findall(r"\[[^\[\]]*\]", str(manifest.get("spec", {}))):
                entries = set(re.findall(r"'([^'\\]+)'", text.replace("\\'", "'")))
                if variable in entries and len(entries) > 1:
                    yield entries


def test_policies_know_every_variable_that_chooses_gpus() -> None:
    """A variable that joins names.py must join every list of the policies."""
    found = list(policy_lists(names.NVIDIA_VISIBLE_DEVICES))
    wanted = set(names.VISIBLE_DEVICES_VARIABLES)
    assert [entries for entries in found if entries != wanted and len(entries) > 2] == []
    assert found.count(wanted) == 3


def test_policies_know_every_variable_that_gives_devices_of_the_machine() -> None:
    """So must one of the others."""
    found = list(policy_lists(names.DRIVER_DEVICE_VARIABLES[0]))
    assert found == [set(names.DRIVER_DEVICE_VARIABLES)] * 3


def test_policy_knows_what_kubelet_says_at_the_end() -> None:
    """The reasons that prove an end to the ledger are those that only kubelets may write."""
    text = (DEPLOY / "policies/endings.yaml").read_text(encoding="utf-8")
    assert [set(one.split(", ")) for one in re.findall(r"\[('Pod[^\]]*)\]", text)] == [
        {f"'{reason}'" for reason in ENDED_BY_KUBELET}
    ]


def test_policies_know_every_annotation() -> None:
    """Atoll's own annotations and the user's stand in the policies as names.py spells them."""
    text = (DEPLOY / "policies/annotations.yaml").read_text(encoding="utf-8")
    for key in (*names.OWN_ANNOTATIONS, *names.USER_ANNOTATIONS):
        assert f"'{key}'" in text, key
    for prefix in names.OWN_ANNOTATION_PREFIXES:
        assert f"'{prefix}'" in text, prefix
    assert set(names.USER_ANNOTATIONS) in list(policy_lists(names.GANG_SIZE))


KNOWN_NAMES = {value for value in vars(names).values() if isinstance(value, str)}


@pytest.mark.parametrize("file", [file for file in FILES if not file.startswith("crds/")])
def test_manifests_spell_names_as_the_code_does(file: str) -> None:
    """Whatever begins with gpu.scheduling/ or atoll-, and is no object of the manifests themselves, is in names.py."""
    own = {manifest["metadata"]["name"] for file in FILES for manifest in load(file) if "metadata" in manifest}
    text = "\n".join(str(document) for document in load(file))
    for word in re.findall(r"gpu\.scheduling/[a-z0-9-]+", text):
        assert word in KNOWN_NAMES or word.startswith(names.MIG_RESOURCE_PREFIX), word
    for word in re.findall(r"(?<![\w/.-])(?:zz-)?atoll-[a-z-]+", text):
        assert word in KNOWN_NAMES | own | SERVICE_ACCOUNTS, word


@pytest.mark.parametrize("file", CONFIGURATIONS)
def test_scheduler_configuration_keeps_its_promises(file: str) -> None:
    """Placement outweighs every default plugin, a missing extender binds nothing, and answers fit into the time-out."""
    from extender.settings import ExtenderSettings

    configuration = load(file)[0]
    (extender,) = configuration["extenders"]
    defaults = ExtenderSettings()
    shares = {
        profile["schedulerName"]: profile.get("percentageOfNodesToScore") for profile in configuration["profiles"]
    }
    assert shares.pop(names.SCHEDULER_NAME) == 100, "a pod with GPUs gets the best of all nodes"
    assert set(shares.values()) <= {None}, "for other pods kube-scheduler looks at as many nodes as it likes"
    assert extender["weight"] * 10 * 10 > 1200
    assert extender["nodeCacheCapable"]
    assert not extender["ignorable"]
    assert extender["urlPrefix"] == f"http://{defaults.host}:{defaults.port}"
    assert float(extender["httpTimeout"].removesuffix("s")) > defaults.answer_seconds
    assert extender["managedResources"] == [{"name": names.GPU_RESOURCE, "ignoredByScheduler": False}]
    assert [extender[f"{verb}Verb"] for verb in ("filter", "prioritize", "bind", "preempt")] == [
        "filter",
        "prioritize",
        "bind",
        "preempt",
    ]
    election = configuration["leaderElection"]
    assert (election["resourceNamespace"], election["resourceName"]) == (names.SYSTEM_NAMESPACE, "atoll-scheduler")


def test_scheduler_configurations_differ_in_profiles_alone() -> None:
    """The variant for tainted nodes follows the main one."""
    main, variant = (load(file)[0] for file in CONFIGURATIONS)
    assert main.pop("profiles") != variant.pop("profiles")
    assert main == variant


def test_image_installs_what_was_tested() -> None:
    """The image's lock holds versions and hashes of the repository's lock, and no tool of development."""
    pin = re.compile(r"^([a-z0-9._-]+)==([^ ;\\]+)", re.MULTILINE)
    whole = dict(pin.findall((REPOSITORY / "requirements.lock").read_text(encoding="utf-8")))
    image = dict(pin.findall((DEPLOY / "image/requirements.lock").read_text(encoding="utf-8")))
    assert image.items() <= whole.items()
    assert not {"pytest", "ruff", "mypy", "hypothesis"} & image.keys()
    assert {"aiohttp", "pydantic", "kubernetes"} <= image.keys()
    dockerfile = (DEPLOY / "image/Dockerfile").read_text(encoding="utf-8")
    assert "--require-hashes" in dockerfile
    assert "\nUSER 65532:65532\n" in dockerfile
    for folder in re.findall(r"^COPY (\w+) ", dockerfile, re.MULTILINE):
        assert Path(REPOSITORY, folder).is_dir(), folder


PARTS = {
    "extender": "extender.settings:ExtenderSettings",
    "webhook": "webhook.settings:WebhookSettings",
    "agent": "agent.settings:AgentSettings",
    "controllers": "controllers.settings:ControllersSettings",
    "jobs": "jobs.settings:JobServiceSettings",
}


@pytest.mark.parametrize(("kind", "name"), POD_OWNERS, ids=lambda value: value)
def test_parts_understand_their_arguments(kind: str, name: str) -> None:
    """Each container of ours is started with settings that its part accepts, probed where it answers."""
    for container in POD_OWNERS[(kind, name)]["containers"]:
        if not container["image"].startswith("atoll:"):
            continue
        part, *flags = container["args"]
        module, _, model = PARTS[part].partition(":")
        variables = {
            entry["name"]: entry.get("value", "node-a")
            for entry in container.get("env", ())
            if entry["name"].startswith("ATOLL_")
        }
        values = settings.load(
            getattr(importlib.import_module(module), model), flags, f"ATOLL_{part.upper()}", environment=variables
        )
        for port in container.get("ports", ()):
            setting = "health_port" if port["name"] == "health" else "port"
            assert port["containerPort"] == getattr(values, setting)
        assert "health" not in {port["name"] for port in container.get("ports", ())} or values.health_host == "*"


def test_every_policy_is_in_the_documentation() -> None:
    """docs/security.md names each policy, or its file."""
    text = (REPOSITORY / "docs/security.md").read_text(encoding="utf-8")
    for path in sorted((DEPLOY / "policies").rglob("*.yaml")):
        for manifest in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            assert manifest["metadata"]["name"] in text or path.name in text
