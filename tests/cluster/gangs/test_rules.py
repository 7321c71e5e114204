"""Rules of gangs besides the lifecycle: times, pauses, bounds, order, membership, sites, seats, capacity of a node."""

import datetime as dt
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.api import names
from atoll.api.base import Condition
from atoll.api.gangs import (
    DOMAINS_MAX,
    GangAssignment,
    GpuGangSpec,
    GpuGangStatus,
    WaitForPodsReady,
    duration_seconds,
)
from atoll.api.times import seconds_of, text_of
from atoll.api.topologies import Topology
from atoll.cluster.gangs import conditions, lifecycle
from atoll.cluster.gangs.kueue_topology import contradiction
from atoll.cluster.gangs.lifecycle import GangAction, GangView, Obstacle
from atoll.cluster.gangs.member_assignments import open_gate, status_assignment
from atoll.cluster.gangs.membership import MemberStage, members_of, pod_set_of, stage_of
from atoll.cluster.gangs.node_domains import NodeDomains, choose_topology, node_domains_of
from atoll.cluster.gangs.queue import AdmissionAttempts, blocker, in_order
from atoll.cluster.gangs.readiness_policy import (
    OutOfBounds,
    PolicyBounds,
    ReadinessPolicy,
    Requeuing,
    exceeds_limit,
    pause_seconds,
    policy_for,
)
from atoll.cluster.objects import Node, decode_node, decode_pod
from atoll.cluster.requests import Verdict
from tests.builders import make_pod, make_report, pod_json
from tests.cluster.gangs.builders import GATES, Life, make_gang, member
from topology.gangs.model import DomainCount, Placement, PodSetPlacement

RACK, HOST = "example.com/rack", "kubernetes.io/hostname"


# Times


@settings(deadline=None)
@given(st.integers(min_value=0, max_value=253_402_300_799))
def test_times_are_those_of_the_calendar(seconds: int) -> None:
    """Text and seconds agree with Python's own calendar, in both directions."""
    text = dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ").rjust(20, "0")

    assert text_of(seconds) == text
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "yesterday", "2026-13-01T00:00:00Z", "2026-01-01T25:00:00Z", "2026-01-01"])
def test_what_is_no_time_has_no_seconds(text: str) -> None:
    """Text of a peer that is no time is nothing, never a crash."""
    assert seconds_of(text) is None


# Conditions


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["A", "B"]), st.integers(1, 9)), max_size=12))
def test_a_conditions_time_is_when_its_status_changed(steps: list[tuple[bool, str, int]]) -> None:
    """However often reason and message change, the time moves with the status alone."""
    entries: tuple[Condition, ...] = ()
    now, changed, last = 0, 0, None
    for is_met, reason, pause in steps:
        now += pause
        changed = now if is_met is not last else changed
        last = is_met
        entries = conditions.put(entries, "X", is_met=is_met, reason=reason, message="", now_seconds=now)
        assert conditions.since_seconds(entries, "X") == changed


# Policy


@pytest.mark.parametrize(
    ("text", "seconds"), [("10s", 10), ("3600s", 3600), ("10m", 600), ("1h30m", 5400), ("2h", 7200)]
)
def test_durations_are_honoured_to_the_second(text: str, seconds: int) -> None:
    """No duration is capped in silence."""
    wishes = WaitForPodsReady(timeout=text)

    policy = policy_for(ReadinessPolicy(), PolicyBounds(), wishes)

    assert isinstance(policy, ReadinessPolicy)
    assert (duration_seconds(text), policy.timeout_seconds) == (seconds, seconds)


@pytest.mark.parametrize("text", ["0s", "0m", "-5s", "10", "", "five minutes", "1.5h"])
def test_durations_that_mean_nothing_are_refused(text: str) -> None:
    """Zero, negative, unit-less and wordy timeouts never reach a decision."""
    with pytest.raises(ValueError):
        WaitForPodsReady(timeout=text)


@pytest.mark.parametrize(
    ("wishes", "fragment"),
    [
        ({"timeout": "2h"}, "allows 60 to 3600 seconds"),
        ({"recoveryTimeout": "10s"}, "recoveryTimeout is 10s"),
        ({"requeuingStrategy": {"backoffMaxSeconds": 900}}, "backoffMaxSeconds is 900"),
        ({"requeuingStrategy": {"backoffLimitCount": 50}}, "allows up to 5"),
        ({"recoveryLimitCount": 50}, "recoveryLimitCount is 50; the administrator allows up to 5"),
        ({"enable": False}, "demands ready pods"),
    ],
)
def test_wishes_beyond_the_bounds_are_told_and_not_cut(wishes: dict[str, Any], fragment: str) -> None:
    """The administrator's bounds hold, and the gang's condition names the value and the bound."""
    administrator = ReadinessPolicy(enable=True)
    bounds = PolicyBounds(may_disable=False, timeout_seconds_min=60, timeout_seconds_max=3600, backoff_seconds_max=600,
                    limit_count_max=5)  # fmt: skip

    refused = policy_for(administrator, bounds, WaitForPodsReady.model_validate(wishes))

    assert isinstance(refused, OutOfBounds)
    assert fragment in refused.message


@pytest.mark.parametrize(
    ("enable", "bounds", "wish", "refused"),
    [
        pytest.param(False, PolicyBounds(may_enable=False), True, True, id="it may not wait"),
        pytest.param(False, PolicyBounds(may_enable=False), False, False, id="it does not wait anyway"),
        pytest.param(True, PolicyBounds(may_enable=False), True, False, id="it waits anyway"),
        pytest.param(True, PolicyBounds(may_disable=False), False, True, id="it must wait"),
        pytest.param(False, PolicyBounds(may_disable=False), True, False, id="it may wait"),
    ],
)
def test_a_gang_waits_for_ready_pods_where_the_administrator_lets_it(
    bounds: PolicyBounds, *, enable: bool, wish: bool, refused: bool
) -> None:
    """A wish that changes nothing is not refused."""
    found = policy_for(ReadinessPolicy(enable=enable), bounds, WaitForPodsReady(enable=wish))

    assert isinstance(found, OutOfBounds) is refused


@pytest.mark.parametrize("wish", ["timeout", "recoveryTimeout"])
def test_a_gang_keeps_others_waiting_no_longer_than_the_administrator_says(wish: str) -> None:
    """blockAdmission: a tenant's timeout of a day would be everybody's."""
    administrator = ReadinessPolicy(True, timeout_seconds=300, recovery_timeout_seconds=300, block_admission=True)

    longer, shorter = (
        policy_for(administrator, PolicyBounds(), WaitForPodsReady.model_validate({wish: text}))
        for text in ("301s", "299s")
    )

    assert isinstance(longer, OutOfBounds)
    assert "allows 1 to 300 seconds" in longer.message
    assert isinstance(shorter, ReadinessPolicy)


def test_what_a_gang_does_not_say_is_the_administrators() -> None:
    """A gang that sets its timeout alone keeps every other value."""
    administrator = ReadinessPolicy(enable=True, block_admission=True, requeuing=Requeuing(base_seconds=7))

    policy = policy_for(administrator, PolicyBounds(), WaitForPodsReady(timeout="9s"))

    assert isinstance(policy, ReadinessPolicy)
    assert (policy.timeout_seconds, policy.block_admission, policy.requeuing.base_seconds) == (9, True, 7)


@settings(deadline=None)
@given(st.integers(1, 60), st.floats(0, 1))
def test_pauses_double_to_the_cap(count: int, jitter: float) -> None:
    """The n-th pause is base x 2^(n-1), up to a tenth more, and never beyond the cap."""
    pause = pause_seconds(Requeuing(base_seconds=60, max_seconds=3600), count, jitter=jitter)

    plain = 60 * 2 ** (count - 1)
    assert pause <= 3600
    assert pause == 3600 or plain <= pause <= 1.1 * plain + 1e-6


def test_a_limit_is_surpassed_and_not_reached() -> None:
    """With a limit of 3 the fourth eviction deactivates; without one none ever does."""
    assert [exceeds_limit(Requeuing(limit_count=3), count) for count in (1, 3, 4)] == [False, False, True]
    assert not exceeds_limit(Requeuing(limit_count=None), 10**9)


OWN: dict[str, tuple[dict[str, Any], list[bool], float]] = {
    "enable and timeout": ({"enable": True, "timeout": "20s"}, [False, False], 20),
    "recoveryTimeout": ({"enable": True, "recoveryTimeout": "30s"}, [True, False], 30),
    "recoveryLimitCount": ({"recoveryLimitCount": 0}, [True, False], 0),
}
PAUSES: dict[str, tuple[dict[str, Any], list[float | None]]] = {
    "backoffBaseSeconds": ({"backoffBaseSeconds": 7}, [7, 14, 28]),
    "backoffMaxSeconds": ({"backoffBaseSeconds": 7, "backoffMaxSeconds": 10}, [7, 10, 10]),
    "backoffLimitCount": ({"backoffBaseSeconds": 7, "backoffLimitCount": 2}, [7, 14, None]),
}


def life_of(wishes: dict[str, Any]) -> Life:
    """Return an admitted gang of one member that chooses for itself, under an administrator who demands nothing."""
    gang = make_gang(1, waitForPodsReady=wishes)
    policy = policy_for(ReadinessPolicy(), PolicyBounds(), gang.spec.wait_for_pods_ready)
    assert isinstance(policy, ReadinessPolicy)
    life = Life(gang, policy)
    admit_again(life)
    return life


def admit_again(life: Life) -> None:
    """Write an admission whose members were let go just now."""
    status = lifecycle.admit(life.gang.status or GpuGangStatus(), now_seconds=life.now, message="")
    life.write(status.model_copy(update={"assignment": GangAssignment(time=text_of(life.now))}))


@pytest.mark.parametrize("case", OWN)
def test_a_gangs_own_times_decide_when_it_is_evicted(case: str) -> None:
    """Not a second before, and then at once."""
    wishes, readiness, seconds = OWN[case]
    life = life_of(wishes)
    stages = [MemberStage.READY if ready else MemberStage.STARTING for ready in readiness]
    decision = life.look(member(0, stages[0]))
    if seconds:
        assert life.look(member(0, stages[1])).act is not GangAction.EVICT
        assert life.look(member(0, stages[1]), after=seconds - 1).act is not GangAction.EVICT
        decision = life.look(member(0, stages[1]), after=1)
    else:
        decision = life.look(member(0, stages[1]))
    assert decision.act is GangAction.EVICT


@pytest.mark.parametrize("case", PAUSES)
def test_a_gangs_own_pauses_decide_when_it_is_tried_again(case: str) -> None:
    """Three evictions in a row; None where the gang is not tried again."""
    wishes, want = PAUSES[case]
    life = life_of({"enable": True, "timeout": "1s", "requeuingStrategy": wishes})
    pauses: list[float | None] = []
    for _ in want:
        admit_again(life)
        decision = life.look(member(0, MemberStage.STARTING), after=2)
        assert decision.act is GangAction.EVICT
        state = decision.status.requeue_state
        at = seconds_of(state.requeue_at or "") if state is not None else None
        pauses.append(None if at is None else round(at - life.now))
        life.now += 1000

    assert pauses == want


# Order


def test_order_is_priority_then_age_then_name() -> None:
    """A total order: the same candidates are tried in the same order whoever lists them first."""

    def view(name: str, priority: int, created: int) -> GangView:
        gang = make_gang(1, name=name)
        metadata = gang.metadata.model_copy(update={"creation_timestamp": text_of(created)})
        one = member(0, MemberStage.GATED, priority=priority)
        return GangView(gang.model_copy(update={"metadata": metadata}), (one,), ReadinessPolicy())

    views = [view("a", 0, 20), view("b", 5, 30), view("c", 0, 10), view("d", 0, 10)]

    for arrangement in (views, views[::-1]):
        assert [one.gang.metadata.name for one in in_order(arrangement)] == ["b", "c", "d", "a"]


@pytest.mark.parametrize(
    ("timestamp", "reason", "first"),
    [
        pytest.param("Eviction", "PodsReadyTimeout", "young", id="not ready in time: behind those that came meanwhile"),
        pytest.param("Eviction", "Preempted", "old", id="preempted: it keeps its place"),
        pytest.param("Eviction", "SchedulerRefused", "old", id="refused by kube-scheduler: it keeps its place"),
        pytest.param("Creation", "PodsReadyTimeout", "old", id="by creation: it keeps its age"),
    ],
)
def test_an_evicted_gang_goes_back_as_the_policy_says(timestamp: str, reason: str, first: str) -> None:
    """Only who was not ready in time loses the place in the queue, and only where the policy says so."""

    def view(name: str, created: int, evicted: int | None) -> GangView:
        status = None
        if evicted is not None:
            condition = {"type": "Evicted", "status": "True", "reason": reason,
                         "lastTransitionTime": text_of(evicted)}  # fmt: skip
            status = {"conditions": [condition]}
        wishes = {"requeuingStrategy": {"timestamp": timestamp}}
        gang = make_gang(1, name=name, status=status, waitForPodsReady=wishes)
        metadata = gang.metadata.model_copy(update={"creation_timestamp": text_of(created)})
        policy = policy_for(ReadinessPolicy(), PolicyBounds(), gang.spec.wait_for_pods_ready)
        assert isinstance(policy, ReadinessPolicy)
        return GangView(gang.model_copy(update={"metadata": metadata}), (), policy)

    assert in_order([view("old", 10, 50), view("young", 30, None)])[0].gang.metadata.name == first


def test_hopeless_gangs_are_tried_ever_more_rarely() -> None:
    """In ten virtual minutes a gang that never fits is tried a few dozen times, room or no room."""
    now, attempts, tries = 0.0, AdmissionAttempts(), 0
    while now < 600:
        wait = attempts.wait_seconds(now, room_at_seconds=0.0)
        if wait <= 0:
            attempts, tries = attempts.next(now, Verdict.NEVER, contends=False), tries + 1
        now += max(wait, 0.01)

    assert tries <= 66


def test_the_pauses_of_a_gang_without_a_place_double_from_half_a_second() -> None:
    """Up to ten seconds."""
    attempts, pauses = AdmissionAttempts(), []
    for _ in range(7):
        attempts = attempts.next(100.0, Verdict.BUSY, contends=True)
        pauses.append(attempts.wait_seconds(100.0, room_at_seconds=0.0))

    assert AdmissionAttempts().wait_seconds(0.0, room_at_seconds=0.0) == 0.0
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


@pytest.mark.parametrize(
    ("verdict", "room_at", "pause"),
    [
        pytest.param(Verdict.BUSY, 99.0, 10.0, id="room before the last attempt"),
        pytest.param(Verdict.BUSY, 101.0, 1.0, id="room since then"),
        pytest.param(Verdict.NEVER, 101.0, 10.0, id="room that it cannot use"),
    ],
)
def test_room_ends_a_long_pause_early(verdict: Verdict, room_at: float, pause: float) -> None:
    """Unless the gang would never fit."""
    attempts = AdmissionAttempts(count=7, at_seconds=100.0, verdict=verdict)

    assert attempts.wait_seconds(100.0, room_at_seconds=room_at) == pause


def test_a_blocking_gang_blocks_until_it_is_ready() -> None:
    """blockAdmission: an admitted gang that is not ready keeps all others waiting; once ready it does not."""

    def view(ready: str) -> GangView:
        condition = {"type": "PodsReady", "status": ready, "reason": "R", "lastTransitionTime": text_of(0)}
        return GangView(
            make_gang(1, status={"conditions": [condition]}), (), ReadinessPolicy(True, block_admission=True)
        )

    assert blocker([view("True"), view("False")]) is not None
    assert blocker([view("True")]) is None


# Membership


@pytest.mark.parametrize(
    ("pod", "stage"),
    [
        ({"schedulingGates": GATES}, MemberStage.GATED),
        ({"schedulingGates": [*GATES, {"name": "kueue.x-k8s.io/topology"}]}, MemberStage.HELD_BACK),
        ({"schedulingGates": GATES, "deleted": True}, MemberStage.ENDING),
        ({}, MemberStage.STARTING),
        ({"node": "n1"}, MemberStage.STARTING),
        ({"phase": "Succeeded"}, MemberStage.SUCCEEDED),
        ({"phase": "Succeeded", "deleted": True}, MemberStage.ENDING),
        ({"phase": "Failed", "deleted": True}, MemberStage.FAILED),
    ],
)
def test_stages_of_members(pod: dict[str, Any], stage: MemberStage) -> None:
    """What a pod shows decides how far it has come."""
    assert stage_of(make_pod(**pod)) is stage


@pytest.mark.parametrize(
    ("codes", "restarts", "stage"),
    [
        pytest.param([0, 0], "Never", MemberStage.SUCCEEDED, id="all ended well"),
        pytest.param([0, 0], "OnFailure", MemberStage.SUCCEEDED, id="all ended well, and only failures are restarted"),
        pytest.param([0, 0], "Always", MemberStage.STARTING, id="they are started again"),
        pytest.param([0, 1], "Never", MemberStage.STARTING, id="one failed"),
        pytest.param([0, None], "Never", MemberStage.STARTING, id="one still runs"),
        pytest.param([0], "Never", MemberStage.STARTING, id="kubelet tells of one of two"),
        pytest.param([], "Never", MemberStage.STARTING, id="kubelet tells of none"),
    ],
)
def test_a_member_has_succeeded_when_its_containers_have(
    codes: list[int | None], restarts: str, stage: MemberStage
) -> None:
    """The phase follows a moment later, and the gang must not miss its member meanwhile."""
    body = pod_json(node="n1", containers=("main", "side"), phase="Running", restartPolicy=restarts)
    states = [{"running": {}} if code is None else {"terminated": {"exitCode": code}} for code in codes]
    body["status"]["containerStatuses"] = [{"name": "c", "state": state} for state in states]
    assert stage_of(decode_pod(orjson.dumps(body))) is stage


SETS = GpuGangSpec.model_validate({"podSets": [{"name": "leader", "count": 1}, {"name": "worker", "count": 8}]})


@pytest.mark.parametrize(
    ("annotations", "labels", "found"),
    [
        ({names.POD_SET: "leader"}, {}, "leader"),
        ({names.POD_SET: "nobody"}, {}, ""),
        ({}, {"jobset.sigs.k8s.io/replicatedjob-name": "worker"}, "worker"),
        ({}, {"training.kubeflow.org/replica-type": "Worker"}, "worker"),
        ({}, {"leaderworkerset.sigs.k8s.io/worker-index": "0"}, "leader"),
        ({}, {"leaderworkerset.sigs.k8s.io/worker-index": "3"}, "worker"),
        ({}, {}, ""),
    ],
)
def test_pod_sets_by_annotation_and_by_owners_labels(annotations: Any, labels: Any, found: str) -> None:
    """The annotation wins, then what JobSet, Kubeflow and LeaderWorkerSet write; nothing is guessed."""
    pod = make_pod(annotations=annotations)
    labelled = msgspec.structs.replace(pod, metadata=msgspec.structs.replace(pod.metadata, labels=labels))

    assert pod_set_of(labelled, SETS) == found


def ranked(labels: list[dict[str, str]], **pod_set: Any) -> list[int]:
    """Return the ranks of pods with these labels, pod by pod."""
    spec = GpuGangSpec.model_validate({"podSets": [{"name": "w", "count": len(labels), **pod_set}]})
    pods = [make_pod(f"p{number}") for number in range(len(labels))]
    made = [
        msgspec.structs.replace(pod, metadata=msgspec.structs.replace(pod.metadata, labels=row))
        for pod, row in zip(pods, labels, strict=True)
    ]
    by_name = {one.pod.metadata.name: one.rank for one in members_of(made, spec, {})}
    return [by_name[f"p{number}"] for number in range(len(labels))]


def test_ranks_come_from_index_labels() -> None:
    """Completion index, replica index, a label that the request names, and sub-groups of a JobSet."""
    assert ranked([{"batch.kubernetes.io/job-completion-index": str(n)} for n in (2, 0, 1)]) == [2, 0, 1]
    assert ranked([{"training.kubeflow.org/replica-index": str(n)} for n in (1, 0)]) == [1, 0]
    assert ranked([{"kubernetes.io/job-completion-index": str(n)} for n in (1, 0)]) == [1, 0]
    assert ranked([{"apps.kubernetes.io/pod-index": str(n)} for n in (1, 0)]) == [1, 0]
    assert ranked([{"my/rank": str(n)} for n in (1, 0)], topology={"podIndexLabel": "my/rank"}) == [1, 0]
    jobset = [
        {
            "jobset.sigs.k8s.io/job-index": job,
            "jobset.sigs.k8s.io/replicatedjob-replicas": "2",
            "batch.kubernetes.io/job-completion-index": index,
        }
        for job, index in (("1", "0"), ("0", "1"), ("1", "1"), ("0", "0"))
    ]
    assert ranked(jobset) == [2, 1, 3, 0]


@pytest.mark.parametrize(
    "labels",
    [
        [{"batch.kubernetes.io/job-completion-index": "1"}, {}],
        [{"batch.kubernetes.io/job-completion-index": "x"}, {"batch.kubernetes.io/job-completion-index": "0"}],
        [{"batch.kubernetes.io/job-completion-index": "1"}, {"batch.kubernetes.io/job-completion-index": "1"}],
    ],
    ids=["missing", "no number", "twice"],
)
def test_bad_indices_fall_back_to_names(labels: list[dict[str, str]]) -> None:
    """Missing, malformed or repeated indices: ranks follow the names, for the whole set."""
    assert ranked(labels) == [0, 1]


def test_names_give_ranks_in_the_order_of_their_numbers() -> None:
    """Of twelve pods without indices the third is ranked third, not behind the eleventh."""
    assert ranked([{}] * 12) == list(range(12))


# Sites


def node(name: str, **labels: str) -> Node:
    """Return a node with labels; `rack` and `host` stand for the real keys."""
    keys = {"rack": RACK, "host": HOST}
    metadata = {"name": name, "uid": name, "labels": {keys.get(key, key): value for key, value in labels.items()}}
    return decode_node(orjson.dumps({"metadata": metadata}))


def topology(*levels: str, name: str = "t") -> Topology:
    """Return a Topology of these levels."""
    spec = {"levels": [{"nodeLabel": level} for level in levels]}
    return Topology.model_validate({"metadata": {"name": name}, "spec": spec})


def spec_with(topology_name: str | None = None, **request: Any) -> GpuGangSpec:
    """Return the spec of a gang with a request for the whole."""
    return GpuGangSpec.model_validate(
        {"podSets": [{"name": "w", "count": 2}], "topology": request, "topologyName": topology_name}
    )


@pytest.mark.parametrize(
    ("spec", "topologies", "reason"),
    [
        (spec_with(mode="required", level=RACK), [], "TopologyMissing"),
        (spec_with("other"), [topology(RACK)], "TopologyMissing"),
        (spec_with(mode="required", level="example.com/rak"), [topology(RACK)], "LevelMissing"),
        (spec_with(mode="preferred", level=RACK), [topology(RACK), topology(RACK, name="u")], "TopologyAmbiguous"),
        (spec_with(mode="required", level="x"), [topology(RACK), topology(RACK, name="u")], "LevelMissing"),
        (spec_with(mode="required", level=RACK, slices=[{"size": 2, "level": "x"}]), [topology(RACK)], "LevelMissing"),
    ],
    ids=["none", "unknown name", "misspelt level", "several", "a level that none of several has", "level of a slice"],
)
def test_a_request_that_no_topology_can_keep_is_an_obstacle(spec: Any, topologies: Any, reason: str) -> None:
    """Unknown topologies and levels make a gang inactive; it is never placed without its constraint."""
    found = choose_topology(spec, topologies)

    assert isinstance(found, Obstacle)
    assert found.reason == reason


def test_of_several_topologies_the_only_one_with_the_levels_is_chosen() -> None:
    """Machines with GPUs and slices of TPUs may have a Topology each; no gang has to name one."""
    slices = topology("example.com/slice", name="slices")

    assert choose_topology(spec_with(mode="required", level="example.com/slice"), [topology(RACK), slices]) is slices


def test_nodes_without_a_level_are_outside_for_those_who_demand_one() -> None:
    """A required rack never uses a node without rack label; a gang without demands may."""
    nodes = [node("n1", rack="a"), node("n2", rack="a"), node("n3")]

    strict = node_domains_of(topology(RACK), nodes, {}, strict=True)
    lenient = node_domains_of(topology(RACK), nodes, {}, strict=False)

    assert isinstance(strict, NodeDomains)
    assert isinstance(lenient, NodeDomains)
    assert set(strict.paths) == {"n1", "n2"}
    assert lenient.paths["n3"] == ("~n3",)


def test_a_level_that_no_node_has_is_an_obstacle() -> None:
    """A label that is absent everywhere is told as such, not as a lack of room."""
    found = node_domains_of(topology("example.com/block", RACK), [node("n1", rack="a")], {}, strict=True)

    assert isinstance(found, Obstacle)
    assert "example.com/block" in found.message


def test_fabric_cliques_are_domains_by_both_ids() -> None:
    """One clique id in two fabrics is two domains; a machine without a fabric is outside."""
    reports = {}
    for name, cluster in (("n1", "A"), ("n2", "B")):
        report = make_report(name)
        fabric = {"fabric": {"clusterUUID": cluster, "cliqueId": "1"}}
        assert report.status is not None
        reports[name] = report.model_copy(update={"status": report.status.model_validate(
            {**report.status.to_json(), **fabric})})  # fmt: skip

    site = node_domains_of(topology(names.FABRIC_LEVEL), [node("n1"), node("n2"), node("n3")], reports, strict=True)

    assert isinstance(site, NodeDomains)
    assert site.paths == {"n1": ("A.1",), "n2": ("B.1",)}


# Seats and room


def test_a_status_with_very_many_domains_is_summarised() -> None:
    """Tens of thousands of hosts fit: the status names the racks instead, and how many hosts there are."""
    domains = tuple(DomainCount((f"r{number // 100}", f"h{number}", f"h{number}"), 1) for number in range(10_000))
    placement = Placement((RACK, HOST), (PodSetPlacement("w", "", domains, ()),), 0, bounded=False)

    (found,) = status_assignment(placement, NodeDomains("t", (RACK, HOST), {})).pod_sets

    assert found.domain_count == 10_000
    assert len(found.domains) == 100 <= DOMAINS_MAX
    assert found.levels == (RACK,)


def test_a_host_is_named_alone_where_it_is_the_lowest_level() -> None:
    """Rack and host: the host's name tells the rest."""
    placement = Placement(
        (RACK, HOST), (PodSetPlacement("w", "", (DomainCount(("r", "h", "h"), 3),), ()),), 0, bounded=False
    )

    (found,) = status_assignment(placement, NodeDomains("t", (RACK, HOST), {})).pod_sets

    assert found.levels == (HOST,)
    assert [(one.values, one.count) for one in found.domains] == [(("h",), 3)]


PIN = {"key": "metadata.name", "operator": "In", "values": ["n1"]}
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


@pytest.mark.parametrize(
    ("affinity", "terms"),
    [
        (None, [{"matchFields": [PIN]}]),
        ({"podAffinity": {}}, [{"matchFields": [PIN]}]),
        (
            {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": [1]}, {"matchFields": [2]}]}}},
            [{"matchExpressions": [1], "matchFields": [PIN]}, {"matchFields": [2, PIN]}],
        ),
        ({"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchFields": [PIN]}]}}}, [{"matchFields": [PIN]}]),
    ],
    ids=["none", "of pods", "two terms", "pinned already"],
)
def test_pinning_only_tightens(affinity: Any, terms: Any) -> None:
    """Every term is narrowed and none is added: more the API server does not allow while a pod is gated."""
    spec = open_gate(affinity, [*GATES, {"name": "other"}], "n1")

    assert spec["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"] == terms
    assert spec["schedulingGates"] == [{"name": "other"}]


SLICES, TWOS = [{"level": HOST, "size": 4}], [{"level": HOST, "size": 2}]
SLICED = {"slice-required-topology": HOST, "slice-size": "4"}
LED = [{"name": "workers", "count": 8, "group": "g"}, {"name": "leader", "count": 1, "group": "g"}]


@pytest.mark.parametrize(
    ("pod_sets", "pod_set", "asked", "agrees"),
    [
        pytest.param([{"name": "workers", "count": 8}], "workers", SLICED, False, id="slices of which no gang knows"),
        pytest.param(
            [{"name": "workers", "count": 8, "topology": {"mode": "unconstrained", "slices": SLICES}}],
            "workers", SLICED, True, id="the same slices",
        ),
        pytest.param(
            [{"name": "workers", "count": 8, "topology": {"mode": "unconstrained", "slices": TWOS}}],
            "workers", SLICED, False, id="slices of another size",
        ),
        pytest.param(
            [{**LED[0], "topology": {"mode": "required", "level": RACK, "slices": TWOS}}, LED[1]],
            "leader", {**SLICED, "required-topology": RACK, "group-name": "g"}, True, id="a leader, who has no slices",
        ),
        pytest.param(
            [{**LED[0], "topology": {"mode": "required", "level": RACK}}, LED[1]],
            "workers", {**SLICED, "required-topology": RACK, "group-name": "g"}, False, id="its workers have some",
        ),
        pytest.param(LED, "workers", {"group-name": "h"}, False, id="another group"),
    ],
)  # fmt: skip
def test_what_kueues_annotations_ask_for_is_said_by_the_gang_or_a_contradiction(
    pod_sets: list[dict[str, Any]], pod_set: str, asked: dict[str, str], agrees: bool
) -> None:
    """The gang waits then, and says which pod asks for what."""
    spec = GpuGangSpec.model_validate({"podSets": pod_sets})
    pod = make_pod("p", annotations={f"kueue.x-k8s.io/podset-{key}": value for key, value in asked.items()})

    found = contradiction(pod, spec, pod_set)

    assert (found == "") == agrees
    assert agrees or (pod.metadata.name in found and "remove the annotations" in found)
