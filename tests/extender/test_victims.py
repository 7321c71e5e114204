"""The preempt verb: kube-scheduler's victims stay, more are added only if islands need them, none without use.

The machine n1 has eight cards with bridges between pairs: 0-1, 2-3, 4-5, 6-7.
"""

from typing import Any

import msgspec
import pytest

from atoll.api import names
from atoll.cluster.budgets import DisruptionBudgets, decode_budget
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import Pod, PodSpec
from atoll.cluster.requests import Rejection, request_of
from atoll.cluster.soft_reservations import SoftReservation
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.mirror import WatchedKind
from extender.nominations import Nominations
from extender.victims import Preemptor, choose_victims
from extender.wire import Victim, Victims
from tests.builders import make_allocation, make_claim, make_lease, make_pod, make_report
from tests.fakes.clock import ManualClock

NOW = 1000.0
PAIRS = "h100-nvl-8"


def scene(**pods: tuple[int, tuple[int, ...]]) -> Ledger:
    """Return a ledger of n1 where each named pod, of this priority, holds these GPUs."""
    ledger = Ledger()
    ledger.put_report(make_report("n1", PAIRS))
    ledger.put_heartbeat("n1", NOW, 180.0)
    for name, (priority, ids) in pods.items():
        ledger.put_pod(holder(name, priority, *ids))
    return ledger


def holder(name: str, priority: int, *ids: int, **options: Any) -> Pod:
    """Return a running pod with these GPUs of n1."""
    return make_pod(
        name,
        uid=name,
        gpus=len(ids),
        node="n1",
        phase="Running",
        priority=priority,
        allocation=make_allocation("n1", *ids),
        **options,
    )


def preemptor(count: int, *, priority: int = 10, **claim: Any) -> Preemptor:
    """Return a waiting pod with this claim."""
    wanted = make_claim(count=count, **claim)
    pod = make_pod("high", uid="high", gpus=count, claim=wanted, priority=priority)
    return Preemptor(pod, request_of(pod, wanted))


def offered(*uids: str, broken: int = 0) -> dict[str, Victims]:
    """Return n1 with these victims of kube-scheduler's."""
    return {"n1": Victims(tuple(Victim(uid) for uid in uids), broken)}


def answer(
    candidates: dict[str, Victims], who: Preemptor, ledger: Ledger, budgets: DisruptionBudgets | None = None
) -> dict[str, tuple[set[str], int]]:
    """Return the victims and the count of broken budgets per node."""
    chosen = choose_victims(candidates, who, ledger, budgets=budgets or DisruptionBudgets(), now_seconds=NOW)
    return {node: ({v.uid for v in each.pods or ()}, each.pdb_violations) for node, each in chosen.items()}


def test_empty_victim_list_is_filled_with_one_victim() -> None:
    """Newer schedulers offer a node of which they think that nobody need go: one low pod of four goes, not both."""
    ledger = scene(low1=(0, (0, 1, 2, 3)), low2=(0, (4, 5, 6, 7)))

    assert answer(offered(), preemptor(4), ledger) == {"n1": ({"low1"}, 0)}


def test_victim_of_kube_scheduler_stays() -> None:
    """It was chosen for cpu or memory, of which the extender knows nothing."""
    ledger = scene(low1=(0, (0, 1, 2, 3)), low2=(0, (4, 5, 6, 7)))

    assert answer(offered("cpu-hog"), preemptor(4), ledger) == {"n1": ({"cpu-hog", "low1"}, 0)}
    assert answer(offered("low2"), preemptor(4), ledger) == {"n1": ({"low2"}, 0)}


def test_more_victims_come_where_the_islands_need_them() -> None:
    """kube-scheduler freed two GPUs by count, of two pairs; one more pod makes a pair whole."""
    ledger = scene(a=(0, (0,)), b=(5, (1,)), c=(0, (2,)), d=(3, (3,)), rest=(10, (4, 5, 6, 7)))

    assert answer(offered("a", "c"), preemptor(2, policy="island"), ledger) == {"n1": ({"a", "c", "d"}, 0)}
    assert answer(offered("a", "c"), preemptor(2), ledger) == {"n1": ({"a", "c"}, 0)}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("a", "c"), ["d", "a", "c"]),
        (("a", "cpu-hog", "c"), ["d", "a", "cpu-hog", "c"]),
        (("cpu-hog", "a", "c"), ["cpu-hog", "d", "a", "c"]),
    ],
    ids=["added-above", "unknown-between", "unknown-first"],
)
def test_most_important_victim_stands_first(given: tuple[str, ...], expected: list[str]) -> None:
    """kube-scheduler takes the first one's priority for a node's highest when it chooses between nodes."""
    ledger = scene(a=(0, (0,)), b=(5, (1,)), c=(0, (2,)), d=(3, (3,)), rest=(10, (4, 5, 6, 7)))
    who = preemptor(2, policy="island")

    chosen = choose_victims(offered(*given), who, ledger, budgets=DisruptionBudgets(), now_seconds=NOW)

    assert [victim.uid for victim in chosen["n1"].pods or ()] == expected


@pytest.mark.parametrize(
    ("count", "claim", "priorities"),
    [
        pytest.param(8, {}, {"low1": 0, "low2": 10}, id="an-equal-stays"),
        pytest.param(9, {}, {"low1": 0, "low2": 0}, id="too-few-even-when-empty"),
        pytest.param(4, {"policy": "island"}, {"low1": 0, "low2": 0}, id="no-such-island"),
        pytest.param(2, {"models": ["nvidia-a100"]}, {"low1": 0, "low2": 0}, id="no-such-model"),
    ],
)
def test_node_that_cannot_be_helped_is_dropped(count: int, claim: dict[str, Any], priorities: dict[str, int]) -> None:
    """Nobody is evicted in vain; nothing possible is an empty map, not an error."""
    ids = {"low1": (0, 1, 2, 3), "low2": (4, 5, 6, 7)}
    ledger = scene(**{name: (priority, ids[name]) for name, priority in priorities.items()})

    assert answer(offered("low1"), preemptor(count, **claim), ledger) == {}


def test_members_of_gangs_are_the_last_victims() -> None:
    """Their gang may not run without them: whoever belongs to none goes first, and kube-scheduler is told to prefer
    nodes where nobody of a gang need go."""
    ledger = scene(plain=(5, (0, 1)))
    ledger.put_pod(holder("bound", 0, 2, 3, annotations={names.GANG: "g"}))
    ledger.put_pod(holder("dear", 10, 4, 5, 6, 7))

    assert answer(offered(), preemptor(2, policy="island"), ledger) == {"n1": ({"plain"}, 0)}
    assert answer(offered("bound"), preemptor(2, policy="island"), ledger) == {"n1": ({"bound"}, 1)}


KEPT = {names.PREEMPTIBLE: "false"}


def with_cpu(pod: Pod, cpu: str) -> Pod:
    """Return the pod with its container asking for cpu too."""
    container = pod.spec.containers[0]
    resources = msgspec.structs.replace(container.resources, requests={**container.resources.requests, "cpu": cpu})
    return msgspec.structs.replace(
        pod,
        spec=msgspec.structs.replace(pod.spec, containers=(msgspec.structs.replace(container, resources=resources),)),
    )


@pytest.mark.parametrize(
    ("count", "other", "expected"),
    [
        pytest.param(4, {}, {"n1": ({"other"}, 0)}, id="another-goes-for-it"),
        pytest.param(8, {}, {}, id="both-would-be-needed"),
        pytest.param(4, {"labels": KEPT}, {}, id="the-other-neither"),
        pytest.param(4, {"priority": 10}, {}, id="the-other-is-an-equal"),
    ],
)
def test_pod_that_may_not_be_preempted_is_no_victim(count: int, other: dict[str, Any], expected: object) -> None:
    """kube-scheduler does not know the label and chose it: it stays, whatever that means for the node."""
    ledger = scene()
    ledger.put_pod(holder("kept", 0, 0, 1, 2, 3, labels=KEPT))
    ledger.put_pod(holder("other", other.get("priority", 5), 4, 5, 6, 7, labels=other.get("labels")))

    assert answer(offered("kept"), preemptor(count), ledger) == expected


@pytest.mark.parametrize(("cpu", "expected"), [("2", {"n1": ({"other"}, 0)}), ("1", {})])
def test_another_victim_frees_as_much_of_the_host(cpu: str, expected: object) -> None:
    """The spared pod may have been chosen for its cpu: nobody goes for it who frees less than the pod needs."""
    ledger = scene()
    ledger.put_pod(with_cpu(holder("kept", 0, 0, 1, 2, 3, labels=KEPT), "3"))
    ledger.put_pod(with_cpu(holder("other", 5, 4, 5, 6, 7), cpu))
    who = preemptor(4)

    assert answer(offered("kept"), Preemptor(with_cpu(who.pod, "2"), who.request), ledger) == expected


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({"affinity": {"podAffinity": {}}}, id="near pods"),
        pytest.param({"affinity": {"podAntiAffinity": {}}}, id="apart from pods"),
        pytest.param({"containers": [{"name": "main", "ports": [{"hostPort": 80}]}]}, id="a port of the host"),
    ],
)
def test_a_pod_that_may_depend_on_the_spared_victim_itself_takes_no_other(spec: dict[str, Any]) -> None:
    """kube-scheduler may have chosen it for where it is, not for what it frees."""
    ledger = scene()
    ledger.put_pod(holder("kept", 0, 0, 1, 2, 3, labels=KEPT))
    ledger.put_pod(holder("other", 5, 4, 5, 6, 7))
    who = preemptor(4)
    pod = msgspec.structs.replace(who.pod, spec=msgspec.convert({**msgspec.to_builtins(who.pod.spec), **spec}, PodSpec))

    assert answer(offered("kept"), preemptor(4), ledger) == {"n1": ({"other"}, 0)}
    assert answer(offered("kept"), Preemptor(pod, who.request), ledger) == {}


def test_node_without_a_fresh_report_is_dropped() -> None:
    """What nobody knows about, nobody evicts for; the same holds for a pod whose request cannot be read."""
    ledger = scene(low=(0, (0, 1, 2, 3, 4, 5, 6, 7)))
    ledger.put_heartbeat("n1", NOW - 1000.0, 180.0)
    assert answer(offered("low"), preemptor(4), ledger) == {}

    unreadable = Preemptor(preemptor(4).pod, Rejection("GpuClaim of the pod is missing"))
    assert answer(offered("low"), unreadable, scene(low=(0, (0, 1)))) == {}


def test_what_ends_already_needs_no_further_victim() -> None:
    """A pod that is being deleted makes room by itself: without victims of kube-scheduler's the node is left alone."""
    ledger = scene(low2=(0, (4, 5, 6, 7)))
    ledger.put_pod(holder("low1", 0, 0, 1, 2, 3, deleted=True))

    assert answer(offered(), preemptor(4), ledger) == {}


def test_gpu_of_a_victim_that_somebody_else_holds_too_does_not_count() -> None:
    """A Lease in another name, perhaps in doubt, outlives the victim."""
    ledger = scene(low=(0, (0, 1)), rest=(10, (2, 3, 4, 5, 6, 7)))
    ledger.put_lease(make_lease("n1", 1))  # held by uid-of-p

    assert answer(offered("low"), preemptor(2), ledger) == {}


def test_broken_budgets_are_counted_and_avoided() -> None:
    """A pod whose budget allows it goes first; where none does, the break is counted for kube-scheduler's choice."""
    text = b'{"metadata":{"name":"b","namespace":"team"},"spec":{"selector":{"matchLabels":{"app":"x"}}}}'
    budgets = DisruptionBudgets((decode_budget(text),))
    guarded = holder("guarded", 0, 0, 1, labels={"app": "x"})
    ledger = scene(other=(0, (2, 3)), rest=(10, (4, 5, 6, 7)))
    ledger.put_pod(guarded)

    assert answer(offered(), preemptor(2, policy="island"), ledger, budgets) == {"n1": ({"other"}, 0)}
    ledger.drop_pod("other")
    ledger.put_pod(holder("other", 10, 2, 3))
    assert answer(offered(), preemptor(2, policy="island"), ledger, budgets) == {"n1": ({"guarded"}, 1)}
    given = offered("guarded", broken=1)
    assert answer(given, preemptor(2, policy="island"), ledger, budgets) == {"n1": ({"guarded"}, 1)}


def test_what_is_kept_for_another_pod_is_not_freed_for_this_one() -> None:
    """Two preemptors of one priority do not evict for the same GPUs; a higher one may."""
    ledger = scene(low=(0, (0, 1)), rest=(10, (2, 3, 4, 5, 6, 7)))
    ledger.keep("other", SoftReservation("n1", (0, 1), 10))

    assert answer(offered("low"), preemptor(2), ledger) == {}
    assert answer(offered("low"), preemptor(2, priority=11), ledger) == {"n1": ({"low"}, 0)}


# What kube-scheduler nominated


def nominate(ledger: Ledger, who: Preemptor, *, node: str = "n1", woken: str = "") -> Nominations:
    """Show the extender the nomination of a pod."""
    nominations = Nominations(ledger, ManualClock(), lambda _pod: who.request)
    show(nominations, ledger, nominated(who, node, woken))
    return nominations


def nominated(who: Preemptor, node: str, woken: str = "") -> Pod:
    """Return the waiting pod as nominated to a node."""
    pod = make_pod("high", uid="high", gpus=2, priority=10, annotations={names.WOKEN: woken} if woken else {})
    return msgspec.structs.replace(pod, status=msgspec.structs.replace(pod.status, nominated_node_name=node))


def show(nominations: Nominations, ledger: Ledger, pod: Pod, kind: ChangeKind = ChangeKind.MODIFIED) -> None:
    """Let a change of a pod arrive, at the ledger first."""
    if kind is ChangeKind.DELETED:
        ledger.drop_pod(pod.metadata.uid)
    else:
        ledger.put_pod(pod)
    nominations.observe(WatchedKind.POD, Change(kind, pod))


def free_for(ledger: Ledger, uid: str, priority: int) -> set[int]:
    """Return the ids that a pod could have on n1 now."""
    devices = ledger.nodes["n1"]
    mask = ledger.free("n1", now_seconds=NOW, asking_uid=uid, asking_priority=priority)
    return {device.id for position, device in enumerate(devices.devices) if mask >> position & 1}


def test_freed_gpus_are_kept_for_the_nominated_pod() -> None:
    """The pair that victims leave stays whole: a pod of the same or a lower priority gets none of it, a higher may."""
    ledger = scene(low1=(0, (0,)), low2=(0, (1,)), rest=(10, (2, 3, 4, 5)))
    ledger.put_pod(holder("more", 10, 6))
    nominations = nominate(ledger, preemptor(2, policy="island"))
    assert ledger.kept("high") is None, "nothing ends there yet"

    for name, device_id in (("low1", 0), ("low2", 1)):
        show(nominations, ledger, holder(name, 0, device_id, deleted=True))
    assert ledger.kept("high") == SoftReservation("n1", (0, 1), 10)
    for name, device_id in (("low1", 0), ("low2", 1)):
        show(nominations, ledger, holder(name, 0, device_id), ChangeKind.DELETED)

    assert free_for(ledger, "thief", 0) == free_for(ledger, "equal", 10) == {7}
    assert free_for(ledger, "high", 10) == free_for(ledger, "higher", 11) == {0, 1, 7}


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda who: (nominated(who, ""), ChangeKind.MODIFIED), id="nomination-withdrawn"),
        pytest.param(lambda who: (nominated(who, "n1"), ChangeKind.DELETED), id="pod-gone"),
        pytest.param(lambda _: (holder("high", 10, 0, 1), ChangeKind.MODIFIED), id="pod-bound"),
    ],
)
def test_keeping_ends_with_the_nomination(end: Any) -> None:
    """Nothing is kept for a pod that no longer waits for it."""
    who = preemptor(2, policy="island")
    ledger = scene()
    nominations = nominate(ledger, who)
    assert ledger.kept("high") is not None

    show(nominations, ledger, *end(who))

    assert ledger.kept("high") is None


@pytest.mark.parametrize(
    ("is_member", "more", "keeps"),
    [
        pytest.param(False, {}, True, id="waits"),
        pytest.param(False, {"schedulingGates": [{"name": "example.com/gate"}]}, False, id="gated"),
        pytest.param(True, {"schedulingGates": [{"name": names.GANG_GATE}]}, True, id="gated-member"),
        pytest.param(True, {"node": "n1"}, False, id="bound-member"),
        pytest.param(True, {"phase": "Failed"}, False, id="failed-member"),
    ],
)
def test_only_who_waits_keeps_what_its_annotation_says(is_member: bool, more: dict[str, Any], keeps: bool) -> None:
    """Members of a gang wait behind its gate."""
    annotations = {names.KEPT: "n1:0,1", **({names.GANG: "g"} if is_member else {})}
    ledger = scene()
    ledger.put_pod(make_pod("w", uid="w", gpus=2, annotations=annotations, priority=10, **more))

    assert (ledger.kept("w") is not None) is keeps


def test_nomination_by_a_wake_up_keeps_nothing() -> None:
    """That pod fits at once; what it will take is expected, as for every pod between filter and bind."""
    ledger = scene()
    nominate(ledger, preemptor(2), woken="7@n1")
    assert ledger.kept("high") is None


def test_annotation_of_the_controllers_keeps_gpus_by_itself() -> None:
    """Whoever holds a ledger knows it, also after a restart; a text that says nothing keeps nothing."""
    ledger = scene()
    ledger.put_pod(make_pod("high", uid="high", priority=3, annotations={names.KEPT: "n1:4,5"}))
    assert free_for(ledger, "thief", 3) == {0, 1, 2, 3, 6, 7}
    assert len(ledger.cells(now_seconds=NOW)) == 1

    for text in ("", "n1", "n1:", "n1:a", ":1", "n1:1,1", "n1:" + ",".join(map(str, range(99)))):
        ledger.put_pod(make_pod("high", uid="high", priority=3, annotations={names.KEPT: text}))
        assert free_for(ledger, "thief", 3) == set(range(8)), text


def test_filter_of_the_pod_sees_what_is_kept_for_it() -> None:
    """The cells that filter judges by differ for the pod itself and for those above it."""
    ledger = scene(rest=(10, (2, 3, 4, 5, 6, 7)))
    ledger.keep("high", SoftReservation("n1", (0, 1), 10))

    def free(uid: str, priority: int | None) -> int:
        return ledger.cells(now_seconds=NOW, asking_uid=uid, asking_priority=priority)["n1"].free.bit_count()

    assert [free("high", 10), free("thief", 10), free("higher", 11), free("nobody", None)] == [2, 0, 2, 0]
