"""The ledger: a held device is never free, in any order of events."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.api import names
from atoll.api.node_status import GpuNodeStatus
from atoll.cluster.allocations import Allocation, bound_allocation
from atoll.cluster.cells import TentativePlacement
from atoll.cluster.errors import IllegalTransition
from atoll.cluster.holds import Hold, HoldSource
from atoll.cluster.leases import Holder, lease_name, parse_lease
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import Lease, Pod
from tests.builders import make_allocation, make_lease, make_pod, make_report, report_json, uuid_of
from topology.demand import PRIOR
from topology.device_requests import DeviceRequest
from topology.scores import EMPTYING

NODES = ("n1", "n2")
UIDS = ("u1", "u2", "u3")
IDS = (0, 1, 2, 5)
"""Ids with a gap, so that a position is not an id."""
REPLACED = "GPU-new-card"


def free(ledger: Ledger, node: str = "n1", *, now: float = 0.0, uid: str = "") -> set[int]:
    """Return the ids that are free on the node."""
    devices = ledger.nodes[node].devices
    mask = ledger.free(node, now_seconds=now, asking_uid=uid)
    return {device.id for position, device in enumerate(devices) if mask >> position & 1}


def small_report(node: str, *, uuids: dict[int, str] | None = None) -> GpuNodeStatus:
    """Return the report of a machine of four GPUs."""
    return make_report(node, "t4-4", ids=IDS, uuids=uuids)


@pytest.fixture
def ledger() -> Ledger:
    """A ledger that knows n1."""
    ledger = Ledger()
    ledger.put_report(small_report("n1"))
    return ledger


def test_a_machine_of_one_gpu_is_one_too() -> None:
    """A workstation: nothing to link, and one GPU to give out."""
    ledger = Ledger()
    ledger.put_report(make_report("n1", status={"devices": report_json("n1")["status"]["devices"][:1], "links": {}}))

    assert free(ledger) == {0}


@pytest.mark.parametrize("source", ["lease", "pod", "assumed", "expected"])
def test_each_kind_of_news_takes_the_device(ledger: Ledger, source: str) -> None:
    """A Lease, a bound pod, a bind under way and an expected bind each take a device away from others."""
    take: dict[str, Callable[[], None]] = {
        "lease": lambda: ledger.put_lease(make_lease("n1", 5)),
        "pod": lambda: ledger.put_pod(make_pod(uid="u1", node="n1", allocation=make_allocation("n1", 5))),
        "assumed": lambda: ledger.assume("u1", make_allocation("n1", 5)),
        "expected": lambda: ledger.put_tentative("u1", TentativePlacement("n1", (5,), 10.0)),
    }
    take[source]()

    assert free(ledger, uid="another") == {0, 1, 2}


def test_own_holds_are_free_for_the_holder_alone(ledger: Ledger) -> None:
    """A repeated bind finds the devices that its Leases, its assumption and its expectation hold."""
    ledger.put_lease(make_lease("n1", 0, holder=Holder("team", "p", "u1")))
    ledger.assume("u1", make_allocation("n1", 0, 1))
    ledger.put_lease(make_lease("n1", 2, holder=Holder("team", "q", "u2")))

    assert free(ledger, uid="u1") == {0, 1, 5}
    assert free(ledger, uid="u2") == {2, 5}
    assert free(ledger) == {5}


def test_pods_that_hold_gpus_of_a_node_are_counted_once_each(ledger: Ledger) -> None:
    """A pod that is known by its Leases, by its bind and by itself keeps a machine from becoming whole once, and no
    more when it is gone."""
    ledger.put_report(small_report("n2"))
    for node in NODES:
        ledger.put_heartbeat(node, 0.0, 60.0)

    def told() -> list[float]:
        ledger.own_cells(now_seconds=0.0)
        rows = ledger.fleet.rows_of(NODES)
        costs = ledger.fleet.with_node_costs(np.zeros(2), rows, ledger.fleet.states_of(rows), DeviceRequest(1), PRIOR)
        return [round(EMPTYING / float(cost)) - 1 for cost in costs]

    assert told() == [0, 0]
    for device in (0, 1):
        ledger.put_lease(make_lease("n1", device, holder=Holder("team", "p", "u1")))
    ledger.put_pod(make_pod(uid="u1", node="n1", allocation=make_allocation("n1", 0, 1)))
    ledger.assume("u2", make_allocation("n2", 0))
    ledger.put_lease(make_lease("n2", 0, holder=Holder("team", "q", "u2")))
    ledger.put_lease(make_lease("n2", 1, holder=Holder("team", "r", "u3")))
    assert told() == [1, 2]
    ledger.drop_lease(lease_name("n2", 1))
    assert told() == [1, 1]


def test_pod_that_ended_holds_through_its_lease_alone(ledger: Ledger) -> None:
    """A terminal phase frees nothing by itself: the Lease stays until somebody has proof."""
    ledger.put_lease(make_lease("n1", 0, holder=Holder("team", "p", "u1")))
    ledger.put_pod(make_pod(uid="u1", node="n1", allocation=make_allocation("n1", 0)))
    assert free(ledger) == {1, 2, 5}

    ledger.put_pod(make_pod(uid="u1", node="n1", allocation=make_allocation("n1", 0), phase="Failed"))
    assert free(ledger) == {1, 2, 5}
    ledger.drop_lease(lease_name("n1", 0))
    assert free(ledger) == {0, 1, 2, 5}


def test_successor_of_the_same_name_inherits_nothing(ledger: Ledger) -> None:
    """A late deletion of the predecessor leaves the successor's GPUs alone; identity is the uid."""
    ledger.put_pod(make_pod("db-0", uid="u1", node="n1", allocation=make_allocation("n1", 0, 1)))
    ledger.drop_pod("u1")
    ledger.put_pod(make_pod("db-0", uid="u2"))
    assert free(ledger) == {0, 1, 2, 5}

    ledger.put_pod(make_pod("db-0", uid="u2", node="n1", allocation=make_allocation("n1", 0)))
    ledger.drop_pod("u1")
    assert free(ledger) == {1, 2, 5}
    assert ledger.allocation_of("u1") is None


def test_replaced_card_is_not_sold_under_the_old_id(ledger: Ledger) -> None:
    """A Lease holds by id and by uuid: neither a new card in the slot nor the old card in another slot is free."""
    ledger.put_lease(make_lease("n1", 5))
    ledger.put_report(small_report("n1", uuids={5: REPLACED, 1: uuid_of("n1", 5)}))

    assert free(ledger) == {0, 2}


def test_instances_of_a_card_that_somebody_holds_whole_are_not_free(ledger: Ledger) -> None:
    """MIG was turned on under a pod: its variable names the card, which opens an instance now, so nobody else gets one
    of that card before the pod is gone."""
    card, *parts, other = IDS
    mig = {part: {"mig": {"profile": "1g.5gb", "parentUuid": uuid_of("n1", card)}} for part in parts}
    ledger.put_report(make_report("n1", "t4-4", ids=IDS, devices={card: {"mig": {"enabled": True}}, **mig}))
    assert free(ledger) == set(IDS)

    ledger.put_lease(make_lease("n1", card))
    assert free(ledger) == {other}

    ledger.drop_lease(f"gpu-n1-{card}")
    assert free(ledger) == set(IDS)


@pytest.mark.parametrize(
    "damage",
    [
        {names.LEASE_DEVICE_ID: "7"},
        {names.LEASE_DEVICE_ID: "not a number"},
        {names.LEASE_DEVICE_ID: "x1"},
        {names.LEASE_DEVICE_ID: "²"},
        {names.LEASE_DEVICE_ID: "123456"},
        {names.LEASE_NODE: ""},
        {names.LEASE_NODE: "n2"},
    ],
    ids=["names another device", "no number", "a short text", "no ASCII", "too long", "no node", "names another node"],
)
def test_unreadable_lease_blocks_the_device_of_its_name(ledger: Ledger, damage: dict[str, str]) -> None:
    """A Lease that nobody can read was somebody's reservation: its device stays taken until it is gone."""
    ledger.put_report(small_report("n2"))
    ledger.put_lease(make_lease("n1", 1, annotations=damage))

    assert free(ledger) == {0, 2, 5}
    assert free(ledger, "n2") == set(IDS)
    assert lease_name("n1", 1) in ledger.unreadable_leases
    ledger.put_lease(make_lease("n1", 1))
    assert not ledger.unreadable_leases
    ledger.drop_lease(lease_name("n1", 1))
    assert free(ledger) == set(IDS)


def test_malformed_allocation_is_noted_and_holds_nothing(ledger: Ledger) -> None:
    """An allocation that nobody can read is told to people; the pod's Leases still hold."""
    ledger.put_pod(make_pod(uid="u1", node="n1", annotations={names.ALLOCATED: "n1:" + "9" * 5000, names.UUIDS: "x"}))

    assert "u1" in ledger.malformed_pods
    assert free(ledger) == set(IDS)
    ledger.put_pod(make_pod(uid="u1", node="n1", allocation=make_allocation("n1", 0)))
    assert not ledger.malformed_pods


def test_mirror_pods_are_not_believed(ledger: Ledger) -> None:
    """The mirror of a static pod was never bound by anybody, so its annotations take no GPU."""
    mirror = {names.MIRROR: "hash"}
    ledger.put_pod(make_pod(uid="u1", node="n1", allocation=make_allocation("n1", 0), annotations=mirror))

    assert free(ledger) == set(IDS)


def test_report_that_goes_and_comes_back_finds_its_holds(ledger: Ledger) -> None:
    """A node without report has nothing to give; when it is back nobody's GPUs have become free."""
    ledger.put_lease(make_lease("n1", 0))
    ledger.drop_report("n1")
    assert ledger.free("n1", now_seconds=0.0) == 0

    ledger.put_report(small_report("n1"))
    assert free(ledger) == {1, 2, 5}


@pytest.mark.parametrize(
    ("devices", "expected"),
    [({1: {"uuid": uuid_of("n1", 0)}}, None), ({1: {"id": 0}}, None), ({}, {0, 1, 2, 5})],
    ids=["one uuid twice", "one id twice", "a sound report"],
)
def test_report_that_contradicts_itself_offers_nothing(devices: dict[int, Any], expected: set[int] | None) -> None:
    """A report in which two devices are one leaves the node without devices, not with wrong ones."""
    ledger = Ledger()
    ledger.put_report(make_report("n1", "t4-4", ids=IDS, devices=devices))

    assert ("n1" in ledger.nodes) == (expected is not None)
    assert ledger.free("n1", now_seconds=0.0).bit_count() == len(expected or ())


def test_silence_makes_a_node_stale() -> None:
    """Nothing new is placed on a node whose agent was never heard, or not for the time that it promised."""
    ledger = Ledger()
    assert ledger.is_stale("n1", 0.0)
    ledger.put_heartbeat("n1", 100.0, 180.0)
    assert not ledger.is_stale("n1", 280.0)
    assert ledger.is_stale("n1", 280.1)


def test_a_node_that_is_heard_again_gives_out_its_gpus() -> None:
    """Silence empties its cell without any other event, and so does the end of silence fill it."""
    ledger = Ledger()
    ledger.put_report(make_report("n1", "t4-4", ids=IDS))
    ledger.put_heartbeat("n1", 100.0, 60.0)
    assert ledger.cells(now_seconds=150.0)["n1"].free == 0b1111
    assert not any(cell.free for cell in ledger.cells(now_seconds=170.0).values())
    ledger.put_heartbeat("n1", 171.0, 60.0)
    assert ledger.cells(now_seconds=172.0)["n1"].free == 0b1111


def test_a_pod_that_ended_without_a_lease_leaves_nothing_behind() -> None:
    """Its last Lease went first; the GPU is another's by now, and is not being released."""
    ledger = Ledger()
    ledger.put_report(make_report("n1", "t4-4", ids=IDS))
    ledger.put_heartbeat("n1", 0.0, 60.0)
    ledger.put_lease(make_lease("n1", 0, holder=Holder("team", "p", "u1")))
    ledger.put_pod(make_pod(uid="u1", node="n1", allocation=make_allocation("n1", 0), phase="Failed"))
    assert ledger.has_left("u1")
    ledger.drop_lease(lease_name("n1", 0))
    assert not ledger.has_left("u1")


def test_expectation_ends_by_bind_by_time_and_with_the_pod(ledger: Ledger) -> None:
    """What a pod will probably take is counted until its bind, its end or the time-out, whichever comes first."""
    ledger.put_tentative("u1", TentativePlacement("n1", (0,), 10.0))
    assert free(ledger, now=9.9) == {1, 2, 5}
    assert free(ledger, now=10.0) == set(IDS)

    for end in (
        lambda: ledger.assume("u1", make_allocation("n1", 2)) or ledger.forget("u1"),
        lambda: ledger.put_pod(make_pod(uid="u1", node="n2")),
        lambda: ledger.drop_pod("u1"),
        lambda: ledger.drop_tentative("u1"),
    ):
        ledger.put_tentative("u1", TentativePlacement("n1", (0,), 10.0))
        assert free(ledger) == {1, 2, 5}
        end()
        assert free(ledger) == set(IDS)


def test_two_bound_pods_on_one_device_both_hold_it(ledger: Ledger) -> None:
    """Where the invariant is broken already, nothing is freed when one of the two goes."""
    ledger.put_pod(make_pod("a", uid="u1", node="n1", allocation=make_allocation("n1", 0)))
    ledger.put_pod(make_pod("b", uid="u2", node="n1", allocation=make_allocation("n1", 0, 1)))

    assert [hold.key for hold in ledger.holds("n1", 0, uuid_of("n1", 0))] == ["u1", "u2"]
    ledger.drop_pod("u1")
    assert free(ledger) == {2, 5}


def test_late_rollback_frees_no_newer_assumption(ledger: Ledger) -> None:
    """Only the attempt that assumed takes back; its pod's end does not, because its requests may still be under way."""
    ledger.assume("u1", make_allocation("n1", 0), attempt="old")
    ledger.assume("u1", make_allocation("n1", 1), attempt="new")

    ledger.forget("u1", attempt="old")
    assert free(ledger) == {0, 2, 5}
    ledger.put_pod(make_pod(uid="u1"))
    ledger.drop_pod("u1")
    assert free(ledger) == {0, 2, 5}
    ledger.forget("u1", attempt="new")
    ledger.forget("u1", attempt="new")
    assert free(ledger) == set(IDS)


@pytest.mark.parametrize("end", ["bound", "gone"])
def test_what_is_left_of_an_ended_attempt_ends_with_its_pods_wait(ledger: Ledger, end: str) -> None:
    """A gang's attempt is over once its Leases stand; its member may be bound to other GPUs of the node, or leave."""
    ledger.put_pod(make_pod(uid="u1"))
    ledger.assume("u1", make_allocation("n1", 0), attempt="token")
    ledger.end_attempt("u1", attempt="token")
    assert free(ledger) == {1, 2, 5}

    if end == "gone":
        ledger.drop_pod("u1")
    else:
        ledger.put_pod(make_pod(uid="u1", node="n1", allocation=make_allocation("n1", 1)))

    assert free(ledger) == ({0, 1, 2, 5} if end == "gone" else {0, 2, 5})


def test_a_report_that_says_nothing_yet_leaves_the_node_without_devices(ledger: Ledger) -> None:
    """The agent creates it before it writes its status."""
    ledger.put_report(GpuNodeStatus.model_validate({"metadata": {"name": "n1"}}))

    assert "n1" not in ledger.nodes
    assert ledger.uncounted == {}


def test_assuming_what_another_has_is_refused_with_its_history(ledger: Ledger) -> None:
    """A double promise is a fault of ours: it raises, tells what happened to the device, and changes nothing."""
    ledger.put_lease(make_lease("n1", 0, holder=Holder("team", "p", "u1")))
    ledger.put_pod(make_pod(uid="u1", node="n1", allocation=make_allocation("n1", 0)))

    with pytest.raises(IllegalTransition) as fault:
        ledger.assume("u2", make_allocation("n1", 1, 0), attempt="token")

    assert (fault.value.device, fault.value.state, fault.value.verb) == ("n1/0", "bound", "assume")
    assert fault.value.history == (f"reserve {lease_name('n1', 0)}", "confirm u1")
    assert ledger.assumed("u2") is None
    assert free(ledger) == {1, 2, 5}


def test_holds_tell_why_a_device_is_taken(ledger: Ledger) -> None:
    """People see every reason, in a fixed order."""
    ledger.put_pod(make_pod(uid="u1", node="n1", allocation=make_allocation("n1", 0)))
    ledger.put_lease(make_lease("n1", 0, holder=Holder("team", "p", "u1")))

    assert ledger.holds("n1", 0, uuid_of("n1", 0)) == (Hold(HoldSource.LEASE, "gpu-n1-0"), Hold(HoldSource.POD, "u1"))


# Against an oracle that keeps the objects themselves and looks at all of them for every question.


@dataclass
class Oracle:
    """The objects as they are now."""

    reports: dict[str, GpuNodeStatus] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    pods: dict[str, Pod] = field(default_factory=dict)
    assumed: dict[str, Allocation] = field(default_factory=dict)
    expected: dict[str, TentativePlacement] = field(default_factory=dict)
    heard: dict[str, tuple[float, float]] = field(default_factory=dict)

    def is_fresh(self, node: str, now: float) -> bool:
        """Tell whether the node has a report that its agent still vouches for."""
        return node in self.reports and node in self.heard and now - self.heard[node][0] <= self.heard[node][1]

    def free(self, node: str, uid: str, now: float) -> set[int]:
        """Return the ids that may be given to the pod with this uid."""
        report = self.reports.get(node)
        devices = report.status.devices if report is not None and report.status is not None else ()
        return {device.id for device in devices if not self._is_taken(node, device.id, device.uuid, uid, now)}

    def is_held(self, node: str, device_id: int, uuid: str, uid: str) -> bool:
        """Tell whether somebody else holds the device for certain, or the pod itself is bound to it."""

        def covers(allocation: Allocation) -> bool:
            return allocation.node == node and (device_id in allocation.device_ids or uuid in allocation.uuids)

        by_lease = any(self._lease_takes(lease, node, device_id, uuid, uid) for lease in self.leases.values())
        by_pod = any(
            allocation is not None and pod.status.phase not in {"Succeeded", "Failed"} and covers(allocation)
            for pod in self.pods.values()
            for allocation in [bound_allocation(pod)]
        )
        by_bind = any(covers(allocation) for owner, allocation in self.assumed.items() if owner != uid)
        return by_lease or by_pod or by_bind

    def _is_taken(self, node: str, device_id: int, uuid: str, uid: str, now: float) -> bool:
        by_expectation = any(
            expectation.node == node and device_id in expectation.device_ids and expectation.until_seconds > now
            for owner, expectation in self.expected.items()
            if owner != uid
        )
        return by_expectation or self.is_held(node, device_id, uuid, uid)

    @staticmethod
    def _lease_takes(lease: Lease, node: str, device_id: int, uuid: str, uid: str) -> bool:
        if lease.spec.holder_identity == "nonsense":
            return lease.metadata.name == lease_name(node, device_id)
        record = parse_lease(lease)
        is_meant = record.node == node and (record.device_id == device_id or record.device_uuid == uuid)
        return is_meant and record.holder.uid != uid


nodes = st.sampled_from(NODES)
uids = st.sampled_from(UIDS)
ids = st.sampled_from(IDS)
id_sets = st.lists(ids, min_size=1, max_size=3, unique=True)
card_changes = st.dictionaries(ids, st.sampled_from([REPLACED, *(uuid_of("n1", i) for i in IDS)]), max_size=2)


def report_of(node: str, changes: dict[int, str]) -> GpuNodeStatus:
    """Return the node's report after cards were swapped; uuids that would stand twice are left as they were."""
    report = small_report(node, uuids=changes)
    assert report.status is not None
    uuids = [device.uuid for device in report.status.devices]
    return report if len(set(uuids)) == len(uuids) else small_report(node)


steps = st.one_of(
    st.tuples(st.just("report"), nodes, card_changes),
    st.tuples(st.just("drop report"), nodes),
    st.tuples(st.just("heartbeat"), nodes, st.sampled_from([-5.0, 0.0]), st.sampled_from([3.0, 9.0, 100.0])),
    st.tuples(st.just("lease"), nodes, ids, uids, st.sampled_from(["", "other card", "nonsense"])),
    st.tuples(st.just("drop lease"), nodes, ids),
    st.tuples(st.just("pod"), uids, nodes, id_sets, st.sampled_from(["Pending", "Running", "Failed"])),
    st.tuples(st.just("unbound pod"), uids),
    st.tuples(st.just("drop pod"), uids),
    st.tuples(st.just("assume"), uids, nodes, id_sets),
    st.tuples(st.just("forget"), uids),
    st.tuples(st.just("expect"), uids, nodes, id_sets, st.sampled_from([5.0, 10.0])),
    st.tuples(st.just("unexpect"), uids),
)


def play(step: tuple[Any, ...], ledger: Ledger, oracle: Oracle) -> None:
    """Tell both of one event."""
    match step:
        case ("report", node, changes):
            report = report_of(node, changes)
            ledger.put_report(report)
            oracle.reports[node] = report
        case ("heartbeat", node, at, silence):
            ledger.put_heartbeat(node, at, silence)
            oracle.heard[node] = (at, silence)
        case ("drop report", node):
            ledger.drop_report(node)
            oracle.reports.pop(node, None)
        case ("lease", node, device_id, uid, oddity):
            lease = odd_lease(node, device_id, uid, oddity)
            ledger.put_lease(lease)
            oracle.leases[lease.metadata.name] = lease
        case ("drop lease", node, device_id):
            ledger.drop_lease(lease_name(node, device_id))
            oracle.leases.pop(lease_name(node, device_id), None)
        case ("pod", uid, node, device_ids, phase):
            pod = make_pod(uid=uid, node=node, allocation=make_allocation(node, *device_ids), phase=phase)
            ledger.put_pod(pod)
            oracle.pods[uid] = pod
            oracle.assumed.pop(uid, None)
            oracle.expected.pop(uid, None)
        case ("unbound pod", uid):
            ledger.put_pod(make_pod(uid=uid))
            oracle.pods[uid] = make_pod(uid=uid)
        case _:
            play_own(step, ledger, oracle)


def play_own(step: tuple[Any, ...], ledger: Ledger, oracle: Oracle) -> None:
    """Tell both of a deletion or of a step of our own binds."""
    match step:
        case ("drop pod", uid):
            ledger.drop_pod(uid)
            for known in (oracle.pods, oracle.assumed, oracle.expected):
                known.pop(uid, None)
        case ("assume", uid, node, device_ids):
            if any(oracle.is_held(node, i, uuid_of(node, i), uid) for i in device_ids):
                with pytest.raises(IllegalTransition):
                    ledger.assume(uid, make_allocation(node, *device_ids))
                return
            ledger.assume(uid, make_allocation(node, *device_ids))
            oracle.assumed[uid] = make_allocation(node, *device_ids)
            oracle.expected.pop(uid, None)
        case ("forget", uid):
            ledger.forget(uid)
            oracle.assumed.pop(uid, None)
        case ("expect", uid, node, device_ids, until):
            ledger.put_tentative(uid, TentativePlacement(node, tuple(device_ids), until))
            oracle.expected[uid] = TentativePlacement(node, tuple(device_ids), until)
        case ("unexpect", uid):
            ledger.drop_tentative(uid)
            oracle.expected.pop(uid, None)


def odd_lease(node: str, device_id: int, uid: str, oddity: str) -> Lease:
    """Return a Lease, perhaps of a card that is not there any more, perhaps unreadable."""
    uuid = REPLACED if oddity == "other card" else uuid_of(node, device_id)
    lease = make_lease(node, device_id, uuid=uuid, holder=Holder("team", "p", uid))
    if oddity != "nonsense":
        return lease
    return Lease(lease.metadata, type(lease.spec)(holder_identity="nonsense"))


@given(st.lists(steps, max_size=40), st.booleans())
def test_free_devices_equal_those_of_an_oracle(history: list[tuple[Any, ...]], asks_between: bool) -> None:
    """After any history the free devices are those that a look at every object gives, for everybody who may ask."""
    ledger, oracle = Ledger(), Oracle()
    for step in history:
        play(step, ledger, oracle)
        play(step, ledger, oracle)
        if asks_between:
            check(ledger, oracle, now=0.0)
    check(ledger, oracle, now=0.0)
    check(ledger, oracle, now=7.0)
    check(ledger, oracle, now=11.0)


def check(ledger: Ledger, oracle: Oracle, *, now: float) -> None:
    """Compare both for every node and everybody who may ask, node by node and in one sweep."""
    for uid in ("", *UIDS):
        cells = ledger.cells(now_seconds=now, asking_uid=uid)
        for node in NODES:
            found = free(ledger, node, now=now, uid=uid) if node in ledger.nodes else set()
            assert found == oracle.free(node, uid, now), (node, uid, now)
            assert (node in cells) == oracle.is_fresh(node, now), (node, now)
            if node in cells:
                devices = ledger.nodes[node].devices
                assert {devices[i].id for i in range(4) if cells[node].free >> i & 1} == found, (node, uid, now)


@given(st.lists(steps, max_size=30))
def test_end_of_everything_leaves_nothing_behind(history: list[tuple[Any, ...]]) -> None:
    """When every object is gone no hold is left: the ledger does not leak."""
    ledger, oracle = Ledger(), Oracle()
    for step in history:
        play(step, ledger, oracle)
    for uid in UIDS:
        ledger.drop_pod(uid)
    for node in NODES:
        for device_id in IDS:
            ledger.drop_lease(lease_name(node, device_id))
        ledger.put_report(small_report(node))
        assert free(ledger, node) == set(IDS)
        assert all(not ledger.holds(node, i, uuid_of(node, i)) for i in IDS)
