"""Every bypass attempt on a real API server, and the requests that must stay allowed.

Each attempt runs twice, as a dry run: without the policies it must be allowed (or the row proves nothing), and with
them the policy in its row must refuse it. The other requests are normal work of Atoll or Kubernetes.
"""

import re
from collections.abc import Callable, Mapping

import pytest

from tests.deploy.allowed_requests import ERRANDS
from tests.deploy.api_server import ApiAnswer, RealApi, manifests, wait_for
from tests.deploy.bypass_attempts import DOORS, JOBSET, PYTORCH, WORKLOAD, noted
from tests.deploy.requests import (
    ALLOCATION,
    GATES,
    LEASES,
    MERGE,
    PODS,
    REPORTS,
    VOLUMES,
    Probe,
    binding,
    lease,
    plain_container,
    pod,
    report,
    shaped,
)

pytestmark = pytest.mark.e2e

CROWD = {f"a{number}": "" for number in range(25_000)}
"""About as many annotations as the API server takes."""
POLICIES = {door.policy for door in DOORS}


def knock(api: RealApi, request: Probe) -> ApiAnswer:
    """Send the request as a dry run: admission runs, nothing is stored."""
    return api.send(
        request.method,
        request.path,
        request.body,
        identity=request.identity,
        content_type=request.content_type,
        dry_run=True,
    )


def refused_by(answer: ApiAnswer) -> str:
    """Return the name of the policy that refused, empty where another reason or nobody did."""
    _, _, rest = answer.message.partition("ValidatingAdmissionPolicy '")
    return "" if answer.is_accepted else rest.partition("'")[0]


def send_owner(api: RealApi, path: str, kind: str, spec: Mapping[str, object]) -> None:
    """Create an owner as another operator would, of a kind that has only its name."""
    _, _, group, version, _, _, plural, name = path.split("/")
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    served = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, of a test"},
        },
        "spec": {"group": group, "names": names, "scope": "Namespaced", "versions": [served]},
    }
    api.send("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
    body = {"apiVersion": f"{group}/{version}", "kind": kind, "metadata": {"name": name}, "spec": spec}
    folder = path.removesuffix(f"/{name}")
    wait_for(lambda: api.send("POST", folder, body).status in {201, 409}, f"the kind {kind} is served")


@pytest.fixture(scope="session")
def furnished(api: RealApi, remove_policies: Callable[[], None]) -> RealApi:
    """An API server with the objects that the doors lead to, and the policies off."""
    remove_policies()
    wait_for(lambda: not POLICIES & {refused_by(knock(api, door)) for door in DOORS}, "the policies are off")
    for node in ("node-a", "node-b"):
        api.send("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}})
        resources = {"cpu": "8", "memory": "8Gi", "pods": "110"}
        status = {"status": {"capacity": resources, "allocatable": resources}}
        api.send("PATCH", f"/api/v1/nodes/{node}/status", status, content_type=MERGE)
        api.send("POST", REPORTS, report(node))
    for user, role in (("operator", "atoll-machine-operator"), ("releaser", "atoll-machine-releaser")):
        binding_of_role = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": f"tests-{user}"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
        }
        api.send("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", binding_of_role)
    nvidia = {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": "nvidia"},
        "handler": "nvidia",
    }
    api.send("POST", "/apis/node.k8s.io/v1/runtimeclasses", nvidia)
    api.send("POST", "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "doors"}})
    for namespace in ("doors", "kube-system", "atoll-system"):
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
        api.send("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", account)
    for name in ("gpu-node-a-0", "atoll-controllers", "atoll-scheduler"):
        api.send("POST", f"{LEASES}/atoll-system/leases", lease(name))
    pods = (
        shaped("waiting"),
        shaped("gated", schedulingGates=GATES),
        shaped("held"),
        shaped("crowded", annotations={**shaped("x")["metadata"]["annotations"], **CROWD}),
        shaped("walled", runtimeClassName="atoll-nvidia"),
        pod("plain"),
        shaped("noted", annotations=noted(30)),
        shaped("noted-by-atoll", annotations=noted(33)),
        pod("volumes", volumes=VOLUMES),
        pod("waiting-plain", plain_container("main")),
    )
    for body in pods:
        api.send("POST", PODS, body)
    template = {"spec": {"restartPolicy": "Never", "containers": [{"name": "main", "image": "app"}]}}
    training = {"metadata": {"name": "training"}, "spec": {"suspend": True, "parallelism": 2, "template": template}}
    api.send("POST", "/apis/batch/v1/namespaces/doors/jobs", {"apiVersion": "batch/v1", "kind": "Job", **training})
    send_owner(api, WORKLOAD, "Workload", {"podSets": [{"name": "main", "count": 2}], "queueName": "q", "priority": 0})
    send_owner(api, PYTORCH, "PyTorchJob", {"runPolicy": {"suspend": False}})
    send_owner(api, JOBSET, "JobSet", {"suspend": False})
    for name, annotations in (("held", ALLOCATION), ("walled", ALLOCATION), ("plain", {}), ("volumes", {})):
        api.send("POST", f"{PODS}/{name}/binding", binding(name, annotations))
    return api


@pytest.fixture(scope="session")
def answers_without_policies(furnished: RealApi) -> Mapping[str, ApiAnswer]:
    """What each door answers while the policies are off."""
    return {door.title: knock(furnished, door) for door in DOORS}


@pytest.fixture(scope="session")
def guarded(
    furnished: RealApi, answers_without_policies: Mapping[str, ApiAnswer], apply_policies: Callable[[], None]
) -> RealApi:
    """The same API server once every policy has begun to refuse."""
    apply_policies()
    wait_for(lambda: {refused_by(knock(furnished, door)) for door in DOORS} >= POLICIES, "every policy refuses")
    return furnished


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.title)
def test_door_is_shut_by_its_policy_alone(
    guarded: RealApi, answers_without_policies: Mapping[str, ApiAnswer], door: Probe
) -> None:
    """Without the policies the request goes through; with them the named one refuses and says what to do."""
    before = answers_without_policies[door.title]
    assert before.is_accepted, f"the row proves nothing: refused without policies by {before}"
    answer = knock(guarded, door)
    assert refused_by(answer) == door.policy, answer
    assert answer.status in {403, 422}


@pytest.mark.parametrize("errand", ERRANDS, ids=lambda errand: errand.title)
def test_ordinary_work_goes_on(guarded: RealApi, errand: Probe) -> None:
    """What kubelets, schedulers, users and Atoll's own parts do every day is not refused."""
    answer = knock(guarded, errand)
    assert answer.is_accepted, answer


def test_every_rule_shuts_a_door(guarded: RealApi) -> None:
    """No rule of a policy is idle: each of them is the reason of some refusal, told in its own words."""
    refusals = [knock(guarded, door).message for door in DOORS]
    for manifest in manifests("policies/*.yaml", "policies/optional/*.yaml"):
        for rule in manifest.get("spec", {}).get("validations", ()):
            literals = re.findall("'([^']+)'", rule.get("messageExpression", ""))
            words = [literal for literal in literals if len(literal) > 3] or [rule["message"]]
            assert any(all(word in refusal for word in words) for refusal in refusals), rule["message"]


def test_the_api_server_finds_no_mistake_of_type(guarded: RealApi) -> None:
    """Each expression fits the published types of what it matches; the controller manager checks that."""
    for name in sorted(POLICIES):
        path = f"/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/{name}"
        wait_for(lambda path=path: "typeChecking" in guarded.send("GET", path).message, f"{name} is checked")
        assert "expressionWarnings" not in guarded.send("GET", path).message, name


def test_a_pod_with_very_many_annotations_is_no_obstacle(guarded: RealApi) -> None:
    """The largest set of annotations that the API server takes does not run the policies out of their budget."""
    many = Probe(title="many", method="POST", path=PODS, body=pod("many", annotations=CROWD))
    answer = knock(guarded, many)
    assert answer.is_accepted, answer
    claimed = shaped("many", annotations={**CROWD, **shaped("x")["metadata"]["annotations"]})
    answer = knock(guarded, Probe(title="many", method="POST", path=PODS, body=claimed))
    assert answer.is_accepted, answer
