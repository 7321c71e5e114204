"""Validates submissions: from the body of a request to a NewJob.

A refusal names field, value, limit and what to do. A job that cannot be rendered is refused here, so the submitter
learns it at once.
"""

from dataclasses import dataclass

from atoll.jobs.choosing import ScoreSheet
from atoll.jobs.documents import parse_job
from atoll.jobs.errors import JobMistake, NodesUnknown
from atoll.jobs.model import Job
from atoll.jobs.needs import Needs
from atoll.jobs.permissions import AccessAnswer, JobCaller, JobOwnership, JobPermission, decide
from atoll.jobs.queue_file import TenantQueue
from atoll.jobs.rendering import Rendered, render
from atoll.jobs.settings import RenderSettings
from atoll.jobs.words import DeploymentType, OwnerType, Priority
from atoll.ml.document import Document
from jobs.api_parts import ApiParts
from jobs.chooser import QUEUE_REFUSES
from jobs.cluster_store import ClusterState, get_cluster
from jobs.problems import ApiRefusal, invalid, mistaken, problem
from jobs.queue_places import place_at, place_in
from jobs.queue_store import queue_file_of, queues_in
from jobs.settings import JobServiceSettings
from jobs.store import AUTO, NewJob

KEY_LENGTH_MAX = 512


@dataclass(frozen=True, slots=True)
class Submission:
    """One request and its caller."""

    body: bytes | Document
    """As it came, or read already."""
    caller: JobCaller
    key: str | None
    """Value of the header Idempotency-Key."""


@dataclass(frozen=True, slots=True)
class AcceptedJob:
    """A job that the caller may submit, with what it renders as; its cluster is not chosen yet."""

    job: Job
    rendered: Rendered
    tenant: str
    namespace: str
    caller: JobCaller
    key: str | None


def accepted_job(
    submission: Submission, settings: JobServiceSettings, rendering: RenderSettings, cluster: str, *, now_seconds: float
) -> AcceptedJob:
    """Return the submitted job. `cluster`: of the path. Raises ApiRefusal."""
    job = _parsed(submission.body, rendering)
    caller = submission.caller
    for field, given in (("id", job.id), ("created_by", job.created_by)):
        if given is not None:
            raise mistaken(field, given, "the service sets it", "remove it")
    if job.cluster_id not in (None, cluster):
        raise mistaken("cluster_id", job.cluster_id, f"this path belongs to cluster {cluster}", "remove it")
    if job.deployment_type is DeploymentType.HELM:
        raise mistaken("deployment_type", "helm", "the service installs no charts", "use `atoll job render`, and Helm")
    tenant = _tenant(job, caller)
    _check_permission(caller, JobOwnership(tenant, job.project_id, caller.name), job)
    namespace = settings.namespace_of(tenant)
    if job.namespace not in (None, namespace):
        raise mistaken("namespace", job.namespace, f"jobs of tenant {tenant} are in {namespace}", "remove it")
    key = _key(job, submission.key)
    placed = job.model_copy(update={"tenant_id": tenant, "namespace": namespace})
    try:
        rendered = render(placed, rendering, now_seconds=now_seconds)
    except NodesUnknown as unknown:
        mistake = unknown.problem
        hint = "the service does not look at nodes: use ext_ml_node_selector, or `atoll job render --cluster`"
        raise mistaken(
            mistake.attribute, mistake.value, "cannot be expressed as a Kubernetes node selector", hint
        ) from unknown
    except JobMistake as mistake_error:
        raise invalid((mistake_error.problem,)) from mistake_error
    if rendered.needs.priority is Priority.CRITICAL:
        check_critical(caller, JobOwnership(tenant, job.project_id, caller.name))
    return AcceptedJob(placed, rendered, tenant, namespace, caller, key)


async def placed_job(accepted: AcceptedJob, parts: ApiParts, cluster: str) -> tuple[NewJob, Needs]:
    """Return the job with its cluster, the given one or the service's choice, its queue and what that fills in; and
    its needs. Raises ApiRefusal."""
    job, choice = accepted.job, None
    if cluster == AUTO:
        sheet = await parts.chooser.choose(job, accepted.rendered, tenant=accepted.tenant, namespace=accepted.namespace)
        if sheet.chosen is None:
            await _refuse_by_queues(accepted, sheet, parts)
            detail = f"no cluster available for job {job.name}: {sheet.told()}"
            raise ApiRefusal(problem(409, "no-cluster", "No cluster is available", detail))
        cluster, choice = sheet.chosen, sheet.plain()
    known, file = await parts.database.read(
        lambda session: (get_cluster(session, cluster), queue_file_of(session, cluster))
    )
    if known.state == ClusterState.DRAINING:
        detail = f"cluster {cluster} is draining and takes no new jobs: submit job {job.name} to another one"
        raise ApiRefusal(problem(409, "cluster-busy", "The cluster is draining", detail))
    if known.tenants and accepted.tenant not in known.tenants:
        detail = f"cluster {cluster} does not serve tenant {accepted.tenant}: submit job {job.name} to another one"
        raise ApiRefusal(problem(409, "no-cluster", "The cluster does not serve this tenant", detail))
    never = await parts.chooser.impossible(known, accepted.rendered.needs.attributes)
    if never:
        shape = job.attributes.tpu_topology or job.attributes.tpu_chip_count
        raise mistaken("ext_ml_tpu_topology", shape, f"cluster {cluster}: {never}", "ask for a slice that there is")
    asked = job.model_copy(update={"cluster_id": cluster})
    place = place_in(
        queues_in(file),
        asked,
        accepted.rendered,
        tenant=accepted.tenant,
        rendering=parts.rendering,
        now=parts.now(),
    )
    needs = place.rendered.needs
    if place.queue is not None:
        count_submission(place.queue, needs, parts, cluster)
    new = NewJob(
        place.job,
        cluster,
        accepted.tenant,
        accepted.namespace,
        accepted.caller.name,
        accepted.key,
        place.chosen,
        choice,
        asked=asked,
    )
    return new, needs


async def _refuse_by_queues(accepted: AcceptedJob, sheet: ScoreSheet, parts: ApiParts) -> None:
    """Refuse a job that only queues keep out of every cluster as one that names a cluster is: field by field."""
    if sheet.rows and all(row.excluded.startswith(QUEUE_REFUSES) for row in sheet.rows):
        await place_at(
            parts.database,
            sheet.rows[0].cluster,
            accepted.job,
            accepted.rendered,
            tenant=accepted.tenant,
            rendering=parts.rendering,
            now=parts.now(),
        )


def count_submission(queue: TenantQueue, needs: Needs, parts: ApiParts, cluster: str) -> None:
    """Refuse a job with GPUs whose queue has taken too many of them lately. Raises ApiRefusal."""
    if needs.gpus is None or parts.queue_limits.try_take(f"{cluster}/{queue.name}"):
        return
    detail = f"queue {queue.name} of cluster {cluster} takes no more jobs with GPUs at this rate: submit it again later"
    raise ApiRefusal(problem(429, "too-many", "Too many submissions", detail), headers={"Retry-After": "1"})


def _parsed(body: bytes | Document, rendering: RenderSettings) -> Job:
    parsed = parse_job(body, rendering.policy())
    if parsed.job is not None:
        return parsed.job
    refused = invalid(parsed.problems)
    if parsed.document.value is None:
        refused.problem = refused.problem.model_copy(update={"status": 400, "title": "The body cannot be read"})
    raise refused


def _tenant(job: Job, caller: JobCaller) -> str:
    """Return the tenant that the job names, or the only one in which the caller may create jobs."""
    if job.tenant_id is not None:
        return job.tenant_id
    mine = caller.tenants(JobPermission.CREATE)
    if len(mine) == 1:
        return mine[0]
    choice = f"name one of {', '.join(mine)}" if mine else "name one"
    raise mistaken("tenant_id", None, "must say whose job it is", choice)


def _check_permission(caller: JobCaller, whose: JobOwnership, job: Job) -> None:
    """Refuse a tenant in which the caller may not create jobs; the message is the same for a hidden tenant."""
    if decide(caller, JobPermission.CREATE, whose) is not AccessAnswer.ALLOWED:
        where = f"tenant {whose.tenant}" + (f", project {whose.project}" if whose.project else "")
        raise ApiRefusal(problem(403, "not-allowed", "Not allowed", f"{caller.name} may not create jobs in {where}"))
    if job.owner_type is OwnerType.PLATFORM and not caller.is_operator:
        detail = f"{caller.name} may not create jobs of the platform: remove owner_type"
        raise ApiRefusal(problem(403, "not-allowed", "Not allowed", detail))


def check_critical(caller: JobCaller, whose: JobOwnership) -> None:
    """Refuse the priority that nothing preempts to whoever may not give it. Raises ApiRefusal."""
    if decide(caller, JobPermission.CRITICAL, whose) is not AccessAnswer.ALLOWED:
        detail = f"{caller.name} may not give jobs of tenant {whose.tenant} the priority critical: take high"
        raise ApiRefusal(problem(403, "not-allowed", "Not allowed", detail))


def _key(job: Job, header: str | None) -> str | None:
    """Return the idempotency key of the header or of the job; the two may not differ."""
    if header is not None and (not 0 < len(header) <= KEY_LENGTH_MAX or not header.isprintable()):
        limit = f"must have 1 to {KEY_LENGTH_MAX} printable characters"
        raise mistaken("Idempotency-Key", header, limit, "send a uuid")
    if header is not None and job.idempotency_key not in (None, header):
        limit = f"the header Idempotency-Key says {header}"
        raise mistaken("idempotency_key", job.idempotency_key, limit, "give one of both")
    return header if header is not None else job.idempotency_key
