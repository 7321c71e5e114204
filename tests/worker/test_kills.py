"""A training is killed at every moment and restarted: it loses at most the work of one step."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.worker import trainer
from worker.places import parse_place
from worker.stores import Store, open_store

STEPS = 3
Train = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def train() -> Iterator[Train]:
    """Start a training in a process of its own, and wait for its end."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, trainer.__file__]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as server:
        assert server.stdin is not None
        assert server.stdout is not None

        def start(*words: object) -> subprocess.CompletedProcess[str]:
            print(json.dumps([[str(word) for word in words], dict(os.environ)]), file=server.stdin, flush=True)
            status, output = json.loads(server.stdout.readline())
            return subprocess.CompletedProcess(words, status, output)

        yield start
        server.stdin.close()


def told(output: str, word: str) -> list[int]:
    """Return the numbers that a training printed behind a word."""
    return [int(line.split()[1]) for line in output.splitlines() if line.startswith(f"{word} ")]


def no_record_names_what_is_not_there(store: Store, folder: Path) -> None:
    """Read every record and each of its parts, without the code under test."""
    keys = store.list_sizes()
    for key in [key for key in keys if key.startswith("committed/")]:
        record = json.loads(store.read(key))["record"]
        name = key.removeprefix("committed/").removesuffix(".json")
        for part in record["parts"]:
            data = store.fetch(f"weights/{name}/{part['name']}", folder).read_bytes()
            assert hashlib.sha256(data).hexdigest() == part["sha256"]


def goes_on(train: Train, uri: str, killed: str) -> None:
    """Start the training again: it goes on behind what was saved and comes to the end of an uninterrupted one."""
    again = train(uri, STEPS)

    assert again.returncode == 0, again.stdout
    [first], saved = told(again.stdout, "first"), told(killed, "saved")
    assert max(saved, default=0) + 1 <= first <= max(saved, default=0) + 2, "a commit whose answer was lost counts too"
    assert f"done {trainer.state_after(STEPS).hex()}" in again.stdout


def test_killed_at_every_touch_of_the_folder(tmp_path: Path, train: Train) -> None:
    """Before each file that is opened, linked, made or removed the process dies once; the folder is good every time."""
    for touch in range(1, 1000):
        uri = f"file://{tmp_path}/{touch}/"
        killed = train(uri, STEPS, "--touch", touch)
        if killed.returncode == 0:
            break
        assert killed.returncode == -signal.SIGKILL, killed.stdout
        no_record_names_what_is_not_there(open_store(parse_place(uri), allowed=(uri,)), tmp_path)
        goes_on(train, uri, killed.stdout)
    assert touch > 10 * STEPS


@pytest.mark.parametrize("when", ["before", "after", "half"])
def test_killed_around_every_call_of_the_store(uri: str, when: str, tmp_path: Path, train: Train) -> None:
    """Each write and each removal is lost once, or its answer is; uploads also leave half an object."""
    [calls] = told(train(f"{uri}whole/", 2, "--kept", 1).stdout, "calls")
    kills = 0
    for call in range(1, calls + 1):
        place = f"{uri}{call}/"
        killed = train(place, 2, "--kept", 1, "--call", call, "--when", when)
        assert killed.returncode == (0 if told(killed.stdout, "calls") else -signal.SIGKILL), killed.stdout
        kills += killed.returncode != 0
        no_record_names_what_is_not_there(open_store(parse_place(place), allowed=(place,)), tmp_path)
        goes_on(train, place, killed.stdout)
    assert kills == (4 if when == "half" else calls), "two saves write two parts each"


def test_killed_again_and_again(uri: str, train: Train) -> None:
    """Five starts in a row die, each in another phase; the sixth comes to the right end."""
    saved = ""
    for call in (14, 9, 12, 11, 16):
        killed = train(uri, STEPS, "--kept", 1, "--call", call, "--when", "half" if call == 12 else "before")
        assert killed.returncode in (0, -signal.SIGKILL), killed.stdout
        assert told(killed.stdout, "first") > [max(told(saved, "saved"), default=0)]
        saved += killed.stdout
    goes_on(train, uri, saved)
