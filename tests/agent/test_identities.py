"""Device ids: stable by uuid, never reused while a pod may hold them."""

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import TooManyDevices
from agent.identities import IDS_MAX, LeaseLookup, assign

UUIDS = [f"GPU-{letter}" for letter in "abcdefgh"]


def settle(uuids: Sequence[str], *, known: Mapping[str, int], leases: Mapping[int, str]) -> dict[str, int]:
    """Answer every look-up from `leases`, as the shell does from the API server."""
    found: dict[int, str | None] = {}
    for _ in range(100):
        step = assign(uuids, known=known, leases=found)
        if not isinstance(step, LeaseLookup):
            return dict(step.ids)
        assert not set(step.ids) & found.keys(), "asked twice for one Lease"
        found |= {device_id: leases.get(device_id) for device_id in step.ids}
    raise AssertionError("never settled")


@pytest.mark.parametrize(
    ("uuids", "known", "leases", "want"),
    [
        pytest.param(["a", "b"], {}, {}, {"a": 0, "b": 1}, id="first start: in the order of the slots"),
        pytest.param(["b", "a"], {"a": 0, "b": 1}, {}, {"a": 0, "b": 1}, id="renumbered by a reboot"),
        pytest.param(["a", "c"], {"a": 0}, {}, {"a": 0, "c": 1}, id="replaced card, its id is free"),
        pytest.param(["a", "c"], {"a": 0}, {1: "b"}, {"a": 0, "c": 2}, id="replaced card, its id is still held"),
        pytest.param(["a", "c"], {"a": 0}, {1: ""}, {"a": 0, "c": 2}, id="a Lease that names no uuid blocks too"),
        pytest.param(["a", "c"], {"a": 0, "b": 1}, {}, {"a": 0, "c": 2}, id="a device that is not seen keeps its id"),
        pytest.param(["b", "a"], {}, {0: "a"}, {"a": 0, "b": 1}, id="record lost: the Lease remembers"),
        pytest.param(["a", "b"], {}, {3: "a"}, {"a": 3, "b": 0}, id="record lost: a Lease beyond the count remembers"),
        pytest.param(["a"], {"b": 0}, {0: "a"}, {"a": 1}, id="a Lease cannot take a known device's id away"),
        pytest.param([], {"a": 0}, {}, {}, id="nothing there"),
    ],
)
def test_ids_follow_the_uuid(
    uuids: list[str], known: dict[str, int], leases: dict[int, str], want: dict[str, int]
) -> None:
    """Known uuids keep their ids; new ones get the lowest id that no Lease holds."""
    assert settle(uuids, known=known, leases=leases) == want


def test_known_devices_cost_no_request() -> None:
    """A steady machine never reads a Lease."""
    step = assign(UUIDS, known={uuid: position for position, uuid in enumerate(UUIDS)}, leases={})

    assert not isinstance(step, LeaseLookup)


def test_one_new_card_costs_one_request() -> None:
    """The agent reads the one Lease that decides, not all of them."""
    step = assign(["a", "new"], known={"a": 0}, leases={})

    assert step == LeaseLookup((1,))


def test_ids_end_somewhere() -> None:
    """With every id taken the agent says so instead of searching for ever."""
    known = {f"u{device_id}": device_id for device_id in range(IDS_MAX)}

    with pytest.raises(TooManyDevices, match="GPU-new"):
        assign(["GPU-new"], known=known, leases={})


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, object]]:
    """Steps in a node's life: which devices are seen, which ids are held, and losses of the record."""
    step = st.one_of(
        st.tuples(
            st.just("see"), st.permutations(UUIDS).flatmap(lambda order: st.integers(0, 8).map(lambda n: order[:n]))
        ),
        st.tuples(st.just("hold"), st.integers(0, 7)),
        st.tuples(st.just("release"), st.integers(0, 7)),
        st.tuples(st.just("drop"), st.integers(0, 7)),
        st.tuples(st.just("restart"), st.just(None)),
    )
    return draw(st.lists(step, max_size=30))


@given(histories())
def test_no_id_is_used_twice_in_any_history(history: list[tuple[str, object]]) -> None:
    """Whatever is seen, replaced, held, released or restarted: an id has one uuid, and a held id keeps its own."""
    known: dict[str, int] = {}
    leases: dict[int, str] = {}
    for verb, subject in history:
        by_position = sorted(known)
        if verb == "see":
            ids = settle(subject, known=known, leases=leases)
            for uuid, device_id in ids.items():
                assert known.get(uuid, device_id) == device_id, "a known uuid changed its id"
                assert leases.get(device_id, uuid) == uuid, "a held id was given to another uuid"
            known |= ids
            assert len(set(known.values())) == len(known), "one id, two uuids"
        elif verb == "hold" and subject < len(by_position):
            uuid = by_position[subject]
            leases.setdefault(known[uuid], uuid)
        elif verb == "release" and subject < len(leases):
            del leases[sorted(leases)[subject]]
        elif verb == "drop" and subject < len(by_position):
            del known[by_position[subject]]
        elif verb == "restart":
            known = dict(known)


@given(st.permutations(UUIDS), st.sets(st.sampled_from(UUIDS)))
def test_a_lost_record_is_restored_from_leases(order: list[str], held: set[str]) -> None:
    """After somebody deleted the report, every device that a Lease names has its old id again."""
    before = {uuid: position for position, uuid in enumerate(UUIDS)}
    leases = {before[uuid]: uuid for uuid in held}

    after = settle(order, known={}, leases=leases)

    assert {uuid: after[uuid] for uuid in held} == {uuid: before[uuid] for uuid in held}
    assert sorted(after.values()) == list(range(len(UUIDS)))
