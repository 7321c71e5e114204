"""The scenes of `make demo PLAY=jobs`: two tenants share eight GPUs, and a second cluster takes what does not fit.

Each scene acts as a user of the job service does, shows what it answers, and checks it. The first broken promise raises
ExpectationFailed. Scenes depend on each other in the order of JOB_SCENES.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from devcluster.demo.errors import ExpectationFailed
from devcluster.demo.job_room import (
    EAST,
    GPU,
    HOME,
    MACHINE_GPUS,
    QUEUES,
    QUOTA,
    SERVICE,
    TENANTS,
    USD_PER_HOUR,
    JobRoom,
    batch,
    namespace_of,
    training,
)
from devcluster.errors import AdminApiError

STEPS: Final = 600
"""Of a tenth of a second each: the sum of all of them shows that none was skipped or done twice."""
CAP_USD: Final = 0.02
ROUNDING_HOURS: Final = 1e-4
JOBS: Final = ("sweep", "report", "evaluate", "explore")


def share(room: JobRoom) -> None:
    """Two tenants get a queue each, and a second cluster is registered."""
    room.stage.scene("Two tenants with a quota each, and a second cluster")
    file = room.write("queues.yaml", QUEUES)
    for cluster in (HOME, EAST):
        words = ("--cluster", cluster) if cluster != HOME else ()
        if cluster == EAST:
            room.show("cluster", "register", EAST, "--file", EAST, "--price", f"{GPU}={USD_PER_HOUR}")
        room.stage.verbatim(f"$ atoll queue apply -f queues.yaml {' '.join(words)}".rstrip())
        room.atoll("queue", "apply", "-f", file, *words)
    room.wait(lambda: _queues_are_active(room), "both queues to be active")
    for place in (HOME, EAST):
        room.wait(partial(_gpus_known, room, place), f"the GPUs of cluster {place} to be known")
    room.show("queue", "list")
    room.show("cluster", "list")


def borrow(room: JobRoom) -> None:
    """A spot training takes the whole machine: half of it is borrowed."""
    room.stage.scene("globex borrows what acme does not use")
    room.submit("sweep", "globex", cluster=HOME, **training(MACHINE_GPUS, STEPS))
    with room.stage.step("sweep runs"):
        room.wait_job("sweep", "running")
        wanted = (MACHINE_GPUS, MACHINE_GPUS - QUOTA)
        room.wait(lambda: room.gpus_of("tenant-globex-queue") == wanted, "Kueue to count what is borrowed")
    room.show("queue", "list")
    room.stage.kept(f"sweep has {MACHINE_GPUS} GPUs, {MACHINE_GPUS - QUOTA} of them borrowed from acme")


def give_back(room: JobRoom) -> None:
    """The owner of the quota comes: the spot training saves a checkpoint and gives way."""
    room.stage.scene("acme takes its quota back; the spot training saves a checkpoint and gives way")
    room.submit("report", "acme", cluster=HOME, **batch(QUOTA, 5))
    with room.stage.step("Kueue preempts sweep, report runs and succeeds"):
        room.wait_job("report", "succeeded")
    told = next(one for one in room.history(room.job("sweep")) if one["what"] == "preempt")
    room.stage.quote(f"sweep: {told['message']}")
    with room.stage.step("sweep runs again"):
        sweep = room.wait_job("sweep", "running")
    saved = sweep["last_checkpoint"]
    room.expect(saved is not None and saved["step"] > 0, "its container said where it saved its last checkpoint")
    room.stage.quote(f"step {saved['step']}, {saved['storage_key']}")
    resumed = room.wait(lambda: _log_number(room, r"Resumed from a checkpoint: step (\d+)"), "sweep to say where it is")
    room.expect(resumed == saved["step"], f"sweep went on after step {resumed}")
    room.expect(
        (sweep["preemption_count"], sweep["retry_count"]) == (1, 0), "it was preempted once, which counts as no failure"
    )


def overflow(room: JobRoom) -> None:
    """The machine is full: the service sends a job to the other cluster, and says why."""
    room.stage.scene("The machine is full: the second cluster takes what does not fit")
    room.submit("evaluate", "acme", cluster="auto", **batch(QUOTA, 15))
    choice = room.job("evaluate")["choice"]
    rows = {one["cluster"]: one for one in choice["rows"]}
    lines = room.atoll("job", "show", "evaluate", "--cluster", "auto")
    first = next(number for number, line in enumerate(lines) if line.startswith("CLUSTER"))
    for line in lines[first : first + 3]:
        room.stage.verbatim(f"  {line}".rstrip())
    room.expect(
        choice["chosen"] == EAST and rows[EAST]["fits"] and not rows[HOME]["fits"],
        "the service chose east for evaluate, because its GPUs fit there now",
    )
    with room.stage.step("evaluate runs there"):
        room.wait_job("evaluate", "running")


def spend(room: JobRoom) -> None:
    """A budget is spent: the job is paused, and its GPUs are free."""
    room.stage.scene(f"explore may cost {CAP_USD} USD, then it is paused")
    room.submit("explore", "globex", cluster=EAST, **batch(2, 600, budget_cap=CAP_USD, budget_action="pause"))

    def paused() -> dict[str, Any] | None:
        job = room.job("explore")
        return job if job["status"] == "pending" and job["pause_requested_at"] else None

    with room.stage.step("explore spends its budget and is paused"):
        job = room.wait(paused, "explore to be paused")
    told = next(one for one in room.history(job) if one["what"] == "budget")
    room.stage.quote(f"explore: {told['message']}")
    pods = room.clusters[EAST].kubectl("get", "pods", "-n", namespace_of("globex"), "-o", "name", check=True)
    room.expect(not pods.stdout.strip(), "none of its pods is left in east")
    with room.stage.step("sweep and evaluate succeed"):
        for name in ("sweep", "evaluate"):
            room.wait_job(name, "succeeded")
    total = room.wait(lambda: _log_number(room, r"done: weight (\d+)"), "the result of sweep")
    room.expect(total == STEPS * (STEPS + 1) // 2, f"sweep did each of its {STEPS} steps once: they add up to {total}")


def bill(room: JobRoom) -> None:
    """The bill names every tenant and job, and its hours add up."""
    room.stage.scene("The bill")
    for place in (HOME, EAST):
        room.wait(partial(_is_at_rest, room, place), f"no job in {place}")
    paid: dict[str, float] = {}
    for place in (HOME, EAST):
        words = ("usage", "--by", "tenant", "--by", "job", "--days", "1", "--cluster", place)
        room.show(*words)
        found = json.loads("\n".join(room.atoll(*words, "-o", "json")))
        _check_hours(room, place, found)
        paid |= {one["group"]["job"]: one["cost_usd"] for one in found["rows"] if one["group"]["job"]}
    costs = {name: job for name in JOBS for job in [room.job(name)]}
    by_name = {name: paid.get(job["id"], paid.get(name, 0.0)) for name, job in costs.items()}
    room.expect(all(cost > 0 for cost in by_name.values()), f"the bill has every job: {', '.join(JOBS)}")
    room.expect(
        CAP_USD <= by_name["explore"] < 10 * CAP_USD, f"explore cost {by_name['explore']:.3f} USD, of {CAP_USD} allowed"
    )
    for tenant in TENANTS:
        seen = room.get(f"/clusters/{HOME}/usage?by=tenant", by=namespace_of(tenant))["rows"]
        tenants = {one["group"]["tenant"] for one in seen}
        room.expect(tenants == {tenant}, f"{tenant} sees its own part of the bill alone")


def check_clusters(room: JobRoom) -> None:
    """Nothing is left over in either cluster."""
    room.stage.scene("Check of every promise")
    for place, cluster in room.clusters.items():
        told = room.atoll("audit", "--kubeconfig", cluster.kubeconfig)
        room.stage.kept(f"atoll audit of {place}: {told[-1]}")
    for tenant in TENANTS:
        room.expect(room.gpus_of(f"tenant-{tenant}-queue") == (0, 0), f"{tenant} uses no quota any more")
    foreign = room.get("/clusters/auto/jobs?name=sweep&page_size=1", by=namespace_of("acme"))
    room.expect(foreign["total"] == 0, "acme does not see the jobs of globex")


JobScene = Callable[[JobRoom], None]
JOB_SCENES: tuple[JobScene, ...] = (share, borrow, give_back, overflow, spend, bill, check_clusters)


def play_jobs(room: JobRoom, scenes: Sequence[JobScene]) -> str:
    """Play the scenes; return the last line of a play in which every promise held. Raises ExpectationFailed, which
    names a copy of the service's log."""
    try:
        for scene in scenes:
            scene(room)
    except (AdminApiError, OSError, ExpectationFailed) as error:
        kept = Path(tempfile.mkdtemp(prefix="atoll-jobs-logs-"))
        shutil.copy(room.service.log, kept)
        for place, cluster in room.clusters.items():
            shutil.copytree(cluster.layout.logs, kept / place)
        raise ExpectationFailed(f"{error}; read {kept / room.service.log.name}", process=SERVICE) from error
    return f"every promise held: {len(JOBS)} jobs of 2 tenants on 2 clusters, {room.stage.seconds:.0f} s"


def _queues_are_active(room: JobRoom) -> bool:
    found = room.get(f"/clusters/{HOME}/queues?page_size=1000")
    return not found["message"] and sum(one["is_active"] is True for one in found["items"]) == len(TENANTS)


def _check_hours(room: JobRoom, place: str, found: dict[str, Any]) -> None:
    """Check that the rows add up to the GPUs that existed, each hour in one of the uses."""
    whole = found["sum"]["gpu_hours"]
    rows = sum(one["gpu_hours"]["total"] for one in found["rows"])
    uses = sum(hours for use, hours in whole.items() if use != "total")
    is_whole = abs(rows - whole["total"]) < ROUNDING_HOURS and abs(uses - whole["total"]) < ROUNDING_HOURS
    room.expect(is_whole, f"{place}: the rows add up to the {whole['total']:.2f} GPU-hours that its GPUs existed")


def _gpus_known(room: JobRoom, place: str) -> bool:
    return GPU in json.dumps(room.get(f"/clusters/{place}"))


def _log_number(room: JobRoom, pattern: str) -> int | None:
    """Return the number in the log of sweep, None while it says none."""
    try:
        lines = room.atoll("job", "logs", "sweep", by=namespace_of("globex"))
    except ExpectationFailed:
        return None  # the container has not started yet
    found = re.findall(pattern, "\n".join(lines))
    return int(found[-1]) if found else None


def _is_at_rest(room: JobRoom, place: str) -> bool:
    jobs = room.get(f"/clusters/{place}/jobs?page_size=100")["items"]
    return all(one["status"] not in ("queued", "admitted", "running") for one in jobs)
