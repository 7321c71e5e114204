"""A training in its own process. Every step hashes the state before it, so the result shows any skipped or repeated
step, and any start from an incomplete state.

Reads lines of JSON, each with its words (URI STEPS [--kept N] [--touch N | --call N --when before|after|half]) and its
environment. Per line it forks a training, so that imports cost once, and answers with exit status and output.
"""

import argparse
import hashlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from tests.worker.faults import FaultyStore, kill_at_touch, kill_this_process
from worker import Checkpoints, objects  # noqa: F401 - a client of clouds, before the forks
from worker.places import allowed_place
from worker.stores import open_store

JOB = "trial"
START = b"\0" * 32


def after(state: bytes, step: int) -> bytes:
    """Return the state after a step."""
    return hashlib.sha256(state + step.to_bytes(8, "big")).digest()


def state_after(steps: int) -> bytes:
    """Return the state after all of these steps, uninterrupted."""
    state = START
    for step in range(1, steps + 1):
        state = after(state, step)
    return state


def in_two_writes(state: bytes) -> object:
    """Return a part that is written in pieces, as large ones are."""

    def produce(file: BinaryIO) -> None:
        file.write(state[:16])
        file.flush()
        file.write(state[16:])

    return produce


def train(words: Sequence[str]) -> None:
    """Train to the end, or to the fault."""
    parser = argparse.ArgumentParser()
    parser.add_argument("uri")
    parser.add_argument("steps", type=int)
    parser.add_argument("--kept", type=int, default=2)
    parser.add_argument("--touch", type=int, default=0)
    parser.add_argument("--call", type=int, default=0)
    parser.add_argument("--when", default="before")
    options = parser.parse_args(words)
    logging.basicConfig(level=logging.INFO)

    place = allowed_place(options.uri, [options.uri])
    if options.touch:
        kill_at_touch(Path("/", place.path), options.touch)
    store = open_store(place, allowed=(options.uri,))
    faulty = FaultyStore(store, at=options.call, when=options.when, act=kill_this_process)
    checkpoints = Checkpoints(faulty, job_id=JOB, uri=place.uri, kept=options.kept)
    with checkpoints.restore() as restored:
        first = 1 if restored is None else restored.next_step
        state = START if restored is None else restored.paths["model"].read_bytes()
    print("first", first, flush=True)
    for step in range(first, options.steps + 1):
        state = after(state, step)
        checkpoints.save(step, {"model": in_two_writes(state), "optimizer": b"momentum" * step}, loss=1 / step)
        print("saved", step, flush=True)
    print("calls", faulty.calls, flush=True)
    print("done", state.hex(), flush=True)


def main() -> None:
    """Serve until there are no more lines."""
    for line in sys.stdin:
        words, environment = json.loads(line)
        with tempfile.TemporaryFile() as output:
            child = os.fork()
            if child == 0:
                os.environ.update(environment)
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                train(words)
                return
            _, status = os.waitpid(child, 0)
            output.seek(0)
            print(json.dumps([os.waitstatus_to_exitcode(status), output.read().decode()]), flush=True)


if __name__ == "__main__":
    main()
