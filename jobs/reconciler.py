"""Reconciles one job with the cluster: creates missing objects, tracks their state, removes those no longer needed.

Level-triggered: each run reads the record and the cluster and does the next step. A process may die at any write: the
next run continues from what it finds. Names of objects follow from the job and labels say which job they belong to,
so a second creation finds the first.

    pending ──create all, the object with the pods last──► queued ──state in the cluster──► ... ──► ended ──► cleaned up
       cancel requested, in any state: remove all ──no objects or pods left──► cancelled
       pause requested, in any state: remove all ──no objects or pods left──► pending, until it is resumed
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Protocol

import structlog
from sqlalchemy.exc import IntegrityError

from atoll.jobs.choosing import ScoreSheet
from atoll.jobs.errors import JobMistake
from atoll.jobs.facts import JobObservation, JobPhase, observe
from atoll.jobs.last_checkpoint import told_at_end
from atoll.jobs.model import Job
from atoll.jobs.planning import JobHistory, PlannedStep, plan_steps
from atoll.jobs.queue_limits import rules_of
from atoll.jobs.rendering import render
from atoll.jobs.retries import Due, TimeOver, bounded, start_of, time_left
from atoll.jobs.settings import RenderSettings
from atoll.jobs.states import ENDED, IN_CLUSTER, JobState, JobStep
from atoll.jobs.words import JobType
from atoll.kube.clock import Clock
from atoll.kube.errors import ApiError, Forbidden, Invalid, NotFound
from atoll.ml.escalation import Escalation, escalation_of
from atoll.ml.queue_rules import QueueRules, waits_for
from jobs.cluster import KEPT, FoundObject, JobCluster, by_job, uids_of, workload_kind
from jobs.cluster_store import MOVING
from jobs.database import Database
from jobs.errors import JobUnknown, RecordChanged, RecordUnreadable
from jobs.log_archive import LogArchive
from jobs.log_keeping import AGAIN_SECONDS, LogKeeper, kept_logs
from jobs.objects import WORKLOADS, objects_of
from jobs.problems import ApiRefusal
from jobs.queue_places import place_at
from jobs.queue_store import queue_file_of, queues_in
from jobs.records import JobRecord
from jobs.removal import SOON_SECONDS, JobRemoval
from jobs.store import change_job, get_job, queue_usage, queued_since, recorded_ids, take_step
from jobs.views import checkpoint_of, job_of

log = structlog.get_logger(__name__)

OVER: Final = (JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.EXPIRED)
BUDGET_SECONDS: Final = 5.0
"""How often a job looks whether its queue's budget has room."""
MOVE_SECONDS: Final = 30.0
"""How often another cluster is looked for."""


@dataclass(frozen=True, slots=True)
class NameObstacle:
    """Why an object cannot be created. `passes`: the obstacle is being removed."""

    told: str
    passes: bool = False


class JobMover(Protocol):
    """Finds another cluster for the jobs of one that is drained."""

    def is_draining(self) -> bool:
        """Return whether the cluster is drained."""
        ...

    async def choose(self, record: JobRecord, job: Job) -> ScoreSheet:
        """Return the score sheet of a job over all clusters."""
        ...

    def moved(self, job_id: str) -> None:
        """Let the new cluster of a job look at it."""
        ...


def moves(record: JobRecord, state: JobState) -> bool:
    """Return whether a job leaves a drained cluster; a batch that runs may end there, within its time."""
    return record.job_type != JobType.BATCH or state is not JobState.RUNNING


class JobReconciler:
    """Reconciles the jobs of one cluster. `mover`: finds them another one while this one is drained. `archive`: of the
    logs of their pods."""

    def __init__(
        self,
        database: Database,
        cluster: JobCluster,
        rendering: RenderSettings,
        clock: Clock,
        *,
        mover: JobMover | None = None,
        archive: LogArchive | None = None,
    ) -> None:
        self._database = database
        self._cluster = cluster
        self._rendering = rendering
        self._clock = clock
        self._mover = mover
        self._removal = JobRemoval(cluster, database, LogKeeper(cluster, archive), clock)
        self._budget_lock = asyncio.Lock()
        """Of two jobs that look at once, only one gets the last of a budget."""
        self._kept: dict[str, frozenset[str]] = {}
        """For each ended job, the uids of the objects kept until the time that `reconcile` returned."""

    async def reconcile(self, job_id: str) -> float | None:
        """Do the next step of a job; return the seconds until the next run, or None to wait for a change.

        Raises KubeError, SearchesBusy, SearchTooLong and SQLAlchemy's errors: the caller retries the job later.
        """
        record = await self._record(job_id)
        if record is None:
            return None
        try:
            return await self._next(record)
        except RecordChanged:
            return 0.0
        except RecordUnreadable as error:
            return await self._keep(record, str(error), self._clock.now())

    async def sweep(self) -> tuple[str, ...]:
        """Remove objects without a record; return the jobs of the other objects, which may need cleaning up."""
        found = by_job(await self._cluster.find())
        new = {job_id: mine for job_id, mine in found.items() if self._kept.get(job_id) != uids_of(mine)}
        known = await self._database.read(lambda session: recorded_ids(session, self._cluster.name, [*new]))
        for job_id, mine in new.items():
            if job_id not in known:
                log.warning("Removing objects without a record", job=job_id, objects=[str(one) for one in mine])
                try:
                    await self._cluster.remove(mine)
                except ApiError as error:  # a webhook may refuse one job's objects: the next sweep tries again
                    log.warning("Could not remove objects without a record", job=job_id, err=str(error))
        return tuple(job_id for job_id in new if job_id in known)

    async def _record(self, job_id: str) -> JobRecord | None:
        """Return the record of a job; None if there is none, or if the job is in another cluster now."""
        try:
            record = await self._database.read(lambda session: get_job(session, job_id))
        except JobUnknown:
            return None
        return record if record.cluster_id == self._cluster.name else None

    async def _next(self, record: JobRecord) -> float | None:
        state, now = JobState(record.state), self._clock.now()
        if state in ENDED:
            return await self._tidy(record, state, now)
        if record.cancel_requested_at is not None:
            return await self._cancel(record, now)
        job = job_of(record)
        time = time_left(
            job.policy,
            JobType(record.job_type),
            started=record.started_at,
            now=now,
            seconds_max=job.attributes.timeout_seconds,
        )
        if isinstance(time, TimeOver):
            return await self._expire(record, job, state, time.message, now)
        if self._mover is not None and self._mover.is_draining() and moves(record, state):
            return _sooner(await self._move(record, job, state, self._mover, now), time, now)
        if record.pause_requested_at is not None:
            return _sooner(await self._pause(record, job, state, now), time, now)
        if state is JobState.QUEUED and (escalation := escalation_of(job.attributes)) is not None:
            return _sooner(await self._escalate(record, job, escalation, now), time, now)
        if state in IN_CLUSTER:
            return _sooner(await self._follow(record, job, state, now), time, now)
        return _sooner(await self._submit(record, job, now), time, now)

    # Into the cluster

    async def _submit(self, record: JobRecord, job: Job, now: datetime) -> float | None:
        start = start_of(job.policy, record.not_before, now)
        if start > now:
            return (start - now).total_seconds()
        found = await self._cluster.find(job_id=record.id, namespace=record.namespace)
        earlier = [one for one in found if one.attempt != str(record.attempt) and one.kind != KEPT]
        if earlier:
            return await self._removal.remove(record, earlier)
        if record.attempt > 1 and await self._removal.remove_stray_pods(record, but=str(record.attempt)):
            return SOON_SECONDS
        rules = await self._budgets(record, job) if not found else None
        if rules is None:
            return await self._enter(record, now)
        async with self._budget_lock:
            usage = await self._database.read(lambda session: queue_usage(session, record.cluster_id, rules.name))
            reason = waits_for(_gpus_of(record), rules, usage)
            if reason:
                await self._say(record, reason, now)
                return BUDGET_SECONDS
            return await self._enter(record, now)

    async def _budgets(self, record: JobRecord, job: Job) -> QueueRules | None:
        """Return the rules of a job's queue, if it has GPUs and the queue a budget."""
        name = job.policy.queue_name or record.queue_name
        if not _gpus_of(record) or name is None:
            return None
        file = await self._database.read(lambda session: queue_file_of(session, record.cluster_id))
        queues = queues_in(file)
        tenant = queues.tenant(record.tenant_id) if queues is not None else None
        queue = next((one for one in tenant.queues if one.name == name), None) if tenant is not None else None
        rules = rules_of(queue) if queue is not None else None
        return rules if rules is not None and rules.has_budget else None

    async def _enter(self, record: JobRecord, now: datetime) -> float | None:
        """Create the job's objects, and record that."""
        try:
            uid = await self._create(record, now)
        except (Invalid, Forbidden, NotFound) as error:
            return await self._fail(record, f"the cluster refuses the job: {error}", now)
        except JobMistake as mistake:
            return await self._fail(record, f"the job can no longer be rendered: {mistake}", now)
        if isinstance(uid, NameObstacle):
            if uid.passes:
                return SOON_SECONDS
            return await self._fail(record, uid.told, now)
        await self._take(record, (PlannedStep(JobStep.SUBMIT, "created", {"workload_uid": uid}),), now)
        return 0.0

    async def _create(self, record: JobRecord, now: datetime) -> str | NameObstacle:
        """Create missing objects; return the uid of the object that runs the pods, or the obstacle."""
        uid = ""
        objects = objects_of(record, self._rendering, service_id=self._cluster.service_id, now=now)
        for one in objects:
            created = await self._cluster.create(one)
            if created is None:
                there = await self._cluster.get(one)
                if there is None:
                    return NameObstacle("", passes=True)
                obstacle = await self._obstacle(record, there)
                if obstacle is not None:
                    return obstacle
                created = there.uid
            uid = created
        return uid

    async def _obstacle(self, record: JobRecord, there: FoundObject) -> NameObstacle | None:
        """Return why an object with the name of one of ours is an obstacle; None if it is ours."""
        if there.service_id == self._cluster.service_id and there.job_id == record.id:
            if there.is_leaving:
                return NameObstacle("", passes=True)
            if there.kind == KEPT or there.attempt == str(record.attempt):
                return None
        advice = "delete it, or give the job another name"
        if there.service_id != self._cluster.service_id:
            return NameObstacle(f"{there} exists and does not belong to this service: {advice}")
        if there.kind == KEPT:
            return NameObstacle(f"{there} holds the checkpoints of job {there.job_id}: {advice}")
        if not await self._is_over(there.job_id):
            return NameObstacle(f"{there} belongs to job {there.job_id}, which has not ended: {advice}")
        await self._cluster.remove([there])
        return NameObstacle("", passes=True)

    async def _is_over(self, job_id: str) -> bool:
        record = await self._record(job_id)
        return record is None or JobState(record.state) in ENDED

    # In the cluster

    async def _follow(self, record: JobRecord, job: Job, state: JobState, now: datetime) -> float | None:
        return await self._record_seen(record, job, state, await self._observe(record, now), now)

    async def _observe(self, record: JobRecord, now: datetime) -> JobObservation:
        """Return the state of a job in the cluster. Raises RecordChanged after it recorded a checkpoint or logs."""
        facts = await self._cluster.facts(record, workload_kind(record))
        told, known = facts.last_checkpoint(record.id), checkpoint_of(record)
        if told is not None and (known is None or told.created_at > known.created_at):
            await self._change(record, {"last_checkpoint": told.model_dump(mode="json")}, now)
            raise RecordChanged(record.id)
        if any(pod.is_leaving for pod in facts.pods):
            await self._removal.keep_logs(record, leaving=True)
        return observe(facts, workload_uid=record.workload_uid)

    async def _record_seen(
        self, record: JobRecord, job: Job, state: JobState, seen: JobObservation, now: datetime
    ) -> float | None:
        history = JobHistory(state, record.retry_count, record.preemption_count)
        planned = plan_steps(history, seen, policy=job.policy, now=now)
        if planned:
            await self._take(record, planned, now)
            return 0.0
        await self._say(record, seen.reason, now)
        return None

    async def _escalate(self, record: JobRecord, job: Job, escalation: Escalation, now: datetime) -> float | None:
        """Follow a queued spot job, and once it has waited for too long take it out, to submit it in a higher class."""
        entered = await self._database.read(lambda session: queued_since(session, record.id))
        wait_seconds = escalation.after_seconds - (now - (entered or now)).total_seconds()
        if wait_seconds > 0:
            soon = await self._follow(record, job, JobState.QUEUED, now)
            return wait_seconds if soon is None else soon
        found = await self._cluster.find(job_id=record.id, namespace=record.namespace)
        left = [one for one in found if one.kind != KEPT]
        if any(one.kind in WORKLOADS and not one.is_leaving for one in left):
            seen = await self._observe(record, now)
            if seen.phase is not JobPhase.WAITS_FOR_QUOTA:
                return await self._record_seen(record, job, JobState.QUEUED, seen, now)
        if left:
            return await self._removal.remove(record, left)
        if await self._removal.remove_stray_pods(record):
            return SOON_SECONDS
        attributes = job.attributes.model_copy(update={"priority_class": escalation.target})
        moved = job.model_copy(update={"attributes": attributes})
        message = f"waited for {escalation.after_seconds} s as spot, so it moves up to {escalation.target}"
        document = {"document": moved.model_dump(mode="json", exclude_unset=True)}
        await self._take(record, (PlannedStep(JobStep.ESCALATE, message, document),), now)
        return 0.0

    # Out of the cluster

    async def _expire(self, record: JobRecord, job: Job, state: JobState, message: str, now: datetime) -> float | None:
        """End a job whose time is over, unless it has ended by itself; stop it before recording that."""
        if state is JobState.PENDING:
            found = await self._cluster.find(job_id=record.id, namespace=record.namespace)
            if await self._note_created(record, found, now):
                return 0.0
        else:
            seen = await self._observe(record, now)
            if seen.phase in OVER:
                return await self._record_seen(record, job, state, seen, now)
            found = await self._cluster.find(job_id=record.id, namespace=record.namespace)
            running = [one for one in found if one.kind in WORKLOADS]
            if running:
                return await self._removal.remove(record, running)
        await self._take(record, (PlannedStep(JobStep.EXPIRE, message),), now)
        return 0.0

    async def _note_created(self, record: JobRecord, found: Sequence[FoundObject], now: datetime) -> bool:
        """Record that this attempt was created, if the process died before it recorded that."""
        made = [one for one in found if one.kind in WORKLOADS and one.attempt == str(record.attempt)]
        if made:
            await self._take(record, (PlannedStep(JobStep.SUBMIT, "created", {"workload_uid": made[0].uid}),), now)
        return bool(made)

    async def _cancel(self, record: JobRecord, now: datetime) -> float | None:
        found = await self._cluster.find(job_id=record.id, namespace=record.namespace)
        left = [one for one in found if one.kind != KEPT]
        if left:
            return await self._removal.remove(record, left)
        if await self._removal.remove_stray_pods(record):
            return SOON_SECONDS
        await self._take(record, (PlannedStep(JobStep.CANCEL, f"cancelled by {record.cancel_requested_by}"),), now)
        return None

    async def _move(self, record: JobRecord, job: Job, state: JobState, mover: JobMover, now: datetime) -> float | None:
        """Take a job out of a drained cluster, once another one can take it, unless it has ended by itself. Its pods
        end within their grace period, in which a training saves a checkpoint."""
        if state in IN_CLUSTER:
            seen = await self._observe(record, now)
            if seen.phase in OVER:
                return await self._record_seen(record, job, state, seen, now)
        try:
            sheet = await mover.choose(record, job)
            if sheet.chosen is None:
                return await self._keep(record, f"no cluster takes the job: {sheet.told()}", now)
            place = await place_at(
                self._database,
                sheet.chosen,
                job,
                render(job, self._rendering, now_seconds=now.timestamp()),
                tenant=record.tenant_id,
                rendering=self._rendering,
                now=now,
            )
        except ApiRefusal as refusal:
            return await self._keep(record, f"no cluster takes the job: {sheet.chosen}: {refusal}", now)
        except JobMistake as mistake:
            told = f"the job can no longer be rendered: {mistake}"
            if state is JobState.PENDING:
                return await self._fail(record, told, now)
            return await self._keep(record, told, now)
        found = await self._cluster.find(job_id=record.id, namespace=record.namespace)
        left = [one for one in found if one.kind != KEPT]
        if left:
            await self._say(record, f"{self._cluster.name} is draining{MOVING}{sheet.chosen}", now)
            return await self._removal.remove(record, left)
        if await self._removal.remove_stray_pods(record):
            return SOON_SECONDS
        kept = f"; its volume of checkpoints stays in {self._cluster.name}" if found else ""
        told = f"moved from {self._cluster.name}, which is draining, to {sheet.chosen}{kept}"
        changes = {"cluster_id": sheet.chosen, "choice": sheet.plain(), "queue_name": place.chosen}
        try:
            await self._take(record, (PlannedStep(JobStep.MOVE, told, changes),), now)
        except IntegrityError:
            why = "which has an active job of the same name and namespace"
            await self._say(record, f"{self._cluster.name} is draining{MOVING}{sheet.chosen}, {why}", now)
            return MOVE_SECONDS
        mover.moved(record.id)
        return 0.0

    async def _keep(self, record: JobRecord, why: str, now: datetime) -> float:
        """Leave a job where it is and as it is, and say why."""
        if self._mover is not None and self._mover.is_draining():
            is_leaving = MOVING in record.message  # its objects are gone, or going
            why = f"{self._cluster.name} is draining{f'{MOVING}another one' if is_leaving else ''}, and {why}"
        await self._say(record, why, now)
        return MOVE_SECONDS

    async def _say(self, record: JobRecord, message: str, now: datetime) -> None:
        """Record why a job waits."""
        if bounded(message) != record.message:
            await self._change(record, {"message": bounded(message)}, now)

    async def _pause(self, record: JobRecord, job: Job, state: JobState, now: datetime) -> float | None:
        """Remove a job from the cluster until it is resumed, unless it has ended by itself."""
        found = await self._cluster.find(job_id=record.id, namespace=record.namespace)
        if state is JobState.PENDING and await self._note_created(record, found, now):
            return 0.0
        left = [one for one in found if one.kind != KEPT]
        if state in IN_CLUSTER and any(one.kind in WORKLOADS and not one.is_leaving for one in left):
            seen = await self._observe(record, now)
            if seen.phase in OVER:
                return await self._record_seen(record, job, state, seen, now)
        if left:
            return await self._removal.remove(record, left)
        if await self._removal.remove_stray_pods(record):
            return SOON_SECONDS
        if state in IN_CLUSTER:
            await self._take(record, (PlannedStep(JobStep.PAUSE, record.message),), now)
        return None

    async def _tidy(self, record: JobRecord, state: JobState, now: datetime) -> float | None:
        """After a job ended, remove running objects at once, and objects kept for inspection after a time."""
        found = await self._cluster.find(job_id=record.id, namespace=record.namespace)
        left = [one for one in found if one.kind != KEPT]
        self._kept[record.id] = uids_of(found)
        if not left:
            return None
        await self._removal.keep_logs(record)
        ended = record.ended_at or now
        until = ended + timedelta(seconds=self._rendering.finished_ttl_seconds)
        if state is JobState.CANCELLED or now >= until:
            del self._kept[record.id]
            return await self._removal.remove(record, left)
        facts = await self._cluster.facts(record, workload_kind(record))
        if facts.workload is not None and not facts.workload.has_ended:
            del self._kept[record.id]
            await self._cluster.remove([one for one in left if one.kind in WORKLOADS])
            return SOON_SECONDS
        is_kept = not any(one.message for one in kept_logs(record))
        return (until - now).total_seconds() if is_kept else AGAIN_SECONDS

    # Records

    async def _fail(self, record: JobRecord, message: str, now: datetime) -> float:
        await self._take(record, (PlannedStep(JobStep.FAIL, bounded(message)),), now)
        return 0.0

    async def _change(self, record: JobRecord, changes: Mapping[str, Any], now: datetime) -> None:
        await self._database.write(
            lambda session: change_job(session, record.id, version=record.version, now=now, changes=changes)
        )

    async def _take(self, record: JobRecord, planned: tuple[PlannedStep, ...], now: datetime) -> None:
        """Record the steps in one transaction. Raises RecordChanged if the record changed since they were planned."""

        def work(session: Any) -> None:  # noqa: ANN401 - a session of the database
            version = record.version
            for one in planned:
                told, changes = _told(record, one, now), one.changes
                taken = take_step(session, record.id, one.step, now=now, message=told, changes=changes, version=version)
                version = taken.version

        await self._database.write(work)
        steps = [one.step.value for one in planned]
        log.info("Took steps", job=record.id, name=record.name, steps=steps, reason=planned[-1].message)


def _told(record: JobRecord, planned: PlannedStep, now: datetime) -> str:
    """Return the message of a step; when a training's time is over, with its last checkpoint."""
    checkpoint = checkpoint_of(record)
    if planned.step is not JobStep.EXPIRE or record.job_type != JobType.TRAINING or checkpoint is None:
        return planned.message
    deadline = job_of(record).policy.deadline
    may_retry = deadline is None or now < deadline
    return told_at_end(planned.message, record.name, checkpoint, may_retry=may_retry)


def _sooner(seconds: float | None, time: Due, now: datetime) -> float | None:
    """Return the earlier of a wait and the end of the job's time."""
    if time.at is None:
        return seconds
    left = max(0.0, (time.at - now).total_seconds())
    return left if seconds is None else min(seconds, left)


def _gpus_of(record: JobRecord) -> int:
    """Return the GPUs of a job, by the estimate of its submission."""
    return int((record.estimate or {}).get("gpu_count") or 0)
