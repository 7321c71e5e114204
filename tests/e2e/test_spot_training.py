"""A spot training is preempted by reserved work three times, once by each preemptor, and loses nothing.

The job is rendered from its document, runs as a real process under a real kubelet, and saves into a real folder, once
into a real S3 server. The machine lovelace has two islands of four cards.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from atoll.api import names
from atoll.api.times import seconds_of
from atoll.jobs.documents import parse_job
from atoll.jobs.rendering import render
from tests.e2e.test_preemption import MODEL
from tests.e2e.world import RealCluster
from tests.jobs.test_job_examples import EXAMPLES
from tests.worker.s3_server import BUCKET, ROOT, command_of, variables_of

pytestmark = pytest.mark.e2e

PORT = 7070
REPOSITORY = Path(__file__).parents[2]
JOB = """
name: spot
job_type: training
container: {image: "localhost/busybox:1"}
policy: {max_retries: 0}
ext_ml_gpu_type: nvidia-l40s
ext_ml_gpu_count: 2
ext_ml_priority_class: spot
ext_ml_checkpoint_enabled: true
ext_ml_checkpoint_on_preempt: true
"""
"""No try is left, so that a single preemption that counts as a failure ends the job."""


class SpotTraining:
    """The job in the cluster, and what its process wrote."""

    def __init__(self, world: RealCluster, place: str, variables: Mapping[str, str]) -> None:
        self.world, self.place, self.variables = world, place, variables
        self.folder = world.locks / f"training-{world.namespace}"
        self.folder.mkdir()
        self.path = f"/apis/batch/v1/namespaces/{world.namespace}/jobs/spot"

    def start(self) -> None:
        """Apply what the job becomes; its GPUs lie apart, so that what is left is enough and not joined."""
        job = parse_job(f"{JOB}ext_ml_checkpoint_storage_uri: {self.place}".encode()).job
        assert job is not None
        claim, *_, body = render(job).objects
        claim["spec"]["devices"]["policy"] = "spread"
        spec = body["spec"]["template"]["spec"]
        container = spec["containers"][0]
        container["imagePullPolicy"] = "Never"
        container["resources"] = {"limits": {names.GPU_RESOURCE: "2"}}
        container["command"] = [sys.executable, "/repository/tests/e2e/training.py"]
        mounts = {"/training": str(self.folder), "/repository": str(REPOSITORY)}
        mounts |= {path: path for path in ("/usr", "/lib", "/lib64", "/etc/ssl", sys.base_prefix, sys.prefix)}
        container["env"] += [
            {"name": "TRAINING_FOLDER", "value": "/training"},
            {"name": "PYTHONPATH", "value": "/repository"},
            *({"name": name, "value": value} for name, value in self.variables.items()),
        ]
        kept = [one for one in spec["volumes"] if one["name"] == "notice"]
        spec["volumes"] = [
            *kept, *({"name": f"v{n}", "hostPath": {"path": path}} for n, path in enumerate(mounts.values()))
        ]  # fmt: skip
        container["volumeMounts"] = [
            *(one for one in container["volumeMounts"] if one["name"] == "notice"),
            *({"name": f"v{n}", "mountPath": path} for n, path in enumerate(mounts)),
        ]
        spec["dnsPolicy"] = "Default"
        applied = self.world.kubectl("apply", "-f", "-", text=yaml.safe_dump_all([claim, body]))
        assert applied.returncode == 0, applied.stderr

    def log(self) -> list[list[str]]:
        """Return the lines of every start so far, as words."""
        path = self.folder / "log"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def starts(self) -> list[int]:
        """Return the first step of every start."""
        return [int(words[1]) for words in self.log() if words[0] == "first"]

    def ends(self) -> list[int]:
        """Return the last step that each preempted start saved."""
        lines = self.log()
        return [int(lines[n - 1][1]) for n, words in enumerate(lines) if words[0] == "preempted"]

    def status(self) -> dict[str, Any]:
        """Return the Job's status."""
        found: dict[str, Any] = self.world.cluster.api.get(self.path)["status"]
        return found


def by_count(world: RealCluster) -> list[str]:
    """All GPUs are wanted, too few are free: kube-scheduler preempts."""
    world.pod("reserved", "all", priorityClassName="high")
    return ["reserved"]


def by_island(world: RealCluster) -> list[str]:
    """Six GPUs are free, no four of them joined: the controllers evict."""
    world.pod("reserved", "island", priorityClassName="high")
    return ["reserved"]


def by_gang(world: RealCluster) -> list[str]:
    """Two members want an island each, and start together: the gang evicts."""
    for number in range(2):
        body = world.pod_body(f"reserved-{number}", "island", priorityClassName="high")
        body["metadata"]["annotations"] |= {names.GANG: "reserved", names.GANG_SIZE: "2"}
        world.create(body)
    return ["reserved-0", "reserved-1"]


Round = Callable[[RealCluster], list[str]]
ROUNDS: tuple[Round, ...] = (by_count, by_island, by_gang)


@pytest.fixture
def s3(world: RealCluster, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The variables of an S3 server in the cluster, which its containers reach."""
    cluster, host = world.cluster, world.cluster.layout.network.bridge
    cluster.spawn("s3", command_of(tmp_path, f"{host}:{PORT}"), env=ROOT)
    listens = f"import socket; socket.create_connection(('{host}', {PORT}))"
    world.wait(lambda: cluster.run(sys.executable, "-c", listens).returncode == 0, "the S3 server to listen")
    yield variables_of(f"{host}:{PORT}")
    cluster.signal("s3", "KILL")
    cluster.wait_exit("s3")


@pytest.mark.parametrize(
    ("place", "rounds"),
    [
        pytest.param("file:///training/checkpoints/", ROUNDS, id="file"),
        pytest.param(f"s3://{BUCKET}/spot/", (by_island,), id="s3"),
    ],
)
def test_spot_training_gives_way_three_times_and_fails_never(
    world: RealCluster, s3: dict[str, str], place: str, rounds: tuple[Round, ...]
) -> None:
    """Each time it saves within its grace, and goes on at the next step once there is room; the Job counts no failure.

    Whom the controllers evict may read in its own container when it ends: the kubelet need not have updated the file
    before it ends the container, and the signal is enough.
    """
    done = world.cluster.kubectl("apply", "-f", str(EXAMPLES / "priority-classes.yaml"))
    assert done.returncode == 0, done.stderr
    world.claim("all", 8, models=MODEL)
    world.claim("island", 4, models=MODEL, policy="island")
    training = SpotTraining(world, place, s3)
    training.start()
    for number, begin in enumerate(rounds, start=1):
        world.wait(
            lambda number=number: len(training.starts()) == number and training.log()[-1][0] == "saved",
            f"start {number} to save",
        )
        reserved = begin(world)
        for name in reserved:
            world.wait_running(name)
        assert len(training.ends()) == number
        for name in reserved:
            world.delete(name)
    world.wait(lambda: len(training.starts()) == len(rounds) + 1, "the last start")
    (training.folder / "finish").touch()
    world.wait(lambda: training.status().get("succeeded"), "the training to be done")

    assert training.starts() == [1, *(step + 1 for step in training.ends())]
    assert training.status().get("failed", 0) == 0
    told = [words for words in training.log() if words[0] == "preempted"]
    assert all(float(words[1]) > 0 for words in told), "saved within the grace period"
    for words, one in zip(told, rounds, strict=True):
        assert len(words) == 2 or (seconds_of(words[2]) is not None and one is not by_count), one
    world.cluster.api.request("DELETE", f"{training.path}?propagationPolicy=Background")
