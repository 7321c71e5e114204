"""Following a job: whatever was missed between two observations, the steps are legal and lead to the current state."""

import itertools
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.jobs.facts import (
    FORWARD,
    JobFacts,
    JobObservation,
    JobPhase,
    PodFacts,
    QuotaFacts,
    WorkloadFacts,
    observe,
    steps_to,
)
from atoll.jobs.planning import JobHistory, plan_steps
from atoll.jobs.policy import JobPolicy
from atoll.jobs.states import ENDED, IN_CLUSTER, JobState, JobStep, step

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
P, S, T = JobPhase, JobState, JobStep


def job(**facts: object) -> WorkloadFacts:
    """Return a Job."""
    return WorkloadFacts("Job", "u1", **facts)  # type: ignore[arg-type]


def deployment(**facts: object) -> WorkloadFacts:
    """Return a Deployment."""
    return WorkloadFacts("Deployment", "u1", runs_whole=True, **facts)  # type: ignore[arg-type]


PENDING, RUNNING = PodFacts("p0"), PodFacts("p1", "Running")
OOM = PodFacts("p2", "Failed", reason="OOMKilled", detail="(exit code 137)")


@pytest.mark.parametrize(
    ("facts", "phase", "reason"),
    [
        pytest.param(JobFacts(None), P.GONE, "deleted by hand?", id="no object"),
        pytest.param(JobFacts(WorkloadFacts("Job", "other")), P.GONE, "deleted by hand?", id="another of that name"),
        pytest.param(JobFacts(job(is_leaving=True)), P.GONE, "is being deleted", id="being deleted"),
        pytest.param(JobFacts(job(is_leaving=True, is_complete=True)), P.SUCCEEDED, "", id="completed, then deleted"),
        pytest.param(JobFacts(job()), P.STARTS, "0 of 1 pods run", id="no pods yet"),
        pytest.param(JobFacts(job(), (PENDING,)), P.STARTS, "0 of 1 pods run", id="a pod waits"),
        pytest.param(
            JobFacts(job(), (PodFacts("p0", reason="Unschedulable", detail="no GPU"),)),
            P.STARTS,
            "pod p0: Unschedulable no GPU",
            id="why a pod waits",
        ),
        pytest.param(
            JobFacts(job(refused='pods "j-" is forbidden: exceeded quota')),
            P.STARTS,
            'its pods cannot be created: pods "j-" is forbidden: exceeded quota',
            id="the API server takes no pod",
        ),
        pytest.param(
            JobFacts(deployment(ready=1, wanted=2, refused="exceeded quota"), (RUNNING,)),
            P.STARTS,
            "its pods cannot be created: exceeded quota",
            id="the API server takes no further pod",
        ),
        pytest.param(JobFacts(job(), (RUNNING,)), P.RUNS, "", id="runs"),
        pytest.param(
            JobFacts(job(), (PodFacts("p1", "Running", is_leaving=True),)), P.STARTS, "0 of 1", id="a pod leaves"
        ),
        pytest.param(JobFacts(job(wanted=3), (RUNNING, PENDING)), P.RUNS, "1 of 3 pods run", id="each on its own"),
        pytest.param(
            JobFacts(job(wanted=2, runs_whole=True), (RUNNING, PENDING)),
            P.STARTS,
            "1 of 2 pods run",
            id="all or nothing",
        ),
        pytest.param(JobFacts(job(is_complete=True), (OOM,)), P.SUCCEEDED, "", id="complete"),
        pytest.param(
            JobFacts(job(failed="BackoffLimitExceeded"), (OOM,)),
            P.FAILED,
            "BackoffLimitExceeded: pod p2: OOMKilled (exit code 137)",
            id="failed",
        ),
        pytest.param(
            JobFacts(job(failed="FailedIndexes", failed_detail="too many")),
            P.FAILED,
            "FailedIndexes: too many",
            id="no pods left",
        ),
        pytest.param(JobFacts(job(failed="DeadlineExceeded")), P.EXPIRED, "maximum run time is over", id="deadline"),
        pytest.param(
            JobFacts(job(failed="PodFailurePolicy"), (PodFacts("p0", "Failed", reason="Preempted"),)),
            P.FAILED,
            "preempted, and retry_on_preemption is false: pod p0: Preempted",
            id="wants no retry",
        ),
        pytest.param(JobFacts(job(is_suspended=True)), P.WAITS_FOR_QUOTA, "waits for quota", id="suspended"),
        pytest.param(
            JobFacts(job(is_suspended=True), quota=QuotaFacts(evicted="Preempted", detail="for another")),
            P.EVICTED,
            "Preempted: for another",
            id="preempted",
        ),
        pytest.param(
            JobFacts(job(is_suspended=True), quota=QuotaFacts(detail="5 more needed")),
            P.WAITS_FOR_QUOTA,
            "waits for quota: 5 more needed",
            id="Kueue says what is missing",
        ),
        pytest.param(
            JobFacts(job(is_suspended=True), quota=QuotaFacts(has_kueue=False)),
            P.WAITS_FOR_QUOTA,
            "its Job is suspended, and the cluster has no Kueue that would resume it",
            id="suspended, without Kueue",
        ),
        pytest.param(
            JobFacts(job(is_suspended=True), quota=QuotaFacts(evicted="PodsReadyTimeout")),
            P.WAITS_FOR_QUOTA,
            "lost its quota: PodsReadyTimeout",
            id="evicted for another reason",
        ),
        pytest.param(JobFacts(deployment(ready=0), (RUNNING,)), P.STARTS, "0 of 1 pods run", id="not ready"),
        pytest.param(JobFacts(deployment(ready=1)), P.RUNS, "", id="ready"),
        pytest.param(JobFacts(deployment(ready=1, wanted=2)), P.STARTS, "1 of 2 pods run", id="half ready"),
        pytest.param(JobFacts(deployment(ready=0, wanted=0)), P.RUNS, "runs with 0 replicas", id="scaled to zero"),
        pytest.param(
            JobFacts(deployment(ready=0), (PodFacts("p0", is_gated=True),)),
            P.WAITS_FOR_QUOTA,
            "waits for quota",
            id="gated",
        ),
    ],
)
def test_what_the_cluster_shows_amounts_to(facts: JobFacts, phase: JobPhase, reason: str) -> None:
    """SYN-1, SYN-2, C-10: every fact that counts, alone and against others."""
    seen = observe(facts, workload_uid="u1")

    assert seen.phase is phase
    assert reason in seen.reason


@pytest.mark.parametrize(("limit", "spent"), [(0, False), (3, True)])
def test_retries_of_the_cluster_count(limit: int, spent: bool) -> None:
    """Where the cluster itself tried pods again as often as it may, nobody tries the whole again."""
    seen = observe(JobFacts(job(failed="BackoffLimitExceeded", backoff_limit=limit), (OOM,)), workload_uid="u1")
    planned = plan_steps(JobHistory(S.RUNNING), seen, policy=JobPolicy(), now=NOW)

    assert seen.spent is spent
    assert planned[-1].step is (T.FAIL if spent else T.RETRY)


LANDS = {
    P.WAITS_FOR_QUOTA: {S.QUEUED},
    P.STARTS: {S.ADMITTED, S.RUNNING},
    P.RUNS: {S.RUNNING},
    P.SUCCEEDED: {S.SUCCEEDED},
    P.FAILED: {S.FAILED, S.PENDING},
    P.EXPIRED: {S.FAILED},
    P.EVICTED: {S.QUEUED, S.FAILED},
    P.GONE: {S.FAILED},
}
"""In which state a job may be after a look that showed a phase."""


@pytest.mark.parametrize(
    ("state", "phase"), list(itertools.product(sorted(IN_CLUSTER), JobPhase)), ids=lambda value: str(value)
)
@given(
    reason=st.sampled_from(["", "OOMKilled", "Error", "Preempted"]),
    retries=st.integers(0, 4),
    preemptions=st.integers(0, 4),
    retry_on_preemption=st.booleans(),
    spent=st.booleans(),
    is_final=st.booleans(),
)
def test_steps_are_legal_and_lead_to_what_is_seen(
    state: JobState,
    phase: JobPhase,
    reason: str,
    retries: int,
    preemptions: int,
    retry_on_preemption: bool,
    spent: bool,
    is_final: bool,
) -> None:
    """From every recorded state, whatever is seen: each step is a row, counts only grow, and the end fits the phase."""
    seen = JobObservation(phase, reason, spent=spent, is_final=is_final)
    policy = JobPolicy(max_retries=2, retry_on_preemption=retry_on_preemption)

    planned = plan_steps(JobHistory(state, retries, preemptions), seen, policy=policy, now=NOW)

    reached = state
    for one in planned:
        reached = step("tune", reached, one.step)
        assert one.changes.get("retry_count", retries + 1) == retries + 1
        assert one.changes.get("preemption_count", preemptions + 1) == preemptions + 1
    assert reached in LANDS[phase]
    if reached is not S.PENDING and reached not in ENDED:
        assert plan_steps(JobHistory(reached, retries, preemptions), seen, policy=policy, now=NOW) == ()


def test_nothing_is_said_of_states_outside_of_the_cluster() -> None:
    """What is not in the cluster, or has ended, is not followed."""
    assert {state for state, _ in FORWARD} == IN_CLUSTER
    assert all(not steps_to(state, phase) for state in {S.PENDING, *ENDED} for phase in JobPhase)
