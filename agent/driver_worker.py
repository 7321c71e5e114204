"""`python -m agent.driver_worker pynvml`: asks the driver for the agent, in a process that may be killed.

In: one JSON list per line, [step, index, others]. Out: one JSON object per line, in the same order: {"facts": ...}, or
{"error": text} when the library as a whole refuses or cannot be loaded. Output of libraries goes to standard error.
It imports little, to stay small: it lives as long as the agent.
"""

import json
import os
import sys
from importlib import import_module
from typing import Any

from agent.amd_driver import AmdDriver
from agent.driver import Driver


def main() -> int:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    driver, problem = _driver(sys.argv[1])
    for line in sys.stdin:
        answer = _answer(driver, json.loads(line)) if driver is not None else {"error": problem}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    if driver is not None:
        driver.close()
    return 0


def _driver(name: str) -> tuple[Driver | AmdDriver | None, str]:
    """Driver by the bindings of that name; None and the reason if they cannot be imported."""
    try:
        library = import_module(name)
    except Exception as error:  # noqa: BLE001 - AMD's raise whatever came of a library that they did not find
        return None, f"cannot import {name}: {type(error).__name__}: {error}"
    return (AmdDriver(library) if name == "amdsmi" else Driver(library)), ""


def _answer(driver: Driver | AmdDriver, request: list[Any]) -> dict[str, Any]:
    step, index, others = request
    try:
        if step == "open":
            return {"facts": driver.open()}
        if step == "events":
            return {"facts": {"events": driver.events()}}
        return {"facts": driver.step(step, index, others)}
    except Exception as error:  # noqa: BLE001 - whatever the bindings raise becomes an answer
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    sys.exit(main())
