"""Responses about queues: what the file says, and what Kueue counts. Pure."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any

from pydantic import BaseModel, Field

from atoll.jobs.queue_file import FlavorQuota, QueueFile, QueueTenant, TenantQueue
from atoll.jobs.queue_objects import Object
from jobs.records import QueueFileRecord

WITHOUT_KUEUE = "the cluster has no Kueue: jobs start at once, without quota"


class QueueAmountView(BaseModel):
    """Quota of one resource of one flavor, as Kubernetes quantities."""

    flavor: str
    resource: str
    nominal: str
    used: Annotated[str, Field(description="counted by Kueue, borrowed quota included")]
    borrowed: str
    borrow_limit: Annotated[str | None, Field(description="no limit if absent")]
    lend_limit: Annotated[str | None, Field(description="no limit if absent")]


class QueueView(BaseModel):
    """One queue of a tenant."""

    name: str
    tenant: str
    namespaces: list[str]
    cohort: str | None
    critical: bool
    stop: str | None
    is_active: Annotated[bool | None, Field(description="whether Kueue admits jobs from it; none if unknown")]
    message: Annotated[str, Field(description="why it is not active")]
    pending: Annotated[int, Field(description="jobs and pods that wait for quota")]
    admitted: Annotated[int, Field(description="jobs and pods that have quota")]
    weighted_share: Annotated[int | None, Field(description="with fair sharing: borrowed share per mille, by weight")]
    amounts: list[QueueAmountView]


class QueueListView(BaseModel):
    """One page of queues, by tenant and name."""

    items: list[QueueView]
    page: int
    page_size: int
    total: Annotated[int, Field(description="count over all pages")]
    has_kueue: Annotated[bool, Field(description="without Kueue jobs start at once, without quota")]
    message: Annotated[str, Field(description="what keeps the cluster from agreeing with the file")]
    problems: Annotated[list[str], Field(description="objects that could not be created, changed or removed")]
    applied_by: str | None
    applied_at: datetime | None


class QueueChangesView(BaseModel):
    """What applying a file changes."""

    changes: Annotated[list[str], Field(description="verb, kind and name of each write, in their order")]
    obstacles: Annotated[list[str], Field(description="what stands in the way")]
    hints: list[str]
    has_kueue: bool
    dry_run: bool


def queue_views(file: QueueFile, counted: Mapping[str, Object] | None) -> list[QueueView]:
    """Return all queues by tenant, in the order of the file. `counted`: ClusterQueues by name; None without Kueue."""
    tenants = sorted(file.tenants, key=lambda one: one.name)
    return [_view(tenant, queue, counted) for tenant in tenants for queue in tenant.queues]


def _view(tenant: QueueTenant, queue: TenantQueue, counted: Mapping[str, Object] | None) -> QueueView:
    status: Mapping[str, Any] = (counted or {}).get(queue.name, {}).get("status") or {}
    active = next((one for one in status.get("conditions") or () if one.get("type") == "Active"), None)
    message = WITHOUT_KUEUE if counted is None else "Kueue has not looked at it yet" if active is None else ""
    if active is not None and active.get("status") != "True":
        message = str(active.get("message", ""))
    return QueueView(
        name=queue.name,
        tenant=tenant.name,
        namespaces=list(tenant.namespaces),
        cohort=queue.cohort,
        critical=queue.critical,
        stop=queue.stop.value if queue.stop is not None else None,
        is_active=active.get("status") == "True" if active is not None else None,
        message=message,
        pending=int(status.get("pendingWorkloads") or 0),
        admitted=int(status.get("admittedWorkloads") or 0),
        weighted_share=(status.get("fairSharing") or {}).get("weightedShare"),
        amounts=_amounts(queue.flavors, status),
    )


def _amounts(quotas: Sequence[FlavorQuota], status: Mapping[str, Any]) -> list[QueueAmountView]:
    used = {
        (flavor.get("name"), one.get("name")): one
        for flavor in status.get("flavorsUsage") or ()
        for one in flavor.get("resources") or ()
    }
    return [
        QueueAmountView(
            flavor=quota.flavor,
            resource=resource,
            nominal=one.nominal,
            used=str(used.get((quota.flavor, resource), {}).get("total", "0")),
            borrowed=str(used.get((quota.flavor, resource), {}).get("borrowed", "0")),
            borrow_limit=one.borrow,
            lend_limit=one.lend,
        )
        for quota in quotas
        for resource, one in quota.resources().items()
    ]


def hints_of(file: QueueFile) -> list[str]:
    """Return what an administrator should know about a valid file."""
    hints = [
        f"tenant {tenant.name} has no critical queue: its critical jobs may be preempted while they borrow quota"
        for tenant in file.tenants
        if not any(queue.critical for queue in tenant.queues)
        and any(queue.cohort is not None for queue in tenant.queues)
    ]
    if file.fair_sharing:
        hints.append("fair_sharing has an effect only with Kueue's own setting fairSharing")
    return hints


def trouble_of(record: QueueFileRecord) -> str:
    """Return what keeps the cluster from agreeing with its file; empty if nothing does."""
    if record.has_kueue is False:
        return WITHOUT_KUEUE
    if record.checked_generation != record.generation:
        return "the file was not yet compared with the cluster"
    return f"{len(record.problems)} objects do not agree with the file" if record.problems else ""
