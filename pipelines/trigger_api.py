"""Routes of triggers, and the two ways by which others fire them: events and signed webhooks."""

import json
from datetime import datetime
from typing import Annotated, Any, Final
from uuid import UUID

import structlog
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, Field, ValidationError

from atoll.jobs.permissions import JobPermission
from atoll.pipelines.events import OWN, Event, events_of_notification, is_notification
from atoll.pipelines.expressions import is_json
from atoll.pipelines.triggers import PipelineTrigger, TriggerType
from atoll.pipelines.wording import faults_of
from jobs.api_parts import Caller, Parts
from jobs.asking import PageNumber, PageSize
from jobs.problems import ApiRefusal, documented, invalid, mistaken, problem
from pipelines.api import PIPELINE, AskedPipeline, OnePipeline
from pipelines.errors import PipelineUnknown, TriggerUnknown
from pipelines.records import TriggerRecord
from pipelines.signing import new_secret, verified
from pipelines.triggers import (
    create_trigger,
    enable_trigger,
    fire_event,
    fire_webhook,
    get_trigger,
    list_triggers,
    remove_trigger,
)

log = structlog.get_logger(__name__)

TRIGGERS: Final = PIPELINE + "/triggers"
TRIGGER: Final = TRIGGERS + "/{trigger_id}"
HOOK: Final = "/api/hooks/{trigger_id}"
EVENTS: Final = "/api/events"
STRUCTURED: Final = "application/cloudevents+json"
ATTRIBUTES: Final = ("id", "source", "type", "subject")
ATTRIBUTE_LENGTH_MAX: Final = 256


class TriggerView(BaseModel):
    """A trigger."""

    id: str
    trigger_type: TriggerType
    enabled: bool
    next_run: datetime | None
    last_run: datetime | None
    last_message: Annotated[str, Field(description="what it did last, or why it began no run")]
    created_by: str
    trigger: dict[str, Any]
    url: Annotated[str | None, Field(description="where a webhook is delivered")] = None
    webhook_secret: Annotated[str | None, Field(description="secret to sign with; shown once, at creation")] = None


class TriggerListView(BaseModel):
    """One page of the triggers of a pipeline, oldest first."""

    items: list[TriggerView]
    page: int
    page_size: int
    total: Annotated[int, Field(description="count over all pages")]


class TriggerChange(BaseModel):
    """What may be changed of a trigger."""

    enabled: bool


class BegunView(BaseModel):
    """The runs that began."""

    executions: list[str]


def add_triggers(app: FastAPI) -> None:
    """Add the routes."""
    schema = {"requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}}
    app.post(TRIGGERS, status_code=201, responses=documented(400, 401, 403, 404, 422, 429, 503), openapi_extra=schema)(
        create
    )
    app.get(TRIGGERS, responses=documented(401, 404, 422, 429, 503))(list_all_triggers)
    app.patch(TRIGGER, responses=documented(401, 403, 404, 422, 429, 503))(change)
    app.delete(TRIGGER, status_code=204, responses=documented(401, 403, 404, 422, 429, 503))(delete)
    app.post(HOOK, status_code=202, responses=documented(401, 422, 429, 503), openapi_extra=schema)(deliver)
    app.post(EVENTS, status_code=202, responses=documented(400, 401, 422, 429, 503), openapi_extra=schema)(receive)


async def create(asked: OnePipeline, request: Request, parts: Parts) -> TriggerView:
    """Record a trigger. The secret of a webhook is in this response alone."""
    await asked.allowed(JobPermission.DELETE)
    trigger = _parsed(await request.body())
    if trigger.depends_on_pipeline_id is not None:
        await _check_other(asked, trigger.depends_on_pipeline_id)
    secret = new_secret() if trigger.trigger_type is TriggerType.WEBHOOK else None
    record = await parts.database.write(
        lambda session: create_trigger(
            session, asked.pipeline_id, trigger, secret=secret, actor=asked.caller.name, now=parts.now()
        )
    )
    return _view(record).model_copy(update={"webhook_secret": secret})


def _parsed(body: bytes) -> PipelineTrigger:
    try:
        return PipelineTrigger.model_validate(_json(body))
    except ValidationError as error:
        raise invalid(faults_of(error, PipelineTrigger)) from error


def _json(body: bytes) -> Any:  # noqa: ANN401 - a value of JSON's types
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiRefusal(problem(400, "unreadable", "The body cannot be read", "send JSON")) from error


async def _check_other(asked: AskedPipeline, pipeline_id: str) -> None:
    """Refuse a dependency on a pipeline that the caller may not see."""
    try:
        await AskedPipeline(asked.parts, asked.caller, pipeline_id).allowed(JobPermission.VIEW)
    except PipelineUnknown as error:
        raise mistaken("depends_on_pipeline_id", pipeline_id, "there is no such pipeline", "correct it") from error


async def list_all_triggers(asked: OnePipeline, page: PageNumber = 1, page_size: PageSize = 100) -> TriggerListView:
    """List the triggers of a pipeline, oldest first."""
    await asked.allowed(JobPermission.VIEW)
    found = await asked.parts.database.read(
        lambda session: list_triggers(session, asked.pipeline_id, page=page, page_size=page_size)
    )
    items = [_view(one) for one in found.records]
    return TriggerListView(items=items, page=page, page_size=page_size, total=found.total)


async def change(asked: OnePipeline, trigger_id: UUID, body: TriggerChange) -> TriggerView:
    """Enable or disable a trigger; what passes while it is disabled begins no run."""
    await _found(asked, trigger_id)
    now = asked.parts.now()
    return _view(
        await asked.parts.database.write(
            lambda session: enable_trigger(session, str(trigger_id), enabled=body.enabled, now=now)
        )
    )


async def delete(asked: OnePipeline, trigger_id: UUID) -> Response:
    """Delete a trigger."""
    await _found(asked, trigger_id)
    await asked.parts.database.write(lambda session: remove_trigger(session, str(trigger_id)))
    return Response(status_code=204)


async def _found(asked: AskedPipeline, trigger_id: UUID) -> None:
    """Check that the trigger belongs to the pipeline, and that the caller may change it."""
    await asked.allowed(JobPermission.DELETE)
    record = await asked.parts.database.read(lambda session: get_trigger(session, str(trigger_id)))
    if record.pipeline_id != asked.pipeline_id:
        raise TriggerUnknown(str(trigger_id))


async def deliver(trigger_id: UUID, request: Request, parts: Parts) -> BegunView:
    """Take a webhook: signed as Standard Webhooks has it, no token needed. A repeated delivery begins no second run."""
    body, now = await request.body(), parts.now()
    try:
        record = await parts.database.read(lambda session: get_trigger(session, str(trigger_id)))
    except TriggerUnknown:
        record = None
    secret = record.secret if record is not None else None
    delivery = verified(secret or new_secret(), request.headers, body, now_seconds=now.timestamp())
    if secret is None or delivery is None:
        detail = "the signature does not hold, it is too old, or there is no such webhook"
        raise ApiRefusal(problem(401, "unauthenticated", "Not authenticated", detail))
    begun = await parts.database.write(lambda session: fire_webhook(session, str(trigger_id), delivery, now))
    return BegunView(executions=begun)


async def receive(request: Request, parts: Parts, caller: Caller) -> BegunView:
    """Take a CloudEvent, structured or binary, or a notification of a bucket in the form of S3. Each fires triggers of
    tenants in which the caller may create jobs."""
    events, now = _events(request, await request.body()), parts.now()
    tenants = None if caller.is_operator else caller.tenants(JobPermission.CREATE)
    log.info("Received events", types=sorted({event["event.type"] for event in events})[:10], user=caller.name)
    begun: list[str] = []
    for event in events:  # each in a transaction of its own: what was sent again begins nothing twice
        begun += await parts.database.write(lambda session: fire_event(session, tenants, event, now))  # noqa: B023
    return BegunView(executions=begun)


def _events(request: Request, body: bytes) -> tuple[Event, ...]:
    """Return the names and values of each event in a request. Raises ApiRefusal."""
    content = _json(body) if body else None
    is_cloud_event = STRUCTURED in request.headers.get("Content-Type", "") or "ce-specversion" in request.headers
    if not is_cloud_event and is_notification(content):
        try:
            events = events_of_notification(content)
        except ValueError as error:
            raise mistaken("Records", "", str(error), "send what a bucket of S3 sends") from error
    else:
        events = (_cloud_event(request, content),)
    if not all(is_json(value) for event in events for value in event.values()):
        raise mistaken("data", "", "is too deep, or has NUL in it", "simplify it")
    return events


def _cloud_event(request: Request, content: Any) -> Event:  # noqa: ANN401 - a value of JSON's types
    media_type = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if media_type == STRUCTURED:
        given = content if isinstance(content, dict) else {}
        data = given.get("data")
    else:
        given = {name: request.headers.get(f"ce-{name}") for name in (*ATTRIBUTES, "specversion")}
        data = content
    if given.get("specversion") != "1.0":
        raise mistaken("specversion", given.get("specversion"), "must be 1.0", "send a CloudEvent")
    event: dict[str, Any] = {"event.data": data}
    for name in ATTRIBUTES:
        value = given.get(name) or ""
        if not isinstance(value, str) or len(value) > ATTRIBUTE_LENGTH_MAX or (not value and name != "subject"):
            raise mistaken(name, value, f"must be a text of at most {ATTRIBUTE_LENGTH_MAX} characters", "correct it")
        event[f"event.{name}"] = value
    if event["event.type"].startswith(OWN):
        raise mistaken("type", event["event.type"], f"{OWN} begins the service's own types", "use another one")
    return event


def _view(record: TriggerRecord) -> TriggerView:
    return TriggerView(
        id=record.id,
        trigger_type=TriggerType(record.trigger_type),
        enabled=record.enabled,
        next_run=record.next_run,
        last_run=record.last_run,
        last_message=record.last_message,
        created_by=record.created_by,
        trigger=record.document,
        url=HOOK.format(trigger_id=record.id) if record.secret is not None else None,
    )
