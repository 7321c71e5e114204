"""Routes of GPU time and cost: of a cluster, summed as asked, and of one job."""

import csv
import io
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Annotated, Final

from fastapi import FastAPI, Query, Response
from pydantic import AwareDatetime, BaseModel, BeforeValidator, Field

from atoll.jobs.costs.spans import HELD, TimeUse
from atoll.jobs.costs.usage import UsageKey, UsageSum, sum_usage
from atoll.jobs.permissions import JobPermission, seen_scopes
from atoll.ml.problems import shown
from jobs.accounts import UsageFilter, spans_between, usage_of_job
from jobs.api_parts import Caller, Cluster, Parts, check_cluster
from jobs.asking import OneJob
from jobs.problems import ApiRefusal, FieldFault, documented, problem

USAGE: Final = "/api/clusters/{cluster}/usage"
DAYS: Final = 30
DAYS_MAX: Final = 366


class GpuHours(BaseModel):
    """GPU-hours by what they went into; those that nobody held are null for callers that see only some tenants."""

    used: Annotated[float, Field(description="held by running pods whose processes use the GPU")]
    idle: Annotated[float, Field(description="held by running pods, with no process of theirs on the GPU")]
    reserved: Annotated[float, Field(description="held while no container runs")]
    free: float | None
    stranded: Annotated[float | None, Field(description="free, and a pod waits that needs them on one machine")]
    unavailable: Annotated[float | None, Field(description="unhealthy, cordoned, silent or in foreign use")]
    unseen: Annotated[float | None, Field(description="the service did not run, and nothing proves who held them")]
    total: Annotated[float, Field(description="sum; of everything, the capacity that existed")]


class UsageRow(BaseModel):
    """One group of the sums."""

    group: Annotated[dict[UsageKey, str], Field(description="what the row is about; empty text for nobody")]
    gpu_hours: GpuHours
    cost_usd: float
    unpriced_gpu_hours: Annotated[float, Field(description="held GPU-hours without a price")]


class UsageView(BaseModel):
    """GPU time and cost of a time."""

    start: datetime
    end: datetime
    rows: list[UsageRow]
    sum: UsageRow


class JobCostView(BaseModel):
    """What a job has used and cost so far."""

    gpu_hours: GpuHours
    cost_usd: float
    unpriced_gpu_hours: float
    is_final: Annotated[bool, Field(description="the job has ended, and no GPU is held for it")]
    estimated_usd: float | None
    advice: Annotated[str, Field(description="what would be cheaper; empty without advice")]


Keys = Annotated[list[UsageKey], Query(description="what to sum by; may be given again", max_length=len(UsageKey))]


def _written(value: object) -> object:
    """Refuse a number, which would count as seconds since 1970."""
    if isinstance(value, str) and "T" not in value.upper():
        raise ValueError("must be a time with its zone, such as 2026-01-31T12:00:00Z")
    return value


Moment = Annotated[AwareDatetime | None, BeforeValidator(_written), Query()]


def add_usage_routes(app: FastAPI) -> None:
    """Add the routes to the application."""
    app.get(USAGE, responses=documented(401, 404, 422, 429, 503))(show_usage)
    app.get(
        USAGE + ".csv",
        response_class=Response,
        responses=documented(401, 404, 422, 429, 503)
        | {200: {"description": "the rows", "content": {"text/csv": {"schema": {"type": "string"}}}}},
    )(show_usage_csv)
    app.get("/api/clusters/{cluster}/jobs/{job_id}/cost", responses=documented(401, 404, 422, 429, 503))(show_cost)


async def show_usage(
    cluster: Cluster,
    parts: Parts,
    caller: Caller,
    by: Keys = [UsageKey.TENANT],  # noqa: B006 - FastAPI copies it
    start: Moment = None,
    end: Moment = None,
) -> UsageView:
    """Sum GPU time and cost of a time, the last 30 days by default. Operators see all GPUs, others their tenants'."""
    await check_cluster(cluster, parts)
    scopes, keys = seen_scopes(caller), tuple(dict.fromkeys(by))
    first, last = times_of(parts.now(), start, end)
    wanted = UsageFilter(cluster, scopes)
    spans = await parts.database.read(lambda session: spans_between(session, wanted, first, last))
    groups = sum_usage(spans, first, last, keys)
    whole = sum_usage(spans, first, last, ()).get((), UsageSum())
    is_all = scopes is None
    rows = [_row(dict(zip(keys, group, strict=True)), groups[group], is_all=is_all) for group in sorted(groups)]
    return UsageView(start=first, end=last, rows=rows, sum=_row({}, whole, is_all=is_all))


async def show_usage_csv(
    cluster: Cluster,
    parts: Parts,
    caller: Caller,
    by: Keys = [UsageKey.TENANT],  # noqa: B006 - FastAPI copies it
    start: Moment = None,
    end: Moment = None,
) -> Response:
    """The same as CSV, for spreadsheets and bills."""
    found = await show_usage(cluster, parts, caller, by, start, end)
    keys = tuple(dict.fromkeys(by))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*keys, *(f"{name}_gpu_hours" for name in GpuHours.model_fields), "cost_usd"])
    for row in found.rows:
        hours = ["" if value is None else f"{value:.6f}" for value in row.gpu_hours.model_dump().values()]
        writer.writerow([*(safe_cell(row.group[key]) for key in keys), *hours, f"{row.cost_usd:.6f}"])
    return Response(text.getvalue(), media_type="text/csv; charset=utf-8")


async def show_cost(asked: OneJob) -> JobCostView:
    """Show what a job has used and cost so far."""
    record = await asked.allowed(JobPermission.VIEW)
    used = await asked.parts.database.read(lambda session: usage_of_job(session, record.cluster_id, record.id))
    row = _row({}, used, is_all=False)
    estimate = record.estimate or {}
    return JobCostView(
        gpu_hours=row.gpu_hours,
        cost_usd=row.cost_usd,
        unpriced_gpu_hours=row.unpriced_gpu_hours,
        is_final=record.actual_micros is not None,
        estimated_usd=estimate.get("usd"),
        advice=_advice(used, str(estimate.get("advice", ""))),
    )


def safe_cell(text: str) -> str:
    """Return a text that no spreadsheet takes for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def times_of(now: datetime, start: datetime | None, end: datetime | None) -> tuple[datetime, datetime]:
    """Return the time that is asked for, the last 30 days by default. Raises ApiRefusal."""
    last = end or now
    first = start or last - timedelta(days=DAYS)
    if not first < last <= first + timedelta(days=DAYS_MAX):
        limit = f"must be before end {last.isoformat()}, and at most {DAYS_MAX} days before it"
        fault = FieldFault(field="start", value=shown(first.isoformat()), limit=limit)
        raise ApiRefusal(problem(422, "invalid-request", "The request has mistakes", f"start {limit}", [fault]))
    return first, last


def _row(group: dict[UsageKey, str], used: UsageSum, *, is_all: bool) -> UsageRow:
    def hours(use: TimeUse) -> float | None:
        return round(used.gpu_hours(use), 6) if is_all else None

    told = GpuHours(
        used=round(used.gpu_hours(TimeUse.USED), 6),
        idle=round(used.gpu_hours(TimeUse.IDLE), 6),
        reserved=round(used.gpu_hours(TimeUse.RESERVED), 6),
        free=hours(TimeUse.FREE),
        stranded=hours(TimeUse.STRANDED),
        unavailable=hours(TimeUse.UNAVAILABLE),
        unseen=hours(TimeUse.UNSEEN),
        total=round(used.gpu_hours(*_shown(is_all=is_all)), 6),
    )
    unpriced = round(used.unpriced_ppm_seconds / 3_600_000_000, 6)
    return UsageRow(group=group, gpu_hours=told, cost_usd=used.usd, unpriced_gpu_hours=unpriced)


def _shown(*, is_all: bool) -> Sequence[TimeUse]:
    return tuple(TimeUse) if is_all else tuple(HELD)


def _advice(used: UsageSum, from_estimate: str) -> str:
    """Return advice from what was measured before advice from what the job says it needs."""
    running = used.gpu_seconds(TimeUse.USED, TimeUse.IDLE)
    idle = used.gpu_seconds(TimeUse.IDLE)
    if running >= 3600 and idle * 2 > running:
        return f"its GPUs had no process for {round(100 * idle / running)} % of the time it ran: ask for fewer"
    return from_estimate
