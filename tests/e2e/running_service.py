"""The job service's process beside a development cluster, used through the command line with real tokens."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from atollctl.__main__ import app
from devcluster import DevCluster
from devcluster.job_service import JobServiceProcess

WAIT_SECONDS = 240.0
PAUSE_SECONDS = 0.2
NAMESPACE = "tenant-acme"
RULES = {
    "rules": [
        {"group": f"system:serviceaccounts:{NAMESPACE}", "role": "member", "tenant": "acme"},
        {"group": "system:serviceaccounts:tenant-other", "role": "admin", "tenant": "other"},
    ]
}


class RunningService(JobServiceProcess):
    """The service's process and whoever calls it."""

    def __init__(
        self,
        cluster: DevCluster,
        folder: Path,
        *,
        rules: Mapping[str, Any] = RULES,
        namespaces: Sequence[str] = (NAMESPACE, "tenant-other"),
        **options: Any,
    ) -> None:
        super().__init__(cluster, folder, rules=rules, namespaces=namespaces, **options)

    def atoll(self, *words: str, by: str = NAMESPACE, status: int = 0) -> str:
        """Run `atoll ...` as an account and return what it prints."""
        done = CliRunner().invoke(app, words, env=self.environment(by))  # a process each would be mostly imports
        assert done.exit_code == status, done.output
        return done.stdout if status == 0 else done.stderr

    def job(self, *words: str, by: str = NAMESPACE, status: int = 0) -> str:
        """Run `atoll job ...` as a tenant's account and return what it prints."""
        return self.atoll("job", *words, by=by, status=status)

    def submit(self, name: str, script: str, **fields: Any) -> str:
        """Submit a job that runs a script; return what is printed."""
        job = {
            "name": name,
            "job_type": "batch",
            "container": {"image": "localhost/busybox:1", "command": ["/bin/sh", "-c", script]},
            "policy": {"priority_class": "normal", "preemption_grace_period": 2},
        } | fields
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(job))
        return self.job("submit", "-f", str(file))

    def status(self, name: str) -> str:
        """Return the state of a job."""
        return re.findall(r"^Status: +(\w+)", self.job("show", name), re.MULTILINE)[0]

    def wait(self, name: str, state: str) -> None:
        """Wait until a job is in a state."""
        wait(lambda: self.status(name) == state, f"{name} to be {state}: {self.job('show', name)}")

    def objects(self, name: str) -> list[str]:
        """Return the objects of a job in the cluster, by kind/name."""
        listed = self.cluster.kubectl(
            "get", "jobs,deployments,pods", "-n", NAMESPACE, "-l", f"job.gpu.scheduling/name={name}", "-o", "name",
            check=True,
        )  # fmt: skip
        return listed.stdout.split()


def wait(condition: Callable[[], Any], what: str) -> Any:
    """Wait for something, for a bounded time."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited too long for {what}"
        time.sleep(PAUSE_SECONDS)
    return found
