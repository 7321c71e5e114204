"""Promises of proposals, over random small clusters and by brute force."""

from collections.abc import Iterator
from itertools import chain, combinations
from typing import Any

from hypothesis import given, note, settings
from hypothesis import strategies as st

from atoll.api import names
from atoll.cluster.health import Availability, judge
from atoll.cluster.requests import Rejection
from atoll.explain.changes import Case, Change, changed, relaxations_of
from atoll.explain.decision import decide, scene_of
from atoll.explain.proposals import Help, Kind, check, find_help
from atoll.explain.shapes import additions
from tests.explain.situations import NODE_CPUS, Situation, holder, situation, waiting

PROFILES = ("dgx1-v100", "l40s-4", "t4-4", "a100-pcie4-bridged", "gb200-tray")


@st.composite
def machines(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """Return one node; four in five are open, fresh and well."""
    profile = draw(st.sampled_from(PROFILES))
    ids = st.integers(0, 3)
    few = st.sets(ids, max_size=3).map(tuple)
    closed = draw(st.sampled_from([{}, {}, {}, {"unschedulable": True}, TAINT]))
    heard = draw(st.sampled_from(["2026-01-31T12:00:00Z"] * 4 + ["2026-01-31T10:00:00Z"]))
    return {"profile": profile, "cordoned": draw(few), "sick": draw(few), "node": closed, "heard": heard}


TAINT = {"taints": [{"key": "team", "value": "a", "effect": "NoSchedule"}]}


@st.composite
def clusters(draw: st.DrawFn) -> Situation:
    """Return one to three nodes, up to four holders, and a pod that may or may not fit."""
    nodes = {f"n{i}": draw(machines(f"n{i}")) for i in range(draw(st.integers(1, 3)))}
    free = {name: set(range(4)) for name in nodes}
    holders = []
    for number in range(draw(st.integers(0, 4))):
        node = draw(st.sampled_from(sorted(nodes)))
        ids = draw(st.sets(st.sampled_from(sorted(free[node])), min_size=1, max_size=3)) if free[node] else set()
        free[node] -= ids
        options = {"deleted": draw(st.integers(0, 4)) == 0, "cpu": draw(st.sampled_from(["", "20", "40"]))}
        priority = draw(st.integers(0, 2))
        holders.append(holder(f"h{number}", node, *sorted(ids), priority=priority, **options))
    claim = {
        "policy": draw(st.sampled_from(["contiguous", "island", "packed", "spread"])),
        "models": draw(st.sampled_from([[], [], ["nvidia-v100"], ["nvidia-t4"], ["nvidia-l40s"]])),
    }
    if claim["policy"] != "spread":
        claim["interconnect"] = draw(st.sampled_from(["any", "any", "nvlink", "pcie"]))
    cpu = draw(st.sampled_from(["", "30", "60", str(NODE_CPUS * 2)]))
    return situation(nodes, holders, waiting(draw(st.integers(1, 5)), claim=claim, cpu=cpu))


def help_of(found: Situation) -> Help | None:
    """Return what would help; None for a pod that needs no help."""
    scene = scene_of(found.snapshot)
    decision = decide(scene, found.pod, found.claim)
    assert not isinstance(decision.request, Rejection)
    return None if decision.fits else find_help(scene, found.pod, decision)


def subsets(items: Any) -> Iterator[tuple[Any, ...]]:
    """Yield every set of one or more, the smallest first."""
    items = sorted(items)
    return chain.from_iterable(combinations(items, size) for size in range(1, len(items) + 1))


def gpus(found: Situation, *states: Availability) -> list[tuple[str, str]]:
    """Return (node, uuid) of the GPUs that stand so."""
    return [
        (report.metadata.name, uuid)
        for report in found.snapshot.reports
        for uuid, standing in judge(report).standings.items()
        if standing.state in states
    ]


def all_changes(kind: Kind, found: Situation) -> Iterator[Change]:
    """Yield every change of a kind that there is on this cluster, wherever it is."""
    others = [pod for pod in found.snapshot.pods if pod.spec.node_name]
    if kind is Kind.RELAX:
        yield from (Change(relaxed=relaxed) for relaxed in subsets(relaxations_of(found.claim)))
    elif kind is Kind.COUNT:
        assert found.claim is not None
        yield from (Change(count=count) for count in range(1, found.claim.spec.devices.count))
    elif kind is Kind.OPEN:
        yield from (Change(opened=node.metadata.name) for node in found.snapshot.nodes)
    elif kind is Kind.GPU:
        yield from (Change(uncordoned=chosen) for chosen in subsets(gpus(found, Availability.CORDONED)))
    elif kind is Kind.REPAIR:
        yield from (Change(healed=chosen) for chosen in subsets(gpus(found, Availability.QUARANTINED)))
    elif kind is Kind.END:
        yield from (Change(ended=chosen) for chosen in subsets(pod.metadata.uid for pod in others))
    elif kind is Kind.ENDING:
        ending = [pod.metadata.uid for pod in others if pod.metadata.deletion_timestamp]
        yield from (Change(ended=chosen) for chosen in subsets(ending))
    else:
        yield from (Change(added=one) for one in additions(found.snapshot, found.pod))


@given(clusters())
@settings(max_examples=50, deadline=None)
def test_every_proposal_makes_the_pod_schedulable(found: Situation) -> None:
    """Whatever is proposed is applied to the whole cluster, and the scheduler's own decision then is yes: on that
    node, with those GPUs where nothing else could be better."""
    told = help_of(found)
    for proposal in told.proposals if told is not None else ():
        note(repr(proposal))
        decision = check(Case(found.snapshot, found.pod, found.claim), proposal.change)
        assert decision.fits
        assert proposal.node in decision.verdicts.feasible


@given(clusters())
@settings(max_examples=25, deadline=None)
def test_nothing_of_a_kind_helps_is_true(found: Situation) -> None:
    """Where no proposal of a kind is made, no change of that kind makes room: every set of them was tried."""
    told = help_of(found)
    for kind in told.helpless if told is not None else ():
        for change in all_changes(kind, found):
            note(f"{kind}: {change}")
            assert not check(Case(found.snapshot, found.pod, found.claim), change).fits


@given(clusters())
@settings(max_examples=25, deadline=None)
def test_first_proposal_of_a_kind_is_the_smallest(found: Situation) -> None:
    """Fewest pods, GPUs and relaxations, and the largest count: no smaller change of the kind helps."""
    told = help_of(found)
    for kind in (Kind.RELAX, Kind.COUNT, Kind.GPU, Kind.REPAIR, Kind.END):
        first = next((one for one in told.proposals if one.kind is kind), None) if told is not None else None
        if first is None:
            continue
        for change in all_changes(kind, found):
            if size(change) < size(first.change):
                note(f"{kind}: {change} is smaller than {first.change}")
                assert not check(Case(found.snapshot, found.pod, found.claim), change).fits


def size(change: Change) -> int:
    """Return how much a change takes; a larger count takes less."""
    return len(change.relaxed) + len(change.uncordoned) + len(change.healed) + len(change.ended) - change.count


def test_changes_leave_the_cluster_alone() -> None:
    """A change makes new values: the snapshot that was asked about is the same afterwards."""
    found = situation({"n1": {"cordoned": (0,)}}, [holder("h", "n1", 1)], waiting(8, claim={"policy": "island"}))
    before = repr(found.snapshot)

    case = Case(found.snapshot, found.pod, found.claim)
    changed(case, Change(count=2, uncordoned=(("n1", "GPU-n1-0000"),), ended=("uid-of-h",), opened="n1"))

    assert repr(found.snapshot) == before
    assert names.CLAIM in found.pod.metadata.annotations
