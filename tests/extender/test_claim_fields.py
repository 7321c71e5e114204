"""Each field of a GpuClaim has an effect on a pod, from the object through filter to the devices of the bind."""

from typing import Any

import pytest

from atoll.api import names
from atoll.api.claims import VisibleDevices
from atoll.cluster.ledger import Ledger
from atoll.cluster.requests import Request, request_of
from atoll.cluster.verdicts import FilterInput, judge_nodes
from extender.bind_plan import BindPlan, plan_on_node
from tests.builders import make_claim, make_pod, make_report, uuid_of
from tests.extender.test_verdicts import NOW, machine_room, take

ROOM = {"t4": "t4-4", "l40s": "l40s-4", "v100": "dgx1-v100", "h100": "dgx-h100"}


def ledger_of() -> Ledger:
    """Return one machine of each kind."""
    return machine_room(**ROOM)


def place(ledger: Ledger, **devices: Any) -> tuple[tuple[str, ...], BindPlan | None]:
    """Return the nodes that filter leaves to a pod with this claim, and what bind takes on the best of them."""
    claim = make_claim(**devices)
    profile = claim.spec.devices.mig_profile
    resource = names.mig_resource(profile) if profile else names.GPU_RESOURCE
    pod = make_pod(claim=claim, gpus=claim.spec.devices.count, resource=resource)
    request = request_of(pod, claim)
    assert isinstance(request, Request)
    verdicts = judge_nodes(list(ledger.nodes), FilterInput(uid="u", request=request, now_seconds=NOW), ledger)
    if verdicts.best is None:
        return (), None
    plan = plan_on_node(
        pod, verdicts.best.node, request, ledger, VisibleDevices.UUID, lost=frozenset(), now_seconds=NOW
    )
    assert isinstance(plan, BindPlan)
    return tuple(verdicts.feasible), plan


NODES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "count": ({"count": 8}, ("v100", "h100")),
    "models": ({"models": ["nvidia-l40s"]}, ("l40s",)),
    "memory": ({"memory": "60Gi"}, ("h100",)),
    "computeCapability": ({"computeCapability": "8.5"}, ("l40s", "h100")),
    "interconnect nvlink": ({"count": 2, "interconnect": "nvlink"}, ("v100", "h100")),
    "interconnect pcie": ({"count": 2, "interconnect": "pcie"}, ("t4", "l40s", "v100")),
    "minBandwidthGBps": ({"count": 2, "minBandwidthGBps": 200}, ("h100",)),
    "policy island": ({"count": 8, "policy": "island"}, ("v100", "h100")),
    "migProfile": ({"migProfile": "3g.40gb"}, ()),
    "vendor": ({"vendor": "amd"}, ()),
    "none of them": ({}, ("t4", "l40s", "v100", "h100")),
}


@pytest.mark.parametrize("case", NODES)
def test_a_field_of_a_claim_decides_which_machines_serve(case: str) -> None:
    """One machine of each kind, all free: those that the field asks for are left, and no others."""
    devices, want = NODES[case]

    feasible, plan = place(ledger_of(), **devices)

    assert feasible == want
    assert plan is None or len(plan.allocation.device_ids) == devices.get("count", 1)


def test_models_are_taken_in_the_order_of_the_claim() -> None:
    """Both fit; the first that is named is the one."""
    for models in (["nvidia-l40s", "nvidia-h100"], ["nvidia-h100", "nvidia-l40s"]):
        _, plan = place(ledger_of(), models=models)
        assert plan is not None
        assert plan.allocation.node == models[0].removeprefix("nvidia-")


@pytest.mark.parametrize(
    ("policy", "numa_nodes"), [("contiguous", 1), ("island", 1), ("packed", 1), ("spread", 2)]
)  # fmt: skip
def test_the_policy_of_a_claim_decides_how_its_gpus_lie(policy: str, numa_nodes: int) -> None:
    """Two of eight GPUs without NVLink on two sockets: together, or one on each."""
    ledger = machine_room(n1="l40s-8")
    _, plan = place(ledger, count=2, policy=policy)

    assert plan is not None
    devices = ledger.nodes["n1"].devices
    assert len({devices[number].numa_node for number in plan.allocation.device_ids}) == numa_nodes


def test_an_island_that_is_broken_serves_the_default_policy_alone() -> None:
    """Four GPUs are free, two on each socket: contiguous takes them, island waits."""
    ledger = machine_room(n1="l40s-8")
    sockets: dict[int | None, list[int]] = {}
    for device in ledger.nodes["n1"].devices:
        sockets.setdefault(device.numa_node, []).append(device.id)
    for number, ids in enumerate(sockets.values()):
        take(ledger, "n1", *ids[2:], uid=f"other-{number}")

    assert place(ledger, count=4)[1] is not None
    assert place(ledger, count=4, policy="island") == ((), None)


@pytest.mark.parametrize(("mixed", "fits"), [(False, False), (True, True)])
def test_mixed_models_of_a_claim_lets_one_pod_have_several(mixed: bool, fits: bool) -> None:
    """Half of the machine's cards are of another model: four of one alone are not there."""
    ledger = Ledger()
    other = {number: {"model": "nvidia-a10", "productName": "NVIDIA A10"} for number in (2, 3)}
    ledger.put_report(make_report("n1", "l40s-4", devices=other))
    ledger.put_heartbeat("n1", NOW, 180.0)

    assert (place(ledger, count=4, mixedModels=mixed)[1] is not None) is fits


def test_a_mig_profile_of_a_claim_takes_instances_of_it() -> None:
    """The instance of that profile, and neither the whole cards nor other instances."""
    ledger = Ledger()
    cards = {2: {"mig": {"profile": "3g.40gb"}}, 3: {"mig": {"profile": "1g.10gb"}}}
    ledger.put_report(make_report("n1", "t4-4", devices=cards))
    ledger.put_heartbeat("n1", NOW, 180.0)

    _, plan = place(ledger, migProfile="3g.40gb")

    assert plan is not None
    assert plan.allocation.uuids == (uuid_of("n1", 2),)


def test_the_vendor_of_a_claim_takes_cards_of_that_vendor() -> None:
    """A machine of each: the claim's vendor decides."""
    ledger = machine_room(h100="dgx-h100", mi300x="mi300x-8")

    assert place(ledger, vendor="amd")[0] == ("mi300x",)
    assert place(ledger)[0] == ("h100",)
