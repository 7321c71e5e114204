"""Selection: which devices of a machine suit a claim, and which of them it gets."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.api import names
from atoll.cluster.machines import NodeDevices, nominal_memory_bytes
from atoll.cluster.requests import Rejection, Request, request_of
from atoll.cluster.selection import Candidate, matches_model, plain, select
from tests.builders import make_claim, make_devices, make_pod
from topology.choice import Reason

MIB = 2**20


def ask(count: int = 1, **devices: Any) -> Request:
    """Return the request of a pod with this claim."""
    claim = make_claim(count=count, **devices)
    profile = devices.get("migProfile", "")
    pod = make_pod(claim=claim, gpus=count, resource=names.mig_resource(profile) if profile else names.GPU_RESOURCE)
    request = request_of(pod, claim)
    assert isinstance(request, Request)
    return request


def chosen(devices: NodeDevices, request: Request, free: int | None = None) -> tuple[int, ...] | str:
    """Return the ids that the node would give, or the reason why it would not."""
    answer = select(devices, devices.all if free is None else free, request)
    if isinstance(answer, Rejection):
        return answer.reason
    return tuple(devices.devices[position].id for position in answer.choice.positions)


@pytest.mark.parametrize(
    ("model", "wanted", "expected"),
    [
        ("nvidia-h100-80gb-hbm3", "nvidia-h100", True),
        ("nvidia-h100-80gb-hbm3", "nvidia-h100-80gb-hbm3", True),
        ("nvidia-h100-80gb-hbm3", "nvidia", True),
        ("nvidia-h100-80gb-hbm3", "nvidia-h1", False),
        ("nvidia-h100-80gb-hbm3", "nvidia-h100-8", False),
        ("nvidia-l40s", "nvidia-l40", False),
        ("nvidia-l4", "nvidia-l40", False),
    ],
)
def test_model_is_matched_by_whole_words(model: str, wanted: str, expected: bool) -> None:
    """An L40 is no L40S, an H100 is an H100 whatever its memory."""
    assert matches_model(model, wanted) is expected


@pytest.mark.parametrize(
    ("reported_mib", "nominal_gib"),
    [
        (81559, 80),
        (46068, 48),
        (15360, 16),
        (40960, 40),
        (81920, 80),
        (95830, 94),
        (143771, 141),
        (183359, 180),
        (24564, 24),
        (23034, 24),
        (11441, 12),
        (32510, 32),
        (196608, 192),
        (65536, 64),
    ],
    ids=lambda value: str(value),
)
def test_card_counts_with_the_memory_it_is_sold_with(reported_mib: int, nominal_gib: int) -> None:
    """A claim of 80Gi gets an 80 GB card although it reports 81559 MiB; one byte more does not."""
    devices = make_devices(devices={0: {"memoryBytes": reported_mib * MIB}})

    assert nominal_memory_bytes(devices.devices[0]) == nominal_gib * 2**30


@pytest.mark.parametrize(
    ("model", "nominal_gib"),
    [
        ("nvidia-gb10", 128),
        ("nvidia-a100-80gb-pcie", 80),
        ("nvidia-h100-80gb-hbm3", 80),
        ("nvidia-gb100", 0),
        ("nvidia-l4", 0),
        ("", 0),
    ],
)
def test_card_that_tells_no_memory_counts_with_that_of_its_model(model: str, nominal_gib: int) -> None:
    """Machines whose processors share one memory tell none: by table, by the name, or unknown; never guessed."""
    devices = make_devices(devices={0: {"memoryBytes": 0, "model": model}})

    assert nominal_memory_bytes(devices.devices[0]) == nominal_gib * 2**30


@pytest.mark.parametrize(
    ("model", "claim", "expected"),
    [
        ("nvidia-l4", {"memory": "1Gi"}, names.REJECT_MEMORY_UNKNOWN),
        ("nvidia-l4", {}, None),
        ("nvidia-gb10", {"memory": "100Gi"}, None),
        ("nvidia-gb10", {"memory": "200Gi"}, names.REJECT_NO_MEMORY),
        ("nvidia-l4", {"memory": "1Gi", "models": ["nvidia-h100"]}, names.REJECT_NO_MODEL),
    ],
)
def test_claim_on_memory_says_that_it_is_unknown(model: str, claim: dict[str, Any], expected: str | None) -> None:
    """Not "too little": nobody knows how much it is. A claim without memory gets the card."""
    devices = make_devices("n1", "t4-4", devices={number: {"memoryBytes": 0, "model": model} for number in range(4)})

    found = chosen(devices, ask(1, **claim))

    assert (found if isinstance(found, str) else None) == expected


@pytest.mark.parametrize(
    ("profile", "nominal_gib"), [("1g.5gb", 5), ("3g.40gb", 40), ("1g.10gb+me", 10), ("odd", 4.75)]
)
def test_mig_instance_counts_with_the_memory_of_its_profile(profile: str, nominal_gib: float) -> None:
    """An instance reports less than its profile says; a claim means the profile."""
    devices = make_devices(devices={0: {"memoryBytes": 4864 * MIB, "mig": {"profile": profile}}})

    assert nominal_memory_bytes(devices.devices[0]) == nominal_gib * 2**30


@pytest.mark.parametrize(
    ("claim", "expected"),
    [
        ({"memory": "80Gi"}, (0,)),
        ({"memory": "81Gi"}, names.REJECT_NO_MEMORY),
        ({"memory": "80G"}, (0,)),
        ({"computeCapability": "9.0"}, (0,)),
        ({"computeCapability": "9.1"}, names.REJECT_NO_CAPABILITY),
        ({"computeCapability": "10"}, names.REJECT_NO_CAPABILITY),
        ({"computeCapability": "8.9"}, (0,)),
        ({"models": ["nvidia-a100"]}, names.REJECT_NO_MODEL),
        ({"models": ["nvidia-a100", "nvidia-h100"]}, (0,)),
        ({"vendor": "amd"}, names.REJECT_NO_MODEL),
        ({"migProfile": "1g.10gb"}, names.REJECT_MIG),
        ({"count": 9}, names.REJECT_NEVER_FITS),
    ],
    ids=str,
)
def test_every_requirement_is_tested_on_the_card(claim: dict[str, Any], expected: tuple[int, ...] | str) -> None:
    """A machine that misses a requirement says which one, in a constant phrase."""
    assert chosen(make_devices(profile="dgx-h100"), ask(**claim)) == expected


def test_cordoned_and_sick_cards_are_left_out() -> None:
    """An administrator's cordon and a sick card take the device from new pods, not from the machine."""
    devices = make_devices(cordoned=[0, 2], sick=[1])

    assert chosen(devices, ask(1)) not in {(0,), (1,), (2,)}
    assert isinstance(chosen(devices, ask(5)), tuple)
    assert chosen(devices, ask(6)) == Reason.TOO_FEW_FREE


def test_card_of_unknown_health_is_left_out() -> None:
    """What the agent cannot read is not given out."""
    devices = make_devices("n1", "t4-4", devices={0: {"health": {"state": "unknown"}}})

    assert chosen(devices, ask(4)) == Reason.TOO_FEW_FREE


MIXED: dict[int, dict[str, Any]] = {
    number: {"model": "nvidia-a100-sxm4-40gb", "memoryBytes": 40 * 2**30} for number in (0, 1, 2)
}
"""Ids 0-2 are A100 in a machine of H100."""


@pytest.mark.parametrize(
    ("claim", "expected"),
    [
        ({"count": 2, "models": ["nvidia-a100", "nvidia-h100"]}, {"nvidia-a100-sxm4-40gb"}),
        ({"count": 2, "models": ["nvidia-h100", "nvidia-a100"]}, {"nvidia-h100-80gb-hbm3"}),
        ({"count": 4, "models": ["nvidia-a100", "nvidia-h100"]}, {"nvidia-h100-80gb-hbm3"}),
        ({"count": 5}, {"nvidia-h100-80gb-hbm3"}),
        ({"count": 6}, names.REJECT_NEVER_FITS),
        ({"count": 6, "mixedModels": True}, {"nvidia-a100-sxm4-40gb", "nvidia-h100-80gb-hbm3"}),
        ({"count": 4, "memory": "80Gi", "mixedModels": True}, {"nvidia-h100-80gb-hbm3"}),
    ],
    ids=[
        "the first model",
        "the other first",
        "the second where the first is too few",
        "no preference",
        "one model alone",
        "mixed on demand",
        "mixed with memory",
    ],
)
def test_one_model_per_pod_in_the_order_of_the_claim(claim: dict[str, Any], expected: set[str] | str) -> None:
    """A pod gets GPUs of one model, the first of the claim that has enough, unless the claim allows to mix."""
    devices = make_devices(profile="dgx-h100", devices=MIXED)
    ids = chosen(devices, ask(**claim))

    found = ids if isinstance(ids, str) else {devices.devices[devices.position_by_id[i]].model for i in ids}
    assert found == expected


def test_second_model_says_that_it_is_second() -> None:
    """Across nodes the preference of the model decides before the cost."""
    devices = make_devices(profile="dgx-h100")
    first = select(devices, devices.all, ask(models=["nvidia-h100", "nvidia-a100"]))
    second = select(devices, devices.all, ask(models=["nvidia-a100", "nvidia-h100"]))

    assert isinstance(first, Candidate)
    assert isinstance(second, Candidate)
    assert (first.preference, second.preference) == (0, 1)
    assert first.order < second.order


def test_mig_instances_are_chosen_by_profile_and_parents_never() -> None:
    """A MIG claim gets instances of its profile; whole-GPU claims get neither instances nor cards in MIG mode."""
    instance = {"mig": {"profile": "3g.40gb", "parentUuid": "GPU-parent"}}
    devices = make_devices("n1", "l40s-4", devices={0: {"mig": {"enabled": True}}, 1: instance, 2: instance})

    assert chosen(devices, ask(2, migProfile="3g.40gb", policy="packed")) == (1, 2)
    assert chosen(devices, ask(1)) == (3,)
    assert chosen(devices, ask(2)) != (0, 3)
    assert chosen(devices, ask(1, migProfile="1g.5gb")) == names.REJECT_MIG


def test_ids_are_not_positions() -> None:
    """Masks are over positions; what is chosen is named by id."""
    devices = make_devices("n1", "t4-4", ids=[7, 3, 9, 1])

    assert devices.mask_of((3, 1)) == 0b1010
    assert devices.mask_of((), ("GPU-n1-0009", "GPU-unknown")) == 0b0100
    assert chosen(devices, ask(2), free=0b1010) == (3, 1)


def test_full_machine_and_wrong_shape_say_different_things() -> None:
    """Too few free ones may change in a moment; an island that the machine does not have never will."""
    devices = make_devices("n1", "l40s-8")

    assert chosen(devices, ask(2), free=0b1) == Reason.TOO_FEW_FREE
    assert chosen(devices, ask(2, interconnect="nvlink")) == Reason.NO_NVLINK_ISLAND
    assert chosen(devices, ask(5, policy="island")) == Reason.NO_ISLAND


def test_claims_that_ask_for_the_same_share_their_answers() -> None:
    """Ten thousand claims of one kind cost no more memory than one; a claim that asks for more has its own."""
    assert plain(ask(2)) == plain(replace(ask(2), claim="another", container_counts=(("a", 2),)))
    assert plain(ask(2)) != plain(ask(2, memory="80Gi"))


def test_equal_nodes_are_ordered_by_name() -> None:
    """Ties between equal machines are broken by the node's name, never by chance."""
    candidates = [select(make_devices(node), 0b1111_1111, ask(2)) for node in ("n2", "n10", "n1")]

    assert min(c.order for c in candidates if isinstance(c, Candidate))[-1] == "n1"


@given(
    st.sampled_from(["dgx1-v100", "dgx-h100", "l40s-8", "gb200-tray", "t4-4"]),
    st.integers(0, 255),
    st.integers(1, 8),
    st.sampled_from(["contiguous", "island", "packed", "spread"]),
)
def test_choice_is_a_set_of_free_usable_devices(profile: str, free: int, count: int, policy: str) -> None:
    """Whatever is free: what is chosen is free, usable, as many as asked, and chosen again when asked again."""
    devices = make_devices("n1", profile, cordoned=[1])
    free &= devices.all
    answer = select(devices, free, ask(count, policy=policy))

    assert answer == select(make_devices("n1", profile, cordoned=[1]), free, ask(count, policy=policy))
    if isinstance(answer, Rejection):
        assert policy != "contiguous" or (free & devices.usable).bit_count() < count
        return
    mask = sum(1 << position for position in answer.choice.positions)
    assert mask.bit_count() == count
    assert mask & ~(free & devices.usable) == 0


@pytest.mark.parametrize(
    ("split", "reason"),
    [
        pytest.param(range(8), names.REJECT_NEVER_FITS, id="every card is split: never whole ones"),
        pytest.param(range(7), names.REJECT_NEVER_FITS, id="one card is whole: never two"),
        pytest.param(range(6), "too few free GPUs", id="two are whole and held: busy"),
    ],
)
def test_cards_that_are_split_are_never_whole_ones(split: range, reason: str) -> None:
    """Their instances are given out instead: "too few free" would let a pod wait for what cannot come."""
    node = make_devices("n1", "dgx-a100", devices={number: {"mig": {"enabled": True}} for number in split})
    answer = select(node, 0, ask(2))

    assert isinstance(answer, Rejection)
    assert answer.reason == reason
