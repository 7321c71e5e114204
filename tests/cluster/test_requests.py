"""Request resolution: pod and claim give one request, or one clear reason why not."""

from typing import Any

import pytest

from atoll.api import names
from atoll.api.claims import GpuClaim, VisibleDevices
from atoll.cluster import pods
from atoll.cluster.allocations import OTHER_BYTES_MAX
from atoll.cluster.machines import parse_capability
from atoll.cluster.requests import Rejection, Request, refused_request, request_of
from tests.builders import make_claim, make_pod
from topology.device_requests import Interconnect, Policy

TWO = make_claim("two", count=2)
SIDECAR = {"name": "proxy", "restartPolicy": "Always"}


@pytest.mark.parametrize(
    ("pod", "claim", "reason"),
    [
        ({"claim": TWO, "gpus": 2}, None, names.REJECT_CLAIM_MISSING),
        ({"claim": TWO, "gpus": 2}, make_claim("two", uid="another", count=2), names.REJECT_CLAIM_REPLACED),
        ({"annotations": {names.CLAIM: "two"}, "gpus": 2}, TWO, names.REJECT_CLAIM_REPLACED),
        ({"claim": TWO, "gpus": 1}, TWO, names.REJECT_COUNT_MISMATCH),
        ({"claim": TWO, "gpus": None}, TWO, names.REJECT_COUNT_MISMATCH),
        ({"claim": TWO, "gpus": {"a": 2, "b": 1}, "containers": ("a", "b")}, TWO, names.REJECT_COUNT_MISMATCH),
        ({"gpus": None}, None, names.REJECT_COUNT_MISMATCH),
        ({"gpus": 0}, None, names.REJECT_COUNT_MISMATCH),
        ({"gpus": 65}, None, names.REJECT_COUNT_MISMATCH),
        ({"gpus": 1, "resource": "gpu.scheduling/mig-1g.5gb"}, None, names.REJECT_COUNT_MISMATCH),
        ({"gpus": 2, "annotations": {names.GANG: "g"}}, None, names.REJECT_GANG),
        ({"claim": TWO, "gpus": 2, "annotations": {names.GANG: "g"}}, TWO, names.REJECT_GANG),
        (
            {"claim": make_claim("g", count=2, spec={"gangRef": "g"}), "gpus": 2},
            make_claim("g", count=2, spec={"gangRef": "g"}),
            names.REJECT_GANG,
        ),
        ({"gpus": 1, "annotations": {"x": "y" * OTHER_BYTES_MAX}}, None, names.REJECT_ANNOTATIONS),
    ],
    ids=[
        "claim deleted while the pod waits",
        "claim created anew",
        "claim uid not written by the webhook",
        "fewer than the claim",
        "no resource beside the claim",
        "containers ask for more in all",
        "nothing asked",
        "zero asked",
        "more than any machine has",
        "MIG without a claim",
        "gang by annotation, no claim",
        "gang by annotation",
        "gang by claim",
        "filled up with annotations while it waits",
    ],
)
def test_contradictions_are_rejected(pod: dict[str, Any], claim: GpuClaim | None, reason: str) -> None:
    """A pod that does not mean what its claim says waits, with a constant phrase that says why."""
    assert request_of(make_pod(**pod), claim) == refused_request(reason)


@pytest.mark.parametrize(
    ("pod", "counts"),
    [
        ({"gpus": 4}, ()),
        ({"gpus": {"b": 4}, "containers": ("a", "b")}, ()),
        ({"gpus": {"a": 3, "b": 1}, "containers": ("a", "b")}, (("a", 3), ("b", 1))),
        ({"gpus": {"a": 0, "b": 4}, "containers": ("a", "b")}, (("b", 4),)),
        ({"gpus": {"a": 3, "proxy": 1}, "containers": ("a",), "init_containers": (SIDECAR,)}, (("proxy", 1), ("a", 3))),
    ],
    ids=["one container", "the second of two", "two ask", "one asks, the other gets none", "a sidecar comes first"],
)
def test_containers_share_or_split(pod: dict[str, Any], counts: tuple[tuple[str, int], ...]) -> None:
    """One mention of the resource means that everybody sees the whole set, several mean parts in the pod's order."""
    request = request_of(make_pod(**pod), None)

    assert isinstance(request, Request)
    assert (request.ask.count, request.container_counts) == (4, counts)


def test_pod_without_claim_asks_for_contiguous_nvidia() -> None:
    """The bare resource means a contiguous claim of that count, with the cluster's own mode."""
    request = request_of(make_pod(gpus=3), None)

    assert isinstance(request, Request)
    assert (request.ask.count, request.ask.policy, request.ask.interconnect) == (3, Policy.CONTIGUOUS, Interconnect.ANY)
    assert (request.vendor, request.models, request.memory_bytes) == ("nvidia", (), 0)
    assert request.visible_devices is None


def test_every_field_of_a_claim_arrives() -> None:
    """Nothing that a user writes into a claim is lost on the way to the choice."""
    claim = make_claim(
        count=2,
        policy="island",
        models=["nvidia-h100", "nvidia-a100"],
        memory="40Gi",
        computeCapability="8.0",
        interconnect="nvlink",
        minBandwidthGBps=100,
        mixedModels=True,
        spec={"visibleDevices": "index"},
    )
    request = request_of(make_pod(claim=claim, gpus=2), claim)

    assert isinstance(request, Request)
    assert request.ask.policy is Policy.ISLAND
    assert request.ask.interconnect is Interconnect.NVLINK
    assert request.ask.min_bandwidth_gbps == 100
    assert request.models == ("nvidia-h100", "nvidia-a100")
    assert request.mixed_models
    assert (request.memory_bytes, request.compute_capability) == (40 * 2**30, (8, 0))
    assert request.visible_devices is VisibleDevices.INDEX
    assert request.claim == "c"


def test_mig_claim_is_counted_by_its_own_resource() -> None:
    """A MIG claim is matched by the resource of its profile, with the plus sign spelled as a resource name can."""
    claim = make_claim(count=2, migProfile="1g.10gb+me")
    pod = make_pod(claim=claim, gpus=2, resource="gpu.scheduling/mig-1g.10gb.me")

    request = request_of(pod, claim)

    assert isinstance(request, Request)
    assert (request.mig_profile, request.ask.count) == ("1g.10gb+me", 2)
    assert request_of(make_pod(claim=claim, gpus=2), claim) == Rejection(names.REJECT_COUNT_MISMATCH)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8.0", (8, 0)), ("10.0", (10, 0)), ("9", (9, 0)), ("", (0, 0)), ("x.y", (0, 0)), ("8.x", (8, 0)), ("²", (0, 0))],
)
def test_capability_is_compared_as_numbers(text: str, expected: tuple[int, int]) -> None:
    """10.0 is more than 9.0; nonsense from a driver is the least there is."""
    assert parse_capability(text) == expected


@pytest.mark.parametrize("quantity", ["x", "-1", "1.5", "1k", "9" * 30, "²", ""])
def test_odd_quantity_counts_as_nothing(quantity: str) -> None:
    """A resource quantity that is no small whole number asks for nothing, and nothing crashes."""
    pod = make_pod(gpus=None)
    resources = type(pod.spec.containers[0].resources)(limits={names.GPU_RESOURCE: quantity})
    container = type(pod.spec.containers[0])("main", resources)

    assert pods.container_count(container, names.GPU_RESOURCE) == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"gpus": None}, False),
        ({"gpus": 0}, True),
        ({"gpus": 1, "resource": "gpu.scheduling/mig-1g.5gb"}, True),
        ({"gpus": None, "annotations": {names.CLAIM: "c"}}, True),
        ({"gpus": None, "annotations": {names.ALLOCATED: "n1:0"}}, True),
        ({"gpus": {"proxy": 1}, "init_containers": (SIDECAR,)}, True),
    ],
    ids=["plain pod", "zero", "MIG", "claim", "allocation", "init container"],
)
def test_what_concerns_atoll(options: dict[str, Any], expected: bool) -> None:
    """Every pod that kube-scheduler would send to the extender, or that holds GPUs, is watched; others cost nothing."""
    assert pods.is_gpu_pod(make_pod(**options)) is expected
