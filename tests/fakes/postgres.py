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


@contextmanager
def postgres() -> Iterator[str]:
    """Run a server until the block ends; yield the URL of its database."""
    programs = find_postgres(cache_root(), report=lambda _text: None)

    def run(program: str, *arguments: str) -> None:
        command = [*UNPRIVILEGED, str(programs.folder / program), *arguments]
        # A server that inherits our pipes would keep them open; its output is in the log.
        subprocess.run(command, env=dict(programs.environment), check=True, stdout=subprocess.DEVNULL, timeout=120)

    with tempfile.TemporaryDirectory(prefix="atoll-pg-") as folder:
        data = f"{folder}/data"
        run("initdb", "-D", data, "-U", "atoll", "-A", "trust", "--no-sync", "--locale=C.UTF-8", "-E", "UTF8")
        run("pg_ctl", "-D", data, "-w", "-s", "-l", str(Path(folder) / "log"), "-o", f"-k {folder} {OPTIONS}", "start")
        try:
            yield f"postgresql+psycopg://atoll@/postgres?host={folder}"
        finally:
            run("pg_ctl", "-D", data, "-m", "immediate", "-w", "-s", "stop")
