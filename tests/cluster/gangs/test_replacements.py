"""Place of a running gang's missing member: in the domain that its gang requires, else near the others."""

from typing import Any

import msgspec
import orjson
import pytest

from atoll.api import names
from atoll.api.gangs import GangAssignment
from atoll.api.topologies import Topology
from atoll.cluster import host_fit
from atoll.cluster.gangs.lifecycle import GangView
from atoll.cluster.gangs.member_assignments import replaced_assignment
from atoll.cluster.gangs.membership import GangMember, MemberStage, members_of
from atoll.cluster.gangs.node_domains import NodeDomains, node_domains_of
from atoll.cluster.gangs.preemption import GangRequest
from atoll.cluster.gangs.readiness_policy import ReadinessPolicy
from atoll.cluster.gangs.replacements import Replacements, place_missing
from atoll.cluster.gangs.search_input import PlacementSnapshot
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import Node, Pod, decode_node
from atoll.cluster.requests import Request, Verdict, request_of
from tests.builders import make_allocation, make_claim, make_pod, make_report
from tests.cluster.gangs.builders import GATES, make_gang

RACK, BLOCK = "example.com/rack", "example.com/block"
PLACES = {"n1": ("x", "a"), "n2": ("x", "a"), "n3": ("x", "b"), "n4": ("x", "b"), "n5": ("y", "a"), "n6": ("y", "a")}


class Ground:
    """Six machines of eight GPUs in three racks of two blocks, and a gang whose members run on some of them."""

    def __init__(self, running: dict[int, str], *, full: tuple[str, ...] = (), cordoned: tuple[str, ...] = (),
                 sick: tuple[str, ...] = (), silent: tuple[str, ...] = (), unheard: tuple[str, ...] = (),
                 small: tuple[str, ...] = (), ended: tuple[int, ...] = (), **spec: Any) -> None:  # fmt: skip
        self.gang = make_gang(8, **spec)
        self.ledger = Ledger()
        self.nodes = {name: self._node(name, cordoned=name in cordoned) for name in PLACES}
        phases = {number: "Succeeded" if number in ended else "Running" for number in running}
        pods = [self._pod(number, node, phases[number]) for number, node in running.items()]
        pods += [make_pod(f"f-{node}", gpus=8, node=node, allocation=make_allocation(node, *range(8))) for node in full]
        for name in PLACES.keys() - set(unheard):
            profile = "t4-4" if name in small else "dgx1-v100"
            self.ledger.put_report(make_report(name, profile, sick=[3] if name in sick else []))
            self.ledger.put_heartbeat(name, -1e9 if name in silent else 0.0, 1e8)
        for pod in pods:
            self.ledger.put_pod(pod)
        self.pods = pods
        self.members = [pod for pod in pods if names.GANG in pod.metadata.annotations]

    def _node(self, name: str, *, cordoned: bool) -> Node:
        block, rack = PLACES[name]
        body = {
            "metadata": {"name": name, "uid": name, "labels": {BLOCK: block, RACK: rack}},
            "spec": {"unschedulable": cordoned},
            "status": {"allocatable": {"cpu": "64", "pods": "110", names.GPU_RESOURCE: "8"}},
        }
        return decode_node(orjson.dumps(body))

    def _pod(self, number: int, node: str, phase: str) -> Pod:
        return make_pod(f"p{number}", gpus=8, node=node, annotations=self._marks(number), phase=phase,
                        allocation=make_allocation(node, *range(8)))  # fmt: skip

    def _marks(self, number: int) -> dict[str, str]:
        """Return a member's annotations; the first pod set, where there are several, is that of number 0."""
        names_ = [one.name for one in self.gang.spec.pod_sets]
        return {names.GANG: "g", **({names.POD_SET: names_[min(number, 1)]} if len(names_) > 1 else {})}

    def site(self) -> NodeDomains:
        """Return blocks and racks."""
        spec = {"levels": [{"nodeLabel": BLOCK}, {"nodeLabel": RACK}]}
        topology = Topology.model_validate({"metadata": {"name": "t"}, "spec": spec})
        site = node_domains_of(topology, self.nodes.values(), {}, strict=True)
        assert isinstance(site, NodeDomains)
        return site

    def place(self, *numbers: int) -> dict[int, str]:
        """Return the node of each missing member that found one."""
        return {number_of(one.member): one.allocation.node for one in self.replacements(*numbers).assignments}

    def replacements(self, *numbers: int) -> Replacements:
        """Return the places of missing members, and what the others wait for."""
        request = self.request(*numbers)
        return place_missing(request.view, request.chosen, request.requests, request.node_domains, request.cluster)

    def request(self, *numbers: int, **claim: Any) -> GangRequest:
        """Return what gated members with these numbers ask for, by a claim or without one."""
        asked = make_claim(**claim) if claim else None
        marks = {"claim": asked, "schedulingGates": GATES}
        missing = [make_pod(f"p{n}", gpus=claim.get("count", 8), annotations=self._marks(n), **marks) for n in numbers]
        found = members_of([*self.members, *missing], self.gang.spec, {})
        chosen = tuple(one for one in found if one.stage is MemberStage.GATED)
        requests: dict[str, Request] = {}
        for pod in missing:
            request = request_of(pod, asked, is_admitted=True)
            assert isinstance(request, Request)
            requests[pod.metadata.uid] = request
        return GangRequest(
            GangView(self.gang, tuple(found), ReadinessPolicy()), chosen, requests, self.site(), self.land()
        )

    def land(self) -> PlacementSnapshot:
        """Return the machines as they are now."""
        on: dict[str, list[Pod]] = {}
        for pod in self.pods:
            on.setdefault(pod.spec.node_name, []).append(pod)
        free = {name: host_fit.free(node, on.get(name, ())) for name, node in self.nodes.items()}
        cells = dict(self.ledger.cells(now_seconds=0.0))
        return PlacementSnapshot(self.nodes, dict(self.ledger.nodes), cells, on, free)


def number_of(member: GangMember) -> int:
    """Return the number in a pod's name."""
    return int(member.pod.metadata.name.removeprefix("p"))


def required(level: str) -> dict[str, Any]:
    """Return a request for one domain of the level."""
    return {"topology": {"mode": "required", "level": level}}


@pytest.mark.parametrize(
    ("spec", "full", "places"),
    [
        pytest.param(required(RACK), (), {1: "n2"}, id="required rack: beside the other"),
        pytest.param(required(RACK), ("n2",), {}, id="required rack that is full: it waits, n3 to n6 or not"),
        pytest.param(required(BLOCK), ("n2",), {1: "n3"}, id="required block: the other rack of the block"),
        pytest.param(required(BLOCK), ("n2", "n3", "n4"), {}, id="required block that is full"),
        pytest.param({}, ("n2", "n3", "n4"), {1: "n5"}, id="nothing required: anywhere, near if possible"),
        pytest.param({}, (), {1: "n2"}, id="nothing required: the same rack first"),
    ],
)
def test_a_replacement_goes_where_its_gang_is_bound_to(spec: Any, full: Any, places: Any) -> None:
    """Racks of one name in two blocks are two racks; what is required is never left, what is not is kept near."""
    assert Ground({0: "n1"}, full=full, **spec).place(1) == places


@pytest.mark.parametrize(
    ("running", "ended", "full", "places"),
    [
        pytest.param({0: "n3"}, (0,), ("n3",), {1: "n4"}, id="nobody runs: where those are that have done their work"),
        pytest.param({0: "n1", 2: "n5"}, (0,), (), {1: "n6"}, id="one runs: beside that one"),
    ],
)
def test_a_replacement_goes_beside_those_that_run(running: Any, ended: Any, full: Any, places: Any) -> None:
    """The rack that is required is theirs. Members that have ended say where it is only while nobody runs."""
    assert Ground(running, ended=ended, full=full, **required(RACK)).place(1) == places


@pytest.mark.parametrize(
    ("ground", "verdict", "said"),
    [
        pytest.param({"full": ("n2",)}, Verdict.BUSY, "1 of 1 members that it lacks find", id="others hold it"),
        pytest.param({"cordoned": ("n2",)}, Verdict.UNKNOWN, "fits when n2 is uncordoned; now", id="a cordon"),
        pytest.param({"sick": ("n2",)}, Verdict.UNKNOWN, "fits when n2 gives out the 1 GPU that it", id="a sick card"),
        pytest.param({"silent": ("n2",)}, Verdict.UNKNOWN, "fits when the agent of n2 reports", id="a silent agent"),
        pytest.param({"unheard": ("n2",)}, Verdict.UNKNOWN, "waits for the report of 1 node: n2", id="no report yet"),
        pytest.param({"small": ("n2",)}, Verdict.NEVER, "too few GPUs that match", id="no other machine of the rack"),
    ],
)
def test_a_gang_hears_why_what_it_lacks_finds_no_place(ground: Any, verdict: Verdict, said: str) -> None:
    """The rack that its other member keeps has one more machine: whether that helps is told as of a whole gang."""
    waiting = Ground({0: "n1"}, **ground, **required(RACK)).replacements(1).waiting

    assert waiting is not None
    assert (waiting.verdict, said in waiting.message) == (verdict, True), waiting.message


def test_a_gang_hears_that_its_own_members_leave_no_room() -> None:
    """Its others fill the rack: no pod has to end, and no node to come back, so that the third could run there."""
    waiting = Ground({0: "n1", 2: "n2"}, **required(RACK)).replacements(1).waiting

    assert waiting is not None
    assert waiting.verdict is Verdict.NEVER


GROUP = [{"name": "leader", "count": 1, "group": "g"}, {"name": "workers", "count": 2, "group": "g", **required(RACK)}]


@pytest.mark.parametrize(
    ("running", "full", "lost", "places"),
    [
        pytest.param({1: "n1"}, (), (0,), {0: "n2"}, id="a leader beside its worker"),
        pytest.param({1: "n1"}, ("n2",), (0,), {}, id="a leader waits while there is no room beside its worker"),
        pytest.param({0: "n3"}, (), (1,), {1: "n4"}, id="a worker beside its leader"),
        pytest.param({0: "n3"}, ("n4",), (1,), {}, id="a worker waits for room beside its leader"),
    ],
)
def test_a_group_stays_in_its_domain(running: Any, full: Any, lost: Any, places: Any) -> None:
    """What a leader and its workers require together holds for each of them later."""
    assert Ground(running, full=full, podSets=GROUP).place(*lost) == places


@pytest.mark.parametrize(("full", "places"), [((), {3: "n4"}), (("n4",), {})], ids=["beside its mate", "it waits"])
def test_a_member_of_a_broken_slice_goes_to_the_rest_of_it(full: Any, places: Any) -> None:
    """Slices of two lie in one rack each: the fourth member goes to the rack of the third, or waits."""
    slices = {"mode": "unconstrained", "slices": [{"level": RACK, "size": 2}]}
    spec = {"podSets": [{"name": "workers", "count": 4, "topology": slices}]}
    assert Ground({0: "n1", 1: "n2", 2: "n3"}, full=full, **spec).place(3) == places


def test_several_lost_members_are_each_charged_before_the_next() -> None:
    """Two spare machines in the block, three lost members: two places, all different."""
    places = Ground({0: "n1", 4: "n2"}, **required(BLOCK)).place(1, 2, 3)

    assert sorted(places.values()) == ["n3", "n4"]


def test_the_status_counts_all_members_where_they_are_after_a_replacement() -> None:
    """Per domain of the lowest level: those that stayed and those that have come."""
    request = (ground := Ground({0: "n1", 4: "n3"}, **required(BLOCK))).request(1)
    come = ground.replacements(1).assignments

    found = replaced_assignment(GangAssignment(topology="t"), request.view.members, come, request.node_domains)

    (workers,) = found.pod_sets
    assert (found.topology, workers.levels, workers.count, workers.domain_count) == ("t", (BLOCK, RACK), 3, 2)
    assert {share.values: share.count for share in workers.domains} == {("x", "a"): 2, ("x", "b"): 1}


def test_a_cordoned_machine_is_no_spare() -> None:
    """A replacement stays gated rather than go to a machine that would refuse it."""
    assert Ground({0: "n1"}, cordoned=("n2",), **required(RACK)).place(1) == {}


def test_one_part_without_a_spare_does_not_keep_another_waiting() -> None:
    """Two pod sets in two racks, one rack has a spare: its member is repaired at once, the other waits."""
    sets = {"podSets": [{"name": "a", "count": 2, **required(RACK)}, {"name": "b", "count": 2, **required(RACK)}]}
    ground = Ground({0: "n1", 2: "n3"}, full=("n2",), **sets)
    ground.members = [with_set(pod, "a" if pod.metadata.name == "p0" else "b") for pod in ground.members]

    missing = [
        with_set(make_pod(f"p{n}", gpus=8, annotations={names.GANG: "g"}, schedulingGates=GATES), pod_set)
        for n, pod_set in ((1, "a"), (3, "b"))
    ]
    found = members_of([*ground.members, *missing], ground.gang.spec, {})
    requests = {pod.metadata.uid: request_of(pod, None, is_admitted=True) for pod in missing}
    chosen = [one for one in found if one.stage is MemberStage.GATED]
    view = GangView(ground.gang, tuple(found), ReadinessPolicy())

    found = place_missing(view, chosen, requests, ground.site(), ground.land())  # type: ignore[arg-type]

    assert {number_of(one.member): one.allocation.node for one in found.assignments} == {3: "n4"}


def with_set(pod: Pod, name: str) -> Pod:
    """Return the pod as a member of a pod set."""

    annotations = {**pod.metadata.annotations, names.POD_SET: name}
    return msgspec.structs.replace(pod, metadata=msgspec.structs.replace(pod.metadata, annotations=annotations))
