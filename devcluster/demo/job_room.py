"""Two clusters and the job service between them, used as people use it: by the command line and the HTTP API.

The service runs beside the cluster `local`, which has the real Kueue; the cluster `east` has none. Each cluster has one
machine of eight GPUs, and all of Atoll. Tokens are those of real accounts.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.request import Request, urlopen

import yaml

from atoll.api import names
from devcluster.atoll_image import TRAINER, write_trainer_image
from devcluster.cluster import DevCluster
from devcluster.demo.errors import ExpectationFailed
from devcluster.demo.stage import Terminal
from devcluster.errors import StartError
from devcluster.images import BUSYBOX
from devcluster.installation import Installation
from devcluster.job_service import ATOLL, JobServiceProcess
from devcluster.kueue import Kueue
from devcluster.node import DevNodeSpec
from devcluster.waiting import wait_until

HOME: Final = "local"
EAST: Final = "east"
OPERATOR: Final = names.SYSTEM_NAMESPACE
TENANTS: Final = ("acme", "globex")
GPU: Final = "nvidia-h100"
USD_PER_HOUR: Final = 4.0
MACHINE_GPUS: Final = 8
QUOTA: Final = 4
SERVICE: Final = "the job service"
WAIT_SECONDS: Final = 120.0
_AGENT_OPTIONS: Final = ("--poll-seconds", "5")
_SMALL: Final = {"cpu_request": "10m", "memory_request": "32Mi", "memory_limit": "256Mi"}

Answer = TypeVar("Answer")


def namespace_of(tenant: str) -> str:
    """Return a tenant's namespace, whose default account is a member of the tenant."""
    return f"tenant-{tenant}"


RULES: Final = {
    "rules": [
        {"group": f"system:serviceaccounts:{OPERATOR}", "role": "operator"},
        *(
            {"group": f"system:serviceaccounts:{namespace_of(tenant)}", "role": "member", "tenant": tenant}
            for tenant in TENANTS
        ),
    ]
}
QUEUES: Final = {
    "flavors": [{"name": "h100"}],
    "cohorts": [{"name": "lab"}],
    "tenants": [
        {"name": tenant, "queues": [{"cohort": "lab", "flavors": [{"flavor": "h100", "quota": {"gpu": QUOTA}}]}]}
        for tenant in TENANTS
    ],
}
PRICES: Final = {"gpus": [{"gpu": "H100", "usd_per_hour": USD_PER_HOUR}]}


@dataclass(frozen=True, slots=True)
class JobRoom:
    """What every scene uses."""

    stage: Terminal
    service: JobServiceProcess
    clusters: Mapping[str, DevCluster]

    # Actions

    def atoll(self, *words: str | Path, by: str = OPERATOR) -> list[str]:
        """Run `atoll ...` as an account and return the printed lines. Raises ExpectationFailed if it fails."""
        environment = {**self.service.environment(by), "COLUMNS": "160", "NO_COLOR": "1"}
        command = [str(word) for word in (ATOLL, *words)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            told = (done.stderr or done.stdout).strip()
            raise ExpectationFailed(f"atoll {' '.join(command[1:])} failed: {told}", process=SERVICE)
        return done.stdout.splitlines()

    def show(self, *words: str, by: str = OPERATOR) -> list[str]:
        """Run `atoll ...` and print the command and its output; return the printed lines."""
        self.stage.verbatim(f"$ atoll {' '.join(words)}")
        lines = self.atoll(*words, by=by)
        for line in lines:
            self.stage.verbatim(f"  {line}".rstrip())
        return lines

    def write(self, name: str, content: object) -> Path:
        """Write a YAML file into the folder of the service."""
        file = self.service.folder / name
        file.write_text(yaml.safe_dump(content, sort_keys=False))
        return file

    def submit(self, name: str, tenant: str, *, cluster: str, **fields: Any) -> None:  # noqa: ANN401 - fields of a job
        """Submit a job of a tenant, in its name, and print the command."""
        file = self.write(f"{name}.yaml", {"name": name, "resources": _SMALL, "ext_ml_gpu_type": GPU} | fields)
        words = ("--cluster", cluster) if cluster != HOME else ()
        self.stage.verbatim(f"$ atoll job submit -f {file.name} {' '.join(words)}".rstrip() + f"    # {tenant}")
        self.atoll("job", "submit", "-f", file, *words, by=namespace_of(tenant))

    # Reads

    def get(self, path: str, *, by: str = OPERATOR) -> Any:  # noqa: ANN401 - plain values
        """Return the answer of the HTTP API to a path below /api."""
        token = (self.service.folder / by).read_text()
        request = Request(f"{self.service.url}/api{path}", headers={"Authorization": f"Bearer {token}"})  # noqa: S310 - our own service
        with urlopen(request, timeout=30) as answer:  # noqa: S310
            return json.load(answer)

    def job(self, name: str) -> dict[str, Any]:
        """Return the newest job of a name, wherever it is."""
        found: dict[str, Any] = self.get(f"/clusters/auto/jobs?name={name}&page_size=1")["items"][0]
        return found

    def history(self, job: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return what happened to a job, oldest first."""
        path = f"/clusters/{job['cluster_id']}/jobs/{job['id']}/events?page_size=200"
        found: list[dict[str, Any]] = self.get(path)["items"]
        return found

    def gpus_of(self, queue: str) -> tuple[int, int]:
        """Return how many GPUs of its quota a queue uses, and how many it borrowed."""
        found = {one["name"]: one for one in self.get(f"/clusters/{HOME}/queues?page_size=1000")["items"]}
        gpus = [one for one in found[queue]["amounts"] if one["resource"] == names.GPU_RESOURCE]
        return sum(int(one["used"]) for one in gpus), sum(int(one["borrowed"]) for one in gpus)

    # Waits and checks

    def wait(self, question: Callable[[], Answer | None], what: str) -> Answer:
        """Return the first true answer. Raises ExpectationFailed."""
        try:
            return wait_until(question, what=what, timeout_seconds=WAIT_SECONDS)
        except StartError as error:
            raise ExpectationFailed(f"waited {WAIT_SECONDS:.0f} s for {what}", process=SERVICE) from error

    def wait_job(self, name: str, *states: str) -> dict[str, Any]:
        """Wait until a job is in one of the states, and return it. A job that failed is not waited for."""

        def question() -> dict[str, Any] | None:
            job = self.job(name)
            if job["status"] == "failed" and "failed" not in states:
                raise ExpectationFailed(f"job {name} failed: {job['message']}", process=SERVICE)
            return job if job["status"] in states else None

        return self.wait(question, f"job {name} to be {' or '.join(states)}")

    def expect(self, holds: object, text: str) -> None:
        """Print `text` if `holds` is true. Raises ExpectationFailed otherwise."""
        if not holds:
            raise ExpectationFailed(f"not so: {text}", process=SERVICE)
        self.stage.kept(text)


def training(gpus: int, steps: int) -> dict[str, Any]:
    """Return the fields of a spot training that saves checkpoints into a volume, and counts its steps."""
    return {
        "job_type": "training",
        "container": {"image": TRAINER, "env": [{"name": "STEPS", "value": str(steps)}]},
        "ext_ml_gpu_count": gpus,
        "ext_ml_priority_class": "spot",
        "ext_ml_checkpoint_enabled": True,
        "ext_ml_checkpoint_on_preempt": True,
        "ext_ml_checkpoint_interval_s": 5,
        "ext_ml_checkpoint_storage_uri": "file:///checkpoints/",
    }


def batch(gpus: int, seconds: int, **intent: Any) -> dict[str, Any]:  # noqa: ANN401 - fields of a job
    """Return the fields of a job of one pod that takes so long."""
    command = ["/bin/sh", "-c", f"trap 'exit 143' TERM; sleep {seconds} & wait $!"]
    return {
        "job_type": "batch",
        "container": {"image": BUSYBOX, "command": command},
        "ext_ml_gpu_count": gpus,
        "policy": {"priority_class": "normal", "preemption_grace_period": 2},
        "intent": intent,
    }


@contextmanager
def opened_room(stage: Terminal, name: str) -> Iterator[JobRoom]:
    """Start both clusters and the service, and remove everything afterwards."""
    with ExitStack() as owned:
        folder = Path(owned.enter_context(tempfile.TemporaryDirectory(prefix="atoll-jobs-")))
        clusters: dict[str, DevCluster] = {}
        owned.callback(_remove, stage, clusters)
        image = folder / "trainer.tar"
        with stage.step("the image of a training: Python and Atoll's worker") as report:
            write_trainer_image(image, report=report)
        for place in (HOME, EAST):
            with stage.step(f"cluster {place}: control plane, one machine of 8 H100, Atoll") as report:
                nodes = (DevNodeSpec(f"hopper-{place}", profile="dgx-h100"),)
                cluster = DevCluster.start(f"{name}-{place}", nodes=nodes, scheduler=False, report=report)
                clusters[place] = cluster
                Installation(cluster, options={"agent": _AGENT_OPTIONS}).install()
        home = clusters[HOME]
        with stage.step(f"cluster {HOME}: Kueue, a volume for checkpoints, accounts of {' and '.join(TENANTS)}"):
            home.load_image(image)
            Kueue(home).install()
            _prepare(home)
        service = JobServiceProcess(
            home,
            folder,
            rules=RULES,
            namespaces=(OPERATOR, *map(namespace_of, TENANTS)),
            options=("--prices", _written(folder / "prices.yaml", PRICES), "--kubeconfig-folder", folder),
        )
        (folder / EAST).write_bytes(clusters[EAST].kubeconfig.read_bytes())
        owned.callback(service.kill)
        with stage.step("atoll jobs serve"):
            service.start()
        yield JobRoom(stage, service, clusters)


def _remove(stage: Terminal, clusters: Mapping[str, DevCluster]) -> None:
    with stage.step("clusters and files are removed"):
        for cluster in clusters.values():
            cluster.stop()


def _prepare(cluster: DevCluster) -> None:
    """Create the tenants' accounts, which have tokens, and the volume that a training's claim will get."""
    for tenant in TENANTS:
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace_of(tenant)}}
        cluster.api.request("POST", "/api/v1/namespaces", body)
    place = cluster.shared_dir / "checkpoints"
    place.mkdir()
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "checkpoints"},
        "spec": {
            "capacity": {"storage": "100Gi"},
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "standard",
            "hostPath": {"path": str(place)},
        },
    }
    cluster.api.request("POST", "/api/v1/persistentvolumes", volume)
    for namespace in (OPERATOR, *map(namespace_of, TENANTS)):
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
        wait_until(partial(cluster.api.get, path), what="the default account", timeout_seconds=WAIT_SECONDS)


def _written(file: Path, content: object) -> Path:
    file.write_text(yaml.safe_dump(content))
    return file
