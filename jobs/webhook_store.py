"""Queries and changes of webhooks and their deliveries.

A delivery is written in the transaction of its event, so none is lost and none is sent for what did not happen. It may
be sent twice if the process dies between the answer and the record of it: receivers know it by its id.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import uuid4

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from atoll.jobs.states import JobState
from jobs.errors import WebhookUnknown
from jobs.records import DeliveryRecord, JobRecord, WebhookRecord

EVENTS: Final[Mapping[JobState, str]] = {
    JobState.QUEUED: "job.queued",
    JobState.RUNNING: "job.running",
    JobState.SUCCEEDED: "job.succeeded",
    JobState.FAILED: "job.failed",
    JobState.PREEMPTED: "job.preempted",
    JobState.CANCELLED: "job.cancelled",
}
OFFERED: Final = "job.topology_relaxation_offer"
EVENT_NAMES: Final = (*EVENTS.values(), OFFERED)
ATTEMPTS_MAX: Final = 10
RETRY_SECONDS: Final = 10
RETRY_SECONDS_MAX: Final = 3600
WEBHOOKS_MAX: Final = 20
"""Webhooks of one tenant."""
TOLD_LENGTH_MAX: Final = 256


def queue_deliveries(session: Session, job: JobRecord, now: datetime) -> None:
    """Write what the webhooks of a job's tenant are to be told of its new state."""
    event = EVENTS.get(JobState(job.state))
    if event is not None:
        queue_event(session, job, event, now)


def queue_event(
    session: Session, job: JobRecord, event: str, now: datetime, *, more: Mapping[str, Any] | None = None
) -> None:
    """Write what the webhooks of a job's tenant are to be told. `more`: beside the job."""
    for webhook in _of_tenant(session, job.cluster_id, job.tenant_id):
        if event not in webhook.events or (webhook.job_types and job.job_type not in webhook.job_types):
            continue
        labels = job.document.get("labels") or {}
        if not webhook.labels.items() <= labels.items():
            continue
        payload = payload_of(job, event, now) | dict(more or {})
        session.add(
            DeliveryRecord(
                id=str(uuid4()),
                webhook_id=webhook.id,
                job_id=job.id,
                event=event,
                payload=payload,
                created_at=now,
                next_at=now,
                told="",
            )
        )


def payload_of(job: JobRecord, event: str, now: datetime) -> dict[str, Any]:
    """Return what is sent: which job, its state and why; nothing of its container, which may hold secrets."""
    return {
        "event": event,
        "time": now.isoformat(),
        "job": {
            "id": job.id,
            "name": job.name,
            "cluster_id": job.cluster_id,
            "tenant_id": job.tenant_id,
            "project_id": job.project_id,
            "job_type": job.job_type,
            "status": job.state,
            "message": job.message,
            "attempt": job.attempt,
            "labels": job.document.get("labels") or {},
        },
    }


def _of_tenant(session: Session, cluster_id: str, tenant: str) -> Sequence[WebhookRecord]:
    where = (WebhookRecord.cluster_id == cluster_id, WebhookRecord.tenant_id == tenant)
    return session.scalars(select(WebhookRecord).where(*where).order_by(WebhookRecord.created_at)).all()


def add_webhook(session: Session, webhook: WebhookRecord) -> bool:
    """Add a webhook; False if its tenant has as many as it may."""
    if len(_of_tenant(session, webhook.cluster_id, webhook.tenant_id)) >= WEBHOOKS_MAX:
        return False
    session.add(webhook)
    session.flush()
    return True


def list_webhooks(
    session: Session, cluster_id: str, tenants: Sequence[str] | None, *, page: int, page_size: int
) -> tuple[Sequence[WebhookRecord], int]:
    """Return a page of the webhooks of some tenants, None for all, oldest first, and the total count."""
    where = [WebhookRecord.cluster_id == cluster_id]
    if tenants is not None:
        where.append(WebhookRecord.tenant_id.in_(tenants))
    total = session.scalar(select(func.count()).select_from(WebhookRecord).where(*where)) or 0
    oldest = select(WebhookRecord).where(*where).order_by(WebhookRecord.created_at, WebhookRecord.id)
    return session.scalars(oldest.offset((page - 1) * page_size).limit(page_size)).all(), total


def get_webhook(session: Session, cluster_id: str, webhook_id: str) -> WebhookRecord:
    """Return a webhook. Raises WebhookUnknown."""
    found = session.get(WebhookRecord, webhook_id)
    if found is None or found.cluster_id != cluster_id:
        raise WebhookUnknown(webhook_id)
    return found


def list_deliveries(
    session: Session, webhook_id: str, *, page: int, page_size: int
) -> tuple[Sequence[DeliveryRecord], int]:
    """Return a page of a webhook's deliveries, newest first, and the total count."""
    mine = DeliveryRecord.webhook_id == webhook_id
    total = session.scalar(select(func.count()).select_from(DeliveryRecord).where(mine)) or 0
    newest = select(DeliveryRecord).where(mine).order_by(DeliveryRecord.created_at.desc(), DeliveryRecord.id)
    return session.scalars(newest.offset((page - 1) * page_size).limit(page_size)).all(), total


def due_deliveries(session: Session, now: datetime, *, count_max: int) -> list[tuple[DeliveryRecord, WebhookRecord]]:
    """Return what is to be sent now, oldest first."""
    due = select(DeliveryRecord, WebhookRecord).join(WebhookRecord, WebhookRecord.id == DeliveryRecord.webhook_id)
    ordered = (
        due.where(DeliveryRecord.next_at <= now)
        .order_by(DeliveryRecord.next_at, DeliveryRecord.created_at)
        .limit(count_max)
    )
    return [(delivery, webhook) for delivery, webhook in session.execute(ordered)]


def note_delivery(session: Session, delivery_id: str, now: datetime, *, status: int | None, told: str) -> None:
    """Record an attempt: delivered if the receiver answered 2xx, else tried again later, and given up in the end."""
    delivery = session.get(DeliveryRecord, delivery_id)
    if delivery is None:
        return  # its webhook is deleted
    delivery.attempts += 1
    delivery.status, delivery.told = status, told[:TOLD_LENGTH_MAX]
    if status is not None and 200 <= status < 300:
        delivery.delivered_at, delivery.next_at = now, None
    elif delivery.attempts >= ATTEMPTS_MAX:
        delivery.next_at = None
    else:
        delivery.next_at = now + timedelta(seconds=retry_seconds(delivery.attempts))
    session.flush()


def retry_seconds(attempts: int) -> int:
    """Return the pause after so many attempts, seconds: it doubles, up to an hour."""
    return min(RETRY_SECONDS_MAX, RETRY_SECONDS << min(attempts - 1, 20))
