"""Queries and changes of the ledger of GPU time, of budgets, and of final costs.

Each function is the work of one transaction. What to write is decided in atoll.jobs.costs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from pydantic import ValidationError
from sqlalchemy import ColumnElement, Row, select
from sqlalchemy.orm import Session

from atoll.jobs.costs.estimates import JobKind
from atoll.jobs.costs.feedback import LESSONS_MAX, estimate_error, learned_seconds
from atoll.jobs.costs.prices import MICROS
from atoll.jobs.costs.spans import (
    HELD,
    NOBODY,
    GpuAccount,
    GpuFact,
    GpuSpan,
    OpenSpan,
    SpanChanges,
    TimeUse,
    advance,
    whole_seconds,
)
from atoll.jobs.costs.spending import BudgetDecision, decide_budget, is_spent
from atoll.jobs.costs.usage import UsageSum, sum_usage
from atoll.jobs.policy import JobIntent
from atoll.jobs.states import ENDED, JobState
from atoll.jobs.words import BudgetAction
from jobs.errors import BudgetSpent, RecordUnreadable
from jobs.records import EstimateErrorRecord, GpuSpanRecord, JobRecord, UsageClockRecord
from jobs.store import ask_to_cancel, ask_to_pause, get_job, note_budget, resume_job

FINALS_MAX: Final = 200
"""Ended jobs whose cost is settled in one transaction."""
SPAN_COLUMNS: Final = tuple(GpuSpanRecord.__table__.columns)
"""All there is of a span: thousands are read at every look, and few of them change."""
BUDGET_ACTOR: Final = "the job's budget"


def observe_gpus(
    session: Session,
    cluster_id: str,
    facts: Mapping[str, GpuFact],
    now: datetime,
    *,
    tenant_of: Callable[[str], str],
    gap_seconds: float,
) -> None:
    """Record what is seen of every GPU. `tenant_of`: tenant of a namespace, empty for none."""
    now = whole_seconds(now)
    clock = session.scalars(
        select(UsageClockRecord).where(UsageClockRecord.cluster_id == cluster_id).with_for_update()
    ).one_or_none()
    mine = (GpuSpanRecord.cluster_id == cluster_id, GpuSpanRecord.ended_at.is_(None))
    rows = session.execute(select(*SPAN_COLUMNS).where(*mine))
    spans = {row.gpu: OpenSpan(fact_of(row), row.started_at) for row in rows}
    known = _resolved(session, facts, tenant_of)
    seen = clock.seen_at if clock is not None else None
    changes = advance(spans, known, seen=seen, now=now, gap_seconds=gap_seconds)
    _write(session, cluster_id, changes, gone=spans.keys() - known.keys() if _passes(seen, now) else set())
    if clock is None:
        session.add(UsageClockRecord(cluster_id=cluster_id, seen_at=now))
    elif now > clock.seen_at:
        clock.seen_at = now
    session.flush()


def _passes(seen: datetime | None, now: datetime) -> bool:
    return seen is None or now > seen


def _resolved(session: Session, facts: Mapping[str, GpuFact], tenant_of: Callable[[str], str]) -> dict[str, GpuFact]:
    """Return the facts with the accounts of their jobs. A pod may carry any label: it counts as a job's only in the
    namespace of that job, else its namespace says whose it is."""
    ids = {fact.account.job_id for fact in facts.values()} - {""}
    owners = select(JobRecord.id, JobRecord.namespace, JobRecord.tenant_id, JobRecord.project_id, JobRecord.created_by)
    jobs = {job.id: job for one in _chunks(sorted(ids)) for job in session.execute(owners.where(JobRecord.id.in_(one)))}

    def resolved(fact: GpuFact) -> GpuFact:
        held = fact.account
        if held == NOBODY:
            return fact
        job = jobs.get(held.job_id)
        if job is None or job.namespace != held.namespace:
            return replace(fact, account=replace(held, tenant=tenant_of(held.namespace), job_id=""))
        account = replace(held, tenant=job.tenant_id, project=job.project_id or "", user=job.created_by)
        return replace(fact, account=account)

    return {gpu: resolved(fact) for gpu, fact in facts.items()}


def _chunks(ids: Sequence[str], size: int = 500) -> Iterator[Sequence[str]]:
    for start in range(0, len(ids), size):
        yield ids[start : start + size]


def _write(session: Session, cluster_id: str, changes: SpanChanges, *, gone: Iterable[str]) -> None:
    """Close the open rows that end, or drop those of no length; then add the others."""
    ended = {(span.fact.gpu, span.fact.use, span.start): span for span in changes.ended}
    mine = select(GpuSpanRecord).where(GpuSpanRecord.cluster_id == cluster_id, GpuSpanRecord.ended_at.is_(None))
    touched = sorted({*(one.fact.gpu for one in changes.begun), *gone})
    for row in [row for one in _chunks(touched) for row in session.scalars(mine.where(GpuSpanRecord.gpu.in_(one)))]:
        span = ended.pop((row.gpu, TimeUse(row.use), row.started_at), None)
        if span is None:
            session.delete(row)
        else:
            row.ended_at = span.end
    session.flush()
    for span in ended.values():
        session.add(_row(cluster_id, span.fact, span.start, span.end))
    for one in changes.begun:
        session.add(_row(cluster_id, one.fact, one.started, None))
    session.flush()


def _row(cluster_id: str, fact: GpuFact, start: datetime, end: datetime | None) -> GpuSpanRecord:
    account = fact.account
    return GpuSpanRecord(
        cluster_id=cluster_id,
        gpu=fact.gpu,
        node=fact.node,
        model=fact.model,
        use=fact.use.value,
        tenant=account.tenant,
        project=account.project,
        user=account.user,
        namespace=account.namespace,
        job_id=account.job_id,
        pod_uid=account.pod_uid,
        share_ppm=fact.share_ppm,
        price_micros=fact.price_micros,
        held_since=fact.held_since,
        started_at=start,
        ended_at=end,
    )


def fact_of(row: GpuSpanRecord | Row[Any]) -> GpuFact:
    """Return what a row says of its GPU, a whole one or its SPAN_COLUMNS."""
    account = GpuAccount(row.tenant, row.project, row.user, row.namespace, row.job_id, row.pod_uid)
    use = TimeUse(row.use)
    return GpuFact(row.gpu, row.node, row.model, use, account, row.share_ppm, row.price_micros, row.held_since)


@dataclass(frozen=True, slots=True)
class UsageFilter:
    """Whose GPU time to read. `scopes`: what the caller may see, as (tenant, project), project None for all projects;
    None means everything, free time too."""

    cluster_id: str
    scopes: Sequence[tuple[str, str | None]] | None = None
    job_id: str = ""


def spans_between(session: Session, wanted: UsageFilter, start: datetime, end: datetime) -> list[GpuSpan]:
    """Return the spans that overlap a time; what goes on ends at the last look."""
    seen = session.scalar(select(UsageClockRecord.seen_at).where(UsageClockRecord.cluster_id == wanted.cluster_id))
    if seen is None:
        return []
    where: list[ColumnElement[bool]] = [
        GpuSpanRecord.cluster_id == wanted.cluster_id,
        GpuSpanRecord.started_at < end,
        GpuSpanRecord.ended_at.is_(None) | (GpuSpanRecord.ended_at > start),
    ]
    if wanted.job_id:
        where.append(GpuSpanRecord.job_id == wanted.job_id)
    if wanted.scopes is not None:
        theirs: ColumnElement[bool] = GpuSpanRecord.id.is_(None)
        for tenant, project in wanted.scopes:
            one = GpuSpanRecord.tenant == tenant
            theirs = theirs | (one if project is None else one & (GpuSpanRecord.project == project))
        where.append(theirs)
    rows = session.execute(select(*SPAN_COLUMNS).where(*where))
    return [GpuSpan(fact_of(row), row.started_at, row.ended_at or max(seen, row.started_at)) for row in rows]


def usage_of_job(session: Session, cluster_id: str, job_id: str) -> UsageSum:
    """Return what a job used and cost so far, from its first attempt on."""
    mine = GpuSpanRecord.job_id == job_id
    first = session.scalar(select(GpuSpanRecord.started_at).where(mine).order_by(GpuSpanRecord.started_at).limit(1))
    seen = session.scalar(select(UsageClockRecord.seen_at).where(UsageClockRecord.cluster_id == cluster_id))
    if first is None or seen is None:
        return UsageSum()
    spans = spans_between(session, UsageFilter(cluster_id, job_id=job_id), first, seen)
    return sum_usage(spans, first, seen, ()).get((), UsageSum())


# Budgets and final costs


def budgeted_ids(session: Session, cluster_id: str) -> Sequence[str]:
    """Return the active jobs that hold GPUs now and have a budget."""
    holding = select(GpuSpanRecord.job_id).where(
        GpuSpanRecord.cluster_id == cluster_id, GpuSpanRecord.ended_at.is_(None), GpuSpanRecord.job_id != ""
    )
    ended = [state.value for state in ENDED]
    cap = JobRecord.document["intent"]["budget_cap"].as_float()
    where = (JobRecord.id.in_(holding), JobRecord.state.not_in(ended), cap.is_not(None))
    return session.scalars(select(JobRecord.id).where(*where)).all()


def spend(session: Session, job_id: str, now: datetime) -> BudgetDecision | None:
    """Act on a spent budget: record a warning, or ask to pause or cancel the job. Return what was decided."""
    job = session.get(JobRecord, job_id)
    if job is None or JobState(job.state) in ENDED:
        return None
    cost = float(usage_of_job(session, job.cluster_id, job_id).cost_micros)
    decided = decide_budget(intent_of(job), cost, mark=job.budget_mark)
    if decided is None:
        return None
    note_budget(session, job_id, now=now, message=decided.message, mark=decided.mark)
    if decided.action is BudgetAction.PAUSE:
        ask_to_pause(session, job_id, now=now, actor=BUDGET_ACTOR, message=decided.message)
    elif decided.action is BudgetAction.CANCEL:
        ask_to_cancel(session, job_id, now=now, actor=BUDGET_ACTOR)
    return decided


def resume_within(session: Session, job_id: str, now: datetime, *, actor: str) -> JobRecord:
    """Resume a paused job, unless its budget is spent. Raises JobUnknown, NotPaused, BudgetSpent."""
    job = get_job(session, job_id)
    intent = intent_of(job)
    is_limited = intent.budget_cap is not None and intent.budget_action is not BudgetAction.WARN
    if is_limited and is_spent(intent, float(usage_of_job(session, job.cluster_id, job_id).cost_micros)):
        raise BudgetSpent(job.name, str(intent.budget_cap))
    return resume_job(session, job_id, now=now, actor=actor)


def settle_costs(session: Session, cluster_id: str, now: datetime) -> int:
    """Record what ended jobs have cost, once no GPU is held for them, and how far their estimates were off. Return how
    many were recorded."""
    holding = select(GpuSpanRecord.job_id).where(
        GpuSpanRecord.cluster_id == cluster_id,
        GpuSpanRecord.ended_at.is_(None),
        GpuSpanRecord.use.in_([use.value for use in HELD]),
    )
    where = (
        JobRecord.cluster_id == cluster_id,
        JobRecord.state.in_([state.value for state in ENDED]),
        JobRecord.actual_micros.is_(None),
        JobRecord.id.not_in(holding),
    )
    found = session.scalars(
        select(JobRecord).where(*where).order_by(JobRecord.ended_at, JobRecord.id).limit(FINALS_MAX)
    )
    jobs = found.all()
    for job in jobs:
        job.actual_micros = round(usage_of_job(session, cluster_id, job.id).cost_micros)
        _learn(session, job, now)
    session.flush()
    return len(jobs)


def _learn(session: Session, job: JobRecord, now: datetime) -> None:
    assert job.actual_micros is not None
    off = estimate_error(job.estimated_micros, job.actual_micros)
    is_whole = job.state == JobState.SUCCEEDED and job.started_at is not None and job.ended_at is not None
    if off is None or not is_whole or job.estimate is None:
        return
    assert job.started_at is not None
    assert job.ended_at is not None
    session.merge(
        EstimateErrorRecord(
            job_id=job.id,
            cluster_id=job.cluster_id,
            job_type=job.job_type,
            gpu_type=job.estimate["gpu_type"],
            gpu_count=job.estimate["gpu_count"],
            seconds=int((job.ended_at - job.started_at).total_seconds()),
            estimated_micros=job.estimated_micros,
            actual_micros=job.actual_micros,
            error_ppm=round(off.error * MICROS),
            is_far=off.is_far,
            recorded_at=now,
        )
    )


def learned(session: Session, cluster_id: str, kind: JobKind) -> int | None:
    """Return how long a job of a kind runs, from earlier ones; None for too few."""
    row = EstimateErrorRecord
    where = (
        row.cluster_id == cluster_id,
        row.job_type == kind.job_type,
        row.gpu_type == kind.gpu_type,
        row.gpu_count == kind.gpu_count,
    )
    newest = select(row.seconds).where(*where).order_by(row.recorded_at.desc(), row.job_id).limit(LESSONS_MAX)
    return learned_seconds(session.scalars(newest).all())


def intent_of(job: JobRecord) -> JobIntent:
    """Return the intent of a recorded job. Raises RecordUnreadable."""
    try:
        return JobIntent.model_validate(job.document.get("intent") or {})
    except ValidationError as error:
        raise RecordUnreadable(f"intent of job {job.name}", error) from error
