"""The status of a claim: allocations and waiting pods."""

from atoll.api import names
from atoll.api.claims import ALLOCATIONS_MAX, ClaimPhase, GpuClaim, GpuClaimStatus
from atoll.cluster.claim_status import claim_status
from atoll.cluster.objects import Pod
from tests.builders import LATER, NOW, make_allocation, make_claim, make_pod, uuid_of

CLAIM = make_claim("c")


def user(name: str, *ids: int, node: str = "n1", **options: object) -> Pod:
    """Return a pod of the claim; bound when it has device ids."""
    where = {"node": node, "allocation": make_allocation(node, *ids)} if ids else {}
    return make_pod(name, claim=CLAIM, **{**where, **options})  # type: ignore[arg-type]


def status(*pods: Pod, claim: GpuClaim = CLAIM, now: str = NOW) -> GpuClaimStatus:
    """Return the status of the claim with these pods."""
    return claim_status(claim, pods, now)


def test_unused() -> None:
    """A claim that no pod names is a template and no more."""
    found = status(make_pod("stranger"))
    assert (found.phase, found.allocated_pods, found.waiting_pods) == (ClaimPhase.UNUSED, 0, 0)


def test_waiting_beside_allocated() -> None:
    """One pod that waits makes the claim wait, and the others' GPUs are listed all the same."""
    found = status(user("b", 2, 3), user("a", 0), user("w"))
    assert (found.phase, found.allocated_pods, found.waiting_pods) == (ClaimPhase.WAITING, 2, 1)
    assert [(entry.pod, entry.ids, entry.uuids) for entry in found.allocations] == [
        ("a", (0,), (uuid_of("n1", 0),)),
        ("b", (2, 3), (uuid_of("n1", 2), uuid_of("n1", 3))),
    ]


def test_allocated() -> None:
    """All pods have their GPUs: the condition is true."""
    found = status(user("a", 0))
    assert found.phase is ClaimPhase.ALLOCATED
    assert found.conditions[0].status == "True"


def test_pods_that_do_not_count() -> None:
    """Ended pods, pods of another namespace and pods of a namesake that existed before do not count."""
    old = make_pod("old", annotations={names.CLAIM: "c", names.CLAIM_UID: "uid-of-the-old-one"})
    other = make_pod("other", namespace="elsewhere", annotations={names.CLAIM: "c", names.CLAIM_UID: "uid-of-c"})
    found = status(user("done", 0, phase="Succeeded"), old, other)
    assert found.phase is ClaimPhase.UNUSED


def test_list_is_bounded_and_the_count_is_not() -> None:
    """A claim of a thousand pods stays a small object."""
    found = status(*(user(f"p{number:04}", 0) for number in range(ALLOCATIONS_MAX + 10)))
    assert len(found.allocations) == ALLOCATIONS_MAX
    assert found.allocated_pods == ALLOCATIONS_MAX + 10


def test_time_of_a_condition_moves_only_with_its_status() -> None:
    """The status of an unchanged claim is equal to what stands there, so nothing is written."""
    first = status(user("a", 0))
    stored = CLAIM.model_copy(update={"status": first})
    assert status(user("a", 0), claim=stored, now=LATER) == first
    assert status(user("a"), claim=stored, now=LATER).conditions[0].last_transition_time == LATER
