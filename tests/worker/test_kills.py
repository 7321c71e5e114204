"""A training is killed at every moment of its life and started again: the work of one step is lost, never more."""

import hashlib
import json
import signal
from pathlib import Path

import pytest

from tests.worker import trainer
from tests.worker.conftest import Run
from worker.places import parse_place
from worker.stores import Store, open_store

STEPS = 3
TRAINER = Path(trainer.__file__)


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


def goes_on(run: Run, uri: str, killed: str) -> None:
    """Start the training again: it goes on behind what was saved and comes to the end of an uninterrupted one."""
    again = run(TRAINER, uri, STEPS)

    assert again.returncode == 0, again.stderr
    [first], saved = told(again.stdout, "first"), told(killed, "saved")
    assert max(saved, default=0) + 1 <= first <= max(saved, default=0) + 2, "a commit whose answer was lost counts too"
    assert f"done {trainer.state_after(STEPS).hex()}" in again.stdout


def test_killed_at_every_touch_of_the_folder(tmp_path: Path, run: Run) -> None:
    """Before each file that is opened, linked, made or removed the process dies once; the folder is good every time."""
    for touch in range(1, 1000):
        uri = f"file://{tmp_path}/{touch}/"
        killed = run(TRAINER, uri, STEPS, "--touch", touch)
        if killed.returncode == 0:
            break
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        no_record_names_what_is_not_there(open_store(parse_place(uri), allowed=(uri,)), tmp_path)
        goes_on(run, uri, killed.stdout)
    assert touch > 10 * STEPS


@pytest.mark.parametrize("when", ["before", "after", "half"])
def test_killed_around_every_call_of_the_store(uri: str, when: str, tmp_path: Path, run: Run) -> None:
    """Each write and each removal is lost once, or its answer is; uploads also leave half an object."""
    [calls] = told(run(TRAINER, f"{uri}whole/", 2, "--kept", 1).stdout, "calls")
    kills = 0
    for call in range(1, calls + 1):
        place = f"{uri}{call}/"
        killed = run(TRAINER, place, 2, "--kept", 1, "--call", call, "--when", when)
        assert killed.returncode == (0 if told(killed.stdout, "calls") else -signal.SIGKILL), killed.stderr
        kills += killed.returncode != 0
        no_record_names_what_is_not_there(open_store(parse_place(place), allowed=(place,)), tmp_path)
        goes_on(run, place, killed.stdout)
    assert kills == (4 if when == "half" else calls), "two saves write two parts each"


def test_killed_again_and_again(uri: str, run: Run) -> None:
    """Five starts in a row die, each in another phase; the sixth comes to the right end."""
    saved = ""
    for call in (14, 9, 12, 11, 16):
        killed = run(TRAINER, uri, STEPS, "--kept", 1, "--call", call, "--when", "half" if call == 12 else "before")
        assert killed.returncode in (0, -signal.SIGKILL), killed.stderr
        assert told(killed.stdout, "first") > [max(told(saved, "saved"), default=0)]
        saved += killed.stdout
    goes_on(run, uri, saved)
