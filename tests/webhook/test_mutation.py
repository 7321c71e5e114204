"""The webhook's changes to pods: tables of situations, and properties over generated pods."""

from typing import Any

import jsonpatch
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.api import names
from atoll.api.claims import GpuClaim, VisibleDevices
from atoll.cluster.allocations import annotations_bytes
from webhook.autoscalers import KeepNodes
from webhook.mutation import CONTAINERS_MAX, ENTRIES_MAX, OTHER_ANNOTATIONS_BYTES_MAX, mutate
from webhook.pods import decode_pod
from webhook.requests import ClaimLookup, ClaimMissing, ClaimUnavailable, ClaimUnreadable, Defaults
from webhook.review import WARNINGS_MAX, Denial, Mutation, User

AUTOSCALERS = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}
UID = "8c4ab7a0-0000-4000-8000-000000000001"
ALICE = User(username="alice", groups=("system:authenticated",))
KUBELET = User(username="system:node:n1", groups=("system:nodes", "system:authenticated"))
GPU = names.GPU_RESOURCE
MIG = "gpu.scheduling/mig-3g.40gb"


def make_claim(
    *, count: int = 2, visible_devices: str | None = None, gang_ref: str | None = None, **devices: Any
) -> GpuClaim:
    """Build a GpuClaim as the API server would return it."""
    spec: dict[str, Any] = {"devices": {"count": count, **devices}}
    if visible_devices:
        spec["visibleDevices"] = visible_devices
    if gang_ref:
        spec["gangRef"] = gang_ref
    return GpuClaim.model_validate({"metadata": {"name": "two", "namespace": "team", "uid": UID}, "spec": spec})


def container(
    name: str = "main", *, gpu: Any = None, env: list[dict[str, Any]] | None = None, **more: Any
) -> dict[str, Any]:
    """Build a container that asks for `gpu` GPUs, as limits and requests."""
    made: dict[str, Any] = {"name": name, "image": "app", "resources": {}, **more}
    if gpu is not None:
        made["resources"] = {"limits": {GPU: gpu}, "requests": {GPU: gpu}}
    if env is not None:
        made["env"] = env
    return made


def make_pod(
    *containers: dict[str, Any], claim: str | None = "two", annotations: dict[str, str] | None = None, **spec: Any
) -> dict[str, Any]:
    """Build a pod as the API server sends it at CREATE: defaults filled in, empty maps left out."""
    annotations = {**({names.CLAIM: claim} if claim is not None else {}), **(annotations or {})}
    metadata: dict[str, Any] = {"generateName": "job-", "namespace": "team", "creationTimestamp": None}
    if annotations:
        metadata["annotations"] = annotations
    spec = {"containers": list(containers) or [container()], "schedulerName": "default-scheduler", **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": {}}


def decide(
    pod: dict[str, Any],
    *,
    claim: ClaimLookup | None = None,
    user: User = ALICE,
    defaults: Defaults | None = None,
    pod_group: str = "",
) -> Mutation | Denial:
    """Run the webhook's decision as the server does: a claim is looked up only where the pod names one."""
    lookup = (claim or make_claim()) if names.CLAIM in pod["metadata"].get("annotations", {}) else None
    view = decode_pod(msgspec.json.encode(pod))
    return mutate(view, namespace="team", user=user, claim=lookup, defaults=defaults or Defaults(), pod_group=pod_group)


def admit(pod: dict[str, Any], **how: Any) -> dict[str, Any]:
    """Return the pod as the webhook leaves it."""
    decision = decide(pod, **how)
    assert isinstance(decision, Mutation), decision
    patched: dict[str, Any] = jsonpatch.apply_patch(pod, list(decision.operations))
    return patched


def refused(pod: dict[str, Any], **how: Any) -> Denial:
    """Return the denial of the pod."""
    decision = decide(pod, **how)
    assert isinstance(decision, Denial), decision
    return decision


def reference(name: str, annotation: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{annotation}']"}}}


def own_variables(name: str) -> list[dict[str, Any]]:
    return [
        reference("NVIDIA_VISIBLE_DEVICES", f"uuids.gpu.scheduling/{name}"),
        reference("CUDA_VISIBLE_DEVICES", f"devices.gpu.scheduling/{name}"),
        *turned_off(*names.DRIVER_DEVICE_VARIABLES),
    ]


def turned_off(*variables: str) -> list[dict[str, Any]]:
    return [{"name": name, "value": ""} for name in variables]


def counts(pod: dict[str, Any], resource: str = GPU) -> dict[str, Any]:
    """Return what every container that mentions the resource asks for, limits and requests being equal."""
    found = {}
    for made in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
        limits, requests = (made.get("resources", {}).get(section, {}) for section in ("limits", "requests"))
        assert str(limits.get(resource)) == str(requests.get(resource))
        if resource in limits:
            found[made["name"]] = limits[resource]
    return found


def test_a_claimed_pod_gets_count_scheduler_uid_and_variables() -> None:
    """The whole of what the webhook adds, spelled out once."""
    pod = make_pod(container(env=[{"name": "LOG", "value": "x"}]))
    want = make_pod(
        container(gpu="2", env=[*own_variables("main"), {"name": "LOG", "value": "x"}]),
        annotations={names.CLAIM_UID: UID},
        schedulerName="gpu-scheduler",
    )

    assert admit(pod) == want


@pytest.mark.parametrize("spare", [0, -1])
def test_annotations_that_leave_no_room_for_the_allocation_are_refused(spare: int) -> None:
    """Bound past the API server's limit, a pod would never again take a status of kubelet's, nor its own end."""
    used = annotations_bytes({names.CLAIM: "two", "x": ""})
    pod = make_pod(annotations={"x": "y" * (OTHER_ANNOTATIONS_BYTES_MAX - used - spare)})

    if spare >= 0:
        admit(pod)
    else:
        assert "move large values to a ConfigMap" in refused(pod).message


def test_a_pod_without_a_claim_gets_what_its_containers_ask_for() -> None:
    """The bare resource is a contiguous claim of that count: no claim-uid, everything else as with a claim."""
    pod = make_pod(container(gpu="4"), claim=None)
    want = make_pod(container(gpu="4", env=own_variables("main")), claim=None, schedulerName="gpu-scheduler")

    assert admit(pod) == want


SIDECAR = {"restartPolicy": "Always"}


@pytest.mark.parametrize(
    ("pod", "want"),
    [
        pytest.param(make_pod(container("a"), container("b")), {"a": "2"}, id="nobody-asks-count-on-first"),
        pytest.param(
            make_pod(container("a"), initContainers=[container("init")]),
            {"a": "2"},
            id="init-container-never-carries-it",
        ),
        pytest.param(
            make_pod(container("a", gpu="1"), container("b", gpu="1")), {"a": "1", "b": "1"}, id="two-ask-a-split"
        ),
        pytest.param(
            make_pod(container("a"), container("b", gpu="2")), {"a": "0", "b": "2"}, id="one-asks-others-see-none"
        ),
        pytest.param(
            make_pod(container("a", gpu="1"), initContainers=[container("log", gpu="1", **SIDECAR), container("init")]),
            {"log": "1", "a": "1"},
            id="sidecar-counts",
        ),
        pytest.param(
            make_pod(container("a", gpu="2"), initContainers=[container("init", gpu="0")]),
            {"a": "2", "init": "0"},
            id="init-container-may-ask-for-none",
        ),
        pytest.param(
            make_pod({"name": "a", "resources": {"limits": {GPU: 2, "cpu": "1"}}}), {"a": 2}, id="only-limits-number"
        ),
        pytest.param(make_pod({"name": "a", "resources": {"requests": {GPU: "2"}}}), {"a": "2"}, id="only-requests"),
        pytest.param(make_pod({"name": "a"}), {"a": "2"}, id="no-resources-at-all"),
        pytest.param(make_pod({"name": "a", "resources": {"limits": {}}}), {"a": "2"}, id="empty-limits"),
    ],
)
def test_counts_on_containers(pod: dict[str, Any], want: dict[str, str]) -> None:
    """kube-scheduler's own sum over the pod equals the claim's count, and a split is told by several mentions."""
    admitted = admit(pod)

    assert {name: str(value) for name, value in counts(admitted).items()} == {
        key: str(value) for key, value in want.items()
    }
    assert sum(int(value) for value in counts(admitted).values()) == 2


def test_every_container_gets_its_own_references() -> None:
    """Init containers, sidecars and containers that see none carry the variables too: a missing value hides all."""
    pod = make_pod(
        container("a", gpu="2"),
        container("b"),
        initContainers=[container("init"), container("log", restartPolicy="Always")],
    )

    spec = admit(pod)["spec"]

    for made in (*spec["initContainers"], *spec["containers"]):
        assert made["env"] == own_variables(made["name"])


def test_references_stand_first_and_user_order_is_kept() -> None:
    """`$(CUDA_VISIBLE_DEVICES)` in a variable of the user's resolves, and nothing of his is reordered."""
    env = [
        {"name": "Z", "value": "$(CUDA_VISIBLE_DEVICES)"},
        {"name": "A", "value": "1"},
        {"name": "M", "value": "$(Z)"},
    ]

    admitted = admit(make_pod(container(env=env)))

    assert admitted["spec"]["containers"][0]["env"] == [*own_variables("main"), *env]


@pytest.mark.parametrize(
    ("claim", "defaults", "want"),
    [
        pytest.param(make_claim(), Defaults(), False, id="uuid-by-default"),
        pytest.param(make_claim(visible_devices="index"), Defaults(), True, id="claim-says-index"),
        pytest.param(make_claim(), Defaults(visible_devices=VisibleDevices.INDEX), True, id="cluster-says-index"),
        pytest.param(
            make_claim(visible_devices="uuid"),
            Defaults(visible_devices=VisibleDevices.INDEX),
            False,
            id="claim-beats-cluster",
        ),
        pytest.param(
            make_claim(visible_devices="index", migProfile="3g.40gb"), Defaults(), False, id="mig-always-uuid"
        ),
    ],
)
def test_index_mode_fixes_the_order(claim: GpuClaim, defaults: Defaults, want: bool) -> None:
    """Numbers mean something only in a known order, so index mode carries CUDA_DEVICE_ORDER; uuids need none."""
    env = admit(make_pod(), claim=claim, defaults=defaults)["spec"]["containers"][0]["env"]

    assert ({"name": "CUDA_DEVICE_ORDER", "value": "PCI_BUS_ID"} in env) is want
    assert [one for one in env if one["name"] != "CUDA_DEVICE_ORDER"] == own_variables("main")


@pytest.mark.parametrize("value", ["", "void", "none", "disabled"])
def test_what_gives_devices_of_the_machine_is_turned_off_past_any_source(value: str) -> None:
    """A source of envFrom and the image lose to env; what the user turned off himself stays as it is."""
    own = [{"name": "NVIDIA_GDRCOPY", "value": value}]
    pod = make_pod({**container(env=own), "envFrom": [{"configMapRef": {"name": "settings"}}]})

    (main,) = admit(pod)["spec"]["containers"]

    assert main["env"] == [one for one in own_variables("main") if one["name"] != "NVIDIA_GDRCOPY"] + own


def test_amd_gets_exactly_one_selector() -> None:
    """AMD's runtime stacks its variables, so only ROCR_VISIBLE_DEVICES is set, by uuid."""
    claim = make_claim(vendor="amd", visible_devices="index")

    env = admit(make_pod(), claim=claim)["spec"]["containers"][0]["env"]

    assert env == [reference("ROCR_VISIBLE_DEVICES", "uuids.gpu.scheduling/main")]


def test_mig_is_counted_under_its_own_name_with_gpu_zero_beside() -> None:
    """kube-scheduler hands a pod to the extender by the exact name `gpu.scheduling/gpu`, so it must be mentioned."""
    admitted = admit(make_pod(container("a"), container("b")), claim=make_claim(count=1, migProfile="3g.40gb"))

    assert counts(admitted, MIG) == {"a": "1"}
    assert counts(admitted) == {"a": "0"}


def test_mig_split_over_two_containers() -> None:
    """One instance for each container: the resource is the profile's, the explicit zero is still there."""
    pod = make_pod(*({"name": name, "resources": {"limits": {MIG: "1"}}} for name in "ab"))

    admitted = admit(pod, claim=make_claim(count=2, migProfile="3g.40gb"))

    assert counts(admitted, MIG) == {"a": "1", "b": "1"}
    assert counts(admitted) == {"a": "0"}


def test_mig_profile_with_a_plus_has_a_valid_resource_name() -> None:
    """A resource name cannot hold a plus, so the profile's plus becomes a dot."""
    admitted = admit(make_pod(container("a")), claim=make_claim(count=1, migProfile="1g.10gb+me"))

    assert counts(admitted, "gpu.scheduling/mig-1g.10gb.me") == {"a": "1"}


FORGED = {
    names.ALLOCATED: "n1:0,1",
    names.UUIDS: "GPU-1,GPU-2",
    names.WOKEN: "7",
    "devices.gpu.scheduling/main": "GPU-1",
    "uuids.gpu.scheduling/other": "GPU-1",
    names.CLAIM_UID: "another",
}


@pytest.mark.parametrize("claim", [None, "two"], ids=["unclaimed", "claimed"])
def test_forged_annotations_are_stripped_with_a_warning(claim: str | None) -> None:
    """Whatever only Atoll writes is a copy or a forgery at CREATE; the user's own annotations stay."""
    pod = make_pod(claim=claim, annotations={**FORGED, "team/owner": "alice"})

    decision = decide(pod)
    annotations = admit(pod)["metadata"]["annotations"]

    assert annotations == {"team/owner": "alice", **({names.CLAIM: "two", names.CLAIM_UID: UID} if claim else {})}
    assert isinstance(decision, Mutation)
    assert len(decision.warnings) == 1
    assert all(key in decision.warnings[0] for key in FORGED)


def test_few_of_many_misspelt_annotations_are_warned_of() -> None:
    """Each search for what was meant takes time, and a request may bring 60,000 keys."""
    annotations = {f"gpu.scheduling/clam{number}": "" for number in range(60_000)}

    decision = decide(make_pod(claim=None, annotations=annotations))

    assert isinstance(decision, Mutation)
    assert len(decision.warnings) == WARNINGS_MAX


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("gpu.scheduling/clam", "did you mean gpu.scheduling/claim?"),
        ("gpu.scheduling/gangsize", "did you mean gpu.scheduling/gang-size?"),
        ("gpu.scheduling/" + "x" * 300, "pods may carry gpu.scheduling/claim"),
    ],
)
@pytest.mark.parametrize("claim", [None, "two"], ids=["unclaimed", "claimed"])
def test_misspelt_annotation_is_warned_of(key: str, hint: str, claim: str | None) -> None:
    """A key under Atoll's prefix that means nothing stays on the pod, and its writer is told."""
    pod = make_pod(claim=claim, annotations={key: "two", "team/owner": "alice"})

    decision = decide(pod)

    assert isinstance(decision, Mutation)
    (warning,) = decision.warnings
    assert hint in warning
    assert admit(pod)["metadata"]["annotations"].items() >= {key: "two", "team/owner": "alice"}.items()


def test_pod_that_serves_models_may_tell_of_them() -> None:
    """What a pod says of its models is known, and nobody is warned."""
    decision = decide(make_pod(annotations=dict.fromkeys(names.MODEL_ANNOTATIONS, "[]")))

    assert isinstance(decision, Mutation)
    assert decision.warnings == ()


def test_a_stripped_pod_without_a_demand_is_otherwise_untouched() -> None:
    """A copy of a GPU pod that asks for nothing loses the annotations and nothing else."""
    pod = make_pod(claim=None, annotations=FORGED)

    assert admit(pod) == {**pod, "metadata": {**pod["metadata"], "annotations": {}}}


def test_a_mirror_pod_is_left_alone() -> None:
    """A static pod runs already; a refusal would only hide it. Only a kubelet can make one."""
    pod = make_pod(annotations={"kubernetes.io/config.mirror": "hash"}, nodeName="n1")

    assert admit(pod, user=KUBELET) == pod
    assert "nodeName" in refused(pod, user=ALICE).message


def test_a_mirror_pod_cannot_bring_an_allocation() -> None:
    """Even a kubelet's pod starts without the annotations that the ledger believes."""
    pod = make_pod(claim=None, annotations={"kubernetes.io/config.mirror": "hash", **FORGED}, nodeName="n1")

    assert admit(pod, user=KUBELET)["metadata"]["annotations"] == {"kubernetes.io/config.mirror": "hash"}


def test_the_runtime_class_is_injected_only_where_the_setting_says_so() -> None:
    """Off by default, since the class must exist in the cluster first."""
    assert "runtimeClassName" not in admit(make_pod())["spec"]
    inject = Defaults(inject_runtime_class=True)
    assert admit(make_pod(), defaults=inject)["spec"]["runtimeClassName"] == "atoll-nvidia"
    assert "runtimeClassName" not in admit(make_pod(), claim=make_claim(vendor="amd"), defaults=inject)["spec"]


@pytest.mark.parametrize(
    ("choice", "gang", "is_told"),
    [
        (KeepNodes.NONE, None, False),
        (KeepNodes.NONE, "mesh", False),
        (KeepNodes.GANGS, None, False),
        (KeepNodes.GANGS, "mesh", True),
        (KeepNodes.ALL, None, True),
        (KeepNodes.ALL, "mesh", True),
    ],
)
def test_autoscalers_are_told_to_leave_nodes_alone_where_the_setting_says_so(
    choice: KeepNodes, gang: str | None, is_told: bool
) -> None:
    """Members of gangs, or all pods with GPUs, get the annotations that autoscalers heed; others stay as they are."""
    admitted = admit(make_pod(), claim=make_claim(gang_ref=gang), defaults=Defaults(keep_nodes=choice))

    told = {key: value for key, value in admitted["metadata"]["annotations"].items() if key in AUTOSCALERS}
    assert told == (AUTOSCALERS if is_told else {})


def test_a_word_of_the_user_to_autoscalers_stays() -> None:
    """Whoever lets a pod be moved is not overruled, and a pod without any annotation gets a whole map."""
    keep = Defaults(keep_nodes=KeepNodes.ALL)
    key = "cluster-autoscaler.kubernetes.io/safe-to-evict"

    movable = admit(make_pod(annotations={key: "true"}), defaults=keep)
    bare = admit(make_pod(container(gpu="1"), claim=None), defaults=keep)

    assert movable["metadata"]["annotations"][key] == "true"
    assert bare["metadata"]["annotations"] == AUTOSCALERS


def test_a_pod_without_gpus_is_none_of_the_keepers_business() -> None:
    """Its node may be taken away as ever."""
    admitted = admit(make_pod(claim=None), defaults=Defaults(keep_nodes=KeepNodes.ALL))

    assert "annotations" not in admitted["metadata"]


def test_a_runtime_class_of_the_user_is_kept_with_a_warning() -> None:
    """The user may know better, but is told that the wall depends on his class."""
    decision = decide(make_pod(runtimeClassName="kata"), defaults=Defaults(inject_runtime_class=True))

    assert isinstance(decision, Mutation)
    assert "kata" in decision.warnings[0]
    assert not [op for op in decision.operations if op["path"] == "/spec/runtimeClassName"]


def test_several_mig_instances_in_one_pod_are_allowed_with_a_warning() -> None:
    """One process can use one instance only; several processes in a pod are fine."""
    decision = decide(make_pod(), claim=make_claim(count=2, migProfile="3g.40gb"))

    assert isinstance(decision, Mutation)
    assert "one MIG instance" in decision.warnings[0]


def literal(name: str, value: str = "all") -> list[dict[str, Any]]:
    return [{"name": name, "value": value}]


FROM_MAP = [{"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "k"}}}]
OTHERS = [reference("CUDA_VISIBLE_DEVICES", "devices.gpu.scheduling/other")]
TWICE = [*own_variables("main"), {"name": "CUDA_VISIBLE_DEVICES", "value": "0"}]


@pytest.mark.parametrize(
    ("pod", "code", "fragment"),
    [
        pytest.param(make_pod(schedulerName="volcano"), 403, "remove schedulerName", id="foreign-scheduler"),
        pytest.param(
            make_pod(container(gpu="1"), claim=None, schedulerName="volcano"),
            403,
            "schedulerName",
            id="foreign-without-claim",
        ),
        pytest.param(make_pod(nodeName="n1"), 403, "spec.nodeName", id="node-name-by-hand"),
        pytest.param(
            make_pod(container(env=literal("CUDA_VISIBLE_DEVICES", "0"))), 403, "remove it", id="cuda-literal"
        ),
        pytest.param(make_pod(container(env=literal("NVIDIA_VISIBLE_DEVICES"))), 403, "remove it", id="nvidia-all"),
        pytest.param(make_pod(container(env=literal("NVIDIA_NVSWITCH"))), 403, "whole machine", id="switches"),
        pytest.param(make_pod(container(env=literal("NVIDIA_IMEX_CHANNELS", "0"))), 403, "remove it", id="imex"),
        pytest.param(make_pod(container(env=literal("NVIDIA_GDRCOPY", "enabled"))), 403, "remove it", id="gdrcopy"),
        pytest.param(make_pod(annotations={"cdi.k8s.io/a": "nvidia.com/gpu=all"}), 403, "cdi.k8s.io/a", id="cdi"),
        pytest.param(make_pod(container(env=literal("CUDA_VISIBLE_DEVICES", ""))), 403, "remove it", id="set-empty"),
        pytest.param(make_pod(container(env=literal("HIP_VISIBLE_DEVICES", "0"))), 403, "remove it", id="other-vendor"),
        pytest.param(make_pod(container(env=FROM_MAP)), 403, "remove it", id="from-configmap"),
        pytest.param(make_pod(container(env=OTHERS)), 403, "remove it", id="reference-to-another-container"),
        pytest.param(make_pod(container(env=TWICE)), 403, "remove it", id="ours-then-overridden"),
        pytest.param(
            make_pod(initContainers=[container("init", env=literal("CUDA_VISIBLE_DEVICES"))]),
            403,
            "'init'",
            id="init-sets-it",
        ),
        pytest.param(make_pod(container(gpu="3")), 400, "for 2", id="sum-differs"),
        pytest.param(make_pod(container(gpu="0")), 400, "for 2", id="zero-beside-a-claim"),
        pytest.param(make_pod(container(gpu="0"), claim=None), 400, "ask for 1 to 64", id="zero-without-claim"),
        pytest.param(make_pod(container(gpu="-1"), claim=None), 400, "whole number", id="negative"),
        pytest.param(make_pod(container(gpu="500m"), claim=None), 400, "whole number", id="fraction"),
        pytest.param(make_pod(container(gpu=1.5), claim=None), 400, "whole number", id="float"),
        pytest.param(make_pod(container(gpu="65"), claim=None), 400, "whole number", id="above-any-machine"),
        pytest.param(
            make_pod(container("a", gpu="40"), container("b", gpu="40"), claim=None),
            400,
            "1 to 64",
            id="sum-above-any-machine",
        ),
        pytest.param(make_pod(container(gpu="9" * 4000), claim=None), 400, "whole number", id="absurd-digits"),
        pytest.param(
            make_pod({"name": "a", "resources": {"limits": {GPU: "2"}, "requests": {GPU: "1"}}}),
            400,
            "equal",
            id="unequal",
        ),
        pytest.param(
            make_pod(container("a", gpu="1"), initContainers=[container("init", gpu="1")]),
            400,
            "sidecars",
            id="init-asks",
        ),
        pytest.param(
            make_pod({"name": "a", "resources": {"limits": {MIG: "1"}}}, claim=None),
            400,
            "migProfile",
            id="mig-without-claim",
        ),
        pytest.param(
            make_pod({"name": "a", "resources": {"limits": {MIG: "2"}}}), 400, "is for", id="mig-beside-whole-claim"
        ),
        pytest.param(
            make_pod({"name": "a", "resources": {"limits": {"gpu.scheduling/gpus": "2"}}}),
            400,
            "gpus",
            id="misspelt-resource",
        ),
        pytest.param(
            make_pod({"name": "a", "resources": {"limits": {"nvidia.com/gpu": "1"}}}),
            403,
            "device plugin",
            id="nvidia-plugin-too",
        ),
        pytest.param(
            make_pod(container(volumeMounts=[{"mountPath": "/var/run//nvidia-container-devices/all"}])),
            403,
            "remove the mount",
            id="devices-by-mount",
        ),
        pytest.param(make_pod(annotations={names.GANG: "G"}), 400, "is no name of a GpuGang", id="gang-misnamed"),
        pytest.param(make_pod(annotations={names.GANG: ""}), 400, "is empty", id="gang-empty"),
        pytest.param(make_pod(annotations={names.GANG_SIZE: "4"}), 400, "name the gang in", id="gang-size-alone"),
        pytest.param(make_pod(annotations={names.POD_SET: "w"}), 400, "name the gang in", id="pod-set-alone"),
        pytest.param(make_pod(annotations={names.RENDEZVOUS: "true"}), 400, "name the gang in", id="rendezvous-alone"),
        pytest.param(
            make_pod(annotations={names.GANG: "g", names.RENDEZVOUS: "yes"}), 400, "write true or", id="rendezvous"
        ),
        pytest.param(
            make_pod(annotations={names.GANG: "g", names.GANG_SIZE: "0"}), 400, "from 1 to 100000", id="gang-of-none"
        ),
        pytest.param(
            make_pod(annotations={names.GANG: "g", names.GANG_SIZE: "four"}), 400, "'four'", id="gang-size-in-words"
        ),
        pytest.param(
            make_pod(annotations={names.GANG: "g", names.POD_SET: "a b"}), 400, "no name of a pod set", id="pod-set"
        ),
        pytest.param(make_pod(schedulingGates=[{"name": names.GANG_GATE}]), 400, "never be removed", id="gate-alone"),
        pytest.param(
            make_pod(claim=None, runtimeClassName="atoll-nvidia"), 403, "for pods that ask", id="class-without-claim"
        ),
        pytest.param(
            make_pod(ephemeralContainers=[container("debug")]), 400, "kubectl debug", id="ephemeral-at-create"
        ),
        pytest.param(
            make_pod(*(container(f"c{index}") for index in range(CONTAINERS_MAX + 1))),
            400,
            "several pods",
            id="too-many",
        ),
        pytest.param(
            make_pod(container("c", env=[{"name": f"e{number}"} for number in range(ENTRIES_MAX + 1)])),
            400,
            "move variables to a ConfigMap",
            id="too-many-variables",
        ),
        pytest.param({**make_pod(), "spec": {"containers": []}}, 400, "no container", id="no-container"),
    ],
)
def test_refusals(pod: dict[str, Any], code: int, fragment: str) -> None:
    """Each refusal says what to change, in bounded length."""
    denial = refused(pod)

    assert denial.code == code
    assert fragment in denial.message
    assert len(denial.message) < 500


@pytest.mark.parametrize(
    ("claim", "code", "fragment"),
    [
        pytest.param(ClaimMissing(), 403, "does not exist in namespace 'team'", id="missing"),
        pytest.param(ClaimUnavailable(), 503, "try again", id="api-down"),
        pytest.param(ClaimUnreadable("spec.devices.count: 0"), 400, "spec.devices.count", id="invalid"),
        pytest.param(
            make_claim().model_copy(
                update={"metadata": make_claim().metadata.model_copy(update={"deletion_timestamp": "t"})}
            ),
            403,
            "is being deleted",
            id="deleting",
        ),
    ],
)
def test_claims_that_cannot_be_used(claim: ClaimLookup, code: int, fragment: str) -> None:
    """The answer tells a missing claim from one that could not be looked up."""
    denial = refused(make_pod(), claim=claim)

    assert denial.code == code
    assert fragment in denial.message


def test_index_mode_refuses_another_device_order() -> None:
    """Fastest-first numbers would point at other cards; where uuids are used the order is the user's business."""
    pod = make_pod(container(env=literal("CUDA_DEVICE_ORDER", "FASTEST_FIRST")))

    assert "CUDA_DEVICE_ORDER" in refused(pod, claim=make_claim(visible_devices="index")).message
    assert admit(pod)["spec"]["containers"][0]["env"][-1] == literal("CUDA_DEVICE_ORDER", "FASTEST_FIRST")[0]


def test_index_mode_accepts_the_same_device_order() -> None:
    """A user who sets PCI_BUS_ID himself agrees with us; the variable is not doubled."""
    pod = make_pod(container(env=literal("CUDA_DEVICE_ORDER", "PCI_BUS_ID")))

    env = admit(pod, claim=make_claim(visible_devices="index"))["spec"]["containers"][0]["env"]

    assert [variable["name"] for variable in env].count("CUDA_DEVICE_ORDER") == 1


def test_the_class_of_nvidia_is_refused_on_amd_claims() -> None:
    """An AMD pod does not carry NVIDIA's variable, so NVIDIA's runtime would believe the image's own."""
    assert "amd" in refused(make_pod(runtimeClassName="atoll-nvidia"), claim=make_claim(vendor="amd")).message


def test_a_container_added_between_rounds_is_shaped_in_the_next() -> None:
    """Another webhook appends a sidecar after ours ran: it gets its references and the first result stays."""
    once = admit(make_pod(container("a")))
    once["spec"]["containers"].append(container("mesh"))

    twice = admit(once)

    assert counts(twice) == {"a": "2"}
    assert twice["spec"]["containers"][1]["env"] == own_variables("mesh")
    assert twice["spec"]["containers"][0] == once["spec"]["containers"][0]


def test_a_copy_of_an_allocated_pod_is_a_new_pod() -> None:
    """kubectl debug --copy-to copies annotations and env: the copy asks for GPUs of its own and brings none."""
    original = admit(make_pod(container("a")))
    original["metadata"]["annotations"] |= {names.ALLOCATED: "n1:0,1", "devices.gpu.scheduling/a": "GPU-1"}
    original["spec"]["containers"].append(container("debugger"))

    copy = admit(original)

    assert copy["metadata"]["annotations"] == {names.CLAIM: "two", names.CLAIM_UID: UID}
    assert copy["spec"]["containers"][1]["env"] == own_variables("debugger")


NAMES = st.from_regex(r"[a-z]([-a-z0-9]{0,8}[a-z0-9])?", fullmatch=True)
VARIABLES = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from(["A", "B", "PATH", "CUDA_DEVICE_ORDER"]), "value": st.text(max_size=5)}
    ),
    max_size=4,
)
QUANTITIES = st.sampled_from(["0", "1", "2", 1, 2])
RESOURCES = st.fixed_dictionaries(
    {},
    optional={
        section: st.dictionaries(st.sampled_from(["cpu", GPU, MIG]), QUANTITIES) for section in ("limits", "requests")
    },
)
CONTAINERS = st.fixed_dictionaries(
    {"image": st.just("app")},
    optional={"env": VARIABLES, "resources": RESOURCES, "restartPolicy": st.just("Always")},
)
ANNOTATIONS = st.dictionaries(
    st.sampled_from([names.CLAIM_UID, names.ALLOCATED, "uuids.gpu.scheduling/x", "team/a~b"]),
    st.sampled_from([UID, "x"]),
)
CLAIMS = st.builds(
    make_claim,
    count=st.integers(1, 3),
    visible_devices=st.sampled_from([None, "uuid", "index"]),
    vendor=st.sampled_from(["nvidia", "amd"]),
    migProfile=st.sampled_from(["", "3g.40gb"]),
)
DEFAULTS = st.builds(
    Defaults,
    visible_devices=st.sampled_from(VisibleDevices),
    inject_runtime_class=st.booleans(),
    keep_nodes=st.sampled_from(KeepNodes),
)


@st.composite
def pods(draw: st.DrawFn) -> dict[str, Any]:
    """Draw pods that mostly can be admitted, some by a claim and some by the bare resource."""
    made = draw(st.lists(CONTAINERS, min_size=1, max_size=4))
    chosen = draw(st.lists(NAMES, min_size=len(made), max_size=len(made), unique=True))
    named = [{"name": name, **one} for name, one in zip(chosen, made, strict=True)]
    regular = draw(st.integers(1, len(named)))
    spec = {"initContainers": named[regular:]} if named[regular:] else {}
    claim = draw(st.sampled_from(["two", None]))
    return make_pod(*named[:regular], claim=claim, annotations=draw(ANNOTATIONS), **spec)


@settings(max_examples=200)
@given(pod=pods(), claim=CLAIMS, defaults=DEFAULTS)
def test_running_it_on_its_own_result_changes_nothing(pod: dict[str, Any], claim: GpuClaim, defaults: Defaults) -> None:
    """Reinvocation is safe: the second answer has neither operations nor refusals."""
    decision = decide(pod, claim=claim, defaults=defaults)
    if isinstance(decision, Denial):
        return
    patched = jsonpatch.apply_patch(pod, list(decision.operations))

    again = decide(patched, claim=claim, defaults=defaults)

    assert isinstance(again, Mutation)
    assert again.operations == ()


@settings(max_examples=200)
@given(pod=pods(), claim=CLAIMS, defaults=DEFAULTS)
def test_nothing_of_the_users_is_removed_or_reordered(pod: dict[str, Any], claim: GpuClaim, defaults: Defaults) -> None:
    """Apart from Atoll's own annotations and the default scheduler's name, what was there is there."""
    decision = decide(pod, claim=claim, defaults=defaults)
    if isinstance(decision, Denial):
        return
    patched = jsonpatch.apply_patch(pod, list(decision.operations))

    for section in ("containers", "initContainers"):
        before, after = (one["spec"].get(section, []) for one in (pod, patched))
        assert [made["name"] for made in after] == [made["name"] for made in before]
        for old, new in zip(before, after, strict=True):
            env = old.get("env", [])
            assert new.get("env", [])[len(new.get("env", [])) - len(env) :] == env
            for part in ("limits", "requests"):
                assert old.get("resources", {}).get(part, {}).items() <= new.get("resources", {}).get(part, {}).items()
    kept = {
        key: value for key, value in pod["metadata"].get("annotations", {}).items() if not names.is_own_annotation(key)
    }
    assert kept.items() <= patched["metadata"].get("annotations", {}).items()


@settings(max_examples=200)
@given(pod=pods(), claim=CLAIMS, defaults=DEFAULTS)
def test_an_admitted_gpu_pod_satisfies_the_rules(pod: dict[str, Any], claim: GpuClaim, defaults: Defaults) -> None:
    """Sum equals the claim, gpu is mentioned for kube-scheduler, all containers have references, scheduler is ours."""
    decision = decide(pod, claim=claim, defaults=defaults)
    has_claim = names.CLAIM in pod["metadata"].get("annotations", {})
    if isinstance(decision, Denial) or not (has_claim or counts_any(pod)):
        return
    patched = jsonpatch.apply_patch(pod, list(decision.operations))
    mig = claim.spec.devices.mig_profile if has_claim else ""

    asked = counts(patched, MIG if mig else GPU)
    assert sum(int(value) for value in asked.values()) == (
        claim.spec.devices.count if has_claim else sum(map(int, asked.values()))
    )
    assert counts(patched)
    assert patched["spec"]["schedulerName"] == names.SCHEDULER_NAME
    for made in (*patched["spec"].get("initContainers", ()), *patched["spec"]["containers"]):
        wanted = (
            {"ROCR_VISIBLE_DEVICES"}
            if has_claim and claim.spec.devices.vendor == "amd"
            else {
                "CUDA_VISIBLE_DEVICES",
                "NVIDIA_VISIBLE_DEVICES",
            }
        )
        found = [one["name"] for one in made["env"] if one["name"] in names.VISIBLE_DEVICES_VARIABLES]
        assert sorted(found) == sorted(wanted)


def counts_any(pod: dict[str, Any]) -> bool:
    """Tell whether any container mentions a resource of Atoll's."""
    mentioned = [
        name
        for made in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"])
        for section in made.get("resources", {}).values()
        for name in section
    ]
    return any(name.startswith("gpu.scheduling/") for name in mentioned)
