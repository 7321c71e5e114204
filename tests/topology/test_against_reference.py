"""The fast path against brute force: equal sets and costs on known and random machines."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles import placement as reference
from tests.topology.machines import random_machines
from topology.canonical import canonical
from topology.choice import Choice, ChoiceRefusal, choose
from topology.demand import PRIOR
from topology.device_requests import DeviceRequest, Interconnect, Policy
from topology.fragmentation import losses
from topology.islands import islands
from topology.model import Machine, machine, mask_of, positions_of
from topology.parts import part_of
from topology.profiles import profile, profile_names
from topology.quality import qualities

SMALL = tuple(name for name in profile_names() if profile(name).machine.count <= 6)
EIGHTS = tuple(name for name in profile_names() if 6 < profile(name).machine.count <= 8)


asks = st.builds(
    DeviceRequest,
    count=st.integers(1, 5),
    policy=st.sampled_from(Policy),
    interconnect=st.sampled_from(Interconnect),
    min_bandwidth_gbps=st.sampled_from((0.0, 0.0, 10.0, 20.0, 40.0)),
)


def assert_same(subject: Machine, free: int, ask: DeviceRequest) -> None:
    """Fast answer and brute force name the same set at the same cost, or both refuse."""
    answer = choose(subject, free, ask)
    oracle = reference.best(subject, positions_of(free), ask, PRIOR)
    if oracle is None:
        assert isinstance(answer, ChoiceRefusal)
    else:
        assert isinstance(answer, Choice)
        assert oracle[0] == answer.positions
        assert pytest.approx(oracle[1], abs=1e-5) == answer.cost


@settings(deadline=None, max_examples=150)
@given(subject=random_machines(), ask=asks, data=st.data())
def test_random_machines_agree_with_brute_force(subject: Machine, ask: DeviceRequest, data: st.DataObject) -> None:
    """On any machine, for any free set and ask, the table's cell is the brute-force optimum."""
    assert_same(subject, data.draw(st.integers(0, subject.full)), ask)


@pytest.mark.parametrize("name", SMALL)
def test_small_known_machines_agree_on_every_free_mask(name: str) -> None:
    """Every free mask, count and policy of every known machine with up to four GPUs; six GPUs: every seventh mask."""
    subject = profile(name).machine
    for free in range(0, subject.full + 1, 1 if subject.count <= 4 else 7):
        for policy, count in itertools.product(Policy, range(1, subject.count + 1)):
            assert_same(subject, free, DeviceRequest(count, policy))


@pytest.mark.parametrize("name", EIGHTS)
def test_quality_of_known_machines_agrees_with_brute_force(name: str) -> None:
    """Ring bandwidths of all sets of two to four GPUs of every known machine with eight."""
    subject = profile(name).machine
    for count in (2, 3, 4):
        for members in itertools.combinations(range(subject.count), count):
            oracle = reference.ring_gbps(subject, members)
            assert pytest.approx(oracle) == qualities(subject).ring_gbps[mask_of(members)], members


@pytest.mark.parametrize("name", EIGHTS)
@pytest.mark.parametrize("count", [5, pytest.param(6, marks=pytest.mark.long)])
def test_quality_of_larger_sets_agrees_with_brute_force(name: str, count: int) -> None:
    """Ring bandwidths of five and six GPUs: one set of each kind that the machine has, all others being relabellings.

    Of seven and eight GPUs on meshes brute force would take days; those are worked out by hand in test_rings.py.
    """
    subject, table = profile(name).machine, qualities(profile(name).machine)
    kinds: dict[Machine, tuple[int, ...]] = {}
    for members in itertools.combinations(range(subject.count), count):
        kind = canonical(part_of(subject, mask_of(members)).machine).machine
        first = kinds.setdefault(kind, members)
        assert table.ring_gbps[mask_of(members)] == table.ring_gbps[mask_of(first)], members
    for members in kinds.values():
        assert pytest.approx(reference.ring_gbps(subject, members)) == table.ring_gbps[mask_of(members)], members


@pytest.mark.long
@pytest.mark.parametrize("name", EIGHTS)
def test_tables_agree_with_brute_force_on_every_free_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every free mask, count and policy of every known machine of eight: set and cost are the brute-force optimum.

    Ring bandwidths, which the tests above compare, come from the table here: by brute force they would take days.
    """
    subject = profile(name).machine
    table = qualities(subject)

    def ring_gbps(_: Machine, members: tuple[int, ...]) -> float:
        return float(table.ring_gbps[mask_of(members)]) if len(members) > 1 else 0.0

    def link_rings(_: Machine, members: tuple[int, ...]) -> float:
        return float("inf") if table.linked[mask_of(members)] else 0.0

    reference.forget()
    monkeypatch.setattr(reference, "ring_gbps", ring_gbps)
    monkeypatch.setattr(reference, "link_rings", link_rings)
    for free, policy, count in itertools.product(range(subject.full + 1), Policy, range(1, subject.count + 1)):
        assert_same(subject, free, DeviceRequest(count, policy))
    monkeypatch.undo()
    reference.forget()


@settings(deadline=None, max_examples=100)
@given(subject=random_machines(devices_max=6))
def test_islands_and_losses_agree_with_brute_force(subject: Machine) -> None:
    """Islands partition the machine as the definition says, and losses count disjoint full sets rightly."""
    assert sorted(map(sorted, reference.islands(subject))) == sorted(
        list(island.positions) for island in islands(subject)
    )
    if subject.count <= 5:
        free = positions_of(subject.full)
        assert pytest.approx(reference.loss(subject, free, PRIOR)) == losses(subject)[subject.full]


@settings(deadline=None, max_examples=100)
@given(subject=random_machines(), ask=asks, data=st.data())
def test_choice_is_inside_free_and_of_the_right_size(subject: Machine, ask: DeviceRequest, data: st.DataObject) -> None:
    """A choice never invents a device and never takes more or fewer than asked."""
    free = data.draw(st.integers(0, subject.full))
    answer = choose(subject, free, ask)
    if isinstance(answer, Choice):
        assert mask_of(answer.positions) & ~free == 0
        assert len(set(answer.positions)) == ask.count


@settings(deadline=None, max_examples=100)
@given(subject=random_machines(), count=st.integers(1, 5), data=st.data())
def test_more_free_gpus_never_give_a_worse_set(subject: Machine, count: int, data: st.DataObject) -> None:
    """Freeing GPUs never lowers the quality of a contiguous choice, nor makes it leave its island."""
    fewer = data.draw(st.integers(0, subject.full))
    more = fewer | data.draw(st.integers(0, subject.full))
    before, after = choose(subject, fewer, DeviceRequest(count)), choose(subject, more, DeviceRequest(count))
    if isinstance(before, Choice):
        assert isinstance(after, Choice)
        assert (len(after.islands) == 1, after.relative_quality) >= (len(before.islands) == 1, before.relative_quality)


def test_equal_costs_go_to_the_better_ring_whatever_the_numbering() -> None:
    """Three GPUs of which spreading likes every pair alike: the pair that links join is given, not the first."""
    cells = [["X", "SYS", "NV4"], ["SYS", "X", "NV4"], ["NV4", "NV4", "X"]]
    answers = []
    for order in itertools.permutations(range(3)):
        rows = [[cells[row][column] for column in order] for row in order]
        answers.append(
            choose(machine(rows, nvlink_generation=2, nvswitch=True), 0b111, DeviceRequest(2, Policy.SPREAD))
        )

    assert {one.ring_gbps for one in answers if isinstance(one, Choice)} == {80.0}
    assert len({one.cost for one in answers if isinstance(one, Choice)}) == 1


@settings(deadline=None, max_examples=100)
@given(subject=random_machines(), ask=asks, data=st.data())
def test_relabelled_machine_gives_an_equally_good_choice(
    subject: Machine, ask: DeviceRequest, data: st.DataObject
) -> None:
    """Numbering the GPUs differently changes neither cost nor bandwidth of the answer."""
    order = data.draw(st.permutations(range(subject.count)))
    free = data.draw(st.integers(0, subject.full))
    relabelled = Machine(
        links=tuple(tuple(subject.links[row][column] for column in order) for row in order),
        pcie=None,
        numa=tuple(subject.numa[position] for position in order),
        nvlink_generation=subject.nvlink_generation,
        nvswitch=subject.nvswitch,
        link_gbps=subject.link_gbps,
        pcie_generation=subject.pcie_generation,
        inter_socket_gbps=subject.inter_socket_gbps,
        vendor=subject.vendor,
        nics=tuple(subject.nics[position] for position in order) if subject.nics else None,
    )
    there = mask_of([index for index, position in enumerate(order) if free >> position & 1])
    one, other = choose(subject, free, ask), choose(relabelled, there, ask)
    if isinstance(one, Choice):
        assert isinstance(other, Choice)
        assert (one.cost, one.ring_gbps, one.relative_quality) == pytest.approx(
            (other.cost, other.ring_gbps, other.relative_quality), abs=2e-6
        )
    else:
        assert one == other
