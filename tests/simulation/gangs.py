"""Gangs in a history: the Jobs that own members, and the promises of whole gangs.

A Job creates members until enough have succeeded and deletes them while it is suspended. It counts successes itself, so
objects of succeeded members may be deleted. `GangJudge` compares the controllers' writes with the truth:

    8  a member is ungated only with all of its GPUs, and if the others hold theirs too: those of an admission together,
       a successor by itself, in the place of one that was ungated in this admission and has ended. It has the id of the
       admission. One that held its GPUs and was deleted counts if no watch had told whoever asked to open the gate: a
       request cannot be called back, and no API server opens a gate on the condition that another pod exists
    9  an admission ends only for events in it: not for members that succeeded and were deleted, not for an earlier one
    10 a gang becomes ready in time or makes room; a gang that fits starts, and a gang that is done is finished
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from atoll.api import names
from atoll.cluster.requests import Verdict
from tests.builders import pod_json
from tests.simulation.server import LEASES, PODS, Object, SimulatedServer
from tests.simulation.virtual_time import VirtualLoop

GANGS = f"/apis/{names.API_VERSION}/namespaces/team/gpugangs"
JOBS = "/apis/batch/v1/namespaces/team/jobs"
TIMEOUT_SECONDS, RECOVERY_SECONDS = 8, 5
RULES = {
    "enable": True,
    "timeout": f"{TIMEOUT_SECONDS}s",
    "recoveryTimeout": f"{RECOVERY_SECONDS}s",
    "requeuingStrategy": {"backoffBaseSeconds": 1, "backoffMaxSeconds": 2, "backoffLimitCount": 3},
}
LAG_SECONDS = 3.0
"""An eviction may be so late, where no watch is slow: it is decided upon, written and told in so long."""
UNREADY_SECONDS = TIMEOUT_SECONDS + RECOVERY_SECONDS + 15.0
LATE_SECONDS = 90.0
"""A gate may open so late where requests are: the gang's time begins with the last one."""
START_SECONDS = 6.0
LOOK_SECONDS = 0.5
AGAIN_SECONDS = 2.0
REASONS = {
    Verdict.BUSY: {"WaitForRoom", "WaitForOtherGangs", "AdmissionUndone"},
    Verdict.UNKNOWN: {"WaitForNodes"},
    Verdict.NEVER: {"NeverFits"},
}
Pool = tuple[Sequence[int], Sequence[int]]
NEVER_READY = "tests/never-ready"
"""Annotation of members whose containers run and are never ready."""


def is_ready(pod: Object) -> bool:
    """Tell whether kubelet says so."""
    conditions = pod["status"].get("conditions") or []
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def has_ended(pod: Object) -> bool:
    """Tell whether a pod has ended, or is being ended."""
    return pod["status"].get("phase") in {"Succeeded", "Failed"} or bool(pod["metadata"].get("deletionTimestamp"))


def condition(obj: Object, kind: str) -> Object:
    """Return a condition, empty where there is none."""
    found = (obj.get("status") or {}).get("conditions") or []
    return next((one for one in found if one["type"] == kind), {})


def uid_of(pod: Object) -> str:
    """Return the uid of a pod."""
    return str(pod["metadata"]["uid"])


def gang_of(pod: Object) -> str:
    """Return the name of a pod's gang."""
    return str(pod["metadata"].get("annotations", {}).get(names.GANG, ""))


def admission_of(pod: Object) -> str:
    """Return the id that a pod bears."""
    return str(pod["metadata"].get("annotations", {}).get(names.ADMISSION, ""))


@dataclass(slots=True)
class SimulatedJob:
    """A Job whose pods are a gang. `done`: uids of members that have succeeded, whatever became of their objects."""

    name: str
    count: int
    gpus: int
    is_never_ready: bool = False
    made: int = 0
    done: set[str] = field(default_factory=set)


class JobController:
    """Makes and deletes the members of Jobs, as Kubernetes' own controller does."""

    def __init__(self, server: SimulatedServer, reserving: Sequence[str]) -> None:
        """`reserving`: names of the gangs that use the reservation."""
        self._server = server
        self.reserving = reserving
        self.jobs: dict[str, SimulatedJob] = {}
        server.listeners.append(self._on_write)

    def create(self, name: str, count: int, gpus: int, *, is_never_ready: bool = False) -> None:
        """Create a Job and its GpuGang, unless they are there."""
        if name in self.jobs:
            return
        self.jobs[name] = SimulatedJob(name, count, gpus, is_never_ready)
        self._server.create(f"{JOBS}/{name}", {"metadata": {"name": name}, "spec": {"suspend": False}})
        self.create_gang(name)
        self.work()

    def run_again(self, name: str) -> bool:
        """Replace a Job that has done its work by another of the name, as TTL and a CronJob do; the gang stays."""
        job = self.jobs.get(name)
        if job is None or len(job.done) < job.count:
            return False
        self.jobs[name] = SimulatedJob(name, job.count, job.gpus, job.is_never_ready, job.made)
        self._server.delete(f"{JOBS}/{name}")
        self._server.create(f"{JOBS}/{name}", {"metadata": {"name": name}, "spec": {"suspend": False}})
        self.work()
        return True

    def create_gang(self, name: str) -> None:
        """Create the GpuGang of a Job."""
        job = self.jobs[name]
        spec = {"podSets": [{"name": "workers", "count": job.count}], "waitForPodsReady": RULES}
        self._server.create(f"{GANGS}/{name}", {"metadata": {"name": name}, "spec": spec})

    def members(self, name: str) -> list[Object]:
        """Return the pods of a gang."""
        return [pod for pod in self._server.pods() if gang_of(pod) == name]

    def work(self) -> None:
        """Bring every Job's pods to what they should be."""
        for job in self.jobs.values():
            owner = self._server.objects.get(f"{JOBS}/{job.name}")
            if owner is None:
                continue
            live = [
                pod
                for pod in self.members(job.name)
                if pod["status"].get("phase") not in {"Succeeded", "Failed"}
                and not pod["metadata"].get("deletionTimestamp")
            ]
            if owner["spec"].get("suspend"):
                for pod in live:
                    self._server.delete(f"{PODS}/{pod['metadata']['name']}")
                continue
            for _ in range(job.count - len(job.done) - len(live)):
                self._make(job, owner["metadata"]["uid"])

    def _make(self, job: SimulatedJob, owner: str) -> None:
        name, job.made = f"{job.name}-{job.made}", job.made + 1
        annotations = {names.GANG: job.name, **({NEVER_READY: "yes"} if job.is_never_ready else {})}
        annotations |= {names.RESERVATION: "nightly"} if job.name in self.reserving else {}
        gates = [{"name": names.GANG_GATE}]
        body = pod_json(name, gpus=job.gpus, annotations=annotations, schedulingGates=gates, restartPolicy="Never")
        body["metadata"]["ownerReferences"] = [
            {"apiVersion": "batch/v1", "kind": "Job", "name": job.name, "uid": owner, "controller": True}
        ]
        self._server.create(f"{PODS}/{name}", body)

    def _on_write(self, path: str, old: Object | None, new: Object | None) -> None:
        if not path.startswith(PODS) or new is None or old is None or gang_of(new) not in self.jobs:
            return
        has_succeeded = new["status"].get("phase") == "Succeeded" and old["status"].get("phase") != "Succeeded"
        if has_succeeded and not new["metadata"].get("deletionTimestamp"):
            self.jobs[gang_of(new)].done.add(new["metadata"]["uid"])


class GangJudge:
    """Holds the controllers' writes about gangs against the truth. `break_promise` is told of what is broken."""

    def __init__(
        self,
        server: SimulatedServer,
        loop: VirtualLoop,
        jobs: JobController,
        break_promise: Callable[[int, str], None],
        *,
        is_undisturbed: bool,
        is_strict: bool,
        is_led: Callable[[], bool],
    ) -> None:
        self._server = server
        self._loop = loop
        self._jobs = jobs
        self._break = break_promise
        self._is_undisturbed = is_undisturbed
        self._is_strict = is_strict
        self._room_since: dict[str, float] = {}
        """When gangs last began to wait for room, with the members that they have now."""
        self._is_led = is_led
        self._known: dict[str, set[str]] = {}
        """Uids that a GpuGang can know to have succeeded: those that existed under it while any controllers led."""
        self._let_go: dict[str, set[str]] = {}
        """Uids by the admission in which they were ungated."""
        self._deleted: dict[str, dict[str, int]] = {}
        """By gang: the versions at which members were deleted that were gated and held GPUs."""
        self._heard: dict[tuple[str, str], int] = {}
        """By uid and version of a pod: what those who asked to open its gate had heard of pods, at least."""
        self._lost: dict[str, set[str]] = {}
        """By admission: those deleted that nobody had heard of, or after its first member was let go; each is replaced
        by itself."""
        self._enough_since: dict[str, float] = {}
        self._unready_since: dict[str, tuple[str, float]] = {}
        self._taken: set[str] = set()
        server.listeners.append(self._on_write)

    def _on_write(self, path: str, old: Object | None, new: Object | None) -> None:
        if path.startswith(PODS) and (pod := new or old) is not None and gang_of(pod):
            self._on_pod(old, new)
        elif path.startswith(GANGS):
            self._on_gang(old, new)
        elif path.endswith(names.CONTROLLERS_LEADER_LEASE):
            for name in self._jobs.jobs:
                self._recount(name)

    # Members

    def _on_pod(self, old: Object | None, new: Object | None) -> None:
        if (old is None or new is None) and (name := gang_of(new or old or {})) in self._room_since:
            self._room_since[name] = self._loop.time()
        if new is not None and old is not None:
            if old["spec"].get("schedulingGates") and not new["spec"].get("schedulingGates"):
                heard = self._heard.get((uid_of(old), old["metadata"]["resourceVersion"]), self._server.version)
                self._on_let_go(new, heard)
            taken = condition(new, "DisruptionTarget")
            if taken.get("status") == "True":
                self._taken.add(admission_of(new))
        if new is None and old is not None and old["spec"].get("schedulingGates") and self._leases()[uid_of(old)]:
            self._deleted.setdefault(gang_of(old), {})[uid_of(old)] = self._server.version
            gang = self._server.objects.get(f"{GANGS}/{gang_of(old)}") or {}
            running = (admission_of(one) for one in self._jobs.members(gang_of(old)))
            # A GpuGang that was made anew has no status yet.
            admission = (gang.get("status") or {}).get("admission", "") or next(filter(None, running), "")
            if self._let_go.get(admission):
                self._lost.setdefault(admission, set()).add(uid_of(old))
        self._recount(gang_of(new or old or {}))

    def on_sent(self, heard: int, method: str, path: str, body: Any) -> None:
        """A process that has heard so much of pods asks for this: a gate is opened on what it knows by then."""
        if method == "PATCH" and path.startswith(PODS) and "schedulingGates" in (body.get("spec") or {}):
            key = body["metadata"]["uid"], body["metadata"]["resourceVersion"]
            self._heard[key] = min(heard, self._heard.get(key, heard))

    def _on_let_go(self, pod: Object, heard: int) -> None:
        name, uid, admission = gang_of(pod), pod["metadata"]["uid"], admission_of(pod)
        if not admission:
            self._break(8, f"{uid} was let go in no admission")
        job, members = self._jobs.jobs[name], {one["metadata"]["uid"]: one for one in self._jobs.members(name)}
        leases = self._leases()
        if leases[uid] < job.gpus:
            self._break(8, f"{uid} was let go with {leases[uid]} of {job.gpus} GPUs")
        held = {one for one in members if leases[one]}
        known = self._let_go.setdefault(admission, set())
        lost = {one for one in known if one not in members or has_ended(members[one])} - held - job.done
        known.add(uid)
        unheard = {one for one, version in self._deleted.get(name, {}).items() if version > heard}
        lost |= self._lost.setdefault(admission, set())
        lost |= unheard
        self._lost[admission] |= unheard
        if len(held | job.done) + len(lost) < job.count:
            self._break(
                8,
                f"{uid} was let go while {len(held)} members hold GPUs, {len(job.done)} are done, {len(lost)} are lost",
            )

    def _leases(self) -> Counter[str]:
        """Return how many Leases each uid holds."""
        leases = self._server.collection(LEASES)
        return Counter(lease["spec"].get("holderIdentity", "").rpartition("/")[2] for lease in leases)

    def _recount(self, name: str) -> None:
        """Note since when enough members are ready or done, as far as the GpuGang of now can know."""
        gang = self._server.objects.get(f"{GANGS}/{name}")
        job = self._jobs.jobs.get(name)
        if gang is None or job is None:
            return
        members = {pod["metadata"]["uid"]: pod for pod in self._jobs.members(name)}
        known = self._known.setdefault(gang["metadata"]["uid"], set())
        if self._is_led():
            known |= job.done & members.keys()
        ready = {
            uid for uid, pod in members.items() if is_ready(pod) and not pod["metadata"].get("deletionTimestamp")
        } - job.done
        if len(ready) + len(known & job.done) >= job.count:
            self._enough_since.setdefault(name, self._loop.time())
        else:
            self._enough_since.pop(name, None)

    # Gangs

    def _on_gang(self, old: Object | None, new: Object | None) -> None:
        gang = new or old
        assert gang is not None
        name = gang["metadata"]["name"]
        if old is not None and new is not None and old.get("status") and not new.get("status"):
            self._known.pop(new["metadata"]["uid"], None)
        if new is None or old is None or not new.get("status") or not old.get("status"):
            self._unready_since.pop(name, None)
            self._enough_since.pop(name, None)
            self._recount(name)
            self._room_since.pop(name, None)
        if new is None:
            return
        evicted = condition(new, names.CONDITION_EVICTED)
        if old is not None and evicted.get("status") == "True" and condition(old, "Evicted").get("status") != "True":
            self._on_evicted(name, old, evicted["reason"])
        if new.get("status"):
            self._note_readiness(name, new)
            if self._is_strict:
                self._note_order(name, new)

    def _note_order(self, name: str, gang: Object) -> None:
        """Under strict order nobody passes a gang that waits for room. Gangs are as old as each other, so they are in
        the order of their names; who was evicted may have lost its place, and who reserves competes with nobody."""
        admitted = condition(gang, names.CONDITION_ADMITTED)
        if admitted.get("reason") == "WaitForRoom":
            self._room_since.setdefault(name, self._loop.time())
        else:
            self._room_since.pop(name, None)
        if admitted.get("status") != "True" or gang["status"].get("admission") in self._let_go:
            return
        if self._has_lost_its_place(name) or not self._is_undisturbed:
            return
        for other, since in self._room_since.items():
            waited = self._loop.time() - since
            if other < name and waited > LAG_SECONDS and not self._has_lost_its_place(other):
                self._break(10, f"gang {name} is admitted before {other}, which waits for room since {waited:.1f} s")

    def _has_lost_its_place(self, name: str) -> bool:
        gang = self._server.objects.get(f"{GANGS}/{name}") or {}
        is_evicted = condition(gang, names.CONDITION_EVICTED).get("reason", "NotEvicted") != "NotEvicted"
        return is_evicted or name in self._jobs.reserving

    def _on_evicted(self, name: str, before: Object, reason: str) -> None:
        enough = self._enough_since.get(name)
        if reason == "PodsReadyTimeout" and self._is_undisturbed and enough is not None:
            seconds = self._loop.time() - enough
            if seconds > LAG_SECONDS:
                self._break(9, f"gang {name} was evicted, and enough were ready or done for {seconds:.1f} s")
        admission = (before.get("status") or {}).get("admission", "")
        if reason == "Preempted" and admission not in self._taken:
            self._break(9, f"gang {name} gave way in admission {admission}, of which nobody was taken")

    def _note_readiness(self, name: str, gang: Object) -> None:
        is_waited_for = (
            condition(gang, names.CONDITION_ADMITTED).get("status") == "True"
            and condition(gang, names.CONDITION_PODS_READY).get("status") != "True"
        )
        admission = gang["status"].get("admission", "")
        if not is_waited_for:
            self._unready_since.pop(name, None)
        elif self._unready_since.get(name, ("", 0.0))[0] != admission:
            self._unready_since[name] = (admission, self._loop.time())

    def check_start(self, name: str, uid: str, free: Callable[[], Sequence[int]], since: float | None = None) -> None:
        """In calm weather this gang has its GPUs soon after it fits. `free`: GPUs of each node that nobody holds or
        uses; those of a predecessor come back when its end is proven. `since`: when the gang was first seen to fit."""
        gang, job = self._server.objects.get(f"{GANGS}/{name}"), self._jobs.jobs.get(name)
        admitted = condition(gang, names.CONDITION_ADMITTED) if gang is not None else {}
        if job is None or gang is None or gang["metadata"]["uid"] != uid or admitted.get("status") == "True":
            return
        now = self._loop.time()
        fits = verdict_of(job.count, job.gpus, free(), ()) is Verdict.FITS
        since = (now if since is None else since) if fits else None
        if since is not None and now - since >= START_SECONDS:
            self._break(10, f"gang {name} fits and does not start: {admitted}")
            return
        self._loop.call_later(LOOK_SECONDS, self.check_start, name, uid, free, since)

    def check_verdict(self, name: str, reason: str) -> None:
        """A gang waits for this since a while ago, in calm weather: its condition says so."""
        admitted = condition(self._server.objects[f"{GANGS}/{name}"], names.CONDITION_ADMITTED)
        if admitted.get("reason") != reason:
            self._break(10, f"gang {name} waits for {reason} and says: {admitted}")

    # The end

    def overdue(self) -> Iterator[str]:
        """Yield gangs that have kept their GPUs, and others waiting, for too long without becoming ready."""
        limit_seconds = UNREADY_SECONDS if self._is_undisturbed else UNREADY_SECONDS + LATE_SECONDS
        for name, (_, since) in self._unready_since.items():
            if self._loop.time() - since > limit_seconds:
                yield f"gang {name} is admitted and not ready for {self._loop.time() - since:.0f} s"

    def problems(self, free: Sequence[int], whole: Sequence[int], pool: Pool) -> Iterator[str]:
        """Yield what is not as it should be at rest. `free`, `whole`: GPUs of each node, free now and in all; `pool`:
        the same of the reservation."""
        yield from (f"gang {name} is admitted and not ready yet" for name in self._unready_since)
        for pod in self._server.pods():
            is_nobodys = f"{GANGS}/{gang_of(pod)}" not in self._server.objects
            if names.KEPT in pod["metadata"]["annotations"] and pod["spec"].get("schedulingGates") and is_nobodys:
                yield f"GPUs are kept for {uid_of(pod)}, whose gang is gone"
        for gang in self._server.collection(GANGS):
            uses = gang["metadata"]["name"] in self._jobs.reserving
            yield from self._problems_of(gang, *(pool if uses else (free, whole)))

    def _problems_of(self, gang: Object, free: Sequence[int], whole: Sequence[int]) -> Iterator[str]:
        name, admitted = gang["metadata"]["name"], condition(gang, names.CONDITION_ADMITTED)
        job, status = self._jobs.jobs[name], gang.get("status") or {}
        is_known = job.done <= self._known.get(gang["metadata"]["uid"], set())
        if len(job.done) >= job.count and is_known and status.get("phase") != "Finished":
            yield f"gang {name} has done its work and is {status.get('phase')}: {admitted}"
        owner = self._server.objects[f"{JOBS}/{name}"]
        if owner["spec"].get("suspend") and gang["spec"].get("active", True):
            yield f"gang {name} is {status.get('phase')} and its Job is still suspended: {admitted}"
        gated = [pod for pod in self._jobs.members(name) if pod["spec"].get("schedulingGates")]
        if not gated or not gang["spec"].get("active", True) or len(gated) + len(job.done) < job.count or not is_known:
            return
        verdict = verdict_of(len(gated), job.gpus, free, whole)
        reasons = (
            REASONS[Verdict.BUSY] | {"WaitForQuorum"} if name in self._jobs.reserving else REASONS.get(verdict, ())
        )
        if verdict is Verdict.FITS and self._is_strict and admitted.get("reason") == "WaitForOtherGangs":
            if not self._room_since.keys() - {name}:
                yield f"gang {name} waits for others, of which none waits for room: {admitted}"
            return
        if verdict is Verdict.FITS or admitted.get("reason") not in reasons:
            yield f"gang {name}: {len(gated)} members of {job.gpus} GPUs, which is {verdict.name}: {admitted}"


def verdict_of(members: int, gpus: int, free: Sequence[int], whole: Sequence[int]) -> Verdict:
    """Return what may be said of members that all ask for the same, on machines whose GPUs are all alike."""
    if sum(count // gpus for count in free) >= members:
        return Verdict.FITS
    return Verdict.BUSY if sum(count // gpus for count in whole) >= members else Verdict.NEVER


class GangSteps:
    """What steps of gangs do in a world."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._server: SimulatedServer = world.server
        self._jobs: JobController = world.jobs

    def take(self, step: Any) -> None:
        """Carry out one step; one that makes no sense now changes nothing."""
        getattr(self, "_" + step.kind.lower().replace(" ", "_"))(step)

    def _first(self, step: Any, phase: str) -> Object | None:
        found = (
            pod
            for pod in self._jobs.members(step.target)
            if pod["spec"].get("nodeName")
            and pod["status"].get("phase") == phase
            and not pod["metadata"].get("deletionTimestamp")
        )
        return next(found, None)

    def _create_gang(self, step: Any) -> None:
        """`number`: members and the GPUs of each, as two digits."""
        self._jobs.create(step.target, *divmod(int(step.number), 10))

    def _create_unready_gang(self, step: Any) -> None:
        self._jobs.create(step.target, 2, 1, is_never_ready=True)

    def _finish_member(self, step: Any, *, has_failed: bool = False) -> None:
        pod = self._first(step, "Running")
        if pod is not None:
            self._world.machine(pod["spec"]["nodeName"]).finish(pod["metadata"]["uid"], has_failed=has_failed)

    def _fail_member(self, step: Any) -> None:
        self._finish_member(step, has_failed=True)

    def _collect_member(self, step: Any) -> None:
        pod = self._first(step, "Succeeded")
        if pod is not None:
            self._server.delete(f"{PODS}/{pod['metadata']['name']}", force=True)

    def _preempt_member(self, step: Any) -> None:
        """kube-scheduler takes a member for a pod of a higher priority."""
        pod = self._first(step, "Running")
        if pod is not None:
            taken = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
            path = f"{PODS}/{pod['metadata']['name']}"
            self._server.patch(path, {"status": {"conditions": [*(pod["status"].get("conditions") or []), taken]}})
            self._server.delete(path)

    def _delete_waiting_member(self, step: Any) -> None:
        """Somebody deletes a gated member; its Job makes another one."""
        gated = (pod for pod in self._jobs.members(step.target) if pod["spec"].get("schedulingGates"))
        if (pod := next(gated, None)) is not None:
            self._server.delete(f"{PODS}/{pod['metadata']['name']}")

    def _hear_verdict(self, step: Any) -> None:
        self._world.gang_judge.check_verdict(step.target, step.other)

    def _make_gang_anew(self, step: Any) -> None:
        if self._delete(GANGS, step.target):
            self._jobs.create_gang(step.target)

    def _delete_gang(self, step: Any) -> None:
        """Delete the GpuGang alone: who runs runs on, who waits waits for another one."""
        self._delete(GANGS, step.target)

    def _run_job_again(self, step: Any) -> None:
        """Let every member that runs end well, and soon replace the Job if it has done its work by then. `number`: odd,
        if its pods go with it."""
        for pod in self._jobs.members(step.target):
            if pod["status"].get("phase") == "Running":
                self._world.machine(pod["spec"]["nodeName"]).finish(pod["metadata"]["uid"])
        self._world.loop.call_later(AGAIN_SECONDS, self._replace_job, step)

    def _replace_job(self, step: Any) -> None:
        before = self._jobs.members(step.target)
        if self._jobs.run_again(step.target) and int(step.number) % 2:
            for pod in before:
                self._server.delete(f"{PODS}/{pod['metadata']['name']}", force=True)

    def _lose_status_of_gang(self, step: Any) -> None:
        self._server.patch(f"{GANGS}/{step.target}", {"status": None})

    def _replace_by_smaller_gang(self, step: Any) -> None:
        """Delete the Job, its pods and its GpuGang, and create smaller ones of the name."""
        if self._jobs.jobs.pop(step.target, None) is None:
            return
        for pod in self._jobs.members(step.target):
            self._server.delete(f"{PODS}/{pod['metadata']['name']}", force=True)
        self._delete(JOBS, step.target)
        self._delete(GANGS, step.target)
        self._jobs.create(step.target, 2, 1)
        if self._world.plan.is_calm and not self._world.plan.is_strict:
            uid = self._server.objects[f"{GANGS}/{step.target}"]["metadata"]["uid"]
            self._world.gang_judge.check_start(step.target, uid, self._world.free_counts)

    def _delete(self, collection: str, name: str) -> bool:
        is_there = f"{collection}/{name}" in self._server.objects
        if is_there:
            self._server.delete(f"{collection}/{name}")
        return is_there
