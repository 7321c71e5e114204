"""The job service's process beside a development cluster, with tokens of real accounts for whoever calls it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from devcluster.cluster import DevCluster
from devcluster.errors import DevclusterError
from devcluster.waiting import wait_until

ATOLL: Final = Path(sys.executable).with_name("atoll")
LISTEN_SECONDS: Final = 240.0


class JobServiceProcess:
    """The process, its folder, and a token for the default account of each namespace, in a file of that name."""

    def __init__(
        self,
        cluster: DevCluster,
        folder: Path,
        *,
        rules: Mapping[str, Any],
        namespaces: Sequence[str],
        options: Sequence[str | Path] = (),
        database: str = "",
        health_port: int = 0,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Write the access rules and the tokens; `start` starts the process. `variables`: beside those of this one."""
        self.cluster = cluster
        self.folder = folder
        self.options = options
        self.database = database or f"sqlite:///{folder}/jobs.db"
        self.health_port = health_port
        self.variables = dict(variables or {})
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""
        (folder / "access.yaml").write_text(yaml.safe_dump(dict(rules)))
        for namespace in namespaces:
            token = cluster.kubectl("create", "token", "default", "-n", namespace, check=True).stdout
            (folder / namespace).write_text(token)

    @property
    def log(self) -> Path:
        """What the process printed."""
        return self.folder / "service.log"

    def start(self) -> None:
        """Start the process; return when it listens. Raises StartError, DevclusterError with its log."""
        where = self.log.stat().st_size if self.log.exists() else 0
        command = [
            ATOLL, "jobs", "serve", "--kubeconfig", self.cluster.kubeconfig, "--port", "0",
            "--health-port", self.health_port, "--database", self.database, "--access", self.folder / "access.yaml",
            *self.options,
        ]  # fmt: skip
        with self.log.open("ab") as stream:
            words, environment = [str(word) for word in command], os.environ | self.variables
            process = subprocess.Popen(words, stderr=stream, stdout=stream, env=environment)
        self.process = process

        def listens() -> str:
            text = self.log.read_text()[where:]
            if process.poll() is not None:
                raise DevclusterError(f"the job service ended with status {process.returncode}:\n{text}")
            return "".join(re.findall(r'"url": ?"(http://127.0.0.1:\d+)"', text)[:1])

        self.url = wait_until(listens, what="the job service", timeout_seconds=LISTEN_SECONDS)

    def kill(self) -> None:
        """End the process without a word, if it runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()

    def environment(self, account: str) -> dict[str, str]:
        """Return the variables with which `atoll` calls the service as the account of a namespace."""
        return {"ATOLL_JOBS_SERVER": self.url, "ATOLL_JOBS_TOKEN_FILE": str(self.folder / account)}
