"""`python -m agent.driver_worker pynvml`: asks the driver on behalf of the agent, in a process that may be killed.

In: one JSON list per line, [step, index, others]. Out: one JSON object per line, in the same order: {"facts": ...}, or
{"error": text} when the library as a whole refuses. Nothing else is imported than what that takes: this process shall
stay small, and it lives as long as the agent.
"""

import json
import sys
from importlib import import_module
from typing import Any

from agent.amd_driver import AmdDriver
from agent.driver import Driver


def main() -> int:
    """Answer until the input ends."""
    name = sys.argv[1]
    library = import_module(name)
    driver = AmdDriver(library) if name == "amdsmi" else Driver(library)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_answer(driver, json.loads(line))) + "\n")
        sys.stdout.flush()
    driver.close()
    return 0


def _answer(driver: Driver | AmdDriver, request: list[Any]) -> dict[str, Any]:
    step, index, others = request
    try:
        if step == "open":
            return {"facts": driver.open()}
        if step == "events":
            return {"facts": {"events": driver.events(others)}}
        return {"facts": driver.step(step, index, others)}
    except Exception as error:  # noqa: BLE001 - whatever the bindings raise becomes an answer
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    sys.exit(main())
