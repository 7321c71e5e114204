"""Performs one try of a step: waits until it is due, acts once, waits for what it began, and records how it ended.

`Once` keeps what a part returned, so that after a crash no finished part runs again. Between the parts there is only
waiting, which may be repeated. What a crash cuts runs again: jobs and calls carry an idempotency key for that.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from hashlib import sha256
from inspect import isawaitable
from typing import Any, Final, Protocol, TypeVar
from uuid import uuid4

import structlog
from sqlalchemy.exc import SQLAlchemyError

from atoll.jobs.permissions import JobCaller, TenantGrant, TenantRole
from atoll.jobs.states import ENDED, JobState
from atoll.jobs.words import JobType, SourceType
from atoll.pipelines.deciding import RunSnapshot, TryOutcome, evaluated, resolved
from atoll.pipelines.expressions import NUL, ExpressionFailed, ExpressionInvalid, is_json
from atoll.pipelines.graph import step_of
from atoll.pipelines.model import PipelineStep
from atoll.pipelines.words import StepState, StepType
from jobs.api_parts import ApiParts
from jobs.creating import creation_of
from jobs.database import Database
from jobs.errors import JobServiceError, RecordUnreadable
from jobs.problems import ApiRefusal
from jobs.submission import Submission
from pipelines.mail import Mailer
from pipelines.notifying import Notice, Notifier
from pipelines.outgoing import CallFailed, CallRefused, OutgoingCall, OutgoingClient
from pipelines.records import PipelineRecord, StepRecord
from pipelines.store import (
    Try,
    advance,
    cancel_job_of_step,
    fail_run,
    get_pipeline,
    get_run,
    snapshot_of,
    step_to_begin,
)
from pipelines.watching import JobSight, Sleeper, StepSight, StepWatch

log = structlog.get_logger(__name__)

OUTPUT_BYTES_MAX: Final = 64 * 1024
ACT_SECONDS: Final = 60.0
"""How long a call may take if its step has no timeout."""
JOB_NAME_LENGTH: Final = 40
DATABASE_PAUSE_SECONDS: Final = 1.0
STOPPED: Final = {"error": "stopped", "may_retry": False}

T = TypeVar("T")

Function = Callable[[Mapping[str, Any], str], Any]
"""A registered function: takes its parameters and an idempotency key, returns a value of JSON's types."""
Once = Callable[[str, Callable[[], Awaitable[dict[str, Any]]]], Awaitable[dict[str, Any]]]
"""Runs a part of a try and keeps what it returned, under a name."""


class StepClock(Sleeper, Protocol):
    """Waits, and tells the time."""

    def now(self) -> datetime:
        """Return the time, in UTC."""
        ...


class StepRefused(Exception):
    """The step cannot be carried out, and no retry would help."""


@dataclass(frozen=True, slots=True)
class StepParts:
    """What steps need to act."""

    api: ApiParts
    outgoing: OutgoingClient
    functions: Mapping[str, Function]
    clock: StepClock

    @property
    def database(self) -> Database:
        """The records."""
        return self.api.database


@dataclass(frozen=True, slots=True)
class _Scene:
    """A try with everything around it."""

    one: Try
    run: RunSnapshot
    owner: PipelineRecord
    step: PipelineStep
    settings: Any
    not_before: datetime | None

    def filled(self, value: Any) -> Any:  # noqa: ANN401 - a value of JSON's types
        """Return a part of the config with its expressions replaced."""
        return resolved(self.run, self.one.key, value)

    @property
    def key(self) -> str:
        """The idempotency key of what this try does."""
        begun = f"pipeline-{self.owner.id}-step-{self.one.key}-run-{self.one.run_id}"
        return begun if self.one.attempt == 1 else f"{begun}-try-{self.one.attempt}"


class StepPerformer:
    """Performs tries."""

    def __init__(self, parts: StepParts, watch: StepWatch) -> None:
        self._parts = parts
        self._watch = watch
        self._notifier = Notifier(parts.database, parts.outgoing, Mailer(parts.api.settings))

    async def perform(self, one: Try, once: Once) -> None:
        """Perform a try and record its end; a run that can no longer be read fails."""
        try:
            scene = await self._lasting(lambda: self._scene(one))
            is_stopped = await self._is_stopped_before(scene)
            began = await once("act", lambda: self._lasting(lambda: self._act(scene, is_stopped=is_stopped)))
            outcome = await self._outcome(scene, began)
            await once("record", lambda: self._lasting(lambda: self._record(one, outcome)))
        except RecordUnreadable as error:
            change = partial(fail_run, run_id=one.run_id, why=str(error), now=self._parts.clock.now())
            await self._lasting(lambda: self._parts.database.write(change))

    async def _lasting(self, work: Callable[[], Awaitable[T]]) -> T:
        """Repeat work, which may be repeated, until the database answers: a try that raised would never go on."""
        while True:
            try:
                return await work()
            except SQLAlchemyError as error:
                log.warning("The database does not answer a step", err=str(error).partition("\n")[0])
                await self._parts.clock.sleep(DATABASE_PAUSE_SECONDS)

    async def _scene(self, one: Try) -> _Scene:
        def read(session: Any) -> _Scene:  # noqa: ANN401 - a session
            record = get_run(session, one.run_id)
            run = snapshot_of(session, record)
            step, _ = step_of(run.graph, one.key)
            of_step = session.get(StepRecord, (one.run_id, one.key))
            owner = get_pipeline(session, record.pipeline_id)
            return _Scene(one, run, owner, step, run.graph.settings[step.name], of_step.not_before)

        return await self._parts.database.read(read)

    async def _is_stopped_before(self, scene: _Scene) -> bool:
        """Wait for the end of the pause before a retry; return whether the step is stopped first, or was already."""
        if scene.run.of(scene.one.key).is_stopping:
            return True
        while scene.not_before is not None and self._parts.clock.now() < scene.not_before:
            if (await self._watch.look(scene.one)).is_stopping:
                return True
        return False

    async def _record(self, one: Try, outcome: TryOutcome) -> dict[str, Any]:
        now, cluster = self._parts.clock.now(), self._parts.api.settings.cluster
        change = partial(advance, run_id=one.run_id, now=now, ended=(one, outcome), cluster=cluster)
        await self._parts.database.write(change)
        return {}

    # Acting

    async def _act(self, scene: _Scene, *, is_stopped: bool) -> dict[str, Any]:
        """Act; return the output, the error, or what to wait for, with the time at which that began."""
        if is_stopped:
            return STOPPED
        seconds = ACT_SECONDS if scene.step.timeout is None else float(scene.step.timeout)
        is_job = scene.step.step_type is StepType.JOB  # its timeout counts from its record, which is not cut off
        try:
            async with asyncio.timeout(None if is_job else seconds):
                found = await self._ACTS[scene.step.step_type](self, scene)
        except TimeoutError:
            return {"error": f"timed out after {seconds:g} s"}
        except (ExpressionFailed, ExpressionInvalid, StepRefused, CallRefused) as error:
            return {"error": str(error), "may_retry": False}
        except CallFailed as error:
            return {"error": str(error)}
        except SQLAlchemyError:
            raise
        except Exception as error:
            log.exception("A step failed by a mistake of the service", run=scene.one.run_id, step=scene.one.key)
            return {"error": f"a mistake of the service: {type(error).__name__}: {error}"}
        if "output" in found:
            return kept(found["output"])
        return {"at": self._parts.clock.now().isoformat(), **found}

    async def _submit(self, scene: _Scene) -> dict[str, Any]:
        """Record the job; a repeated try finds the job that it recorded before."""
        body = {
            **scene.filled(scene.settings.job),
            "name": job_name(scene.owner.name, scene.step.name, scene.one),
            "source_type": SourceType.PIPELINE.value,
            "source_id": scene.owner.id,
            "step_id": scene.step.name,
            "tenant_id": scene.owner.tenant_id,
            **({"project_id": scene.owner.project_id} if scene.owner.project_id else {}),
        }
        grant = TenantGrant(TenantRole.MEMBER, scene.owner.tenant_id, scene.owner.project_id)
        caller = JobCaller(scene.owner.created_by, (grant,))
        now, parts = self._parts.clock.now(), self._parts
        try:
            submission = Submission(json.dumps(body).encode(), caller, scene.key)
            creation = await creation_of(parts.api, submission, parts.api.settings.cluster, now)

            def record(session: Any) -> str | None:  # noqa: ANN401 - a session
                step = step_to_begin(session, scene.one)
                if step is None:
                    return None
                job, _ = creation(session, str(uuid4()))
                step.job_id = job.id
                return job.id

            job_id = await parts.database.write(record)
        except ApiRefusal as refusal:
            raise StepRefused(f"the job is refused: {refusal.problem.detail}") from refusal
        except JobServiceError as error:
            return {"error": str(error)}
        if job_id is None:
            return STOPPED
        if not scene.settings.wait_for_ready:
            return {"output": {"job_id": job_id, "status": JobState.PENDING.value, "name": body["name"]}}
        return {"job_id": job_id}

    async def _call(self, scene: _Scene) -> dict[str, Any]:
        asked = scene.settings
        headers = {"Idempotency-Key": scene.key} | scene.filled(asked.headers)
        found = await self._parts.outgoing.call(
            OutgoingCall(
                asked.method,
                str(scene.filled(asked.url)),
                scene.owner.tenant_id,
                {name: str(value) for name, value in headers.items()},
                asked.secret_headers,
                scene.filled(asked.body),
            )
        )
        if found["status_code"] >= 400:
            return {"error": f"{asked.method} answered with status {found['status_code']}"}
        return {"output": found}

    async def _run_function(self, scene: _Scene) -> dict[str, Any]:
        function = self._parts.functions.get(scene.settings.function_name)
        if function is None:
            raise StepRefused(f"there is no function {scene.settings.function_name}")
        parameters = scene.filled(scene.settings.parameters)
        try:
            found = await asyncio.to_thread(function, parameters, scene.key)
            if isawaitable(found):
                found = await found
        except Exception as error:  # noqa: BLE001 - any function may be registered
            return {"error": f"{scene.settings.function_name}: {type(error).__name__}: {error}"}
        return {"output": {"result": found}}

    async def _notify(self, scene: _Scene) -> dict[str, Any]:
        asked = scene.settings
        subject = asked.subject or f"{scene.owner.name}: {scene.step.name}"
        notice = Notice(
            scene.one,
            asked.channel,
            asked.recipients,
            str(scene.filled(subject)),
            str(scene.filled(asked.template)),
            scene.filled(asked.data),
            scene.owner.tenant_id,
            scene.key,
        )
        await self._notifier.tell(notice, self._parts.clock.now())
        return {"output": {"sent": True}}

    async def _begin_wait(self, scene: _Scene) -> dict[str, Any]:  # noqa: ARG002 - its beginning alone is kept
        return {"wait": True}

    _ACTS: Final[Mapping[StepType, Callable[["StepPerformer", _Scene], Awaitable[dict[str, Any]]]]] = {
        StepType.JOB: _submit,
        StepType.API_CALL: _call,
        StepType.FUNCTION: _run_function,
        StepType.NOTIFICATION: _notify,
        StepType.WAIT: _begin_wait,
    }

    # Waiting

    async def _outcome(self, scene: _Scene, began: Mapping[str, Any]) -> TryOutcome:
        """Wait for what a try began, and return how it ended."""
        if "error" in began:
            return TryOutcome(error=str(began["error"]), may_retry=bool(began.get("may_retry", True)))
        if "output" in began:
            return TryOutcome(began["output"])
        begin = datetime.fromisoformat(began["at"])
        if "job_id" in began:
            return await self._follow_job(scene, str(began["job_id"]), begin)
        return await self._wait(scene, begin)

    async def _follow_job(self, scene: _Scene, job_id: str, begin: datetime) -> TryOutcome:
        timeout, is_late = scene.step.timeout, False
        is_service = scene.settings.job.get("job_type") == JobType.SERVICE
        while True:
            seen = await self._watch.look(scene.one, job_id)
            if seen.job is None:
                return TryOutcome(error=f"job {job_id} has no record any more", may_retry=False)
            if seen.job.state in ENDED or (is_service and seen.job.state is JobState.RUNNING and not is_late):
                return _outcome_of(job_id, seen.job, late_seconds=timeout if is_late else None)
            is_late = is_late or (timeout is not None and self._parts.clock.now() >= begin + timedelta(seconds=timeout))
            if is_late or seen.is_stopping:
                await self._cancel_job(scene, job_id)

    async def _cancel_job(self, scene: _Scene, job_id: str) -> None:
        now, actor = self._parts.clock.now(), f"pipeline {scene.owner.name}"
        change = partial(cancel_job_of_step, job_id=job_id, now=now, actor=actor)
        await self._lasting(lambda: self._parts.database.write(change))

    async def _wait(self, scene: _Scene, begin: datetime) -> TryOutcome:
        asked = scene.settings
        waits = asked.duration if asked.duration is not None else scene.step.timeout or asked.timeout
        due = begin + timedelta(seconds=waits)
        next_look = begin
        while True:
            seen, now = await self._watch.look(scene.one), self._parts.clock.now()
            waited = {"waited": int((now - begin).total_seconds())}
            if seen.is_stopping:
                return TryOutcome(error="stopped", may_retry=False)
            if asked.condition is not None and now >= next_look:
                next_look = now + timedelta(seconds=asked.poll_interval)
                held = await self._holds(scene)
                if held is not None:
                    return TryOutcome(waited) if held == "" else TryOutcome(error=held, may_retry=False)
            if now >= due:
                is_done = asked.duration is not None
                return TryOutcome(waited) if is_done else TryOutcome(error=f"the condition did not hold in {waits} s")

    async def _holds(self, scene: _Scene) -> str | None:
        """Return an empty text if the condition holds, the error if it has no value, None if it does not hold."""
        states: dict[str, str] = {}
        for name, step in scene.run.graph.steps.items():
            done = scene.run.of(name)
            if step.step_type is StepType.JOB and done.state is StepState.SUCCEEDED:
                seen: StepSight = await self._watch.look(scene.one, str(done.output["job_id"]))
                states[name] = seen.job.state.value if seen.job is not None else ""
        try:
            holds = evaluated(scene.run, scene.one.key, scene.settings.condition, more=states)
        except (ExpressionFailed, ExpressionInvalid) as error:
            return str(error)
        return "" if holds else None


def job_name(pipeline: str, step: str, one: Try) -> str:
    """Return the name of a step's job: readable, and its own for each run, iteration and try."""
    digest = sha256(f"{one.run_id}/{one.key}/{one.attempt}".encode()).hexdigest()[:8]
    return f"{pipeline}-{step.replace('_', '-')}"[:JOB_NAME_LENGTH].rstrip("-") + f"-{digest}"


def _outcome_of(job_id: str, job: JobSight, *, late_seconds: int | None) -> TryOutcome:
    if late_seconds is not None and job.state is not JobState.SUCCEEDED:
        return TryOutcome(error=f"job {job.name} timed out after {late_seconds} s and was cancelled")
    if job.state in (JobState.SUCCEEDED, JobState.RUNNING):
        return TryOutcome({"job_id": job_id, "status": job.state.value, "name": job.name})
    told = f": {job.message}" if job.message else ""
    return TryOutcome(error=f"job {job.name} {job.state.value}{told}", may_retry=job.state is JobState.FAILED)


def kept(output: Any) -> dict[str, Any]:  # noqa: ANN401 - whatever a step returned
    """Return an output as it can be recorded, or the error that it cannot."""
    try:
        clean = _clean(output)
        text = json.dumps(clean, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return {"error": f"the output is not of JSON's types: {error}", "may_retry": False}
    if len(text) > OUTPUT_BYTES_MAX:
        told = f"the output has {len(text)} bytes, and {OUTPUT_BYTES_MAX} are allowed: store it and return its place"
        return {"error": told, "may_retry": False}
    return {"output": clean} if is_json(clean) else {"error": "the output is too deep", "may_retry": False}


def _clean(value: Any) -> Any:  # noqa: ANN401 - a value of JSON's types
    """Return a value without NUL and halves of characters, which databases do not store."""
    if isinstance(value, str):
        return value.replace(NUL, "\ufffd").encode("utf-8", "replace").decode()
    if isinstance(value, list | tuple):
        return [_clean(one) for one in value]
    if isinstance(value, dict):
        return {_clean(str(key)): _clean(one) for key, one in value.items()}
    return value
