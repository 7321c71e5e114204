"""Machines that differ only in numbering: one canonical form, one set of tables, and the results of brute force."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles import placement as reference
from tests.topology.machines import random_machines
from topology import canonical as canonical_module
from topology.canonical import canonical, renumbered
from topology.choice import Choice, choose
from topology.demand import PRIOR
from topology.device_requests import DeviceRequest, Policy
from topology.model import Machine, mask_of, positions_of
from topology.profiles import profile, profile_names
from topology.tables import RelabelledTable, table


def shuffled(machine: Machine, seed: int) -> Machine:
    """The machine with its GPUs numbered in another way."""
    order = list(range(machine.count))
    random.Random(seed).shuffle(order)
    return renumbered(machine, order)


@pytest.mark.parametrize("name", profile_names())
def test_known_machine_has_one_form_however_it_is_numbered(name: str) -> None:
    """Every known machine is recognised under other numbers, and its canonical form is its own canonical form."""
    subject = profile(name).machine
    form = canonical(subject).machine

    assert canonical(form).machine == form
    assert {canonical(shuffled(subject, seed)).machine for seed in range(3)} == {form}


@settings(deadline=None, max_examples=100)
@given(subject=random_machines(devices_max=7), seed=st.integers(0, 1000))
def test_random_machine_has_one_form_however_it_is_numbered(subject: Machine, seed: int) -> None:
    """Renumbering never leads to another form, and the order of the form leads there."""
    form = canonical(subject)

    assert canonical(shuffled(subject, seed)).machine == form.machine
    assert renumbered(subject, form.order) == form.machine


@pytest.mark.parametrize("name", ["dgx1-v100", "h100-nvl-8", "dgx2-v100"])
def test_isomorphic_machines_share_one_table(name: str) -> None:
    """The table of a renumbered machine is a view of the one that is built already."""
    first, second = (table(shuffled(profile(name).machine, seed), DeviceRequest(4)) for seed in (1, 2))

    assert isinstance(first, RelabelledTable)
    assert isinstance(second, RelabelledTable)
    assert first.shared is second.shared


@settings(deadline=None, max_examples=100)
@given(
    subject=random_machines(devices_max=5),
    ask=st.builds(DeviceRequest, count=st.integers(1, 5), policy=st.sampled_from(Policy)),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_shared_tables_answer_in_the_numbers_of_the_machine(
    subject: Machine, ask: DeviceRequest, seed: int, data: st.DataObject
) -> None:
    """Whoever's table was built first: set, ties and cost are those of brute force on the machine that is asked."""
    choose(canonical(subject).machine, canonical(subject).machine.full, ask)
    other = shuffled(subject, seed)
    free = data.draw(st.integers(0, other.full))

    answer, oracle = choose(other, free, ask), reference.best(other, positions_of(free), ask, PRIOR)

    if isinstance(answer, Choice):
        assert oracle is not None
        assert (answer.positions, answer.cost) == (oracle[0], pytest.approx(oracle[1], abs=1e-5))
    else:
        assert oracle is None


def test_required_gpus_are_kept_under_other_numbers() -> None:
    """A required GPU is a GPU of the machine that is asked, not of the one that the table was built for."""
    other = shuffled(profile("h100-nvl-8").machine, 5)
    for position in range(8):
        answer = choose(other, other.full, DeviceRequest(2), required=1 << position)

        assert isinstance(answer, Choice)
        assert position in answer.positions
        assert answer.relative_quality == 1


def test_search_for_the_form_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """With too few orders tried, isomorphic machines may go unrecognised; the answers stay right."""
    monkeypatch.setattr(canonical_module, "LEAVES_MAX", 1)
    canonical.cache_clear()
    subject = shuffled(profile("pcie8-pix-phb").machine, 9)
    answer = choose(subject, subject.full, DeviceRequest(2))
    canonical.cache_clear()

    assert isinstance(answer, Choice)
    assert answer.relative_quality == 1
    assert mask_of(answer.positions).bit_count() == 2
