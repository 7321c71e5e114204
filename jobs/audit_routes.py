"""The route of the audit: what was decided in the caller's tenants."""

from datetime import datetime
from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import BaseModel, Field

from atoll.jobs.permissions import TenantRole
from jobs.api_parts import Caller, Cluster, Parts, check_cluster
from jobs.asking import PageNumber, PageSize
from jobs.audit import list_audit
from jobs.problems import ApiRefusal, documented, problem


class AuditView(BaseModel):
    """One decision."""

    at: datetime
    user: str
    action: Annotated[str, Field(description="such as job:cancel")]
    answer: Annotated[str, Field(description="allowed, refused, or hidden: it was as if there were no such job")]
    resource_type: str
    resource_id: str
    tenant_id: str
    project_id: str | None
    job_type: str | None
    source_type: str | None
    source_id: str | None
    extra: dict[str, Any]


class AuditListView(BaseModel):
    """One page of the audit, newest first."""

    items: list[AuditView]
    page: int
    page_size: int
    total: Annotated[int, Field(description="count over all pages")]


def add_audit_routes(app: FastAPI) -> None:
    """Add the route to the application."""
    app.get("/api/clusters/{cluster}/audit", responses=documented(401, 403, 404, 422, 429, 503))(show_audit)


async def show_audit(
    cluster: Cluster, parts: Parts, caller: Caller, page: PageNumber = 1, page_size: PageSize = 50
) -> AuditListView:
    """List decisions about the jobs of tenants whose admin the caller is; an operator sees all."""
    await check_cluster(cluster, parts)
    admin = [one.tenant for one in caller.grants if one.role is TenantRole.ADMIN and one.project is None]
    if not admin and not caller.is_operator:
        raise ApiRefusal(problem(403, "not-allowed", "Not allowed", f"{caller.name} is admin of no tenant"))
    await parts.audit.flush()
    tenants = None if caller.is_operator else admin
    found, total = await parts.database.read(
        lambda session: list_audit(session, tenants, page=page, page_size=page_size)
    )
    items = [AuditView.model_validate(one, from_attributes=True) for one in found]
    return AuditListView(items=items, page=page, page_size=page_size, total=total)
