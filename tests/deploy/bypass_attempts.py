"""Every way to give a pod other GPUs than it holds, one row each, with the policy that prevents it.

The attacker is an administrator unless a row says otherwise, so that only the policy can stop the request.
"""

from typing import Any

from atoll.api import names
from tests.deploy.requests import (
    ALL_GPUS,
    ALLOCATION,
    APPLY,
    CLAIM_UID,
    JSON_PATCH,
    LEASES,
    MERGE,
    MOUNT,
    PODS,
    REMOVE_GATE,
    REPORTS,
    VOLUMES,
    Probe,
    annotate,
    binding,
    create,
    debug,
    launcher,
    lease,
    node_status,
    plain_container,
    pod,
    reference,
    report,
    shaped,
    shaped_container,
    shaped_with_env,
)

ANNOTATION_DOORS = [
    create("a forged allocation on a new pod", shaped("new", annotations=ALLOCATION), policy="atoll-annotations"),
    create("a forged variable on an unclaimed pod", pod("new", annotations=ALLOCATION), policy="atoll-annotations"),
    create(
        "a forged allocation on a pod whose name the API server makes up",
        {**shaped("new", annotations=ALLOCATION), "metadata": {"generateName": "new-", "annotations": ALLOCATION}},
        policy="atoll-annotations",
    ),
    annotate("pods: other GPUs", "held", {"uuids.gpu.scheduling/main": "GPU-b"}, policy="atoll-annotations"),
    annotate(
        "pods/status: other GPUs", "held/status", ALLOCATION | {"gpu.scheduling/uuids": "b"}, policy="atoll-annotations"
    ),
    annotate("pods: an allocation removed", "held", {"gpu.scheduling/allocated": None}, policy="atoll-annotations"),
    annotate("pods: a variable added", "waiting", {"devices.gpu.scheduling/main": "GPU-b"}, policy="atoll-annotations"),
    annotate("pods: another claim's uid", "waiting", {"gpu.scheduling/claim-uid": "other"}, policy="atoll-annotations"),
    annotate("pods: a wake-up by hand", "waiting", {"gpu.scheduling/woken": "1"}, policy="atoll-annotations"),
    annotate("pods: a notice by hand", "held", {"gpu.scheduling/preemption-notice": "1"}, policy="atoll-annotations"),
    annotate("pods: GPUs kept by hand", "waiting", {"gpu.scheduling/kept": "node-a:0"}, policy="atoll-annotations"),
    create(
        "GPUs kept for a new pod",
        shaped("new", annotations={"gpu.scheduling/kept": "node-a:0"}),
        policy="atoll-annotations",
    ),
    create(
        "a new pod that says it was admitted",
        shaped("new", annotations={"gpu.scheduling/admission": "a"}),
        policy="atoll-annotations",
    ),
    annotate("pods: a rank by hand", "gated", {"gpu.scheduling/rank": "0"}, policy="atoll-annotations"),
    annotate("pods: a leader by hand", "gated", {"gpu.scheduling/leader": "mine"}, policy="atoll-annotations"),
    annotate("pods: an admission by hand", "gated", {"gpu.scheduling/admission": "a"}, policy="atoll-annotations"),
    annotate(
        "the controllers change an admission beside the gate",
        "waiting",
        {"gpu.scheduling/admission": "a"},
        identity="controllers",
        policy="atoll-annotations",
    ),
    annotate("pods: another claim", "waiting", {"gpu.scheduling/claim": "eight"}, policy="atoll-annotations"),
    annotate(
        "pods: a reservation added later",
        "waiting",
        {"gpu.scheduling/reservation": "nightly"},
        policy="atoll-annotations",
    ),
    annotate("pods: the claim removed", "waiting", {"gpu.scheduling/claim": None}, policy="atoll-annotations"),
    annotate("pods: a claim added later", "plain", {"gpu.scheduling/claim": "two"}, policy="atoll-annotations"),
    annotate("pods/status: another gang", "waiting/status", {"gpu.scheduling/gang": "g"}, policy="atoll-annotations"),
    Probe(
        title="server-side apply: other GPUs",
        path=f"{PODS}/held?fieldManager=mallory&force=true",
        body={
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "held", "annotations": {"gpu.scheduling/uuids": "GPU-b"}},
        },
        content_type=APPLY,
        policy="atoll-annotations",
    ),
    annotate(
        "the controllers change an allocation",
        "held/status",
        {"uuids.gpu.scheduling/main": "GPU-b"},
        identity="controllers",
        policy="atoll-annotations",
    ),
    annotate(
        "the scheduler changes an allocation after bind",
        "held/status",
        {"uuids.gpu.scheduling/main": "GPU-b"},
        identity="scheduler",
        policy="atoll-annotations",
    ),
    annotate(
        "a kubelet changes an allocation on its node",
        "held/status",
        {"uuids.gpu.scheduling/main": "GPU-b"},
        identity="kubelet@node-a",
        policy="atoll-annotations",
    ),
]

MIRROR = {"kubernetes.io/config.mirror": "forgotten", "kubernetes.io/config.hash": "forgotten"}
MIRROR_DOORS = [
    create(
        "a tenant's mirror of a pod that the API server does not know",
        pod("new", annotations=MIRROR, nodeName="node-a"),
        policy="atoll-mirrors",
    ),
]

BINDING_DOORS = [
    Probe(
        title="pods/binding with an allocation",
        method="POST",
        path=f"{PODS}/waiting/binding",
        body=binding("waiting", ALLOCATION),
        policy="atoll-bindings",
    ),
    Probe(
        title="the legacy bindings with an allocation",
        method="POST",
        path="/api/v1/namespaces/doors/bindings",
        body=binding("waiting", ALLOCATION),
        policy="atoll-bindings",
    ),
    Probe(
        title="the scheduler's Binding changes the claim",
        method="POST",
        path=f"{PODS}/waiting/binding",
        body=binding("waiting", {**ALLOCATION, "gpu.scheduling/claim": "eight"}),
        identity="scheduler",
        policy="atoll-bindings",
    ),
]

GATE_DOORS = [
    Probe(
        title="a member leaves its gang's gate",
        path=f"{PODS}/gated",
        body=REMOVE_GATE,
        content_type=JSON_PATCH,
        policy="atoll-gates",
    ),
]

ENDED = [{"name": "main", "image": "none", "imageID": "", "ready": False, "restartCount": 0,
          "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}]  # fmt: skip

TRAINING = "/apis/batch/v1/namespaces/doors/jobs/training"
WORKLOAD = "/apis/kueue.x-k8s.io/v1beta2/namespaces/doors/workloads/training"
PYTORCH = "/apis/kubeflow.org/v1/namespaces/doors/pytorchjobs/training"
JOBSET = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/doors/jobsets/training"
OWNER_DOORS = [
    Probe(title=f"the controllers change {what} of a {kind}", path=path, body=body, content_type=MERGE,
          identity="controllers", policy="atoll-owners")
    for what, kind, path, body in (
        ("more than the switch", "Job", TRAINING, {"spec": {"suspend": True, "parallelism": 7}}),
        ("how long it may run", "Job", TRAINING, {"spec": {"activeDeadlineSeconds": 7}}),
        ("the labels", "Job", TRAINING, {"metadata": {"labels": {"team": "mine"}}}),
        ("a foreign annotation", "Job", TRAINING, {"metadata": {"annotations": {"team": "mine"}}}),
        ("more than the switch", "Workload", WORKLOAD, {"spec": {"active": False, "priority": 7}}),
        ("the switch of other kinds", "Workload", WORKLOAD, {"spec": {"suspend": True}}),
        ("another section's switch", "Workload", WORKLOAD, {"spec": {"runPolicy": {"active": False}}}),
        ("what stands beside the specification", "Workload", WORKLOAD, {"spec": {"active": False}, "data": {"a": "b"}}),
        ("the switch of other kinds", "PyTorchJob", PYTORCH, {"spec": {"suspend": True}}),
        ("when it is cleaned up", "PyTorchJob", PYTORCH, {"spec": {"runPolicy": {"cleanPodPolicy": "All"}}}),
        ("a training operator's switch", "JobSet", JOBSET, {"spec": {"runPolicy": {"suspend": True}}}),
        ("what it is admitted for", "Workload", WORKLOAD, {"spec": {"podSets": [{"name": "main", "count": 9}]}}),
    )
]  # fmt: skip

CONTROLLERS_DOORS = [
    Probe(title=f"the controllers change {what}", path=f"{PODS}/{target}", body=body, content_type=MERGE,
          identity="controllers", policy="atoll-controllers-pods")
    for what, target, body in (
        ("the image of somebody's pod", "plain", {"spec": {"containers": [{**plain_container(), "image": "mine"}]}}),
        ("the time that a pod may run", "plain", {"spec": {"activeDeadlineSeconds": 7}}),
        ("the labels of a pod", "plain", {"metadata": {"labels": {"app": "mine"}}}),
        ("a foreign annotation of a pod", "plain", {"metadata": {"annotations": {"team": "mine"}}}),
        ("the phase of a pod", "plain/status", {"status": {"phase": "Failed"}}),
        ("what became of a container", "plain/status", {"status": {"containerStatuses": ENDED}}),
        ("a foreign condition", "plain/status", {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}),
    )
]  # fmt: skip

SECRETS = "/api/v1/namespaces/atoll-system/secrets"
SECRET_DOORS = [
    Probe(title=f"the controllers make a Secret {what}", method="POST", path=SECRETS, identity="controllers",
          policy="atoll-controllers-secrets",
          body={"apiVersion": "v1", "kind": "Secret", "type": kind, "metadata": {"name": name, "annotations": {
              "kubernetes.io/service-account.name": "default"}}})
    for what, name, kind in (
        ("with the token of another account", "atoll-authority", "kubernetes.io/service-account-token"),
        ("of another name", "mine", "Opaque"),
    )
]  # fmt: skip

NOMINATION_DOORS = [
    Probe(title=f"{who} names the node of a waiting pod with GPUs", path=f"{PODS}/waiting/status",
          body={"status": {"nominatedNodeName": "node-a"}}, content_type=MERGE, identity=identity,
          policy="atoll-nominations")
    for who, identity in (("a tenant", "admin"), ("the cluster's own scheduler", "default-scheduler"))
]  # fmt: skip

TERM = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"a": "b"}}}
NODE_TERM = {"matchExpressions": [{"key": "a", "operator": "Exists"}]}


def noted(count: int) -> dict[str, str]:
    """Return the annotations of a pod with GPUs and so many more of Atoll's."""
    notes = {f"gpu.scheduling/note-{number}": "" for number in range(count)}
    return {**shaped("x")["metadata"]["annotations"], **notes}


MANY_CONTAINERS = [shaped_container(f"c{number}", gpus=int(number == 0)) for number in range(257)]


MANY_LABELS = {f"l{number}": "" for number in range(257)}


def labelled(body: dict[str, Any]) -> dict[str, Any]:
    """Return the object with labels without end."""
    return {**body, "metadata": {**body["metadata"], "labels": MANY_LABELS}}


MANY_TOLERATIONS = [{"key": f"k{number}", "operator": "Exists"} for number in range(65)]
SIZE_DOORS = [
    create("more labels than are kept", labelled(shaped("new")), policy="atoll-sizes"),
    Probe(title="labels added later", path=f"{PODS}/held", content_type=MERGE, policy="atoll-sizes",
          body={"metadata": {"labels": MANY_LABELS}}),
    create("a gang's member without GPUs and with more labels than are kept",
           labelled(launcher()), policy="atoll-sizes"),
    *(Probe(title=f"a {kind} with more {field} than anybody needs", method="POST",
            path=f"/apis/gpu.scheduling/v1/namespaces/doors/{kind.lower()}s",
            body={"apiVersion": "gpu.scheduling/v1", "kind": kind, "metadata": {"name": "new", field: MANY_LABELS},
                  "spec": spec}, policy="atoll-object-sizes")
      for kind, spec in (("GpuClaim", {"devices": {"count": 1}}), ("GpuGang", {"podSets": [{"name": "w", "count": 1}]}))
      for field in ("labels", "annotations")),
    create("annotations that mean nothing", shaped("new", annotations=noted(33)), policy="atoll-sizes"),
    Probe(title="annotations that mean nothing, added later", path=f"{PODS}/noted", content_type=MERGE,
          body={"metadata": {"annotations": {"gpu.scheduling/one-more": ""}}}, policy="atoll-sizes"),
    create("containers without end", shaped("new", *MANY_CONTAINERS), policy="atoll-sizes"),
    create("too many tolerations", shaped("new", tolerations=MANY_TOLERATIONS), policy="atoll-sizes"),
    Probe(title="too many tolerations, added later", path=f"{PODS}/waiting", content_type=MERGE,
          body={"spec": {"tolerations": MANY_TOLERATIONS}}, policy="atoll-sizes"),
    create("too many terms of anti-affinity", shaped("new", affinity={"podAntiAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [TERM] * 20,
        "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "podAffinityTerm": TERM}] * 13}}),
        policy="atoll-sizes"),
    create("too many terms of node affinity", shaped("new", affinity={"nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [NODE_TERM] * 65}}}),
        policy="atoll-sizes"),
]  # fmt: skip

CDI = {"cdi.k8s.io/gpus": "nvidia.com/gpu=0"}
SHAPE_DOORS = [
    create(
        "devices of the machine by variable",
        shaped_with_env({"name": "NVIDIA_NVSWITCH", "value": "all"}),
        policy="atoll-shape",
    ),
    *(
        create(
            f"{variable} left to a source of variables or to the image",
            shaped(
                "new",
                {
                    **shaped_container(gpus=1),
                    "env": [one for one in shaped_container()["env"] if one["name"] != variable],
                    "envFrom": [{"configMapRef": {"name": "settings"}}],
                },
            ),
            policy="atoll-shape",
        )
        for variable in names.DRIVER_DEVICE_VARIABLES
    ),
    create(
        "devices by annotation on a claimed pod",
        shaped("new", annotations={**shaped("x")["metadata"]["annotations"], **CDI}),
        policy="atoll-shape",
    ),
    create("webhook down: a claim", pod("new", annotations={"gpu.scheduling/claim": "two"}), policy="atoll-shape"),
    create(
        "webhook down: a bare resource",
        pod("new", {**plain_container(), "resources": {"limits": {"gpu.scheduling/gpu": "1"}}}),
        policy="atoll-shape",
    ),
    create(
        "outside of the webhook: a bare resource in kube-system",
        pod("new", {**plain_container(), "resources": {"limits": {"gpu.scheduling/gpu": "1"}}}),
        namespace="kube-system",
        policy="atoll-shape",
    ),
    create("a node chosen by hand", shaped("new", nodeName="node-a"), policy="atoll-shape"),
    create("a foreign scheduler", shaped("new", schedulerName="nobody"), policy="atoll-shape"),
    create("no uid of the claim", shaped("new", annotations={"gpu.scheduling/claim": "two"}), policy="atoll-shape"),
    create(
        "a uid without a claim",
        shaped("new", annotations={"gpu.scheduling/claim-uid": CLAIM_UID}),
        policy="atoll-shape",
    ),
    create("all GPUs by variable", shaped_with_env(ALL_GPUS), policy="atoll-shape"),
    create(
        "the neighbour's GPUs by variable",
        shaped_with_env({"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": reference("uuids", "side")}),
        policy="atoll-shape",
    ),
    create(
        "a sidecar without variables",
        shaped("new", shaped_container(gpus=1), plain_container("side")),
        policy="atoll-shape",
    ),
    create(
        "an init container without variables",
        shaped("new", initContainers=[plain_container("init")]),
        policy="atoll-shape",
    ),
    create(
        "AMD's variable alone under NVIDIA's class",
        shaped(
            "new",
            {
                **shaped_container(gpus=1),
                "env": [{"name": "ROCR_VISIBLE_DEVICES", "valueFrom": reference("uuids", "main")}],
            },
            runtimeClassName="atoll-nvidia",
        ),
        policy="atoll-shape",
    ),
    create(
        "the RuntimeClass by hand",
        pod("new", plain_container(NVIDIA_VISIBLE_DEVICES="all"), runtimeClassName="atoll-nvidia"),
        policy="atoll-shape",
    ),
    create("references without a request", shaped("new", shaped_container(), annotations={}), policy="atoll-shape"),
    create(
        "MIG instances that kube-scheduler would bind by itself",
        shaped("new", {**shaped_container(), "resources": {"limits": {"gpu.scheduling/mig-3g.40gb": "1"}}}),
        policy="atoll-shape",
    ),
    create(
        "a member of a gang without its gate",
        shaped("new", annotations={"gpu.scheduling/gang": "g"}),
        policy="atoll-shape",
    ),
    create("a launcher without its gate", launcher(plain_container(), schedulingGates=[]), policy="atoll-shape"),
    create(
        "a launcher that takes all GPUs", launcher(plain_container(NVIDIA_VISIBLE_DEVICES="all")), policy="atoll-shape"
    ),
    create("a launcher under the RuntimeClass", launcher(runtimeClassName="atoll-nvidia"), policy="atoll-shape"),
    create("a launcher that reads GPUs of its annotations", launcher(shaped_container()), policy="atoll-shape"),
    create(
        "GPUs chosen by a mount",
        shaped("new", {**shaped_container(gpus=1), **MOUNT}, volumes=VOLUMES),
        policy="atoll-shape",
    ),
]

DEBUG_DOORS = [
    debug("kubectl debug with all GPUs", "plain", {"env": [ALL_GPUS]}, policy="atoll-ephemeral-containers"),
    debug(
        "kubectl debug with a field as variable",
        "held",
        {"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]},
        policy="atoll-ephemeral-containers",
    ),
    debug("kubectl debug with a CUDA image", "walled", {}, policy="atoll-ephemeral-containers"),
    debug(
        "kubectl debug with no GPU, but the runtime at work",
        "walled",
        {"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "none"}]},
        policy="atoll-ephemeral-containers",
    ),
    *(
        debug(
            f"kubectl debug with {variable}",
            target,
            {"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}, {"name": variable, "value": "enabled"}]},
            policy="atoll-ephemeral-containers",
        )
        for target in ("plain", "walled")
        for variable in names.DRIVER_DEVICE_VARIABLES
    ),
    debug("kubectl debug with a mount", "volumes", MOUNT, policy="atoll-ephemeral-containers"),
]

ENDING_DOORS = [
    Probe(
        title="pods/status: the containers of a pod with GPUs have ended",
        path=f"{PODS}/held/status",
        body={"status": {"phase": "Failed", "containerStatuses": ENDED}},
        content_type=MERGE,
        policy="atoll-endings",
    ),
    Probe(
        title="server-side apply: an init container of a pod with GPUs has ended",
        path=f"{PODS}/held/status?fieldManager=mallory&force=true",
        body={
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "held"},
            "status": {"initContainerStatuses": ENDED},
        },
        content_type=APPLY,
        policy="atoll-endings",
    ),
    Probe(
        title="pods/status: kubelet runs nothing more of a pod with GPUs",
        path=f"{PODS}/held/status",
        body={
            "status": {"phase": "Failed", "conditions": [{"type": "Ready", "status": "False", "reason": "PodFailed"}]}
        },
        content_type=MERGE,
        policy="atoll-endings",
    ),
    Probe(
        title="pods/status: the containers of a pod have ended before it gets its GPUs",
        path=f"{PODS}/waiting/status",
        body={"status": {"containerStatuses": ENDED}},
        content_type=MERGE,
        policy="atoll-endings",
    ),
    Probe(
        title="pods/status: kubelet runs nothing more of a pod that gets GPUs later",
        path=f"{PODS}/waiting/status",
        body={"status": {"conditions": [{"type": "Ready", "status": "False", "reason": "PodFailed"}]}},
        content_type=MERGE,
        policy="atoll-endings",
    ),
]

OWNER = {"apiVersion": "v1", "kind": "Node", "name": "node-a", "uid": CLAIM_UID}
LEASE_DOORS = [
    Probe(
        title="a GPU's Lease deleted",
        method="DELETE",
        path=f"{LEASES}/atoll-system/leases/gpu-node-a-0",
        policy="atoll-leases",
    ),
    Probe(title="all Leases deleted", method="DELETE", path=f"{LEASES}/atoll-system/leases", policy="atoll-leases"),
    Probe(
        title="a GPU's Lease for another holder",
        path=f"{LEASES}/atoll-system/leases/gpu-node-a-0",
        body={"spec": {"holderIdentity": "mine"}},
        content_type=MERGE,
        policy="atoll-leases",
    ),
    Probe(
        title="a GPU's Lease made by hand",
        method="POST",
        path=f"{LEASES}/atoll-system/leases",
        body=lease("gpu-node-a-7"),
        policy="atoll-leases",
    ),
    Probe(
        title="a GPU's Lease under a name that the API server makes up",
        method="POST",
        path=f"{LEASES}/atoll-system/leases",
        body={**lease(""), "metadata": {"generateName": "gpu-node-a-"}},
        policy="atoll-leases",
    ),
    Probe(
        title="an owner for a GPU's Lease, with whom the garbage collector would delete it",
        path=f"{LEASES}/atoll-system/leases/gpu-node-a-0",
        body={"metadata": {"ownerReferences": [OWNER]}},
        content_type=MERGE,
        policy="atoll-leases",
    ),
    Probe(
        title="a finalizer that would keep a GPU's Lease for ever",
        path=f"{LEASES}/atoll-system/leases/gpu-node-a-0",
        body={"metadata": {"finalizers": ["example.org/never"]}},
        content_type=MERGE,
        policy="atoll-leases",
    ),
    Probe(
        title="the garbage collector deletes a GPU's Lease",
        method="DELETE",
        path=f"{LEASES}/atoll-system/leases/gpu-node-a-0",
        identity="garbage-collector",
        policy="atoll-leases",
    ),
    Probe(
        title="server-side apply: a GPU's Lease for another holder",
        path=f"{LEASES}/atoll-system/leases/gpu-node-a-0?fieldManager=mallory&force=true",
        body=lease("gpu-node-a-0", "default/mine/uid"),
        content_type=APPLY,
        policy="atoll-leases",
    ),
    Probe(
        title="the scheduler ends the controllers' term",
        method="DELETE",
        path=f"{LEASES}/atoll-system/leases/atoll-controllers",
        identity="scheduler",
        policy="atoll-leases",
    ),
    Probe(
        title="the controllers take the scheduler's term",
        path=f"{LEASES}/atoll-system/leases/atoll-scheduler",
        body={"spec": {"holderIdentity": "controllers"}},
        content_type=MERGE,
        identity="controllers",
        policy="atoll-leases",
    ),
]


def declare_gone(title: str, identity: str, *, by: str, node: str = "node-a") -> Probe:
    """Say that a machine is gone for good."""
    spec = {"spec": {"gone": [{"nodeUid": "uid-of-the-machine", "reason": "scrapped", **({"by": by} if by else {})}]}}
    is_new = node == "node-c"
    return Probe(
        title=title,
        method="POST" if is_new else "PATCH",
        path=REPORTS if is_new else f"{REPORTS}/{node}",
        body={**report(node), **spec} if is_new else spec,
        content_type="application/json" if is_new else MERGE,
        identity=identity,
        policy="atoll-gone-machines",
    )


AGENT_DOORS = [
    Probe(
        title="an agent reports for another node",
        path=f"{REPORTS}/node-b/status",
        body={"status": {"deviceCount": 8}},
        content_type=MERGE,
        identity="agent@node-a",
        policy="atoll-node-agents",
    ),
    Probe(
        title="an agent registers another node",
        method="POST",
        path=REPORTS,
        body=report("node-c"),
        identity="agent@node-a",
        policy="atoll-node-agents",
    ),
    Probe(
        title="an agent's token that is bound to no node",
        path=f"{REPORTS}/node-a/status",
        body={"status": {"deviceCount": 8}},
        content_type=MERGE,
        identity="agent",
        policy="atoll-node-agents",
    ),
    Probe(
        title="an agent's heartbeat for another node",
        method="POST",
        path=f"{LEASES}/atoll-nodes/leases",
        body=lease("node-b"),
        identity="agent@node-a",
        policy="atoll-node-agents",
    ),
    node_status(
        "an agent counts another node's GPUs",
        "node-b",
        {"status": {"capacity": {"gpu.scheduling/gpu": "8"}}},
        policy="atoll-node-agents",
    ),
    node_status(
        "an agent counts its node's cpus",
        "node-a",
        {"status": {"capacity": {"cpu": "999"}}},
        policy="atoll-node-resources",
    ),
    node_status(
        "an agent takes a resource of its node away",
        "node-a",
        {"status": {"allocatable": {"cpu": None}}},
        policy="atoll-node-resources",
    ),
    node_status(
        "an agent labels its node", "node-a", {"metadata": {"labels": {"zone": "x"}}}, policy="atoll-node-resources"
    ),
    node_status(
        "an agent moves its node's address",
        "node-a",
        {"status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.9"}]}},
        policy="atoll-node-resources",
    ),
    Probe(
        title="the controllers cordon a GPU",
        path=f"{REPORTS}/node-a",
        body={"spec": {"cordons": [{"uuid": "GPU-aaaa"}]}},
        content_type=MERGE,
        identity="controllers",
        policy="atoll-cordons",
    ),
    declare_gone("whoever may cordon says that a machine is gone", "operator", by="operator"),
    declare_gone("whoever may say that a machine is gone says it in another's name", "releaser", by="admin"),
    declare_gone("whoever may say that a machine is gone says it in nobody's name", "releaser", by=""),
    declare_gone("the forged word of an agent that registers its node", "agent@node-c", by="admin", node="node-c"),
]

ENV_FROM = {"envFrom": [{"configMapRef": {"name": "settings"}}]}


def unclaimed(title: str, body: dict[str, Any]) -> Probe:
    """Return the creation of a pod that asks for nothing of Atoll's."""
    return create(title, body, namespace="default", policy="atoll-unclaimed-pods")


def device(path: str) -> dict[str, Any]:
    """Return the spec of a pod that mounts a path of its machine."""
    return {"volumes": [{"name": "machine", "hostPath": {"path": path}}]}


UNCLAIMED_DOORS = [
    unclaimed("a source of variables", pod("new", {**plain_container(), **ENV_FROM})),
    unclaimed(
        "a source of variables beside no GPU, but the runtime at work",
        pod("new", {**plain_container(NVIDIA_VISIBLE_DEVICES="none"), **ENV_FROM}),
    ),
    unclaimed(
        "a source of variables with half a name",
        pod("new", {**plain_container(), "envFrom": [{"prefix": "NVIDIA_", "configMapRef": {"name": "settings"}}]}),
    ),
    unclaimed(
        "a source of variables of an init container",
        pod("new", initContainers=[{**plain_container("init"), **ENV_FROM}]),
    ),
    unclaimed("memory of other nodes", pod("new", plain_container(NVIDIA_IMEX_CHANNELS="0"))),
    unclaimed(
        "a mount that NVIDIA's runtime reads",
        pod("new", {**plain_container(), **MOUNT}, volumes=VOLUMES),
    ),
    *(
        unclaimed(f"a mount of {path}", pod("new", **device(path)))
        for path in ("/", "/dev", "/dev/", "//dev/nvidia0", "/dev/dri/renderD128", "/dev/kfd")
    ),
    unclaimed("devices by annotation", pod("new", annotations=CDI)),
    Probe(
        title="NVIDIA's handler under an innocent name",
        method="POST",
        path="/apis/node.k8s.io/v1/runtimeclasses",
        policy="atoll-runtime-classes",
        body={
            "apiVersion": "node.k8s.io/v1",
            "kind": "RuntimeClass",
            "metadata": {"name": "fast"},
            "handler": "nvidia-cdi",
        },
    ),
    create(
        "an unclaimed pod with all GPUs",
        pod("new", plain_container(NVIDIA_VISIBLE_DEVICES="all")),
        namespace="default",
        policy="atoll-unclaimed-pods",
    ),
    create(
        "an unclaimed pod under NVIDIA's own class",
        pod("new", runtimeClassName="nvidia"),
        namespace="default",
        policy="atoll-unclaimed-pods",
    ),
]

DOORS = [
    *ANNOTATION_DOORS,
    *MIRROR_DOORS,
    *BINDING_DOORS,
    *GATE_DOORS,
    *OWNER_DOORS,
    *CONTROLLERS_DOORS,
    *SECRET_DOORS,
    *NOMINATION_DOORS,
    *SHAPE_DOORS,
    *SIZE_DOORS,
    *DEBUG_DOORS,
    *ENDING_DOORS,
    *LEASE_DOORS,
    *AGENT_DOORS,
    *UNCLAIMED_DOORS,
]
