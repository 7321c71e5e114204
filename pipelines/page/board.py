"""What the page lists: runs that have not ended, and the last that have. A caller sees what the API lists for them."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Final

from pydantic import BaseModel, Field
from sqlalchemy import ColumnElement, Row, Select, func, select
from sqlalchemy.orm import Session

from atoll.jobs.permissions import JobCaller, seen_scopes
from atoll.pipelines.words import RunState
from pipelines.records import PipelineRecord, RunRecord, StepRecord
from pipelines.store import ACTIVE, within

ACTIVE_MAX: Final = 200
ENDED_MAX: Final = 100
MESSAGE_LENGTH: Final = 300


class RunLine(BaseModel):
    """One run in the list."""

    id: str
    pipeline_id: str
    pipeline: str
    tenant: str
    number: int
    status: RunState
    message: str
    cause: str
    created_at: datetime
    ended_at: datetime | None
    mark: Annotated[str, Field(description="differs after any change of the run or one of its steps")]


class RunBoard(BaseModel):
    """The whole answer: runs, the newest first. `left_out`: active runs beyond ACTIVE_MAX."""

    now: datetime
    active: list[RunLine]
    ended: list[RunLine]
    left_out: int


def run_mark(session: Session, caller: JobCaller) -> object:
    """Return what differs after any change of a run that is listed."""
    return _rows(session, caller)


def read_runs(session: Session, caller: JobCaller, now: datetime) -> RunBoard:
    """Return what a caller sees."""
    active, ended, steps = _rows(session, caller)
    marks = {one.run_id: ".".join(map(str, one[1:])) for one in steps}
    count = len(active)
    if count > ACTIVE_MAX:
        where = (*_seen(caller), RunRecord.state.in_(ACTIVE))
        count = session.scalar(select(func.count()).select_from(RunRecord).join(PipelineRecord).where(*where)) or 0
    return RunBoard(
        now=now,
        active=[_line(one, marks.get(one.id, "")) for one in active[:ACTIVE_MAX]],
        ended=[_line(one, "") for one in ended],
        left_out=max(0, count - ACTIVE_MAX),
    )


Found = Row[*tuple[Any, ...]]


def _rows(session: Session, caller: JobCaller) -> tuple[Sequence[Found], ...]:
    """Return active runs, ended ones, and what differs after any change of the active ones' steps."""
    seen = _seen(caller)
    newest = _columns().where(*seen, RunRecord.state.in_(ACTIVE)).order_by(RunRecord.created_at.desc(), RunRecord.id)
    active = session.execute(newest.limit(ACTIVE_MAX + 1)).all()
    last = _columns().where(*seen, RunRecord.ended_at.is_not(None)).order_by(RunRecord.ended_at.desc(), RunRecord.id)
    steps = (
        select(
            StepRecord.run_id,
            func.sum(StepRecord.attempt),
            func.count(StepRecord.job_id),
            func.count(StepRecord.started_at),
            func.count(StepRecord.ended_at),
        )
        .where(StepRecord.run_id.in_([one.id for one in active]))
        .group_by(StepRecord.run_id)
        .order_by(StepRecord.run_id)
    )
    return active, session.execute(last.limit(ENDED_MAX)).all(), session.execute(steps).all()


def _columns() -> Select[*tuple[Any, ...]]:
    run, owner = RunRecord, PipelineRecord
    return select(
        run.id, run.pipeline_id, owner.name, owner.tenant_id, run.number, run.state, run.message, run.cause,
        run.created_at, run.ended_at, run.version,
    ).join(owner)  # fmt: skip


def _seen(caller: JobCaller) -> Sequence[ColumnElement[bool]]:
    scopes = seen_scopes(caller)
    return () if scopes is None else (within(PipelineRecord, scopes),)


def _line(row: Found, mark: str) -> RunLine:
    return RunLine(
        id=row.id,
        pipeline_id=row.pipeline_id,
        pipeline=row.name,
        tenant=row.tenant_id,
        number=row.number,
        status=RunState(row.state),
        message=row.message[:MESSAGE_LENGTH],
        cause=row.cause,
        created_at=row.created_at,
        ended_at=row.ended_at,
        mark=f"{row.version} {mark}",
    )
