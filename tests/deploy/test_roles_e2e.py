"""Rights of each identity on a real API server (RBAC only), allowed and denied.

Policies cover what roles cannot restrict; test_doors_e2e tests them.
"""

import json

import pytest

from tests.deploy.api_server import RealApi, wait_for

pytestmark = pytest.mark.e2e

SYSTEM = "atoll-system"
NODES = "atoll-nodes"


def attributes(action: str, namespace: str) -> dict[str, str]:
    """Read `verb resource[.group][/subresource][:name]` into what a SubjectAccessReview asks."""
    verb, _, target = action.partition(" ")
    target, _, name = target.partition(":")
    target, _, subresource = target.partition("/")
    resource, _, group = target.partition(".")
    found = {"verb": verb, "resource": resource, "group": group, "subresource": subresource, "name": name}
    return {key: value for key, value in {**found, "namespace": namespace}.items() if value}


LEASES = "leases.coordination.k8s.io"
CLAIMS = "gpuclaims.gpu.scheduling"
REPORTS = "gpunodestatuses.gpu.scheduling"
BUDGETS = "poddisruptionbudgets.policy"
WEBHOOKS = "mutatingwebhookconfigurations.admissionregistration.k8s.io"

ALLOWED = [
    ("controllers", "get nodes", ""),
    ("scheduler", "create pods/binding", "default"),
    ("scheduler", "patch pods/status", "default"),
    ("scheduler", "watch pods", ""),
    ("scheduler", f"watch {CLAIMS}", ""),
    ("scheduler", f"list {BUDGETS}", ""),
    ("scheduler", "create tokenreviews.authentication.k8s.io", ""),
    ("scheduler", "create subjectaccessreviews.authorization.k8s.io", ""),
    ("scheduler", f"watch {REPORTS}", ""),
    ("scheduler", f"create {LEASES}", SYSTEM),
    ("scheduler", f"update {LEASES}:atoll-scheduler", SYSTEM),
    ("scheduler", f"delete {LEASES}:gpu-a-0", SYSTEM),
    ("scheduler", f"watch {LEASES}", NODES),
    ("scheduler", "create events.events.k8s.io", "default"),
    ("webhook", f"get {CLAIMS}", "default"),
    ("webhook", f"watch {CLAIMS}", ""),
    ("webhook", "list deviceclasses.resource.k8s.io", ""),
    ("webhook", "get resourceclaims.resource.k8s.io", "default"),
    ("webhook", "get resourceclaimtemplates.resource.k8s.io", "default"),
    ("webhook", "watch secrets:atoll-webhook-tls", SYSTEM),
    ("agent", f"create {REPORTS}", ""),
    ("agent", f"patch {REPORTS}/status", ""),
    ("agent", "patch nodes/status", ""),
    ("agent", "get nodes/pods", ""),
    ("agent", "watch pods", ""),
    ("agent", f"create {LEASES}", NODES),
    ("agent", f"patch {LEASES}", NODES),
    ("agent", f"get {LEASES}:gpu-a-0", SYSTEM),
    ("controllers", f"delete {LEASES}:gpu-a-0", SYSTEM),
    ("controllers", f"create {LEASES}", SYSTEM),
    ("controllers", "patch pods", "default"),
    ("controllers", "patch pods/status", "default"),
    ("controllers", "create pods/eviction", "default"),
    ("controllers", f"list {BUDGETS}", ""),
    ("controllers", f"patch {CLAIMS}/status", "default"),
    ("controllers", "patch gpugangs.gpu.scheduling/status", "default"),
    ("controllers", "create gpugangs.gpu.scheduling", "default"),
    ("controllers", "watch topologies.gpu.scheduling", ""),
    ("controllers", "patch gpureservations.gpu.scheduling/status", ""),
    ("scheduler", "watch gpureservations.gpu.scheduling", ""),
    ("controllers", "watch persistentvolumes", ""),
    ("controllers", "watch persistentvolumeclaims", ""),
    ("controllers", "patch jobs.batch", "default"),
    ("controllers", "patch workloads.kueue.x-k8s.io", "default"),
    ("controllers", "list workloads.kueue.x-k8s.io", "default"),
    ("controllers", f"patch {REPORTS}", ""),
    ("controllers", f"delete {REPORTS}", ""),
    ("controllers", f"delete {LEASES}", NODES),
    ("controllers", "create events.events.k8s.io", "default"),
    ("controllers", "create secrets", SYSTEM),
    ("controllers", "patch secrets:atoll-authority", SYSTEM),
    ("controllers", f"patch {WEBHOOKS}:zz-atoll-webhook", ""),
]

DENIED = [
    ("controllers", f"declare-gone {REPORTS}", ""),
    ("controllers", f"patch {LEASES}", NODES),
    ("agent", f"declare-gone {REPORTS}", ""),
    ("scheduler", f"get {CLAIMS}", ""),
    ("webhook", "get secrets:atoll-webhook-tls", SYSTEM),
    ("agent", "get pods", "default"),
    ("agent", f"update {LEASES}", NODES),
    ("controllers", f"get {CLAIMS}", "default"),
    ("controllers", f"get {LEASES}", NODES),
    ("controllers", "create events", "default"),
    ("controllers", "patch gpureservations.gpu.scheduling", ""),
    ("scheduler", "patch gpureservations.gpu.scheduling/status", ""),
    ("scheduler", "create pods", "default"),
    ("scheduler", "patch pods", "default"),
    ("scheduler", "get secrets", SYSTEM),
    ("scheduler", f"patch {REPORTS}/status", ""),
    ("scheduler", f"patch {CLAIMS}/status", "default"),
    ("scheduler", f"delete {LEASES}", "default"),
    ("scheduler", f"update {LEASES}", NODES),
    ("scheduler", "patch nodes/status", ""),
    ("scheduler", "create pods/eviction", "default"),
    ("webhook", "get pods", "default"),
    ("webhook", "list resourceclaims.resource.k8s.io", "default"),
    ("webhook", "get secrets:atoll-authority", SYSTEM),
    ("webhook", "list secrets", SYSTEM),
    ("webhook", "get secrets:atoll-webhook-tls", "default"),
    ("webhook", f"get {LEASES}", SYSTEM),
    ("webhook", f"create {CLAIMS}", "default"),
    ("webhook", f"patch {CLAIMS}/status", "default"),
    ("agent", f"patch {REPORTS}", ""),
    ("agent", f"update {REPORTS}", ""),
    ("agent", f"delete {REPORTS}", ""),
    ("agent", "patch nodes", ""),
    ("agent", "update nodes/status", ""),
    ("agent", "get nodes/proxy", ""),
    ("agent", "patch pods", "default"),
    ("agent", "patch pods/status", "default"),
    ("agent", "create pods/eviction", "default"),
    ("agent", "get secrets", SYSTEM),
    ("agent", f"create {LEASES}", SYSTEM),
    ("agent", f"list {LEASES}", SYSTEM),
    ("agent", f"delete {LEASES}", SYSTEM),
    ("agent", f"delete {LEASES}", NODES),
    ("controllers", "watch workloads.kueue.x-k8s.io", "default"),
    ("controllers", "patch workloads.kueue.x-k8s.io/status", "default"),
    ("controllers", "create workloads.kueue.x-k8s.io", "default"),
    ("webhook", "get jobs.batch", "default"),
    ("controllers", "create pods", "default"),
    ("controllers", "delete pods", "default"),
    ("controllers", f"patch {BUDGETS}", "default"),
    ("controllers", f"delete {BUDGETS}", "default"),
    ("webhook", f"list {BUDGETS}", ""),
    ("agent", f"list {BUDGETS}", ""),
    ("controllers", "create tokenreviews.authentication.k8s.io", ""),
    ("controllers", "create subjectaccessreviews.authorization.k8s.io", ""),
    ("controllers", "create pods/binding", "default"),
    ("controllers", "create pods/exec", "default"),
    ("controllers", "patch nodes", ""),
    ("controllers", "get persistentvolumes", ""),
    ("controllers", "patch persistentvolumeclaims", "default"),
    ("controllers", "patch nodes/status", ""),
    ("controllers", f"patch {REPORTS}/status", ""),
    ("controllers", f"create {CLAIMS}", "default"),
    ("controllers", "get secrets", SYSTEM),
    ("controllers", "get secrets:other", SYSTEM),
    ("controllers", "create secrets", "default"),
    ("controllers", "delete secrets:atoll-authority", SYSTEM),
    ("controllers", f"patch {WEBHOOKS}:other", ""),
    ("controllers", f"create {LEASES}", NODES),
    ("controllers", "create roles.rbac.authorization.k8s.io", SYSTEM),
]


def title(row: tuple[str, str, str]) -> str:
    """Return a readable test id."""
    return " ".join(part for part in row if part)


@pytest.mark.parametrize("row", ALLOWED, ids=title)
def test_part_may_do_its_work(api: RealApi, row: tuple[str, str, str]) -> None:
    """The role holds what the part does; so that a denial below is not just a missing role."""
    identity, action, namespace = row
    wait_for(lambda: api.allows(identity, attributes(action, namespace)), "the role that was just applied holds")


@pytest.mark.parametrize("row", DENIED, ids=title)
def test_part_may_do_nothing_else(api: RealApi, row: tuple[str, str, str]) -> None:
    """The role holds no more than that."""
    identity, action, namespace = row
    assert not api.allows(identity, attributes(action, namespace))


@pytest.fixture(scope="module")
def people(api: RealApi) -> RealApi:
    """Users who hold Kubernetes' own roles view and edit in the namespace default, filled by aggregation."""
    for role in ("view", "edit"):
        binding = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": f"tests-{role}"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": f"user-{role}"}],
        }
        path = "/apis/rbac.authorization.k8s.io/v1/namespaces/default/rolebindings"
        assert api.apply(binding, path=path).is_accepted
    wait_for(lambda: "gpu.scheduling" in api.send("GET", f"{ROLES}/edit").message, "the roles are aggregated")
    return api


ROLES = "/apis/rbac.authorization.k8s.io/v1/clusterroles"


@pytest.mark.parametrize(
    ("user", "action", "may"),
    [
        ("user-view", f"list {CLAIMS}", True),
        ("user-view", f"create {CLAIMS}", False),
        ("user-edit", f"create {CLAIMS}", True),
        ("user-edit", f"delete {CLAIMS}", True),
        ("user-edit", f"patch {CLAIMS}/status", False),
        ("user-edit", "patch pods/status", False),
        ("user-edit", "create pods/binding", False),
        ("user-edit", "create bindings", False),
    ],
)
def test_users_of_the_usual_roles_may_handle_claims(people: RealApi, user: str, action: str, *, may: bool) -> None:
    """Whoever may edit a namespace may claim GPUs in it, and gets no hand on what Atoll or Kubernetes writes."""
    wait_for(lambda: people.allows(user, attributes(action, "default")) == may, "the aggregated roles hold")


@pytest.mark.parametrize("action", [f"delete {LEASES}:gpu-a-0", f"create {LEASES}", "get secrets:atoll-authority"])
def test_users_of_another_namespace_have_no_hand_on_the_ledger(people: RealApi, action: str) -> None:
    """Rights in one's own namespace free no GPU."""
    assert not people.allows("user-edit", attributes(action, SYSTEM))


def test_impersonation_gives_a_token_the_name_of_its_node(api: RealApi) -> None:
    """The tests' own ground: an identity of an agent carries the node as the API server would sign it."""
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    answer = api.send("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", review, identity="agent@node-a")
    user = json.loads(answer.message)["status"]["userInfo"]
    assert user["extra"] == {"authentication.kubernetes.io/node-name": ["node-a"]}
