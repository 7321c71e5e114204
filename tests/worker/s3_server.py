"""A real S3 server over a folder, as a process of its own."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from devcluster.build import ensure_s3

ACCESS_KEY, SECRET_KEY, REGION = "atoll", "atoll-in-tests", "us-east-1"
ROOT = {"ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY}
BUCKET = "checkpoints"
START_SECONDS = 30


@contextmanager
def s3_server(folder: Path) -> Iterator[dict[str, str]]:
    """Serve a bucket until the block ends; the variables by which clients of S3 find it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = command_of(folder, address)
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, env={**os.environ, **ROOT}, stdout=log, stderr=log)
    try:
        wait_until_it_listens(server, address, folder / "log")
        yield variables_of(address)
    finally:
        server.kill()
        server.wait()


def command_of(folder: Path, address: str) -> list[str | Path]:
    """Return the command of a server with an empty bucket in a folder; it needs the variables of ROOT."""
    (folder / "data" / BUCKET).mkdir(parents=True)
    (folder / "attributes").mkdir()
    flags = ["--port", address, "--region", REGION]
    return [ensure_s3(), *flags, "posix", "--sidecar", folder / "attributes", folder / "data"]


def variables_of(address: str) -> dict[str, str]:
    """Return the variables by which clients find a server."""
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": REGION,
        "AWS_ENDPOINT_URL": f"http://{address}",
        "AWS_ALLOW_HTTP": "true",
    }


def wait_until_it_listens(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    """Return when the server takes connections; fail with its log where it ended."""
    host, _, port = address.partition(":")
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise AssertionError(f"the S3 server does not listen: {log.read_text()[-2000:]}")
