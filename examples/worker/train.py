"""A training that survives preemption, as small as it can be: it counts, saves, and goes on where it was.

Run it, end it with SIGTERM, run it again. docs/checkpoints.md names the variables that tell it where to save.
"""

import logging
import os
import sys
import time

from worker import EXIT_PREEMPTED, CheckpointSettings, Preemption, parts_of, states_of

STEPS = int(os.environ.get("STEPS", "100"))
SECONDS_PER_STEP = 0.1


def main() -> int:
    """Train to the end, or until the container is to be ended."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    preemption = Preemption.watch()
    checkpoints = CheckpointSettings.from_environment().open()

    model = {"weight": 0.0}
    first = 1
    with checkpoints.restore() as restored:
        if restored is not None:
            model, first = states_of(restored)["model"], restored.next_step

    for step in range(first, STEPS + 1):
        time.sleep(SECONDS_PER_STEP)
        model["weight"] += step
        is_preempted = preemption.seconds_left() is not None
        if checkpoints.is_due() or is_preempted or step == STEPS:
            checkpoints.save(step, parts_of({"model": model}), loss=1 / step)
        if is_preempted:
            print(f"preempted after step {step}", flush=True)
            return EXIT_PREEMPTED
    print(f"done: weight {model['weight']:.0f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
