"""The job service as a part of the Helm release, with the account and the rights that the chart gives it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from atoll.api import names
from atollctl.__main__ import app
from devcluster.certificates import CertificateAuthority, Subject
from tests.e2e.release import ChartRelease, gpu_node
from tests.e2e.running_service import wait

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="real nodes need root on Linux"),
]

DATABASE = "sqlite:////dev/shm/jobs.db"
"""One replica, whose records end with its pod."""
ACCOUNTS = ("operator", "member")
RULES = [
    {"user": "system:serviceaccount:default:operator", "role": "operator"},
    {"user": "system:serviceaccount:default:member", "role": "member", "tenant": "acme"},
]
QUEUES = {
    "flavors": [{"name": "any"}],
    "tenants": [{"name": "acme", "queues": [{"flavors": [{"flavor": "any", "quota": {"gpu": 8}}]}]}],
}
JOB = {
    "name": "look",
    "job_type": "batch",
    "ext_ml_gpu_count": 2,
    "resources": {"cpu_request": "10m", "memory_request": "32Mi", "memory_limit": "64Mi"},
    "container": {"image": "localhost/busybox:1", "command": ["/bin/sh", "-c", "echo saw $NVIDIA_VISIBLE_DEVICES"]},
}


class JobsRelease:
    """The release, and whoever calls its job service."""

    def __init__(self, release: ChartRelease, folder: Path) -> None:
        self.release = release
        self.folder = folder
        self.url = ""

    def install(self) -> None:
        """Create the Secrets that the chart asks for, and install it."""
        kubectl = self.release.cluster.kubectl
        pair = CertificateAuthority(self.folder / "pki", now=datetime.now(UTC)).issue(
            "jobs", Subject("atoll-jobs", dns_names=("localhost",))
        )
        kubectl("create", "namespace", names.SYSTEM_NAMESPACE, check=True)
        own = ("-n", names.SYSTEM_NAMESPACE, "create", "secret")
        kubectl(*own, "generic", "atoll-jobs-database", f"--from-literal=url={DATABASE}", check=True)
        kubectl(*own, "tls", "atoll-jobs-tls", f"--cert={pair.certificate}", f"--key={pair.key}", check=True)
        values = {"jobs": {"enabled": True, "replicas": 1, "access": RULES}, "priorityClasses": {"create": False}}
        (self.folder / "jobs.yaml").write_text(yaml.safe_dump(values))
        self.release.install("--values", self.folder / "jobs.yaml")
        done = self.release.kubectl("rollout", "status", "deployment/atoll-jobs", "--timeout=300s")
        assert done.returncode == 0, self.release.describe()
        for name in ACCOUNTS:
            kubectl("create", "serviceaccount", name, "-n", "default", check=True)
            token = kubectl("create", "token", name, "-n", "default", check=True).stdout
            (self.folder / name).write_text(token)

    @contextmanager
    def reached(self) -> Iterator[None]:
        """Forward a port of this machine to the Service until the block ends."""
        cluster = self.release.cluster
        words = ("-n", names.SYSTEM_NAMESPACE, "port-forward", "service/atoll-jobs", ":443")
        command = [str(cluster.program("kubectl")), f"--kubeconfig={cluster.kubeconfig}", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as forward:
            try:
                assert forward.stdout is not None
                self.url = "https://localhost:" + re.findall(r":(\d+) ->", forward.stdout.readline())[0]
                yield
            finally:
                forward.kill()

    def atoll(self, *words: str | Path, by: str) -> str:
        """Run `atoll ...` as an account and return what it prints."""
        environment = {
            "ATOLL_JOBS_SERVER": self.url,
            "ATOLL_JOBS_TOKEN_FILE": str(self.folder / by),
            "ATOLL_JOBS_CA": str(self.folder / "pki/ca.crt"),
        }
        done = CliRunner().invoke(app, list(map(str, words)), env=environment)
        assert done.exit_code == 0, done.output + self.release.describe()
        return done.stdout


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobsRelease]:
    """A cluster of one machine on which the chart was installed with the job service."""
    with ChartRelease.cluster_for((gpu_node("hopper", "dgx-h100"),)) as release:
        made = JobsRelease(release, tmp_path_factory.mktemp("jobs"))
        made.install()
        with made.reached():
            yield made


def test_a_job_runs_through_the_installed_service_with_the_rights_of_the_chart(jobs: JobsRelease) -> None:
    """An operator applies queues, which makes the tenant's namespace and the priorities; a member submits a job to the
    cluster that the service chooses, and reads its output. Nothing was forbidden to the service."""
    queues, job = jobs.folder / "queues.yaml", jobs.folder / "job.yaml"
    queues.write_text(yaml.safe_dump(QUEUES))
    job.write_text(yaml.safe_dump(JOB))
    jobs.atoll("queue", "apply", "-f", queues, by="operator")
    kubectl = jobs.release.cluster.kubectl
    wait(lambda: kubectl("get", "namespace", "tenant-acme").returncode == 0, "the tenant's namespace")
    wait(lambda: kubectl("get", "priorityclass", "normal").returncode == 0, "the priorities")
    wait(lambda: "nvidia-h100" in jobs.atoll("cluster", "show", "local", by="operator"), "the GPUs of the cluster")

    jobs.atoll("job", "submit", "-f", job, "--cluster", "auto", by="member")
    wait(lambda: "Status:       succeeded" in jobs.atoll("job", "show", "look", by="member"), "the job to succeed")
    assert len(re.findall(r"GPU-[-0-9a-f]+", jobs.atoll("job", "logs", "look", by="member"))) == 2
    wait(lambda: re.search(r"acme", jobs.atoll("usage", by="member")), "the GPU time of the tenant")
    printed = jobs.release.kubectl("logs", "deployment/atoll-jobs", "--tail=-1").stdout
    assert "forbidden" not in printed.lower(), printed[-4000:]
