"""The Helm chart, rendered by the real Helm: it matches the plain manifests, and bad values are refused by name."""

import importlib
import itertools
import json
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from atoll.cluster.host_fit import node_reason
from atoll.cluster.objects import decode_node, decode_pod
from atoll.jobs.aliases import PRIORITIES
from atoll.jobs.words import PRIORITY_VALUES
from atoll.service import settings
from devcluster import chart
from devcluster.build import ensure_binaries
from devcluster.errors import BuildError
from tests.deploy.api_server import DEPLOY
from tests.deploy.test_manifests import PARTS
from tests.kubernetes_schemas import validate

pytestmark = pytest.mark.timeout(1200)  # where Helm is built first

VALUES = sorted(path.name for path in chart.CHART.glob("values-*.yaml"))
EVERYTHING = (
    "monitoring.podMonitor=true",
    "monitoring.prometheusRule=true",
    "monitoring.dashboard=true",
    "policies.unclaimedPods=true",
    "webhook.tls.source=certManager",
    "logLevel=debug",
    "visibleDevices=index",
    "webhook.keepNodes=gangs",
    "priorityClasses.create=true",
    "priorityClasses.kueue=true",
    "jobs.enabled=true",
    "jobs.secretKeySecret=atoll-jobs-key",
    "jobs.prices.spot_share=0.3",
    "jobs.logArchive=s3://logs/{tenant}/",
    "jobs.logArchiveSecret=atoll-jobs-logs",
)
FOREIGN_GROUPS = ("monitoring.coreos.com", "cert-manager.io", "kueue.x-k8s.io", "security.openshift.io")
KEPT = "helm.sh/resource-policy"
READY = {"conditions": [{"type": "Ready", "status": "True"}]}

Object = dict[str, Any]
Objects = dict[tuple[str, str, str], Object]


def rendered(*arguments: str | Path, kubernetes: str = "1.37.2") -> Objects:
    """Return the chart's objects by kind, namespace and name."""
    return by_name(yaml.safe_load_all(chart.render(*arguments, kubernetes=kubernetes)))


def by_name(objects: Iterable[Object]) -> Objects:
    """Return the objects by kind, namespace and name; one that stands twice is a mistake."""
    found: Objects = {}
    for body in objects:
        if body:
            key = (body["kind"], body["metadata"].get("namespace", ""), body["metadata"]["name"])
            assert key not in found, key
            found[key] = body
    return found


def values_file(name: str) -> tuple[str, Path]:
    """Return the arguments that take a values file of the chart."""
    return "--values", chart.CHART / name


def sets(*values: str) -> list[str]:
    """Return the arguments that set values."""
    return [word for value in values for word in ("--set", value)]


def pods(objects: Objects) -> dict[str, Object]:
    """Return the pods of the parts by their owners' names."""
    return {
        name: body["spec"]["template"]["spec"]
        for (kind, _, name), body in objects.items()
        if kind in {"Deployment", "DaemonSet"}
    }


def test_plain_manifests_are_what_the_chart_renders(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody changes one of the two alone."""
    assert chart.main(["--check"]) == 0, capsys.readouterr().err


def test_a_stale_manifest_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`make verify` says which file, and what to do."""
    fresh = chart.plain_manifests()
    monkeypatch.setattr(chart, "plain_manifests", lambda: {**fresh, "agent.yaml": "something else\n"})

    assert chart.main(["--check"]) == 1
    assert capsys.readouterr().err == "deploy/agent.yaml differs from what deploy/chart renders: run make manifests\n"


def test_helm_installs_what_the_kustomization_lists() -> None:
    """Object by object the same, but for what only Helm needs: nothing is forgotten on either way."""
    kustomization = yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())
    listed = (yaml.safe_load_all((DEPLOY / file).read_text()) for file in kustomization["resources"])
    charted = rendered(*values_file("values-plain.yaml"))
    configuration = charted.pop(("ConfigMap", "atoll-system", "atoll-scheduler"))

    assert without_keeping(charted) == without_release_namespace(by_name(itertools.chain.from_iterable(listed)))
    assert configuration["data"]["config.yaml"] in (DEPLOY / "scheduler/config.yaml").read_text()


@pytest.mark.e2e
def test_helm_installs_what_kustomize_builds() -> None:
    """The same by the kustomize in kubectl, with the configuration of kube-scheduler that it puts into a ConfigMap."""
    kubectl = ensure_binaries(real_nodes=False)["kubectl"]
    done = subprocess.run([kubectl, "kustomize", DEPLOY], capture_output=True, text=True, check=True)
    built = by_name(yaml.safe_load_all(done.stdout))
    hashed = next(name for kind, _, name in built if kind == "ConfigMap")
    scheduler = built[("Deployment", "atoll-system", "atoll-scheduler")]["spec"]["template"]["spec"]
    charted = rendered(*values_file("values-plain.yaml"))
    text = charted.pop(("ConfigMap", "atoll-system", "atoll-scheduler"))["data"]["config.yaml"]
    volume = {"name": "config", "configMap": {"name": hashed}}

    assert built.pop(("ConfigMap", "atoll-system", hashed))["data"]["config.yaml"].endswith(text)
    assert volume in scheduler["volumes"]
    volume["configMap"]["name"] = "atoll-scheduler"
    scheduler["volumes"] = [volume]
    assert without_keeping(charted) == without_release_namespace(built)


def test_the_package_is_the_chart(tmp_path: Path) -> None:
    """The archive holds what the folder links to: it can be installed without this repository."""
    archive = chart.package(tmp_path, "--version", "0.2.0", "--app-version", "0.2.0")
    done = chart.helm("template", chart.RELEASE, archive, "--namespace", chart.NAMESPACE, "--kube-version", "1.37.2")

    assert done.returncode == 0, done.stderr
    assert by_name(yaml.safe_load_all(done.stdout.replace("atoll:0.2.0", "atoll:0.1.0"))) == rendered()


def test_the_archive_of_logs_is_a_place_and_a_secret_by_name() -> None:
    """The credentials stand in no value, argument or file of the release; without the Secret the pod's identity counts,
    and without a place nothing is archived."""

    def container(*values: str) -> Object:
        (found,) = pods(rendered(*sets("jobs.enabled=true", *values)))["atoll-jobs"]["containers"]
        return dict(found)

    place, secret = "jobs.logArchive=s3://logs/{tenant}/", "jobs.logArchiveSecret=store"
    both, identity, none = container(place, secret), container(place), container(secret)

    assert "--log-archive=s3://logs/{tenant}/" in both["args"]
    assert both["envFrom"] == [{"secretRef": {"name": "store"}}]
    assert "--log-archive=s3://logs/{tenant}/" in identity["args"]
    assert "envFrom" not in identity
    assert not any("log-archive" in one for one in none["args"])
    assert "envFrom" not in none
    for shared in ("s3://logs/", "https://logs/{tenant}/", "s3://{tenant}"):
        with pytest.raises(BuildError, match="logArchive"):
            rendered(*sets("jobs.enabled=true", f"jobs.logArchive={shared}"))


def test_priorities_of_jobs_are_those_that_rendered_jobs_name() -> None:
    """The words of jobs with the values that `atoll job` counts with, and those of ML jobs for the same; with Kueue for
    its queues too. Nothing of it by default: the names are the whole cluster's, and may be taken."""
    kinds = ("PriorityClass", "WorkloadPriorityClass")

    def values_of(*settings: str) -> list[dict[str, int]]:
        objects = rendered(*(word for one in settings for word in ("--set", f"priorityClasses.{one}")))
        return [{name: body["value"] for (each, _, name), body in objects.items() if each == kind} for kind in kinds]

    by_word = {priority.value: value for priority, value in PRIORITY_VALUES.items()}
    by_class = {each.value: PRIORITY_VALUES[agreeing[0]] for each, agreeing in PRIORITIES.items()}

    assert values_of() == [{}, {}]
    assert values_of("create=true") == [by_word | by_class, {}]
    assert values_of("create=true", "kueue=true") == [by_word | by_class] * 2
    assert values_of("create=true", "values.low=null")[0].keys() == (by_word | by_class).keys() - {"low"}


def without_keeping(objects: Objects) -> Objects:
    """Return the objects without the annotation that keeps kinds and a namespace when the release goes."""
    for (kind, _, name), body in objects.items():
        annotations = body["metadata"].get("annotations", {})
        assert (annotations.pop(KEPT, "") == "keep") == (kind in {"CustomResourceDefinition", "Namespace"}), name
        if not annotations:
            body["metadata"].pop("annotations", None)
    return objects


def without_release_namespace(objects: Objects) -> Objects:
    """Return the objects without the namespace that holds the release: Helm makes it before."""
    return {key: body for key, body in objects.items() if key != ("Namespace", "", "atoll-system")}


@pytest.mark.parametrize("values", ["", *VALUES])
def test_helm_finds_nothing_to_say_about_it(values: str) -> None:
    """`helm lint` with each values file: no error, no warning."""
    words = ["lint", chart.CHART, "--namespace", chart.NAMESPACE, "--strict"]
    done = chart.helm(*words, *(values_file(values) if values else ()))

    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout


@pytest.mark.parametrize("kubernetes", ["1.35.4", "1.37.2"])
@pytest.mark.parametrize(
    "values", [(), *((name,) for name in VALUES), EVERYTHING], ids=lambda v: v[0] if v else "default"
)
def test_every_set_of_values_renders_valid_objects(values: tuple[str, ...], kubernetes: str) -> None:
    """No unknown fields, for the oldest and the newest Kubernetes, and parts understand what they are started with."""
    is_file = len(values) == 1
    objects = rendered(*(values_file(values[0]) if is_file else sets(*values)), kubernetes=kubernetes)

    for (kind, _, _), body in objects.items():
        if kind != "CustomResourceDefinition" and not body["apiVersion"].startswith(FOREIGN_GROUPS):
            validate(body, kubernetes.rpartition(".")[0], strict=True)
    for spec in pods(objects).values():
        for container in spec["containers"]:
            if container["image"] == "atoll:0.1.0":
                load_settings(container)


def load_settings(container: Object) -> Any:
    """Return the settings that a container's arguments make; a wrong one is refused."""
    part, *flags = container["args"]
    module, _, model = PARTS[part].partition(":")
    node = {"ATOLL_AGENT_NODE": "node-a"} if part == "agent" else {}
    return settings.load(
        getattr(importlib.import_module(module), model), flags, f"ATOLL_{part.upper()}", environment=node
    )


def test_one_word_sets_webhook_and_extender_alike() -> None:
    """visibleDevices must agree, so that it is one value."""
    found = pods(rendered(*sets("visibleDevices=index")))
    parts = {
        container["name"]: load_settings(container)
        for spec in found.values()
        for container in spec["containers"]
        if container["name"] in {"webhook", "extender"}
    }

    assert {name: part.visible_devices for name, part in parts.items()} == {"webhook": "index", "extender": "index"}


@pytest.mark.parametrize(
    ("cluster", "tag"), [("1.37.2", "v1.37.2"), ("v1.36.4+k3s1", "v1.36.4"), ("v1.35.9-gke.1200", "v1.35.9")]
)
def test_kube_scheduler_has_the_clusters_version(cluster: str, tag: str) -> None:
    """Without a word of the administrator, also where a distribution adds something to the version."""
    scheduler = pods(rendered(kubernetes=cluster))["atoll-scheduler"]

    assert scheduler["containers"][0]["image"] == f"registry.k8s.io/kube-scheduler:{tag}"


def test_pods_start_anew_when_kube_schedulers_configuration_changes() -> None:
    """It reads the file at its start alone."""

    def mark(*values: str) -> str:
        template = rendered(*sets(*values))[("Deployment", "atoll-system", "atoll-scheduler")]["spec"]["template"]
        return str(template["metadata"]["annotations"]["checksum/config"])

    assert mark() == mark()
    assert mark() != mark("scheduler.weight=30")


def test_high_availability_puts_two_of_each_on_different_nodes() -> None:
    """Strictly, with a budget each, and with elections of seconds."""
    objects = rendered(*values_file("values-ha.yaml"))
    for name in ("atoll-scheduler", "atoll-webhook", "atoll-controllers"):
        body = objects[("Deployment", "atoll-system", name)]
        (spread,) = body["spec"]["template"]["spec"]["topologySpreadConstraints"]
        assert body["spec"]["replicas"] == 2
        assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "DoNotSchedule")
        assert spread["labelSelector"]["matchLabels"] == body["spec"]["selector"]["matchLabels"]
        assert objects[("PodDisruptionBudget", "atoll-system", name)]["spec"]["maxUnavailable"] == 1
    election = yaml.safe_load(objects[("ConfigMap", "atoll-system", "atoll-scheduler")]["data"]["config.yaml"])
    assert election["leaderElection"]["leaseDuration"] == "6s"


def test_parts_stay_off_the_nodes_of_the_agents() -> None:
    """Root on a GPU node would own scheduler and controllers; only agents, and values that say so, go there."""
    selector = {"nvidia.com/gpu.present": "true", "pool": "gpus"}
    values = ["agent.nodeSelector.pool=gpus"]
    nodes = {"gpu": selector, "other pool": {**selector, "pool": "cpus"}, "plain": {}}

    def allowed(*more: str) -> dict[str, set[str]]:
        found = pods(rendered(*[word for value in (*values, *more) for word in ("--set-string", value)]))
        return {
            part: {
                name
                for name, labels in nodes.items()
                if not node_reason(
                    decode_pod(json.dumps({"metadata": {"name": part}, "spec": spec}).encode()),
                    decode_node(json.dumps({"metadata": {"name": name, "labels": labels}, "status": READY}).encode()),
                )
            }
            for part, spec in found.items()
        }

    off = {"plain", "other pool"}
    assert allowed() == {
        "atoll-agent": {"gpu"}, "atoll-scheduler": off, "atoll-webhook": off, "atoll-controllers": off,
    }  # fmt: skip
    assert allowed("avoidGpuNodes=preferred")["atoll-controllers"] == {*off, "gpu"}


def test_agents_ask_verified_kubelets() -> None:
    """By default nothing is said, which verifies; a CA is mounted; consent is one value, and both are refused."""

    def agent(*values: str) -> Any:
        return pods(rendered(*sets(*values)))["atoll-agent"]

    default, given, consent = (
        load_settings(agent(*values)["containers"][0])
        for values in ((), ("agent.kubeletCA=kubelets",), ("agent.kubeletInsecure=true",))
    )
    assert (default.kubelet_ca, default.kubelet_insecure) == (None, False)
    assert consent.kubelet_insecure
    spec = agent("agent.kubeletCA=kubelets")
    (volume,) = (one for one in spec["volumes"] if "configMap" in one)
    (mount,) = (one for one in spec["containers"][0]["volumeMounts"] if one["name"] == volume["name"])
    assert (volume["configMap"]["name"], str(given.kubelet_ca)) == ("kubelets", f"{mount['mountPath']}/ca.crt")


def test_a_single_replica_has_no_budget() -> None:
    """It would keep every drain of its node waiting for ever."""
    objects = rendered(*values_file("values-small.yaml"))

    assert [key for key in objects if key[0] == "PodDisruptionBudget"] == []


def test_a_scheduler_that_must_stay_keeps_its_profile() -> None:
    """On managed control planes Atoll's kube-scheduler serves GPU pods alone."""
    objects = rendered(*values_file("values-managed.yaml"))
    text = objects[("ConfigMap", "atoll-system", "atoll-scheduler")]["data"]["config.yaml"]

    assert [profile["schedulerName"] for profile in yaml.safe_load(text)["profiles"]] == ["gpu-scheduler"]


def test_kube_scheduler_may_look_at_fewer_nodes() -> None:
    """By a share for pods with GPUs and another for the rest; 0 leaves either to kube-scheduler."""
    values = ("--set", "scheduler.gpuPercentageOfNodesToScore=0,scheduler.percentageOfNodesToScore=30")
    text = rendered(*values)[("ConfigMap", "atoll-system", "atoll-scheduler")]["data"]["config.yaml"]
    configuration = yaml.safe_load(text)

    assert configuration["percentageOfNodesToScore"] == 30
    assert configuration["profiles"] == [{"schedulerName": "default-scheduler"}, {"schedulerName": "gpu-scheduler"}]


def test_openshift_chooses_users_and_lets_the_agent_see_the_machine() -> None:
    """No pod asks for a user of its own; the agent's account has constraints that allow what its pod asks for."""
    objects = rendered(*values_file("values-openshift.yaml"))
    found = pods(objects)
    contexts = {name: spec["securityContext"] for name, spec in found.items()}
    allowed = objects[("SecurityContextConstraints", "", "atoll-agent")]
    agent = found["atoll-agent"]

    assert not any(context.keys() & {"runAsUser", "runAsGroup"} for context in contexts.values())
    assert all(context["runAsNonRoot"] for context in contexts.values())
    assert contexts["atoll-agent"]["seLinuxOptions"] == {"type": "spc_t"}
    namespace = next(key[1] for key in objects if key[0] == "DaemonSet")
    assert allowed["users"] == [f"system:serviceaccount:{namespace}:{agent['serviceAccountName']}"]
    assert allowed["allowHostPID"] == agent["hostPID"]
    assert {next(key for key in volume if key != "name") for volume in agent["volumes"]} <= set(allowed["volumes"])
    assert not any(allowed[name] for name in ("allowPrivilegedContainer", "allowHostNetwork", "allowedCapabilities"))


def test_gke_lets_critical_pods_into_the_namespaces() -> None:
    """A quota in each namespace names the priority classes of the parts there, and has room for them."""
    objects = rendered(*values_file("values-gke.yaml"))
    asked = {
        (namespace, body["spec"]["template"]["spec"]["priorityClassName"])
        for (kind, namespace, _), body in objects.items()
        if kind in {"Deployment", "DaemonSet"}
    }
    quotas = {key[1]: body["spec"] for key, body in objects.items() if key[0] == "ResourceQuota"}

    allowed = {name: quota["scopeSelector"]["matchExpressions"][0]["values"] for name, quota in quotas.items()}
    assert asked == {(name, value) for name, values in allowed.items() for value in values}
    assert all(int(quota["hard"]["pods"]) > 5000 for quota in quotas.values())
    assert [key for key in rendered() if key[0] == "ResourceQuota"] == []


def test_annotations_of_the_webhook_stand_beside_cert_managers() -> None:
    """AKS is told to leave the configuration alone, whoever signs the certificate."""
    configuration = ("MutatingWebhookConfiguration", "", "zz-atoll-webhook")
    told = {"admissions.enforcer/disabled": "true"}

    plain = rendered(*values_file("values-aks.yaml"))
    managed = rendered(*values_file("values-aks.yaml"), *sets("webhook.tls.source=certManager"))

    assert plain[configuration]["metadata"]["annotations"] == told
    assert managed[configuration]["metadata"]["annotations"].items() > told.items()


def test_the_agent_joins_the_groups_of_the_device_files() -> None:
    """It alone: pods of users get theirs from their own template."""
    found = pods(rendered(*sets("agent.supplementalGroups={44,109}")))

    assert {name: spec["securityContext"].get("supplementalGroups") for name, spec in found.items()} == {
        **dict.fromkeys(found, None),
        "atoll-agent": [44, 109],
    }


def test_every_platform_has_values_and_a_section() -> None:
    """docs/platforms.md says of each what was tried; no values file of a platform is without one."""
    page = (DEPLOY.parent / "docs" / "platforms.md").read_text(encoding="utf-8")
    first_lines = "".join((chart.CHART / name).read_text().splitlines()[0] + "\n" for name in VALUES)
    anchors = re.findall(r"docs/platforms\.md#(\S+)$", first_lines, re.MULTILINE)

    assert len(anchors) == 6
    for anchor in anchors:
        section = page.lower().partition(f"## {anchor}\n")[2].partition("\n## ")[0]
        assert "**tried.**" in section, anchor
        assert "**not tried.**" in section, anchor


def test_certificates_have_one_keeper() -> None:
    """With cert-manager or a Secret of the administrator's the controllers leave them alone, and trust is published."""
    configuration = ("MutatingWebhookConfiguration", "", "zz-atoll-webhook")

    def controllers(objects: Objects) -> Any:
        return load_settings(pods(objects)["atoll-controllers"]["containers"][0])

    generated = rendered()
    assert controllers(generated).keep_certificates
    assert "caBundle" not in str(generated[configuration])  # or each upgrade would take it away

    managed = rendered(*sets("webhook.tls.source=certManager"))
    assert not controllers(managed).keep_certificates
    assert managed[configuration]["metadata"]["annotations"] == {
        "cert-manager.io/inject-ca-from": "atoll-system/atoll-webhook"
    }
    certificate = managed[("Certificate", "atoll-system", "atoll-webhook")]["spec"]
    assert certificate["secretName"] == "atoll-webhook-tls"
    assert "atoll-webhook.atoll-system.svc" in certificate["dnsNames"]

    signed = rendered(*sets("webhook.tls.source=certManager", "webhook.tls.issuerRef.name=corporate"))
    assert [key for key in signed if key[0] == "Issuer"] == []

    own = rendered(*sets("webhook.tls.source=secret", "webhook.tls.caBundle=-----BEGIN CERTIFICATE-----"))
    assert not controllers(own).keep_certificates
    assert {webhook["clientConfig"]["caBundle"] for webhook in own[configuration]["webhooks"]} == {
        "LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0t"
    }


def test_who_keeps_no_certificates_has_no_right_to() -> None:
    """With cert-manager, or a Secret of the administrator's, the controllers reach no Secret and no configuration."""

    def reached(*values: str) -> set[str]:
        objects = rendered(*sets(*values))
        bound = {
            body["roleRef"]["name"]
            for (kind, _, _), body in objects.items()
            if kind.endswith("RoleBinding") and body["subjects"][0]["name"] == "atoll-controllers"
        }
        roles = [body for (kind, _, name), body in objects.items() if kind.endswith("Role") and name in bound]
        return {resource for role in roles for rule in role["rules"] for resource in rule.get("resources", ())}

    own = {"secrets", "mutatingwebhookconfigurations"}
    assert reached() >= own
    assert not reached("webhook.tls.source=certManager") & own
    assert not reached("webhook.tls.source=secret", "webhook.tls.caBundle=-----BEGIN CERTIFICATE-----") & own


def ingress(objects: Objects, part: str) -> dict[int, Any]:
    """Return who may connect to which port of a part's pods; None: everybody."""
    wanted = ("NetworkPolicy", f"atoll-{part}")
    (policy,) = (body["spec"] for (kind, _, name), body in objects.items() if (kind, name) == wanted)
    return {port["port"]: rule.get("from") for rule in policy["ingress"] for port in rule["ports"]}


def test_every_part_is_reached_on_its_declared_ports_alone() -> None:
    """A policy selects the pods of each part, and opens the ports that their containers declare, and the page."""
    objects = rendered()
    for (kind, namespace, name), body in objects.items():
        if kind not in {"Deployment", "DaemonSet"}:
            continue
        policy = objects[("NetworkPolicy", namespace, name)]["spec"]
        assert policy["podSelector"]["matchLabels"] == body["spec"]["selector"]["matchLabels"]
        containers = body["spec"]["template"]["spec"]["containers"]
        declared = {port["containerPort"] for container in containers for port in container.get("ports", ())}
        assert set(ingress(objects, name.removeprefix("atoll-"))) - {8083} == declared


@pytest.mark.parametrize("server", ["10.0.0.1/32", "fd00::1/128"])
def test_an_administrator_names_who_may_connect(server: str) -> None:
    """API servers by address, monitoring by namespace; or he turns the policies off."""
    objects = rendered(
        *sets(f"networkPolicies.apiServers={{{server}}}", "networkPolicies.monitoringNamespaces={watching}")
    )
    watching = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "watching"}}}]

    assert ingress(objects, "webhook") == {8443: [{"ipBlock": {"cidr": server}}], 8081: watching}
    assert ingress(objects, "scheduler") == {10259: watching, 9434: watching}
    assert [key for key in rendered(*sets("networkPolicies.create=false")) if key[0] == "NetworkPolicy"] == []


WATCHED = {"PodMonitor", "PrometheusRule"}
ODD = ["--v=2: # not a comment", "--v='\"{{ .Values }}", "--v=a,b", "--v=true", "--v=\u00e9"]
"""Arguments that YAML, Helm or a shell could take for something else."""


def test_odd_texts_stay_texts(tmp_path: Path) -> None:
    """What an administrator writes reaches containers, labels and selectors as he wrote it."""
    labels = {"a": "true", "b": "1", "c": "null", "d": "{{ fail }}"}
    part = {
        "extraArgs": ODD,
        "nodeSelector": labels,
        "tolerations": [{"key": "k", "value": "no", "effect": "NoExecute"}],
    }
    values = {
        "scheduler": {**part, "extender": {"extraArgs": ODD}},
        **dict.fromkeys(("webhook", "controllers"), part),
        "agent": {**part, "extraVolumes": [{"name": "v", "emptyDir": {}}]},
        "imagePullSecrets": [{"name": "1"}, {"name": "true"}],
        "monitoring": {"podMonitor": True, "prometheusRule": True, "dashboard": True, "labels": labels},
    }
    (tmp_path / "odd.yaml").write_text(yaml.safe_dump(values))

    objects = rendered("--values", tmp_path / "odd.yaml")

    for name, spec in pods(objects).items():
        for container in spec["containers"]:
            words = container.get("args", container.get("command"))
            assert words[-len(ODD) :] == ODD, name
        assert labels.items() <= spec["nodeSelector"].items()
        assert spec["imagePullSecrets"] == values["imagePullSecrets"]
        assert spec["tolerations"] == part["tolerations"]
    watched = [body for (kind, _, name), body in objects.items() if kind in WATCHED or name == "atoll-dashboard"]
    assert len(watched) == 3
    assert all(labels.items() <= body["metadata"]["labels"].items() for body in watched)
    for (kind, _, _), body in objects.items():
        if kind in {"Deployment", "DaemonSet", "ConfigMap"}:
            validate(body, "1.37", strict=True)


def test_kind_is_installed_by_the_chart() -> None:
    """Workers of kind play machines, and their agents find the cgroups of pods where kind puts them."""
    values = (*values_file("values-simulated.yaml"), "--values", DEPLOY / "kind/values.yaml")

    (agent,) = pods(rendered(*values))["atoll-agent"]["containers"]

    assert {"--backend=simulated", "--cgroup-root=/kubelet"} <= set(agent["args"])
    assert load_settings(agent)


BAD_VALUES = {
    "a misspelt key": (("scheduler.replica=2",), "replica"),
    "a section that does not exist": (("extender.replicas=2",), "extender"),
    "no replica": (("webhook.replicas=0",), "replicas"),
    "a number as text": (("controllers.replicas=two",), "replicas"),
    "a weight with which spreading would win": (("scheduler.weight=12",), "weight"),
    "an unknown mode": (("visibleDevices=name",), "visibleDevices"),
    "an unknown word about autoscalers": (("webhook.keepNodes=some",), "keepNodes"),
    "an unknown backend": (("agent.backend=intel",), "backend"),
    "a failure policy that Kubernetes lacks": (("webhook.failurePolicy=Open",), "failurePolicy"),
    "an argument that is none": (("webhook.extraArgs={inject-runtime-class}",), "extraArgs"),
    "a digest that is none": (("image.digest=latest",), "digest"),
    "pods without a limit of memory": (("webhook.resources.limits=null",), "limits"),
    "a simulated machine without a kind": (("agent.backend=simulated",), "agent.profile"),
    "a kind of machine for real ones": (("agent.profile=dgx1-v100",), "agent.backend simulated"),
    "a Secret of one's own that nobody trusts": (("webhook.tls.source=secret",), "webhook.tls.caBundle"),
    "a kubelet's CA that nobody uses": (
        ("agent.kubeletCA=kubelets", "agent.kubeletInsecure=true"),
        "agent.kubeletInsecure",
    ),
    "trust in nobody's certificate": (("webhook.tls.caBundle=-----BEGIN CERTIFICATE-----",), "webhook.tls.source"),
    "a part whose limits were taken away": (("webhook.resources=null",), "resources"),
    "no number of replicas": (("scheduler.replicas=null",), "replicas"),
    "an image without a name": (("image.repository=null",), "repository"),
    "no word about certificates": (("webhook.tls=null",), "tls"),
    "arguments that are nothing": (("agent.extraArgs=null",), "extraArgs"),
    "an election of which only one time is known": (("scheduler.leaderElection.leaseDuration=6s",), "renewDeadline"),
    "a pause that is longer than the longest": (("scheduler.podInitialBackoffSeconds=9",), "podMaxBackoffSeconds"),
    "an issuer without a name": (
        ("webhook.tls.source=certManager", "webhook.tls.issuerRef.kind=ClusterIssuer"),
        "issuerRef",
    ),
    "an API server by name": (("networkPolicies.apiServers={kubernetes}",), "apiServers"),
    "root as the user of the pods": (("podSecurity.runAsUser=0",), "runAsUser"),
    "a group by name": (("agent.supplementalGroups={video}",), "supplementalGroups"),
    "an issuer that nobody asks": (("webhook.tls.issuerRef.name=corporate",), "webhook.tls.issuerRef"),
}


@pytest.mark.parametrize("values", BAD_VALUES)
def test_bad_values_are_refused_by_name(values: str) -> None:
    """Before anything reaches the cluster, with the value's name in the message."""
    given, word = BAD_VALUES[values]

    with pytest.raises(BuildError, match=word):
        chart.render(*sets(*given))


def test_another_namespace_is_refused() -> None:
    """Policies and parts know theirs by name; an installation elsewhere would half work."""
    done = chart.helm("template", "atoll", chart.CHART, "--namespace", "gpu")

    assert done.returncode != 0
    assert 'Atoll\'s namespace is atoll-system, not "gpu"' in done.stderr


def test_old_clusters_are_refused() -> None:
    """Kubernetes before 1.35 lacks what the policies need."""
    with pytest.raises(BuildError, match=r"1\.35"):
        chart.render(kubernetes="1.34.9")


@pytest.mark.parametrize(
    ("values", "told", "not_told"),
    [
        ("values-plain.yaml", "mv /etc/kubernetes/manifests/kube-scheduler.yaml", "kubectl taint"),
        ("values-managed.yaml", "kubectl taint nodes -l nvidia.com/gpu.present=true", "mv /etc/kubernetes"),
        ("values-simulated.yaml", "Agents SIMULATE machines of the kind dgx1-v100", "kubectl taint"),
    ],
)
def test_notes_say_what_is_left_to_do(values: str, told: str, not_told: str) -> None:
    """Two schedulers on one node would over-commit it: the administrator is told which of the two ways is his."""
    words = ["install", "atoll", chart.CHART, "--namespace", chart.NAMESPACE, "--dry-run=client"]
    done = chart.helm(*words, *values_file(values))

    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    assert told in notes
    assert not_told not in notes


def test_every_default_has_a_schema() -> None:
    """What values.yaml holds the schema describes, and the other way round."""
    schema = json.loads((chart.CHART / "values.schema.json").read_text())
    values = yaml.safe_load((chart.CHART / "values.yaml").read_text())

    def compare(described: Object, given: Object, path: str) -> None:
        properties = described["properties"]
        assert set(properties) - {"global"} == set(given), path
        for key, value in given.items():
            if isinstance(value, dict) and value and "properties" in properties[key]:
                compare(properties[key], value, f"{path}.{key}")

    del schema["properties"]["scheduler"]["properties"]["leaderElection"]["properties"]
    del schema["properties"]["webhook"]["properties"]["tls"]["properties"]["issuerRef"]["properties"]
    compare(schema, values, "values")
