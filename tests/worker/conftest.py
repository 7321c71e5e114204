"""Fixtures: storage for checkpoints in a folder, in memory as a cloud, and in a bucket of a real S3 server."""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.worker.s3_server import BUCKET, s3_server
from worker.places import parse_place
from worker.stores import Store, open_store

REPOSITORY = Path(__file__).parents[2]
FOLDERS = itertools.count()
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Yield the variables of an S3 server for all tests of a process; each test has its own folder in the bucket."""
    with s3_server(tmp_path_factory.mktemp("s3")) as variables:
        yield variables


@pytest.fixture
def cloud() -> MemoryFileSystem:
    """Return an empty in-memory file system of fsspec."""

    class Cloud(MemoryFileSystem):
        store, pseudo_dirs = {}, [""]

    return Cloud(skip_instance_cache=True)


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.e2e)])
def uri(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a folder on disk, then one in a real bucket; clients find the server through the environment."""
    if request.param == "file":
        return f"file://{tmp_path}/run/"
    for name, value in request.getfixturevalue("s3").items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/run-{next(FOLDERS)}/"


@pytest.fixture
def store(uri: str) -> Store:
    """Return the store at the URI."""
    return open_store(parse_place(uri), allowed=(uri,))


@pytest.fixture
def run() -> Run:
    """Return a function that runs a Python program with the worker on its path and waits for its end."""

    def start(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *map(str, words)],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **variables},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return start
