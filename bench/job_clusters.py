"""The job service beside three real control planes: many recorded jobs, 1,000 of them active, each with a GPU.

Everything is real but the nodes: control planes, all of Atoll in each cluster, and the service as its own process,
called by HTTP with a token that the API server reviews. kwok plays nodes and pods. Prints, for each database, the time
of a submission, of one whose cluster the service chooses, of a page of the list and of a cancellation (p50, p99), the
time from the first submission until every job runs and from the first of 100 cancellations until nothing is left of
these jobs, and CPU and memory of the service. A refused request or a job that does not come to run fails the run.

    python -m bench.job_clusters --jobs 10000 --active 1000 --database postgresql
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from atoll.api import names
from bench.figures import cpu_seconds
from bench.jobs import CLUSTERS, record_ended
from bench.stand import Stand, open_stand
from devcluster.cluster import DevCluster
from devcluster.installation import DEPLOY
from devcluster.job_service import JobServiceProcess
from devcluster.waiting import wait_until
from jobs.database import opened
from tests.fakes.postgres import postgres

PRIORITIES = DEPLOY.parent / "examples" / "jobs" / "complete" / "priority-classes.yaml"
HOME = CLUSTERS[0]
TENANT, NAMESPACE = "acme", "tenant-acme"
RULES = {
    "rules": [
        {"group": f"system:serviceaccounts:{names.SYSTEM_NAMESPACE}", "role": "operator"},
        {"group": f"system:serviceaccounts:{NAMESPACE}", "role": "member", "tenant": TENANT},
    ]
}
OPTIONS = ("--requests-per-second", "10000", "--requests-burst", "100000")
JOB = {
    "job_type": "batch",
    "container": {"image": "busybox:1"},
    "resources": {"cpu_request": "10m", "memory_request": "16Mi"},
    "ext_ml_gpu_count": 1,
}
AT_ONCE = 16
PAGES = 100
PAGE_SIZE = 50
CANCELLED = 100
WAIT_SECONDS = 1200.0
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class ServiceCaller:
    """Calls the running service and notes how long each call takes."""

    service: JobServiceProcess
    figures: dict[str, float] = field(default_factory=dict)
    refused: int = 0

    def __post_init__(self) -> None:
        token = (self.service.folder / NAMESPACE).read_text()
        limits = httpx.Limits(max_connections=AT_ONCE)
        headers = {"Authorization": f"Bearer {token}"}
        self._client = httpx.Client(base_url=f"{self.service.url}/api", headers=headers, timeout=120, limits=limits)

    def time(self, name: str, calls: Iterable[Callable[[], httpx.Response]], *, at_once: int = 1) -> None:
        """Carry out calls and note p50 and p99 of their time, in milliseconds."""

        def timed(call: Callable[[], httpx.Response]) -> float:
            began = time.perf_counter()
            answer = call()
            self.refused += answer.is_error
            return 1000 * (time.perf_counter() - began)

        with ThreadPoolExecutor(at_once) as threads:
            times = sorted(threads.map(timed, calls))
        self.figures |= {f"{name}_p50_ms": times[len(times) // 2], f"{name}_p99_ms": times[len(times) * 99 // 100]}

    def submission(self, cluster: str, number: int) -> Callable[[], httpx.Response]:
        """Return the call that submits a job."""
        return lambda: self._client.post(f"/clusters/{cluster}/jobs", json={"name": f"job-{number}", **JOB})

    def page(self, number: int) -> Callable[[], httpx.Response]:
        """Return the call that reads a page of the list."""
        words = {"page": number, "page_size": PAGE_SIZE}
        return lambda: self._client.get("/clusters/auto/jobs", params=words)

    def count(self, state: str) -> int:
        """Return how many jobs are in a state."""
        answer = self._client.get("/clusters/auto/jobs", params={"status": state, "page_size": 1})
        return int(answer.raise_for_status().json()["total"])

    def cancel(self) -> None:
        """Cancel the jobs of a page."""
        words: dict[str, str | int] = {"status": "running", "page_size": CANCELLED}
        rows = self._client.get("/clusters/auto/jobs", params=words).raise_for_status().json()["items"]
        paths = [f"/clusters/{row['cluster_id']}/jobs/{row['id']}" for row in rows]
        self.time("cancel", [lambda path=path: self._client.delete(path) for path in paths], at_once=AT_ONCE)  # type: ignore[misc]


def cpu_of(service: JobServiceProcess) -> float:
    """Return the seconds of CPU that the service has used."""
    assert service.process is not None
    return cpu_seconds(Path(f"/proc/{service.process.pid}/stat").read_text(), ticks_per_second=TICKS)


def memory_of(service: JobServiceProcess) -> float:
    """Return the resident memory of the service, in MiB."""
    assert service.process is not None
    text = Path(f"/proc/{service.process.pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) / 1024


def measure(stands: dict[str, Stand], url: str, folder: Path, jobs: int, active: int) -> dict[str, float]:
    """Return the figures of one database."""
    database = opened(url)
    record_ended(database, jobs - active)
    database.close()
    for name, stand in stands.items():
        (folder / name).write_bytes(stand.cluster.kubeconfig.read_bytes())
    options = (*OPTIONS, "--kubeconfig-folder", folder)
    accounts = (names.SYSTEM_NAMESPACE, NAMESPACE)
    service = JobServiceProcess(
        stands[HOME].cluster, folder, rules=RULES, namespaces=accounts, options=options, database=url
    )
    service.start()
    try:
        operator = {"Authorization": f"Bearer {(folder / names.SYSTEM_NAMESPACE).read_text()}"}
        for name in CLUSTERS[1:]:
            path, terms = f"{service.url}/api/clusters/{name}", {"kubeconfig": f"file:{name}"}
            httpx.put(path, json=terms, headers=operator, timeout=60).raise_for_status()
        return figures_of(ServiceCaller(service), jobs, active)
    finally:
        service.kill()
        for stand in stands.values():
            stand.cluster.kubectl("delete", "jobs", "--all", "-n", NAMESPACE, check=True)


def figures_of(caller: ServiceCaller, jobs: int, active: int) -> dict[str, float]:
    """Submit, wait until all run, list, choose, cancel some, and return the figures."""
    service, began, used = caller.service, time.perf_counter(), cpu_of(caller.service)
    submissions = [caller.submission(CLUSTERS[number % len(CLUSTERS)], number) for number in range(active)]
    caller.time("submit", submissions, at_once=AT_ONCE)
    wait_until(lambda: caller.count("running") == active, what="all jobs to run", timeout_seconds=WAIT_SECONDS)
    caller.figures |= {
        "all_run_seconds": time.perf_counter() - began,
        "cpu_ms_per_job_until_it_runs": 1000 * (cpu_of(service) - used) / active,
    }
    caller.time("list", [caller.page(1 + number * 7 % (jobs // PAGE_SIZE)) for number in range(PAGES)])
    caller.time("choose", [caller.submission("auto", active + number) for number in range(PAGES // 2)])
    idle, used = time.perf_counter(), cpu_of(service)
    time.sleep(30)
    caller.figures["idle_cpu_percent"] = 100 * (cpu_of(service) - used) / (time.perf_counter() - idle)
    wait_until(lambda: caller.count("running") == active + PAGES // 2, what="all to run", timeout_seconds=WAIT_SECONDS)
    began, used = time.perf_counter(), cpu_of(service)
    caller.cancel()
    left = active + PAGES // 2 - CANCELLED
    wait_until(lambda: caller.count("running") == left, what="the cancelled jobs to end", timeout_seconds=WAIT_SECONDS)
    caller.figures |= {
        "cancelled_seconds": time.perf_counter() - began,
        "cpu_ms_per_cancelled_job": 1000 * (cpu_of(service) - used) / CANCELLED,
        "memory_mib": memory_of(service),
        "refused": caller.refused,
    }
    return caller.figures


def prepare(cluster: DevCluster) -> None:
    """Make the priorities and the tenant's namespace, whose default account has a token."""
    cluster.kubectl("apply", "-f", str(PRIORITIES), check=True)
    cluster.kubectl("create", "namespace", NAMESPACE, check=True)
    account = ("get", "serviceaccount", "default", "-n", NAMESPACE)
    wait_until(lambda: cluster.kubectl(*account).returncode == 0, what="the default account", timeout_seconds=60)


def main() -> int:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000, help="recorded jobs, the active ones among them")
    parser.add_argument("--active", type=int, default=1000, help="jobs that run at a time")
    parser.add_argument("--nodes", type=int, default=60, help="nodes of 8 GPUs of each cluster")
    parser.add_argument("--database", choices=("sqlite", "postgresql"), action="append", help="both by default")
    options = parser.parse_args()
    refused = 0.0
    with ExitStack() as owned, postgres() as server:
        stands = {name: owned.enter_context(open_stand(f"bench-{name}", options.nodes)) for name in CLUSTERS}
        for stand in stands.values():
            prepare(stand.cluster)
        for name in options.database or ("sqlite", "postgresql"):
            folder = Path(owned.enter_context(tempfile.TemporaryDirectory(prefix="atoll-bench-")))
            url = server if name == "postgresql" else f"sqlite:///{folder}/jobs.db"
            figures = measure(stands, url, folder, options.jobs, options.active)
            print(name, json.dumps({key: round(value, 1) for key, value in figures.items()}, indent=1), flush=True)
            refused += figures["refused"]
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
