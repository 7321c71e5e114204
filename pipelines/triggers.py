"""Queries and changes of triggers, each the work of one transaction.

Every run that a trigger begins has an idempotency key: the trigger with its instant, event, delivery or crossing, or
the run that ended. So no instant begins two runs, whoever looks, and however often.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any, Final
from uuid import uuid4

import structlog
from pydantic import ValidationError
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from atoll.jobs.retries import bounded
from atoll.pipelines.events import OWN, Event, topics_of
from atoll.pipelines.expressions import ExpressionFailed, ExpressionInvalid
from atoll.pipelines.thresholds import Threshold
from atoll.pipelines.triggers import PipelineTrigger, TriggerType
from atoll.pipelines.words import ENDED_RUNS, RunState
from jobs.errors import RecordUnreadable
from jobs.problems import ApiRefusal
from pipelines.errors import KeyTaken, RunActive, TriggerUnknown
from pipelines.histories import forget_mark, metric_of, new_entries
from pipelines.inputs import checked_inputs
from pipelines.records import PipelineRecord, RunRecord, TriggerRecord, graph_in
from pipelines.store import PAGE_SIZE_MAX, PipelinePage, RunRequest, create_run, get_pipeline

log = structlog.get_logger(__name__)

FIRED_TOGETHER_MAX: Final = 50
"""Triggers that one transaction deals with, so that a thousand on one minute do not block everybody else."""
ENDS_SLACK: Final = timedelta(minutes=1)
"""How much earlier than the last look an end may have been recorded: transactions end out of order."""
KEY_LENGTH_MAX: Final = 512
ENABLED_AT: Final = "enabled_at"
SEEN_MAX: Final = 100
"""Events that a threshold knows again if they come a second time."""


def create_trigger(
    session: Session, pipeline_id: str, trigger: PipelineTrigger, *, secret: str | None, actor: str, now: datetime
) -> TriggerRecord:
    """Record a trigger. Raises PipelineUnknown."""
    get_pipeline(session, pipeline_id)
    record = TriggerRecord(
        id=str(uuid4()),
        pipeline_id=pipeline_id,
        created_by=actor,
        trigger_type=trigger.trigger_type.value,
        topic=trigger.event_topic or trigger.depends_on_pipeline_id,
        document=trigger.model_dump(mode="json", exclude_unset=True),
        secret=secret,
        memory={},
        enabled=trigger.enabled,
        looked_at=now,
        next_run=trigger.next_instant(now) if trigger.enabled else None,
        last_message="",
        created_at=now,
    )
    session.add(record)
    session.flush()
    return record


def get_trigger(session: Session, trigger_id: str) -> TriggerRecord:
    """Return a trigger. Raises TriggerUnknown."""
    record = session.get(TriggerRecord, trigger_id)
    if record is None:
        raise TriggerUnknown(trigger_id)
    return record


def list_triggers(session: Session, pipeline_id: str, *, page: int, page_size: int) -> PipelinePage:
    """Return a page of the triggers of a pipeline, oldest first."""
    where = TriggerRecord.pipeline_id == pipeline_id
    total = session.scalar(select(func.count()).select_from(TriggerRecord).where(where)) or 0
    size = min(page_size, PAGE_SIZE_MAX)
    oldest = select(TriggerRecord).where(where).order_by(TriggerRecord.created_at, TriggerRecord.id)
    return PipelinePage(session.scalars(oldest.offset((page - 1) * size).limit(size)).all(), total)


def enable_trigger(session: Session, trigger_id: str, *, enabled: bool, now: datetime) -> TriggerRecord:
    """Enable or disable a trigger; what passed while it was disabled begins no run. Raises TriggerUnknown."""
    record = get_trigger(session, trigger_id)
    if enabled and not record.enabled:
        record.looked_at, record.next_run = now, trigger_of(record).next_instant(now)
        crossings = {key: value for key, value in record.memory.items() if key == "crossings"}
        record.memory = crossings | {ENABLED_AT: now.isoformat()}
    record.enabled = enabled
    session.flush()
    return record


def remove_trigger(session: Session, trigger_id: str) -> None:
    """Remove a trigger. Raises TriggerUnknown."""
    session.delete(get_trigger(session, trigger_id))


def trigger_of(record: TriggerRecord) -> PipelineTrigger:
    """Return the trigger of a record. Raises RecordUnreadable."""
    try:
        return PipelineTrigger.model_validate(record.document)
    except ValidationError as error:
        raise RecordUnreadable("the trigger", error) from error


def _live_trigger(record: TriggerRecord) -> PipelineTrigger | None:
    """Return the trigger of a record; one that can no longer be read is disabled, and says why."""
    try:
        return trigger_of(record)
    except RecordUnreadable as error:
        record.enabled, record.last_message = False, bounded(f"disabled: {error}")
        log.warning("Disabled a trigger", trigger=record.id, err=str(error))
        return None


# Firing


def fire_due(session: Session, now: datetime) -> int:
    """Begin the runs of cron triggers that are due; return how many triggers were dealt with."""
    where = (TriggerRecord.enabled, TriggerRecord.next_run.is_not(None), TriggerRecord.next_run <= now)
    due = select(TriggerRecord).where(*where).order_by(TriggerRecord.next_run, TriggerRecord.id)
    records = session.scalars(due.limit(FIRED_TOGETHER_MAX).with_for_update()).all()
    for record in sorted(records, key=lambda one: one.pipeline_id):
        trigger = _live_trigger(record)
        if trigger is None:
            continue
        for instant in trigger.due(record.looked_at, now):
            if trigger.may_begin(instant):
                _begin(session, record, f"cron of {instant.isoformat()}", instant.isoformat(), trigger.inputs, now)
        record.looked_at, record.next_run = now, trigger.next_instant(now)
    session.flush()
    return len(records)


def fire_ends(session: Session, now: datetime) -> None:
    """Begin the runs of dependency triggers whose other pipeline has ended a run."""
    where = (TriggerRecord.enabled, TriggerRecord.trigger_type == TriggerType.DEPENDENCY.value)
    found = select(TriggerRecord).where(*where).order_by(TriggerRecord.pipeline_id, TriggerRecord.id)
    for record in session.scalars(found.with_for_update()).all():
        trigger = _live_trigger(record)
        if trigger is None:
            continue
        enabled_at = datetime.fromisoformat(record.memory.get(ENABLED_AT, record.created_at.isoformat()))
        since = max(enabled_at, record.looked_at - ENDS_SLACK)
        ended = (
            RunRecord.pipeline_id == record.topic,
            RunRecord.state.in_([state.value for state in ENDED_RUNS]),
            RunRecord.ended_at >= since,
        )
        for run in session.scalars(select(RunRecord).where(*ended).order_by(RunRecord.ended_at)).all():
            if trigger.follows(RunState(run.state)) and trigger.may_begin(run.ended_at or now):
                _begin(session, record, f"end of run {run.number} of another pipeline", run.id, trigger.inputs, now)
        record.looked_at = now
    session.flush()


def fire_event(session: Session, tenants: Sequence[str] | None, event: Event, now: datetime) -> list[str]:
    """Begin the runs that an event begins in some tenants, None for all; return their ids."""
    where = [TriggerRecord.enabled, TriggerRecord.topic.in_(topics_of(event["event.type"]))]
    if tenants is not None:
        where.append(PipelineRecord.tenant_id.in_(tenants))
    # in the order of pipelines, as their records are locked: two events at once do not wait for each other
    found = select(TriggerRecord).join(PipelineRecord).where(*where)
    begun: list[str] = []
    for record in session.scalars(found.order_by(TriggerRecord.pipeline_id, TriggerRecord.id)).all():
        begun += _take_event(session, record, event, now)
    session.flush()
    return begun


def fire_jobs(session: Session, after: int, now: datetime) -> int | None:
    """Begin the runs of event triggers whose jobs entered a state; return where to go on, None if there are no more.

    A job of the trigger's own pipeline begins none: its failure would begin the next one for ever.
    """
    where = (TriggerRecord.enabled, TriggerRecord.topic.startswith(OWN, autoescape=True))
    waiting = select(TriggerRecord, PipelineRecord).join(PipelineRecord).where(*where)
    found = session.execute(waiting.order_by(TriggerRecord.pipeline_id, TriggerRecord.id)).all()
    if not found:
        forget_mark(session)
        return None
    entries, following = new_entries(session, after, now)
    for record, owner in found:
        for entry in entries:
            is_known = entry.job.tenant_id == owner.tenant_id and owner.project_id in (None, entry.job.project_id)
            if is_known and entry.at >= record.looked_at and entry.job.document.get("source_id") != owner.id:
                _take_event(session, record, entry.event, now)
    session.flush()
    return following


def _take_event(session: Session, record: TriggerRecord, event: Event, now: datetime) -> list[str]:
    """Begin the run that an event begins by one trigger; return its id."""
    trigger = _live_trigger(record)
    if trigger is None or not (trigger.takes(event) and trigger.may_begin(now)):
        return []
    key = f"{event['event.source']} {event['event.id']}"
    try:
        if trigger.threshold is not None and not _crosses(session, record, trigger.threshold, event, key):
            return []
        inputs = trigger.inputs_of(event)
    except (ExpressionFailed, ExpressionInvalid) as error:
        record.last_message = bounded(str(error))
        return []
    return _begin(session, record, f"event {event['event.type']}", key, inputs, now)


def _crosses(session: Session, record: TriggerRecord, threshold: Threshold, event: Event, key: str) -> bool:
    """Return whether the number in an event crosses the limit; an event that comes again changes nothing.

    Raises ExpressionFailed.
    """
    session.refresh(record, with_for_update=True)
    seen, digest = record.memory.get("seen", []), sha256(key.encode()).hexdigest()[:16]
    if digest in seen:
        return False
    fires, is_armed = threshold.judged(threshold.number_of(event), is_armed=record.memory.get("armed", True))
    record.memory = {"armed": is_armed, "seen": [*seen, digest][-SEEN_MAX:]}
    return fires


def fire_metrics(session: Session, now: datetime) -> None:
    """Begin the runs of thresholds whose metric of the service crosses its limit."""
    where = (
        TriggerRecord.enabled,
        TriggerRecord.trigger_type == TriggerType.THRESHOLD.value,
        TriggerRecord.topic.is_(None),
    )
    found = select(TriggerRecord).where(*where).order_by(TriggerRecord.pipeline_id, TriggerRecord.id)
    for record in session.scalars(found.with_for_update()).all():
        trigger, memory = _live_trigger(record), record.memory
        threshold = trigger.threshold if trigger is not None else None
        if trigger is None or threshold is None or threshold.metric is None or not trigger.may_begin(now):
            continue
        number = metric_of(session, threshold.metric, get_pipeline(session, record.pipeline_id), now)
        fires, is_armed = threshold.judged(number, is_armed=memory.get("armed", True))
        crossings = memory.get("crossings", 0) + fires
        record.memory = {"armed": is_armed, "crossings": crossings}
        if fires:
            told = {"metric": threshold.metric.value, "value": number}
            event = {f"event.{name}": "" for name in ("id", "source", "type", "subject")} | {"event.data": told}
            _begin_by_metric(session, record, event, f"crossing {crossings}", now)
    session.flush()


def _begin_by_metric(session: Session, record: TriggerRecord, event: Event, key: str, now: datetime) -> None:
    told = event["event.data"]
    try:
        inputs = trigger_of(record).inputs_of(event)
    except (ExpressionFailed, ExpressionInvalid) as error:
        record.last_message = bounded(str(error))
        return
    _begin(session, record, f"{told['metric']} is {told['value']:g}", key, inputs, now)


def fire_webhook(session: Session, trigger_id: str, delivery: str, now: datetime) -> list[str]:
    """Begin the run of a webhook whose signature holds; a repeated delivery begins none. Raises TriggerUnknown."""
    record = get_trigger(session, trigger_id)
    trigger = trigger_of(record)
    if not record.enabled or not trigger.may_begin(now):
        return []
    return _begin(session, record, "webhook", delivery, trigger.inputs, now)


def _key_of(record: TriggerRecord, key: str) -> str:
    """Return an idempotency key that fits: no two events have the same, however long their ids are."""
    found = f"trigger-{record.id}-{key}"
    return found if len(found) <= KEY_LENGTH_MAX else f"trigger-{record.id}-{sha256(key.encode()).hexdigest()}"


def _begin(
    session: Session, record: TriggerRecord, cause: str, key: str, inputs: Mapping[str, Any], now: datetime
) -> list[str]:
    """Begin a run, unless its key has begun one; return its id. What prevents it is kept as the trigger's message."""
    owner = get_pipeline(session, record.pipeline_id)
    try:
        given = checked_inputs(graph_in(owner.document, f"pipeline {owner.name}").pipeline, inputs)
        asked = RunRequest(given, record.created_by, cause, _key_of(record, key))
        with session.begin_nested():
            run, is_new = create_run(session, record.pipeline_id, asked, now)
    except (RunActive, KeyTaken, RecordUnreadable) as error:
        record.last_message = bounded(f"no run for {cause}: {error}")
        return []
    except ApiRefusal as refusal:
        record.last_message = bounded(f"no run for {cause}: {refusal.problem.detail}")
        return []
    if is_new:
        record.last_run, record.last_message = now, f"began run {run.number}: {cause}"
        log.info("Began a run", pipeline=record.pipeline_id, run=run.id, trigger=record.id, cause=cause)
    return [run.id] if is_new else []
