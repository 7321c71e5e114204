"""A GpuReservation: what it takes, keeps and returns, who may use it, and that no GPU is promised twice."""

from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.api import job_names, names
from atoll.api.claims import GpuClaim
from atoll.api.reservations import GpuReservation, GpuReservationStatus, ReservationPhase
from atoll.api.times import text_of
from atoll.cluster.leases import Holder, LeaseRecord, lease_body, parse_lease, reserved_for, returned_lease
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import Pod, decode_lease
from atoll.cluster.requests import Rejection, Request, Verdict, request_of
from atoll.cluster.reservation_use import mark_of, why_unusable
from atoll.cluster.reservations import NodeOffer, ReservationDecision, decide
from atoll.cluster.verdicts import FilterInput, judge_nodes
from tests.builders import NOW, make_allocation, make_claim, make_pod, make_report

START = 1_000_000.0
PROFILES = {"n1": "dgx1-v100", "n2": "dgx-h100", "n3": "h100-nvl-8", "n4": "l40s-8"}


def make_reservation_object(count: int = 4, *, status: dict[str, Any] | None = None, **spec: Any) -> GpuReservation:
    """Return a reservation for namespace team; keywords beside those of the shape go to the spec."""
    shape = {key: spec.pop(key) for key in ("models", "unit", "level", "migProfile") if key in spec}
    body = {
        "metadata": {"name": "nightly", "uid": "uid-of-nightly"},
        "spec": {"shape": {"count": count, **shape}, "namespaces": ["team"], **spec},
        "status": status,
    }
    return GpuReservation.model_validate(body)


class Floor:
    """A machine hall whose Leases are written as the controllers and binds write them."""

    def __init__(self, *nodes: str) -> None:
        self.ledger = Ledger()
        for name in nodes:
            self.ledger.put_report(make_report(name, PROFILES[name]))
            self.ledger.put_heartbeat(name, START, 1e9)
        self.domains: dict[str, str] = {}

    def cut(self, name: str, instances: dict[int, str]) -> None:
        """Let a node report some of its devices as MIG instances of these profiles."""
        devices = {number: {"mig": {"profile": profile}} for number, profile in instances.items()}
        self.ledger.put_report(make_report(name, PROFILES[name], devices=devices))

    def offers(self) -> dict[str, NodeOffer]:
        """Return what nobody holds."""
        return {
            name: NodeOffer(devices, self.ledger.free(name, now_seconds=START), self.domains.get(name, ""))
            for name, devices in self.ledger.nodes.items()
        }

    def leases(self, reservation: GpuReservation) -> list[LeaseRecord]:
        """Return what belongs to a reservation, whoever has it."""
        mark = mark_of(reservation)
        return [record for record in self.ledger.leases.values() if record.reservation == mark]

    def settle(self, reservation: GpuReservation, now_seconds: float = START) -> ReservationDecision:
        """Decide, and carry it out as the controllers do."""
        decision = decide(reservation, self.leases(reservation), self.offers(), now_seconds)
        for record in decision.released:
            assert record.holder.is_reservation, "what a pod has is never ended by a reservation"
            self.ledger.drop_lease(record.lease_name)
        for device in decision.taken:
            reserved = reserved_for(mark_of(reservation), device.node, f"uid-of-{device.node}", NOW)
            self.write(lease_body(reserved, device.device_id, device.uuid), is_new=True)
        return decision

    def write(self, body: dict[str, Any], *, is_new: bool = False) -> None:
        """Create or change a Lease; the API server lets one creator win."""
        name = body["metadata"]["name"]
        assert not (is_new and name in self.ledger.leases), f"{name} is held already"
        self.ledger.put_lease(decode_lease(orjson.dumps(body)))

    def use(self, pod: Pod, reservation: GpuReservation, claim: GpuClaim | None = None) -> list[LeaseRecord]:
        """Let a pod take GPUs over as a bind does: filter, choose, assume, write. Returns what it took."""
        request = request_of(pod, claim, reservation=reservation)
        if isinstance(request, Rejection):
            return []
        question = FilterInput(uid=pod.metadata.uid, request=request, now_seconds=START)
        best = judge_nodes(sorted(self.ledger.nodes), question, self.ledger).best
        if best is None:
            return []
        devices = self.ledger.nodes[best.node].devices
        ids = tuple(devices[position].id for position in best.choice.positions)
        allocation = make_allocation(best.node, *ids)
        self.ledger.assume(pod.metadata.uid, allocation, attempt="t", reservation=request.reservation)
        taken = []
        for record in self.leases(reservation):
            if record.node == best.node and record.device_id in ids:
                assert record.holder.is_reservation, "taken over from the reservation, from nobody else"
                own = reserved_for(record.reservation, record.node, record.node_uid, NOW)
                holder = Holder("team", pod.metadata.name, pod.metadata.uid)
                self.write(lease_body(replace(own, holder=holder), record.device_id, record.device_uuid))
                taken.append(self.ledger.leases[record.lease_name])
        self.ledger.forget(pod.metadata.uid, attempt="t")
        assert len(taken) == len(ids), "all of its GPUs or none"
        return taken


def user(name: str = "p", gpus: int = 1, **options: Any) -> Pod:
    """Return a waiting pod that names the reservation."""
    annotations = {names.RESERVATION: "nightly", **options.pop("annotations", {})}
    return make_pod(name, gpus=gpus, annotations=annotations, **options)


# What it takes


@pytest.mark.parametrize(
    ("count", "shape", "nodes", "expected"),
    [
        pytest.param(4, {}, ("n1",), {"n1": 4}, id="single-GPUs"),
        pytest.param(12, {}, ("n1", "n2"), {"n1": 8, "n2": 4}, id="of-several-nodes"),
        pytest.param(8, {"models": ["nvidia-h100"]}, ("n1", "n2"), {"n2": 8}, id="of-a-model"),
        pytest.param(4, {"unit": "island"}, ("n3",), {"n3": 4}, id="pairs"),
        pytest.param(4, {"unit": "island"}, ("n4",), {"n4": 4}, id="one-island-of-four"),
        pytest.param(3, {"unit": "island"}, ("n4",), {}, id="no-island-is-that-small"),
        pytest.param(8, {"unit": "node"}, ("n1", "n2"), {"n1": 8}, id="a-whole-node"),
        pytest.param(12, {"unit": "node"}, ("n1", "n2"), {"n1": 8}, id="whole-nodes-only"),
    ],
)
def test_shape_is_taken(count: int, shape: dict[str, Any], nodes: tuple[str, ...], expected: dict[str, int]) -> None:
    """As much of it as there is; what is missing is told."""
    reservation = make_reservation_object(count, **shape)
    decision = Floor(*nodes).settle(reservation)

    assert {entry.node: len(entry.ids) for entry in decision.status.nodes} == expected
    is_whole = sum(expected.values()) == count
    assert decision.status.phase is (ReservationPhase.ACTIVE if is_whole else ReservationPhase.FILLING)
    assert bool(decision.status.message) != is_whole


def test_all_of_it_lies_in_one_domain() -> None:
    """The rack with the most free machines whose machines could hold all; a rack that never could takes nothing."""
    floor = Floor("n1", "n2", "n3", "n4")
    floor.domains = {"n1": "small", "n2": "wide", "n3": "wide", "n4": ""}
    reservation = make_reservation_object(16, level="example.com/rack")
    assert {entry.node for entry in floor.settle(reservation).status.nodes} == {"n2", "n3"}

    other = floor.settle(make_reservation_object(24, level="example.com/rack", status=None))
    assert not other.taken
    assert "24" in other.status.message


def test_nothing_is_taken_of_a_domain_that_has_one_gpu_too_few() -> None:
    """All of it would never be had there."""
    floor = Floor("n1", "n2")
    floor.domains = {"n1": "a", "n2": "a"}

    assert not floor.settle(make_reservation_object(17, level="example.com/rack")).taken
    assert len(floor.settle(make_reservation_object(16, level="example.com/rack")).taken) == 16


@pytest.mark.parametrize(
    ("spec", "now_seconds", "phase"),
    [
        pytest.param({"starts": text_of(START + 60)}, START, ReservationPhase.PENDING, id="not-begun"),
        pytest.param({"starts": text_of(START)}, START, ReservationPhase.ACTIVE, id="begun"),
        pytest.param({"ends": text_of(START)}, START, ReservationPhase.ENDED, id="ended"),
        pytest.param({"ends": "tomorrow"}, START, ReservationPhase.ENDED, id="no-time"),
    ],
)
def test_time_decides_whether_it_holds_anything(
    spec: dict[str, Any], now_seconds: float, phase: ReservationPhase
) -> None:
    """Before its begin and from its end on it holds nothing."""
    floor = Floor("n1")
    floor.settle(make_reservation_object())
    decision = floor.settle(make_reservation_object(**spec), now_seconds)

    assert decision.status.phase is phase
    assert bool(floor.leases(make_reservation_object())) == (phase is ReservationPhase.ACTIVE)


def test_what_exceeds_a_smaller_shape_is_given_back() -> None:
    """All that is idle, where pods use as much as the new shape has; what they use stays theirs."""
    floor = Floor("n1")
    begun = floor.settle(make_reservation_object(4)).status
    (record,) = floor.use(user(), make_reservation_object(4, status=begun.to_json()))
    decision = floor.settle(make_reservation_object(1, status=begun.to_json()))
    assert len(decision.released) == 3
    assert floor.leases(make_reservation_object(1)) == [floor.ledger.leases[record.lease_name]]


def test_what_nobody_uses_is_given_back_for_good() -> None:
    """Counted from the last use; a pod that comes too late does not bring it back."""
    floor, timeout = Floor("n1"), 60
    begun = floor.settle(make_reservation_object(unusedTimeoutSeconds=timeout)).status
    used = make_reservation_object(unusedTimeoutSeconds=timeout, status=begun.to_json())
    (record,) = floor.use(user(), used)
    busy = floor.settle(used, START + 1000).status
    assert (busy.phase, busy.used, busy.unused_since) == (ReservationPhase.ACTIVE, 1, None)

    floor.write(returned_lease(record, NOW))
    idle = floor.settle(make_reservation_object(unusedTimeoutSeconds=timeout, status=busy.to_json()), START + 1001)
    assert idle.again_seconds == timeout
    late = make_reservation_object(unusedTimeoutSeconds=timeout, status=idle.status.to_json())
    over = floor.settle(late, START + 1001 + timeout).status
    assert (over.phase, floor.leases(late)) == (ReservationPhase.RELEASED, [])
    again = make_reservation_object(unusedTimeoutSeconds=timeout, status=over.to_json())
    assert floor.settle(again, START + 2000).taken == ()


@pytest.mark.parametrize(
    ("asked", "spec", "timeout"),
    [
        pytest.param(["60"], {}, 60, id="one-pod"),
        pytest.param(["60", "90"], {}, 90, id="the-longest-of-several"),
        pytest.param(["60", None], {}, None, id="one-sets-none"),
        pytest.param(["60"], {"unusedTimeoutSeconds": 20}, 20, id="the-reservation-has-a-shorter-one"),
        pytest.param(["60"], {"unusedTimeoutSeconds": 600}, 60, id="the-reservation-has-a-longer-one"),
        pytest.param(["60"], {"namespaces": ["team", "other"]}, None, id="another-team-counts-on-it"),
        *(pytest.param([text], {}, None, id=f"nonsense-{text}") for text in ("", "0", "-1", "1.5", "\u0663", "9" * 30)),
    ],
)
def test_pods_say_how_long_it_waits_for_the_next_ones(
    asked: list[str | None], spec: dict[str, Any], timeout: int | None
) -> None:
    """Those that used it last; counted from the end of the last one."""
    key = job_names.RESERVATION_TIMEOUT
    pods = [user(f"p{i}", annotations={} if text is None else {key: text}) for i, text in enumerate(asked)]
    floor, reservation = Floor("n1"), make_reservation_object(status={"phase": "Active"}, **spec)
    floor.settle(reservation)
    taken = [record for pod in pods for record in floor.use(pod, reservation)]
    assert len(taken) == len(pods)
    busy = decide(reservation, floor.leases(reservation), floor.offers(), START, users=pods).status
    for record in taken:
        floor.write(returned_lease(record, NOW))
    idle = floor.settle(make_reservation_object(status=busy.to_json(), **spec), START + 500)
    assert idle.again_seconds == timeout
    later = make_reservation_object(status=idle.status.to_json(), **spec)
    assert floor.settle(later, START + 501).again_seconds == (timeout and timeout - 1)


def test_sick_gpu_is_exchanged_and_a_silent_node_is_not() -> None:
    """A card that may not be given out is no use to anybody; of one that nobody hears of nothing is known."""
    reservation = make_reservation_object(8)
    floor = Floor("n1", "n2")
    floor.settle(reservation)
    floor.ledger.put_report(make_report("n1", PROFILES["n1"], sick=[3]))
    decision = floor.settle(reservation)
    assert [(r.node, r.device_id) for r in decision.released] == [("n1", 3)]
    assert [device.node for device in decision.taken] == ["n2"]

    leases = floor.leases(reservation)
    heard = {name: offer for name, offer in floor.offers().items() if name != "n1"}
    assert decide(reservation, leases, heard, START).released == ()
    moved = decide(reservation, leases, heard, START, gone={"n1"})
    assert {record.node for record in moved.released} == {"n1"}, "its Node was deleted"


@pytest.mark.parametrize(
    ("count", "shape", "expected"),
    [
        pytest.param(2, {"migProfile": "1g.10gb"}, (2, 3), id="instances-of-a-profile"),
        pytest.param(3, {"migProfile": "1g.10gb", "unit": "node"}, (2, 3, 4), id="all-of-a-node"),
        pytest.param(4, {"migProfile": "1g.10gb"}, (2, 3, 4), id="as-many-as-there-are"),
        pytest.param(8, {}, (0, 1, 6, 7), id="whole-GPUs-are-none-of-them"),
    ],
)
def test_instances_of_a_profile_are_taken_like_gpus(
    count: int, shape: dict[str, Any], expected: tuple[int, ...]
) -> None:
    """Neither whole GPUs nor instances of another profile; a pod that asks for the profile gets them."""
    floor = Floor("n1")
    floor.cut("n1", {2: "1g.10gb", 3: "1g.10gb", 4: "1g.10gb", 5: "3g.40gb"})
    reservation = make_reservation_object(count, **shape)
    (node,) = floor.settle(reservation).status.nodes
    assert len(node.ids) == min(count, len(expected))
    assert set(node.ids) <= set(expected)

    profile = shape.get("migProfile", "")
    claim = make_claim("c", count=1, migProfile=profile)
    resource = names.mig_resource(profile) if profile else names.GPU_RESOURCE
    active = make_reservation_object(count, status={"phase": "Active"}, **shape)
    pod = user(resource=resource, claim=claim)
    (taken,) = floor.use(pod, active, claim)
    assert taken.device_id in node.ids


# Who may use it


@pytest.mark.parametrize(
    ("pod", "spec", "phase", "reason"),
    [
        pytest.param(user(), {}, "Active", "", id="of-the-namespace"),
        pytest.param(user(), {}, "Filling", "", id="while-it-fills"),
        pytest.param(user(namespace="other"), {}, "Active", names.REJECT_RESERVATION_FOREIGN, id="of-another"),
        pytest.param(
            user(namespace="other", serviceAccountName="robot"), {"serviceAccounts": ["other/robot"]}, "Active", "",
            id="of-an-account",
        ),
        pytest.param(
            user(namespace="other"), {"serviceAccounts": ["other/robot"]}, "Active",
            names.REJECT_RESERVATION_FOREIGN, id="of-another-account",
        ),
        pytest.param(user(), {}, "Pending", names.REJECT_RESERVATION_EARLY, id="too-early"),
        pytest.param(user(), {}, "Ended", names.REJECT_RESERVATION_OVER, id="too-late"),
        pytest.param(user(), {}, "Released", names.REJECT_RESERVATION_OVER, id="given-back"),
        pytest.param(user(gpus=5), {}, "Active", names.REJECT_RESERVATION_SMALL, id="too-small"),
    ],
)  # fmt: skip
def test_who_may_use_it_and_why_not(pod: Pod, spec: dict[str, Any], phase: str, reason: str) -> None:
    """Each refusal has words of its own."""
    reservation = make_reservation_object(status={"phase": phase}, **spec)
    count = int(str(pod.spec.containers[0].resources.limits[names.GPU_RESOURCE]))
    assert why_unusable(pod, reservation, count) == reason


def test_pod_that_names_one_never_runs_outside_it() -> None:
    """Whoever knows of no such reservation refuses it; where that holds too little the pod waits beside free GPUs."""
    assert request_of(user(), None) == Rejection(names.REJECT_RESERVATION_MISSING, Verdict.UNKNOWN)

    floor = Floor("n1", "n2")
    reservation = make_reservation_object(2, status={"phase": "Active"})
    floor.settle(reservation)
    assert len(floor.use(user("a", 2), reservation)) == 2
    assert floor.use(user("b", 1), reservation) == []
    request = request_of(user("b", 1), None, reservation=reservation)
    verdicts = judge_nodes(["n1", "n2"], FilterInput("uid-of-b", request, START), floor.ledger)
    assert set(verdicts.rejected.values()) == {names.REJECT_RESERVATION_ELSEWHERE}


def test_member_of_a_gang_keeps_what_its_admission_took_when_the_reservation_is_over() -> None:
    """Half of a gang is worth nothing. A pod that has taken nothing yet is refused; so is a member without GPUs, and a
    pod without a gang, which would choose anew."""
    floor = Floor("n1")
    running = make_reservation_object(2, status={"phase": "Active"})
    floor.settle(running)
    taken = floor.use(user("p", 2), running)
    over, member = make_reservation_object(2, status={"phase": "Ended"}), user(gpus=2, annotations={names.GANG: "g"})

    kept = request_of(member, None, is_admitted=True, reservation=over, holds=taken)
    assert isinstance(kept, Request)
    assert kept.reservation == "uid-of-nightly"
    assert request_of(member, None, is_admitted=True, reservation=None, holds=taken) == kept
    refused = Rejection(names.REJECT_RESERVATION_OVER)
    assert request_of(member, None, is_admitted=True, reservation=over) == refused
    assert request_of(user(gpus=2), None, is_admitted=True, reservation=over, holds=taken) == refused


def test_what_it_holds_is_free_for_nobody_else() -> None:
    """Neither for filter nor for an assumption."""
    floor = Floor("n1")
    floor.settle(make_reservation_object(8))
    stranger = make_pod("stranger", gpus=1)
    request = request_of(stranger, None)
    assert isinstance(request, Request)
    assert judge_nodes(["n1"], FilterInput("uid-of-stranger", request, START), floor.ledger).best is None
    assert floor.ledger.free("n1", now_seconds=START, asking_uid="uid-of-stranger", asking_priority=2**31) == 0


# Histories


class ReservationHistory:
    """A reservation of one unit in a hall of three machines, its pods, and pods of others."""

    def __init__(self, unit: str) -> None:
        self.floor, self.unit, self.count = Floor("n1", "n2", "n3"), unit, 8
        self.status = GpuReservationStatus(phase=ReservationPhase.FILLING)
        self.users: list[list[LeaseRecord]] = []
        self.outside: list[str] = []
        self.pods = 0

    def reservation(self, **spec: Any) -> GpuReservation:
        return make_reservation_object(self.count, unit=self.unit, status=self.status.to_json(), **spec)

    def settle(self, _choice: int, **spec: Any) -> None:
        self.status = self.floor.settle(self.reservation(**spec)).status

    def use(self, choice: int) -> None:
        self.pods += 1
        taken = self.floor.use(user(f"u{self.pods}", 1 + choice % 3), self.reservation())
        self.users += [taken] if taken else []

    def end(self, choice: int) -> None:
        for record in self.users.pop(choice % len(self.users)) if self.users else ():
            self.floor.write(returned_lease(record, NOW))

    def bind(self, choice: int) -> None:
        free = self.floor.ledger.free("n1", now_seconds=START)
        for device_id in [number for number in range(8) if free >> number & 1][:1]:
            other = replace(reserved_for("", "n1", "uid-of-n1", NOW), holder=Holder("x", "o", f"o{device_id}"))
            body = lease_body(other, device_id, make_allocation("n1", device_id).uuids[0])
            self.floor.write(body, is_new=True)
            self.outside.append(body["metadata"]["name"])

    def finish(self, choice: int) -> None:
        if self.outside:
            self.floor.ledger.drop_lease(self.outside.pop(choice % len(self.outside)))

    def sicken(self, choice: int) -> None:
        self.floor.ledger.put_report(make_report("n2", PROFILES["n2"], sick=[choice]))

    def disagree(self, choice: int) -> None:
        """Another leader's clock is far off, so that the reservation has not begun, or is over."""
        off_seconds = 1000.0 * (choice - 4)
        spec = {"starts": text_of(START - 500.0), "ends": text_of(START + 500.0)}
        self.status = self.floor.settle(self.reservation(**spec), START + off_seconds).status

    def resize(self, choice: int) -> None:
        self.count = max(1, self.count + choice - 3)

    def check(self) -> None:
        """Pods have what they took, and nobody else is offered anything of the reservation's."""
        held = self.floor.leases(self.reservation())
        assert sum(not record.holder.is_reservation for record in held) == sum(map(len, self.users))
        for name, devices in self.floor.ledger.nodes.items():
            own = devices.mask_of(tuple(record.device_id for record in held if record.node == name))
            assert not own & self.floor.ledger.free(name, now_seconds=START, asking_priority=2**31)


EVENTS = (
    ReservationHistory.settle,
    ReservationHistory.use,
    ReservationHistory.end,
    ReservationHistory.bind,
    ReservationHistory.finish,
    ReservationHistory.sicken,
    ReservationHistory.disagree,
    ReservationHistory.resize,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["gpu", "island", "node"]), st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 7))))
def test_no_gpu_twice_none_lost_and_all_back_in_the_end(unit: str, events: list[tuple[Any, int]]) -> None:
    """Whatever pods and people do: a GPU is one holder's, the reservation has at most what it asks for, nobody outside
    is offered what it holds, and once it has ended and its pods have, everything is free."""
    history = ReservationHistory(unit)
    for happen, choice in events:
        happen(history, choice)
        history.check()
    history.settle(0)
    assert history.status.idle <= max(0, history.count - history.status.used)
    history.settle(0, ends=text_of(START))
    while history.users:
        history.end(0)
    history.settle(0, ends=text_of(START))
    assert history.floor.ledger.leases.keys() == set(history.outside)


def test_lease_tells_which_reservation_it_goes_back_to() -> None:
    """Taken over by a pod and given back, it is the Lease that it was."""
    reserved = reserved_for("nightly/uid-of-nightly", "n1", "uid-of-n1", NOW)
    kept = parse_lease(decode_lease(orjson.dumps(lease_body(reserved, 3, "GPU-3"))))
    assert kept.holder.is_reservation
    taken = replace(kept, holder=Holder("team", "p", "u"), attempt="t", deadline=NOW)
    back = parse_lease(decode_lease(orjson.dumps(returned_lease(taken, NOW))))
    assert back == kept
