"""The watch cache: identity is the UID, late events change nothing, gaps are reported as gaps."""

from dataclasses import dataclass, field
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.kube.cache import TOMBSTONES_MAX, Cache, Change, ChangeKind


@dataclass(frozen=True)
class Meta:
    name: str
    uid: str
    resource_version: str
    namespace: str = "team"


@dataclass(frozen=True)
class Thing:
    metadata: Meta
    note: str = field(default="", compare=True)


def thing(name: str, uid: str, version: int, note: str = "") -> Thing:
    return Thing(Meta(name, uid, str(version)), note)


def told(changes: list[Change[Thing]]) -> list[tuple[str, str, bool]]:
    return [(change.kind.value, change.object.metadata.uid, change.synthetic) for change in changes]


def test_first_sight_update_and_deletion_are_told_with_old_and_new_state() -> None:
    """The consumer learns each step with the state before and after it."""
    cache: Cache[Thing] = Cache()
    first, second, last = thing("p", "u1", 1), thing("p", "u1", 2), thing("p", "u1", 3, "final")

    assert cache.put(first) == [Change(ChangeKind.ADDED, first)]
    assert cache.put(second) == [Change(ChangeKind.MODIFIED, second, first)]
    assert cache.remove(last.metadata, last) == [Change(ChangeKind.DELETED, last, second)]
    assert not cache.objects
    assert not cache.by_uid


def test_successor_of_the_same_name_is_a_deletion_and_an_addition() -> None:
    """A watch that was interrupted shows a recreated object as one update: the old UID must not live on in the new."""
    cache: Cache[Thing] = Cache()
    cache.put(thing("db-0", "u1", 1))

    changes = cache.put(thing("db-0", "u2", 9))

    assert told(changes) == [("DELETED", "u1", True), ("ADDED", "u2", False)]
    assert set(cache.by_uid) == {"u2"}


def test_late_deletion_of_the_predecessor_leaves_the_successor_alone() -> None:
    """The final state of the old UID is passed on as evidence; the object that bears the name now stays."""
    cache: Cache[Thing] = Cache()
    cache.put(thing("db-0", "u1", 1))
    cache.put(thing("db-0", "u2", 9))
    last = thing("db-0", "u1", 5, "final")

    assert cache.remove(last.metadata, last) == [Change(ChangeKind.DELETED, last)]
    assert cache.objects["team", "db-0"].metadata.uid == "u2"


def test_older_state_of_a_live_object_is_ignored() -> None:
    """Out of order, the newest state wins."""
    cache: Cache[Thing] = Cache()
    cache.put(thing("p", "u1", 5))

    assert cache.put(thing("p", "u1", 4)) == []
    assert cache.put(thing("p", "u1", 5)) == []
    assert cache.objects["team", "p"].metadata.resource_version == "5"


def test_state_from_before_its_deletion_does_not_bring_an_object_back() -> None:
    """An update that arrives after the deletion it precedes makes no ghost that holds GPUs for ever."""
    cache: Cache[Thing] = Cache()
    cache.put(thing("p", "u1", 1))
    cache.remove(Meta("p", "u1", "9"), thing("p", "u1", 9))

    assert cache.put(thing("p", "u1", 8)) == []
    assert not cache.objects


def test_object_that_matches_the_selector_again_comes_back() -> None:
    """With a selector a DELETED is not the end of a UID: a newer state is taken."""
    cache: Cache[Thing] = Cache()
    cache.put(thing("p", "u1", 1))
    cache.remove(Meta("p", "u1", "5"), thing("p", "u1", 5))

    assert told(cache.put(thing("p", "u1", 7))) == [("ADDED", "u1", False)]
    assert cache.remove(Meta("p", "u1", "5"), thing("p", "u1", 5)) == []
    assert set(cache.by_uid) == {"u1"}


def test_listing_deletes_what_it_did_not_show_and_says_that_nobody_saw_it() -> None:
    """A gap proves absence, not how it came about: such deletions are synthetic."""
    cache: Cache[Thing] = Cache()
    cache.put(thing("kept", "u1", 1))
    cache.put(thing("missed", "u2", 2))
    cache.begin_listing()

    assert cache.put(thing("kept", "u1", 1)) == []
    assert told(cache.end_listing()) == [("DELETED", "u2", True)]
    assert set(cache.by_uid) == {"u1"}


def test_unfinished_listing_deletes_nothing() -> None:
    """A list that broke half-way is begun again; what it had not come to is still there."""
    cache: Cache[Thing] = Cache()
    cache.put(thing("a", "u1", 1))
    cache.begin_listing()
    cache.begin_listing()
    cache.put(thing("a", "u1", 1))

    assert cache.end_listing() == []
    assert set(cache.by_uid) == {"u1"}


def test_listing_is_the_truth_even_when_versions_went_back() -> None:
    """After a restore from backup the server's versions are smaller: what it lists counts."""
    cache: Cache[Thing] = Cache()
    cache.put(thing("a", "u1", 100, "newer"))
    cache.begin_listing()

    assert told(cache.put(thing("a", "u1", 10, "restored"))) == [("MODIFIED", "u1", False)]
    assert cache.objects["team", "a"].note == "restored"


def test_unreadable_state_is_marked_and_the_older_one_kept() -> None:
    """One object that cannot be decoded is known to be untrusted until a readable state arrives."""
    cache: Cache[Thing] = Cache()
    cache.put(thing("p", "u1", 1))

    assert cache.put_unreadable(Meta("p", "u1", "2"), "no spec") == []
    assert dict(cache.untrusted) == {("team", "p"): "no spec"}
    assert cache.objects["team", "p"].metadata.resource_version == "1"

    cache.put(thing("p", "u1", 3))

    assert not cache.untrusted


def test_unreadable_successor_ends_its_predecessor() -> None:
    """If the name belongs to another UID now, the old one is gone, readable or not."""
    cache: Cache[Thing] = Cache()
    cache.put(thing("p", "u1", 1))

    assert told(cache.put_unreadable(Meta("p", "u2", "2"), "no spec")) == [("DELETED", "u1", True)]
    assert not cache.objects


def test_unreadable_final_state_is_told_as_a_gap() -> None:
    """A deletion whose final state cannot be read proves nothing about that state."""
    cache: Cache[Thing] = Cache()
    cache.put(thing("p", "u1", 1))

    assert told(cache.remove(Meta("p", "u1", "2"), None)) == [("DELETED", "u1", True)]
    assert cache.remove(Meta("p", "u9", "2"), None) == []


def test_listing_forgets_marks_of_what_is_gone() -> None:
    """Marks do not pile up for objects that left during a gap."""
    cache: Cache[Thing] = Cache()
    cache.put_unreadable(Meta("gone", "u1", "1"), "bad")
    cache.begin_listing()
    cache.end_listing()

    assert not cache.untrusted


def test_memory_of_deleted_objects_is_bounded() -> None:
    """Churn over months does not grow the cache."""
    cache: Cache[Thing] = Cache()
    for number in range(TOMBSTONES_MAX + 10):
        cache.put(thing("p", f"u{number}", 2 * number + 1))
        cache.remove(Meta("p", f"u{number}", str(2 * number + 2)), thing("p", f"u{number}", 2 * number + 2))

    assert len(cache._tombstones) == TOMBSTONES_MAX


HISTORY = [("put", "u1", 1), ("put", "u1", 2), ("remove", "u1", 3), ("put", "u2", 4), ("put", "u2", 5)]


@pytest.mark.parametrize(
    "order", list(permutations(HISTORY)), ids=lambda order: "-".join(str(step[2]) for step in order)
)
def test_every_order_of_one_history_ends_in_the_same_state(order: tuple[tuple[str, str, int], ...]) -> None:
    """However its events are shuffled, the cache ends with the newest UID in its newest state, told once as added."""
    cache: Cache[Thing] = Cache()
    changes: list[Change[Thing]] = []
    for verb, uid, version in order:
        state = thing("p", uid, version)
        changes += cache.put(state) if verb == "put" else cache.remove(state.metadata, state)

    assert {uid: held.metadata.resource_version for uid, held in cache.by_uid.items()} == {"u2": "5"}
    assert replay(changes) == dict(cache.by_uid)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "remove", "unreadable", "list"]),
        st.integers(0, 2),
        st.integers(0, 4),
        st.integers(1, 20),
    ),
    max_size=40,
)


@given(STEPS)
def test_changes_replayed_give_the_cache(steps: list[tuple[str, int, int, int]]) -> None:
    """A consumer that only applies the changes holds exactly what the cache holds, whatever happens."""
    cache: Cache[Thing] = Cache()
    changes: list[Change[Thing]] = []
    for verb, name, uid, version in steps:
        state = thing(f"n{name}", f"n{name}u{uid}", version)
        if verb == "put":
            changes += cache.put(state)
        elif verb == "remove":
            changes += cache.remove(state.metadata, state)
        elif verb == "unreadable":
            changes += cache.put_unreadable(state.metadata, "bad")
        else:
            cache.begin_listing()
            changes += cache.put(state)
            changes += cache.end_listing()

    assert replay(changes) == dict(cache.by_uid)
    assert {held.metadata.uid for held in cache.objects.values()} == set(cache.by_uid)


def replay(changes: list[Change[Thing]]) -> dict[str, Thing]:
    """Apply changes as the plainest consumer would, and check that each one fits the state before it."""
    held: dict[str, Thing] = {}
    for change in changes:
        uid = change.object.metadata.uid
        assert held.get(uid) == change.old
        if change.kind is ChangeKind.DELETED:
            held.pop(uid, None)
        else:
            assert (change.kind is ChangeKind.ADDED) == (uid not in held)
            held[uid] = change.object
    return held
