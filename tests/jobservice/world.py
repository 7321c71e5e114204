"""A cluster in memory that runs Jobs and Deployments, and a service that can be killed or get no answer at any write.

Tests move the time. A seeded generator decides what happens to a job, so a seed determines the history.
"""

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from atoll.api import job_names
from atoll.jobs.settings import RenderSettings
from atoll.kube.client import Listing
from atoll.kube.errors import Unanswered, api_error
from jobs.cluster import JobCluster
from jobs.database import Database
from jobs.log_archive import LogArchive
from jobs.reconciler import JobMover, JobReconciler
from jobs.store import active_ids
from tests.fakes.api_server import FakeApiServer
from tests.fakes.clock import ManualClock

T = TypeVar("T")
Object = dict[str, Any]
SERVICE_ID = "11111111-2222-3333-4444-555555555555"
JOBS, DEPLOYMENTS = "/apis/batch/v1/namespaces/{}/jobs", "/apis/apps/v1/namespaces/{}/deployments"


class ServiceKilled(BaseException):
    """The service's process was killed."""


@dataclass
class Faults:
    """Faults of the next writes: the process is killed before or after write number `kill_at`, from 0, or with `loses`
    only has no answer; `loss` is the share of requests without an answer, whether carried out or not."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    kill_at: int | None = None
    kill_after: bool = False
    loses: bool = False
    loss: float = 0.0
    writes: int = 0

    def write(self, what: Callable[[], T], lost: Callable[[], Exception]) -> T:
        """Carry out a write, or apply a fault before or after it."""
        number, self.writes = self.writes, self.writes + 1
        if number == self.kill_at and not self.kill_after:
            raise lost() if self.loses else ServiceKilled
        is_lost, is_done = self.rng.random() < self.loss, self.rng.random() < 0.5
        if is_lost and not is_done:
            raise lost()
        result = what()
        if number == self.kill_at:
            raise lost() if self.loses else ServiceKilled
        if is_lost:
            raise lost()
        return result

    def read(self, what: Callable[[], T], lost: Callable[[], Exception]) -> T:
        """Carry out a read, or raise the error of a lost answer."""
        if self.rng.random() < self.loss:
            raise lost()
        return what()


class FaultyDatabase(Database):
    """The real database with faults, in this thread."""

    def __init__(self, engine: Any, faults: Faults) -> None:
        super().__init__(engine)
        self._faults = faults

    async def read(self, work: Callable[[Session], T]) -> T:
        """Read, or fail because the database is gone."""
        return self._faults.read(lambda: self._run(work, writes=False), _database_gone)

    async def write(self, work: Callable[[Session], T]) -> T:
        """Write, or fail because the database is gone or the process is killed."""
        return self._faults.write(lambda: self._run(work, writes=True), _database_gone)


def _database_gone() -> Exception:
    return OperationalError("", {}, Exception("the database is gone"))


class WorldApi:
    """The API server as the service sees it."""

    def __init__(self, world: "JobWorld", faults: Faults) -> None:
        self._world = world
        self._faults = faults

    async def get(self, path: str, **_options: Any) -> bytes:
        """GET one object."""
        return self._faults.read(lambda: self._world.answer("GET", path), lambda: _unanswered(path))

    async def list(
        self, path: str, decode: Callable[[bytes], T], *, params: Mapping[str, str | int] | None = None
    ) -> Listing[T]:
        """List a collection, filtered by labels."""
        wanted = dict(
            part.split("=", 1) for part in str((params or {}).get("labelSelector", "")).split(",") if "=" in part
        )
        found = self._faults.read(lambda: self._world.collection(path), lambda: _unanswered(path))
        items = [one for one in found if wanted.items() <= (one["metadata"].get("labels") or {}).items()]
        return Listing([decode(json.dumps(one).encode()) for one in items], "1")

    async def create(self, path: str, body: Mapping[str, Any], **_options: Any) -> bytes:
        """POST. Other tasks run before the answer."""
        await asyncio.sleep(0)
        return self._faults.write(lambda: self._world.answer("POST", path, dict(body)), lambda: _unanswered(path))

    async def patch(self, path: str, body: Mapping[str, Any], **_options: Any) -> bytes:
        """PATCH, as a merge patch."""
        return self._faults.write(lambda: self._world.answer("PATCH", path, dict(body)), lambda: _unanswered(path))

    async def delete(self, path: str, options: Mapping[str, Any] | None = None, **_options: Any) -> bytes:
        """DELETE."""
        return self._faults.write(
            lambda: self._world.answer("DELETE", path, dict(options or {})), lambda: _unanswered(path)
        )

    async def stream(self, path: str, _params: Mapping[str, str | int], **_options: Any) -> AsyncGenerator[bytes, None]:
        """GET the log of a pod, in two chunks. One that has not started yet has none."""
        text = self._faults.read(lambda: self._world.log_of(path), lambda: _unanswered(path))
        half = len(text) // 2
        yield text[:half]
        yield text[half:]


def _unanswered(path: str) -> Exception:
    return Unanswered("no answer", path=path, sent=True)


class JobWorld:
    """One cluster with simulated controllers and kubelets."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.server = FakeApiServer()
        self.clock = ManualClock()
        self.created: list[tuple[str, str, str]] = []
        """Kind, job and attempt of every created object."""
        self.plays = True
        self.ends = True
        """Whether pods of Jobs end at all."""
        self.fates: dict[str, str] = {}
        """Outcome of a job's pods by job name; default: success."""
        self.told: dict[str, str] = {}
        """Termination message of a job's containers by job name."""
        self.logs: dict[str, bytes] = {}
        """What the containers of a job print, by job name."""
        self.holds: set[str] = set()
        """Names of jobs that Kueue has not admitted."""
        self.is_gone = False
        """Whether the API server answers nobody."""

    # API server

    def answer(self, method: str, path: str, body: Any = None) -> bytes:
        """Answer a request. Raises the real client's errors."""
        if self.is_gone:
            raise _unanswered(path)
        if method == "POST" and path.rsplit("/", 1)[-1] in ("jobs", "deployments"):
            self._note(path, body)
        if method == "DELETE" and path in self.server.objects and self._stays(path, body):
            return b"{}"
        answer: web.Response = self.server.respond(method, path, {}, body)
        raw = answer.body if isinstance(answer.body, bytes) else b""
        if answer.status >= 300:
            raise api_error(raw, path=path, status=answer.status)
        return raw

    def log_of(self, path: str) -> bytes:
        """Return what a pod printed: its name, and what the test says. Raises the real client's errors."""
        pod = json.loads(self.answer("GET", path.removesuffix("/log")))
        if pod["status"]["phase"] == "Pending":
            told = {"kind": "Status", "message": "container is waiting to start", "reason": "BadRequest", "code": 400}
            raise api_error(json.dumps(told).encode(), path=path, status=400)
        name = path.split("/")[-2]
        return f"{name} begins\n".encode() + self.logs.get(pod["metadata"]["labels"][job_names.JOB_NAME], b"")

    def collection(self, path: str) -> list[Object]:
        """Return the objects of a collection, which may span all namespaces. Raises the real client's errors."""
        if self.is_gone:
            raise _unanswered(path)
        *root, plural = path.strip("/").split("/")
        base = "/" + "/".join(root)
        return [
            one for key, one in self.server.objects.items() if key.startswith(base) and key.rsplit("/", 2)[1] == plural
        ]

    def _note(self, path: str, body: Object) -> None:
        if f"{path}/{body['metadata']['name']}" in self.server.objects:
            return
        labels = body["metadata"]["labels"]
        self.created.append((body["kind"], labels[job_names.JOB_ID], labels[job_names.ATTEMPT]))
        if body["kind"] == "Job" and body["metadata"]["name"] in self.holds:
            body["spec"] = body["spec"] | {"suspend": True}

    def _stays(self, path: str, options: Object) -> bool:
        """Mark an object that is deleted in the foreground; True if it stays until its pods are gone."""
        current = self.server.objects[path]
        uid = options.get("preconditions", {}).get("uid")
        if options.get("propagationPolicy") != "Foreground" or uid != current["metadata"]["uid"]:
            return False
        self._change(path, metadata=current["metadata"] | {"deletionTimestamp": "2026-01-31T12:00:00Z"})
        return True

    def _change(self, path: str, **sections: Any) -> None:
        self.server.put(path, self.server.objects[path] | sections)

    # Controllers and kubelets

    def of_kind(self, *kinds: str) -> list[tuple[str, Object]]:
        """Return the objects of the kinds, with their paths."""
        return [(path, one) for path, one in sorted(self.server.objects.items()) if one.get("kind") in kinds]

    def pods_of(self, uid: str) -> list[tuple[str, Object]]:
        """Return the pods of a workload, with their paths."""
        return [(path, pod) for path, pod in self.of_kind("Pod") if pod["owner"] == uid]

    def play(self) -> None:
        """Run one step of every controller and kubelet."""
        for path, one in self.of_kind("Job", "Deployment"):
            pods = self.pods_of(one["metadata"]["uid"])
            if "deletionTimestamp" in one["metadata"]:
                self._take_down(path, pods)
            elif one["kind"] == "Deployment":
                self._run_deployment(path, one, pods)
            elif not _has_ended(one):
                self._run_job(path, one, pods)

    def settle(self, rounds: int = 20) -> None:
        """Run steps until the cluster is idle."""
        for _ in range(rounds):
            self.play()

    def _take_down(self, path: str, pods: list[tuple[str, Object]]) -> None:
        for pod_path, _ in pods:
            self.server.remove(pod_path)
        if not pods:
            self.server.remove(path)

    def _run_deployment(self, path: str, one: Object, pods: list[tuple[str, Object]]) -> None:
        wanted = one["spec"].get("replicas", 1)
        if not pods:
            self._start_pods(path, one, wanted)
            return
        self._progress(pods, ends=False)
        running = sum(pod["status"]["phase"] == "Running" for _, pod in self.pods_of(one["metadata"]["uid"]))
        self._change(path, status={"availableReplicas": running})

    def _run_job(self, path: str, one: Object, pods: list[tuple[str, Object]]) -> None:
        if one["spec"].get("suspend"):
            for pod_path, _ in pods:
                self.server.remove(pod_path)
            return
        if not pods:
            self._start_pods(path, one, one["spec"].get("parallelism", 1))
            return
        self._progress(pods, ends=self.ends)
        phases = {pod["status"]["phase"] for _, pod in self.pods_of(one["metadata"]["uid"])}
        if "Failed" in phases:
            condition = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}
            self._change(path, status={"conditions": [condition]})
        elif phases == {"Succeeded"}:
            self._change(path, status={"conditions": [{"type": "Complete", "status": "True"}], "succeeded": 1})

    def _start_pods(self, path: str, one: Object, count: int) -> None:
        namespace, template = one["metadata"]["namespace"], one["spec"]["template"]
        for index in range(count):
            name = f"{one['metadata']['name']}-{one['metadata']['labels'][job_names.ATTEMPT]}-{index}"
            pod = {
                "kind": "Pod",
                "owner": one["metadata"]["uid"],
                "metadata": {"labels": template["metadata"]["labels"]},
                "status": {"phase": "Pending"},
            }
            self.server.put(f"/api/v1/namespaces/{namespace}/pods/{name}", pod)

    def _progress(self, pods: list[tuple[str, Object]], *, ends: bool) -> None:
        """Advance pods, each at random: first to running, then to the job's outcome."""
        for path, pod in pods:
            phase = pod["status"]["phase"]
            if self.plays and self.rng.random() < 0.5:
                continue
            if phase == "Pending":
                self._change(path, status={"phase": "Running"})
            elif phase == "Running" and ends:
                self._change(path, status=self._end_of(pod))

    def _end_of(self, pod: Object) -> Object:
        name = pod["metadata"]["labels"][job_names.JOB_NAME]
        reason, message = self.fates.get(name, ""), self.told.get(name, "")
        if not reason:
            ended = {"terminated": {"exitCode": 0, "message": message}}
            return {"phase": "Succeeded", "containerStatuses": [{"state": ended}]}
        ended = {"terminated": {"reason": reason, "exitCode": 137, "message": message}}
        return {"phase": "Failed", "containerStatuses": [{"state": ended}]}

    # People and Kueue

    def delete_by_hand(self, name: str) -> None:
        """Delete a Job and its pods by force."""
        for path, one in self.of_kind("Job", "Deployment"):
            if one["metadata"]["name"] == name:
                for pod_path, _ in self.pods_of(one["metadata"]["uid"]):
                    self.server.remove(pod_path)
                self.server.remove(path)

    def suspend(self, name: str, *, reason: str = "Preempted") -> None:
        """Suspend a Job as Kueue does when it takes the quota back."""
        for path, one in self.of_kind("Job"):
            if one["metadata"]["name"] == name and not _has_ended(one) and not one["spec"].get("suspend"):
                self._change(path, spec=one["spec"] | {"suspend": True})
                workload = {
                    "kind": "Workload",
                    "metadata": {"labels": {"kueue.x-k8s.io/job-uid": one["metadata"]["uid"]}},
                    "status": {"conditions": [{"type": "Evicted", "status": "True", "reason": reason}]},
                }
                base = f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{one['metadata']['namespace']}/workloads"
                self.server.put(f"{base}/{name}", workload)

    def admit(self, name: str) -> None:
        """Admit a Job as Kueue does."""
        self.holds.discard(name)
        for path, one in self.of_kind("Job"):
            if one["metadata"]["name"] == name and one["spec"].get("suspend"):
                self._change(path, spec=one["spec"] | {"suspend": False})
                self.server.objects.pop(
                    f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{one['metadata']['namespace']}/workloads/{name}", None
                )


class ServiceProcess:
    """One run of the service's process: its reconciler over a world and a database."""

    def __init__(
        self,
        world: JobWorld,
        engine: Any,
        faults: Faults | None = None,
        rendering: RenderSettings | None = None,
        *,
        cluster: str = "local",
        mover: JobMover | None = None,
        archive: LogArchive | None = None,
    ) -> None:
        self.name = cluster
        self.faults = faults or Faults()
        self.database = FaultyDatabase(engine, self.faults)
        jobs = JobCluster(WorldApi(world, self.faults), name=cluster, service_id=SERVICE_ID)
        self.reconciler = JobReconciler(
            self.database, jobs, rendering or RenderSettings(), world.clock, mover=mover, archive=archive
        )
        self.waits: dict[str, float | None] = {}

    async def look_at(self, job_id: str, *, rounds: int = 12) -> None:
        """Reconcile a job until nothing is left to do at once."""
        for _ in range(rounds):
            wait = await self.reconciler.reconcile(job_id)
            self.waits[job_id] = wait
            if wait is None or wait > 0:
                return

    async def resync(self) -> None:
        """Reconcile every active job and every object in the cluster, as a process does at its start."""
        active = await self.database.read(lambda session: active_ids(session, self.name))
        for job_id in dict.fromkeys([*active, *await self.reconciler.sweep()]):
            await self.look_at(job_id)


def _has_ended(one: Object) -> bool:
    return any(condition["type"] in ("Complete", "Failed") for condition in one.get("status", {}).get("conditions", ()))
