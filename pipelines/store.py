"""Queries and changes of pipelines and runs.

Each function is the work of one transaction. A run changes only through `advance`, which decides with
atoll.pipelines.deciding under the lock of the run's record.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import uuid4

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from atoll.jobs.retries import bounded
from atoll.jobs.states import ENDED, IllegalStep, JobState
from atoll.pipelines.deciding import (
    Decision,
    EndRun,
    RunSnapshot,
    StartTry,
    StepRun,
    TryOutcome,
    after_try,
    new_run,
    settled,
)
from atoll.pipelines.model import Pipeline
from atoll.pipelines.rerunning import rerun
from atoll.pipelines.words import (
    ENDED_RUNS,
    ENDED_STEPS,
    OverlapPolicy,
    RunState,
    SkipCause,
    StepState,
    StepType,
)
from jobs.errors import JobUnknown, RecordUnreadable
from jobs.records import JobRecord
from jobs.store import ask_to_cancel
from pipelines.errors import KeyTaken, PipelineDeployed, PipelineUnknown, RunActive, RunNotEnded, RunUnknown
from pipelines.quota import gpu_room
from pipelines.records import DeploymentRecord, PipelineRecord, RunRecord, StepRecord, graph_in

PAGE_SIZE_MAX: Final = 200
AS_LOCKED: Final = {"populate_existing": True}
"""What the session read before the lock may have changed meanwhile."""
ACTIVE: Final = tuple(state.value for state in RunState if state not in ENDED_RUNS)


@dataclass(frozen=True, slots=True)
class Try:
    """One try of a step that must be running."""

    run_id: str
    key: str
    attempt: int


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A run that somebody or a trigger asks for. `cause`: in words."""

    inputs: Mapping[str, Any]
    created_by: str
    cause: str = "manual"
    key: str | None = None


@dataclass(frozen=True, slots=True)
class PipelinePage:
    """One page of a list, and the total count."""

    records: Sequence[Any]
    total: int


# Pipelines


def apply_pipeline(
    session: Session, pipeline: Pipeline, *, tenant: str, created_by: str, now: datetime
) -> tuple[PipelineRecord, bool]:
    """Record a pipeline, or change the one of its name; return it and whether it is new."""
    document = pipeline.model_dump(mode="json", exclude_unset=True)
    where = (PipelineRecord.tenant_id == tenant, PipelineRecord.name == pipeline.name)
    known = session.scalars(select(PipelineRecord).where(*where).with_for_update()).one_or_none()
    if known is not None:
        known.document, known.project_id, known.updated_at = document, pipeline.project_id, now
        session.flush()
        return known, False
    record = PipelineRecord(
        id=str(uuid4()),
        tenant_id=tenant,
        project_id=pipeline.project_id,
        name=pipeline.name,
        created_by=created_by,
        document=document,
        runs_begun=0,
        created_at=now,
        updated_at=now,
    )
    session.add(record)
    session.flush()
    return record, True


def get_pipeline(session: Session, pipeline_id: str) -> PipelineRecord:
    """Return a pipeline. Raises PipelineUnknown."""
    record = session.get(PipelineRecord, pipeline_id)
    if record is None:
        raise PipelineUnknown(pipeline_id)
    return record


def list_pipelines(
    session: Session,
    scopes: Sequence[tuple[str, str | None]] | None,
    *,
    name: str | None = None,
    page: int = 1,
    page_size: int = 50,
) -> PipelinePage:
    """Return a page of pipelines by name. `scopes`: what the caller may see, as (tenant, project); None: everything."""
    return page_by_name(session, PipelineRecord, scopes, name=name, page=page, page_size=page_size)


def page_by_name(
    session: Session,
    kind: type[PipelineRecord] | type[DeploymentRecord],
    scopes: Sequence[tuple[str, str | None]] | None,
    *,
    name: str | None,
    page: int,
    page_size: int,
) -> PipelinePage:
    """Return a page of records that have a tenant, a project and a name, by name. `scopes`: as of `list_pipelines`."""
    where: list[ColumnElement[bool]] = []
    if scopes is not None:
        where.append(within(kind, scopes))
    if name is not None:
        where.append(kind.name == name)
    total = session.scalar(select(func.count()).select_from(kind).where(*where)) or 0
    size = min(page_size, PAGE_SIZE_MAX)
    by_name = select(kind).where(*where).order_by(kind.name, kind.id)
    return PipelinePage(session.scalars(by_name.offset((page - 1) * size).limit(size)).all(), total)


def within(
    kind: type[PipelineRecord] | type[DeploymentRecord], scopes: Sequence[tuple[str, str | None]]
) -> ColumnElement[bool]:
    """Return the condition that a record is in one of the scopes, which are (tenant, project)."""
    seen: ColumnElement[bool] = kind.id.is_(None)
    for tenant, project in scopes:
        one = kind.tenant_id == tenant
        seen = seen | (one if project is None else one & (kind.project_id == project))
    return seen


# Runs


def create_run(session: Session, pipeline_id: str, asked: RunRequest, now: datetime) -> tuple[RunRecord, bool]:
    """Record a run; return it and whether it is new: a repeated idempotency key returns the earlier run.

    Raises PipelineUnknown, RunActive, KeyTaken, RecordUnreadable.
    """
    owner = _locked_pipeline(session, pipeline_id)
    known = _by_key(session, pipeline_id, asked.key)
    if known is not None:
        if known.inputs != dict(asked.inputs):
            raise KeyTaken(asked.key or "")
        return known, False
    graph = graph_in(owner.document, f"pipeline {owner.name}")
    overlap = graph.pipeline.overlap
    active = () if overlap is OverlapPolicy.ALLOW else _active_runs(session, pipeline_id)
    if active and overlap is OverlapPolicy.FORBID:
        raise RunActive(owner.name, active[0].number)
    for one in active:
        cancel_run(session, one.id, now=now, actor=asked.created_by)
    return _recorded(session, owner, new_run(graph, str(uuid4()), asked.inputs), asked, now=now), True


def rerun_run(
    session: Session, run_id: str, *, now: datetime, actor: str, key: str | None = None
) -> tuple[RunRecord, bool]:
    """Record a run that keeps what succeeded in an ended one; return it and whether it is new: a repeated idempotency
    key returns the earlier run.

    Raises RunUnknown, RunNotEnded, RunActive, KeyTaken, RecordUnreadable.
    """
    earlier = get_run(session, run_id)
    owner = _locked_pipeline(session, earlier.pipeline_id)
    known = _by_key(session, owner.id, key)
    if known is not None:
        if known.rerun_of != run_id:
            raise KeyTaken(key or "")
        return known, False
    if earlier.state not in (RunState.FAILED, RunState.CANCELLED):
        raise RunNotEnded(owner.name, earlier.number, earlier.state)
    snapshot = rerun(snapshot_of(session, earlier), str(uuid4()), lost=_lost_steps(session, run_id))
    may_overlap = snapshot.graph.pipeline.overlap is OverlapPolicy.ALLOW
    active = () if may_overlap else _active_runs(session, owner.id)
    if active:
        raise RunActive(owner.name, active[0].number)
    asked = RunRequest(earlier.inputs, actor, f"run {earlier.number} again", key)
    return _recorded(session, owner, snapshot, asked, now=now, rerun_of=earlier), True


def _lost_steps(session: Session, run_id: str) -> set[str]:
    """Return the steps whose jobs went on when they succeeded, such as services, and do so no more."""
    steps = session.scalars(select(StepRecord).where(StepRecord.run_id == run_id)).all()
    jobs = {
        one.key: one.output["job_id"]
        for one in steps
        if one.output.get("status") in (JobState.PENDING, JobState.RUNNING)
    }
    found = session.execute(select(JobRecord.id, JobRecord.state).where(JobRecord.id.in_(jobs.values())))
    alive = {job_id for job_id, state in found if JobState(state) not in ENDED - {JobState.SUCCEEDED}}
    return {key for key, job_id in jobs.items() if job_id not in alive}


def _recorded(
    session: Session,
    owner: PipelineRecord,
    snapshot: RunSnapshot,
    asked: RunRequest,
    *,
    now: datetime,
    rerun_of: RunRecord | None = None,
) -> RunRecord:
    owner.runs_begun += 1
    record = RunRecord(
        id=snapshot.run_id,
        pipeline_id=owner.id,
        number=owner.runs_begun,
        cause=asked.cause,
        created_by=asked.created_by,
        idempotency_key=asked.key,
        document=owner.document if rerun_of is None else rerun_of.document,
        inputs=dict(asked.inputs),
        state=RunState.PENDING.value,
        message="",
        rerun_of=rerun_of.id if rerun_of is not None else None,
        created_at=now,
    )
    session.add(record)
    session.flush()
    _write_steps(session, record, StepsBefore({}, {}), snapshot, (), now)
    return record


def _locked_pipeline(session: Session, pipeline_id: str) -> PipelineRecord:
    where = PipelineRecord.id == pipeline_id
    locked = select(PipelineRecord).where(where).with_for_update().execution_options(**AS_LOCKED)
    record = session.scalars(locked).one_or_none()
    if record is None:
        raise PipelineUnknown(pipeline_id)
    return record


def _by_key(session: Session, pipeline_id: str, key: str | None) -> RunRecord | None:
    if key is None:
        return None
    where = (RunRecord.pipeline_id == pipeline_id, RunRecord.idempotency_key == key)
    return session.scalars(select(RunRecord).where(*where)).one_or_none()


def _active_runs(session: Session, pipeline_id: str) -> Sequence[RunRecord]:
    where = (RunRecord.pipeline_id == pipeline_id, RunRecord.state.in_(ACTIVE))
    return session.scalars(select(RunRecord).where(*where).order_by(RunRecord.number)).all()


def get_run(session: Session, run_id: str) -> RunRecord:
    """Return a run. Raises RunUnknown."""
    record = session.get(RunRecord, run_id)
    if record is None:
        raise RunUnknown(run_id)
    return record


def list_runs(session: Session, pipeline_id: str, *, page: int, page_size: int) -> PipelinePage:
    """Return a page of a pipeline's runs, newest first."""
    where = RunRecord.pipeline_id == pipeline_id
    total = session.scalar(select(func.count()).select_from(RunRecord).where(where)) or 0
    size = min(page_size, PAGE_SIZE_MAX)
    newest = select(RunRecord).where(where).order_by(RunRecord.number.desc())
    return PipelinePage(session.scalars(newest.offset((page - 1) * size).limit(size)).all(), total)


def steps_of(session: Session, run_id: str) -> Sequence[StepRecord]:
    """Return the steps of a run in the document's order."""
    where = StepRecord.run_id == run_id
    return session.scalars(select(StepRecord).where(where).order_by(StepRecord.position, StepRecord.key)).all()


def active_run_ids(session: Session, *, state: RunState | None = None) -> Sequence[str]:
    """Return the runs that have not ended, or those in a state, oldest first."""
    states = ACTIVE if state is None else (state.value,)
    found = select(RunRecord.id).where(RunRecord.state.in_(states)).order_by(RunRecord.created_at, RunRecord.id)
    return session.scalars(found).all()


def running_tries(session: Session, run_id: str | None = None) -> Sequence[Try]:
    """Return the tries that must be running, of one run or of all; parallel and loop steps have no tries."""
    where = [
        RunRecord.state == RunState.RUNNING.value,
        StepRecord.state == StepState.RUNNING.value,
        StepRecord.attempt > 0,
    ]
    if run_id is not None:
        where.append(StepRecord.run_id == run_id)
    columns = select(StepRecord.run_id, StepRecord.key, StepRecord.attempt).join(RunRecord).where(*where)
    return [Try(run, key, attempt) for run, key, attempt in session.execute(columns)]


def cancel_run(session: Session, run_id: str, *, now: datetime, actor: str) -> RunRecord:
    """Cancel a run and the jobs of its steps; a repeated request changes nothing. Raises RunUnknown."""
    record = _locked_run(session, run_id)
    if record.state in ENDED_RUNS or record.cancel_requested_at is not None:
        return record
    record.cancel_requested_at, record.cancel_requested_by = now, actor
    record.message = "cancelling: waiting until its steps have ended"
    for step in steps_of(session, run_id):
        if step.job_id is not None:
            cancel_job_of_step(session, step.job_id, now=now, actor=actor)
    try:
        advance(session, run_id, now=now)
    except RecordUnreadable as error:
        fail_run(session, run_id, str(error), now=now)
    return record


def step_to_begin(session: Session, one: Try) -> StepRecord | None:
    """Return the record of a step that begins a job in this transaction; None if it was stopped before it began one.

    Whoever cancels the run waits, and then finds the job. Raises RunUnknown.
    """
    _locked_run(session, one.run_id)
    record = session.get_one(StepRecord, (one.run_id, one.key))
    return None if record.is_stopping and record.job_id is None else record


def cancel_job_of_step(session: Session, job_id: str, *, now: datetime, actor: str) -> None:
    """Ask for the cancellation of a job, unless it has ended or was removed."""
    with suppress(JobUnknown, IllegalStep):
        ask_to_cancel(session, job_id, now=now, actor=actor)


@dataclass(frozen=True, slots=True)
class StepsBefore:
    """The steps of a run before a change: their records and what these say."""

    records: Mapping[str, StepRecord]
    steps: Mapping[str, StepRun]


def advance(
    session: Session,
    run_id: str,
    *,
    now: datetime,
    ended: tuple[Try, TryOutcome] | None = None,
    cluster: str = "",
) -> None:
    """Record how a try ended, decide what follows, and record that. `cluster`: where jobs run; its free quota decides
    whether the branches of a parallel step run together.

    Calling it again changes nothing, so it may be called after any crash. Raises RunUnknown, RecordUnreadable.
    """
    record = _locked_run(session, run_id)
    if record.state in ENDED_RUNS:
        return
    if record.state == RunState.PENDING and not _may_begin(session, record):
        return
    records = {one.key: one for one in steps_of(session, run_id)}
    run = _snapshot(record, records)
    before = StepsBefore(records, run.steps)
    if ended is not None and run.of(ended[0].key).attempt == ended[0].attempt:
        run = after_try(run, ended[0].key, ended[1])
    if any(one.step_type is StepType.PARALLEL and not run.of(one.name).has_ended for one in run.graph.pipeline.steps):
        run = replace(run, room=gpu_room(session, cluster, get_pipeline(session, record.pipeline_id).tenant_id))
    run, decisions = settled(run)
    if record.state == RunState.PENDING:
        record.state, record.started_at = RunState.RUNNING.value, now
    _write_steps(session, record, before, run, decisions, now)
    last = decisions[-1] if decisions else None
    if isinstance(last, EndRun):
        record.state, record.message, record.ended_at = last.state.value, bounded(last.message), now
    session.flush()


def fail_run(session: Session, run_id: str, why: str, *, now: datetime) -> None:
    """End a run that cannot go on, with the jobs of its steps. Raises RunUnknown."""
    record = _locked_run(session, run_id)
    if record.state in ENDED_RUNS:
        return
    record.state, record.message, record.ended_at = RunState.FAILED.value, bounded(why), now
    for step in steps_of(session, run_id):
        if step.state in ENDED_STEPS:
            continue
        if step.job_id is not None:
            cancel_job_of_step(session, step.job_id, now=now, actor="atoll")
        step.state, step.error, step.ended_at = StepState.FAILED.value, bounded(why), now
    session.flush()


def _may_begin(session: Session, record: RunRecord) -> bool:
    """Return whether a run may begin: with overlap other than allow, once every earlier run has ended."""
    overlap = record.document.get("overlap", OverlapPolicy.ALLOW)
    if overlap == OverlapPolicy.ALLOW or record.cancel_requested_at is not None:
        return True
    return all(one.number >= record.number for one in _active_runs(session, record.pipeline_id))


def snapshot_of(session: Session, record: RunRecord) -> RunSnapshot:
    """Return a run as the decision needs it."""
    return _snapshot(record, {one.key: one for one in steps_of(session, record.id)})


def _snapshot(record: RunRecord, records: Mapping[str, StepRecord]) -> RunSnapshot:
    graph = graph_in(record.document, f"the pipeline of run {record.number}")
    fresh = new_run(graph, record.id, record.inputs)
    steps = {key: _step_run(one) for key, one in records.items()}
    return replace(fresh, steps=steps, cancel_requested=record.cancel_requested_at is not None)


def _step_run(record: StepRecord) -> StepRun:
    return StepRun(
        StepState(record.state),
        record.attempt,
        record.output,
        record.error,
        SkipCause(record.skip_cause) if record.skip_cause is not None else None,
        record.is_stopping,
    )


def _write_steps(
    session: Session,
    run: RunRecord,
    before: StepsBefore,
    after: RunSnapshot,
    decisions: Sequence[Decision],
    now: datetime,
) -> None:
    pauses = {one.key: one.pause_seconds for one in decisions if isinstance(one, StartTry)}
    positions = {name: number for number, name in enumerate(after.graph.steps)}
    for key, step in after.steps.items():
        known = before.records.get(key)
        if known is not None and before.steps[key] == step and key not in pauses:
            continue
        record = known or StepRecord(
            run_id=run.id, key=key, position=positions[key.partition("[")[0]], job_id=step.output.get("job_id")
        )
        record.state, record.attempt, record.output = step.state.value, step.attempt, dict(step.output)
        record.error, record.is_stopping = bounded(step.error), step.is_stopping
        record.skip_cause = step.skip_cause.value if step.skip_cause is not None else None
        if key in pauses:
            record.job_id, record.not_before = None, now + timedelta(seconds=pauses[key])
        if step.state is StepState.RUNNING and record.started_at is None:
            record.started_at = now
        if step.state in ENDED_STEPS and record.ended_at is None:
            record.ended_at = now
        session.add(record)
    session.flush()


def _locked_run(session: Session, run_id: str) -> RunRecord:
    locked = select(RunRecord).where(RunRecord.id == run_id).with_for_update().execution_options(**AS_LOCKED)
    record = session.scalars(locked).one_or_none()
    if record is None:
        raise RunUnknown(run_id)
    return record


def remove_pipeline(session: Session, pipeline_id: str) -> None:
    """Remove a pipeline with its runs. Raises PipelineUnknown, PipelineDeployed, RunActive."""
    owner = _locked_pipeline(session, pipeline_id)
    deployed = select(DeploymentRecord.name).where(DeploymentRecord.pipeline_id == pipeline_id)
    if name := session.scalar(deployed):
        raise PipelineDeployed(owner.name, name)
    active = _active_runs(session, pipeline_id)
    if active:
        raise RunActive(owner.name, active[0].number)
    session.delete(owner)
