"""A real PostgreSQL for tests, on its own socket, as an unprivileged user of a user namespace."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from devcluster.paths import cache_root
from devcluster.system_programs import find_postgres

UNPRIVILEGED = ("unshare", "--user", "--map-user=1000", "--map-group=1000")
"""PostgreSQL refuses root; outside its user namespace, this user still owns the cache's files."""
OPTIONS = "-c listen_addresses='' -c fsync=off -c synchronous_commit=off -c full_page_writes=off"


class PostgresServer:
    """A server in a folder; tests may stop it and start it again."""

    def __init__(self, folder: str) -> None:
        self._programs = find_postgres(cache_root(), report=lambda _text: None)
        self._folder = folder
        self._data = f"{folder}/data"
        self.url = f"postgresql+psycopg://atoll@/postgres?host={folder}"
        auth = ("-U", "atoll", "-A", "trust", "--no-sync", "--locale=C.UTF-8", "-E", "UTF8")
        self.run("initdb", "-D", self._data, *auth)

    def run(self, program: str, *arguments: str) -> None:
        """Run one of its programs."""
        command = [*UNPRIVILEGED, str(self._programs.folder / program), *arguments]
        # A server that inherits our pipes would keep them open; its output is in the log.
        subprocess.run(
            command, env=dict(self._programs.environment), check=True, stdout=subprocess.DEVNULL, timeout=120
        )

    def start(self) -> None:
        """Start it and wait until it listens."""
        log, options = str(Path(self._folder) / "log"), f"-k {self._folder} {OPTIONS}"
        self.run("pg_ctl", "-D", self._data, "-w", "-s", "-l", log, "-o", options, "start")

    def stop(self) -> None:
        """Cut every connection and end it."""
        self.run("pg_ctl", "-D", self._data, "-m", "fast", "-w", "-s", "stop")

    def client_options(self) -> tuple[str, ...]:
        """Return what its client programs need to reach it."""
        return ("-h", self._folder, "-U", "atoll")


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """Run a server until the block ends."""
    with tempfile.TemporaryDirectory(prefix="atoll-pg-") as folder:
        server = PostgresServer(folder)
        server.start()
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def postgres() -> Iterator[str]:
    """Run a server until the block ends; yield the URL of its database."""
    with postgres_server() as server:
        yield server.url
