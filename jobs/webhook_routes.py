"""Routes of webhooks: create, list and delete them, and read what was delivered."""

from datetime import datetime
from typing import Annotated, Final
from uuid import UUID, uuid4

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from atoll.jobs.base import LabelKey, LabelValue
from atoll.jobs.permissions import AccessAnswer, JobCaller, JobOwnership, JobPermission, decide
from atoll.jobs.words import JobType
from atoll.ml.policy import MlPolicy
from jobs.api_parts import Caller, Cluster, Parts, check_cluster
from jobs.asking import PageNumber, PageSize
from jobs.errors import WebhookUnknown
from jobs.problems import ApiRefusal, documented, mistaken, problem
from jobs.records import DeliveryRecord, WebhookRecord
from jobs.webhook_sender import refuse_url
from jobs.webhook_store import (
    EVENT_NAMES,
    WEBHOOKS_MAX,
    add_webhook,
    get_webhook,
    list_deliveries,
    list_webhooks,
)

WEBHOOKS: Final = "/api/clusters/{cluster}/webhooks"
EventName = Annotated[str, Field(pattern=f"^({'|'.join(name.replace('.', '[.]') for name in EVENT_NAMES)})$")]


class WebhookFilters(BaseModel):
    """Which jobs a webhook is about; without a filter about all of its tenant."""

    model_config = ConfigDict(extra="forbid")

    job_type: Annotated[list[JobType], Field(max_length=len(JobType))] = []
    labels: Annotated[dict[LabelKey, LabelValue], Field(max_length=16, description="all must be on the job")] = {}


class NewWebhook(BaseModel):
    """A webhook to create."""

    model_config = ConfigDict(extra="forbid")

    url: Annotated[str, Field(min_length=1, max_length=1024, description="https, at a public host")]
    secret: Annotated[
        str,
        Field(min_length=16, max_length=256, description="signs deliveries; stored encrypted, never shown"),
    ]
    events: Annotated[list[EventName], Field(min_length=1, max_length=len(EVENT_NAMES))] = list(EVENT_NAMES)
    filters: WebhookFilters = WebhookFilters()
    tenant_id: Annotated[str | None, Field(max_length=49, description="the caller's only one by default")] = None


class WebhookView(BaseModel):
    """A webhook, without its secret."""

    id: str
    tenant_id: str
    url: str
    events: list[str]
    filters: WebhookFilters
    enabled: bool
    created_by: str
    created_at: datetime


class WebhookListView(BaseModel):
    """One page of webhooks, oldest first."""

    items: list[WebhookView]
    page: int
    page_size: int
    total: Annotated[int, Field(description="count over all pages")]


class DeliveryView(BaseModel):
    """One event that a webhook was told, or is still to be told."""

    id: Annotated[str, Field(description="as in the header Atoll-Delivery; a repetition has the same one")]
    job_id: str
    event: str
    created_at: datetime
    attempts: int
    status: Annotated[int | None, Field(description="HTTP status of the last answer")]
    told: Annotated[str, Field(description="why the last attempt failed")]
    next_at: Annotated[datetime | None, Field(description="when it is tried again; null if it is not")]
    delivered_at: datetime | None


class DeliveryListView(BaseModel):
    """One page of deliveries, newest first."""

    items: list[DeliveryView]
    page: int
    page_size: int
    total: Annotated[int, Field(description="count over all pages")]


def add_webhook_routes(app: FastAPI) -> None:
    """Add the routes to the application."""
    app.post(WEBHOOKS, status_code=201, responses=documented(400, 401, 403, 404, 409, 422, 429, 503))(create_webhook)
    app.get(WEBHOOKS, responses=documented(401, 404, 422, 429, 503))(show_webhooks)
    app.delete(WEBHOOKS + "/{webhook_id}", status_code=204, responses=documented(401, 404, 422, 429, 503))(
        delete_webhook
    )
    app.get(WEBHOOKS + "/{webhook_id}/deliveries", responses=documented(401, 404, 422, 429, 503))(show_deliveries)


async def create_webhook(cluster: Cluster, parts: Parts, caller: Caller, webhook: NewWebhook) -> WebhookView:
    """Create a webhook: a tenant's job events are sent there, signed."""
    await check_cluster(cluster, parts)
    if parts.secrets is None:
        detail = "this service stores no secrets: start it with --secret-key"
        raise ApiRefusal(problem(409, "no-secret-key", "No secrets", detail))
    refused = refuse_url(webhook.url, MlPolicy(hosts=parts.settings.webhook_hosts))
    if refused is not None:
        raise mistaken("url", webhook.url, refused.limit, refused.hint)
    tenant = _tenant(webhook, caller)
    record = WebhookRecord(
        id=str(uuid4()),
        cluster_id=cluster,
        tenant_id=tenant,
        url=webhook.url,
        secret=parts.secrets.seal(webhook.secret),
        events=list(dict.fromkeys(webhook.events)),
        job_types=[one.value for one in webhook.filters.job_type],
        labels=webhook.filters.labels,
        created_by=caller.name,
        created_at=parts.now(),
    )
    if not await parts.database.write(lambda session: add_webhook(session, record)):
        detail = f"tenant {tenant} has {WEBHOOKS_MAX} webhooks: delete one"
        raise ApiRefusal(problem(409, "too-many-webhooks", "Too many webhooks", detail))
    return _view(record)


async def show_webhooks(
    cluster: Cluster, parts: Parts, caller: Caller, page: PageNumber = 1, page_size: PageSize = 20
) -> WebhookListView:
    """List the webhooks of the caller's tenants."""
    await check_cluster(cluster, parts)
    tenants = None if caller.is_operator else [one for one in caller.tenants(JobPermission.CREATE) if _may(caller, one)]
    found, total = await parts.database.read(
        lambda session: list_webhooks(session, cluster, tenants, page=page, page_size=page_size)
    )
    return WebhookListView(items=[_view(one) for one in found], page=page, page_size=page_size, total=total)


async def delete_webhook(cluster: Cluster, webhook_id: UUID, parts: Parts, caller: Caller) -> None:
    """Delete a webhook, with what it was not yet told."""
    found = await _found(cluster, webhook_id, parts, caller)
    await parts.database.write(lambda session: session.delete(get_webhook(session, cluster, found.id)))


async def show_deliveries(
    cluster: Cluster, webhook_id: UUID, parts: Parts, caller: Caller, page: PageNumber = 1, page_size: PageSize = 20
) -> DeliveryListView:
    """List what a webhook was told, newest first."""
    webhook = await _found(cluster, webhook_id, parts, caller)
    found, total = await parts.database.read(
        lambda session: list_deliveries(session, webhook.id, page=page, page_size=page_size)
    )
    items = [_delivery_view(one) for one in found]
    return DeliveryListView(items=items, page=page, page_size=page_size, total=total)


async def _found(cluster: str, webhook_id: UUID, parts: Parts, caller: JobCaller) -> WebhookRecord:
    """Return a webhook of the caller's tenants. Raises WebhookUnknown for any other."""
    await check_cluster(cluster, parts)
    found = await parts.database.read(lambda session: get_webhook(session, cluster, str(webhook_id)))
    if not _may(caller, found.tenant_id):
        raise WebhookUnknown(str(webhook_id))
    return found


def _may(caller: JobCaller, tenant: str) -> bool:
    """Return whether the caller may create jobs everywhere in a tenant: a webhook tells of all its jobs."""
    return decide(caller, JobPermission.CREATE, JobOwnership(tenant, None, caller.name)) is AccessAnswer.ALLOWED


def _tenant(webhook: NewWebhook, caller: JobCaller) -> str:
    mine = [one for one in caller.tenants(JobPermission.CREATE) if _may(caller, one)]
    tenant = webhook.tenant_id or (mine[0] if len(mine) == 1 else "")
    if not tenant:
        raise mistaken(
            "tenant_id", None, "must say whose jobs it is about", f"name one of {', '.join(mine) or 'yours'}"
        )
    if not _may(caller, tenant):
        detail = f"{caller.name} may not create webhooks in tenant {tenant}"
        raise ApiRefusal(problem(403, "not-allowed", "Not allowed", detail))
    return tenant


def _view(record: WebhookRecord) -> WebhookView:
    filters = WebhookFilters(job_type=[JobType(one) for one in record.job_types], labels=record.labels)
    return WebhookView(
        id=record.id,
        tenant_id=record.tenant_id,
        url=record.url,
        events=record.events,
        filters=filters,
        enabled=True,
        created_by=record.created_by,
        created_at=record.created_at,
    )


def _delivery_view(one: DeliveryRecord) -> DeliveryView:
    return DeliveryView(
        id=one.id,
        job_id=one.job_id,
        event=one.event,
        created_at=one.created_at,
        attempts=one.attempts,
        status=one.status,
        told=one.told,
        next_at=one.next_at,
        delivered_at=one.delivered_at,
    )
