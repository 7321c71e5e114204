"""A training in a container of a spot job: it saves at every step, handles the preemption notice, and logs both.

Its state is the sum of all steps, so a skipped or repeated step shows. It ends when a file says so.
"""

import os
import sys
import time
from pathlib import Path

from worker import EXIT_PREEMPTED, CheckpointSettings, Preemption, parts_of, states_of

SAVE_SECONDS = 2.0
"""A real save takes longer than a step; its grace is far longer."""


def main() -> int:
    """Train until the file `finish` is there, or the container is to be ended."""
    folder = Path(os.environ["TRAINING_FOLDER"])
    notice = Path("/etc/atoll/preemption-notice")
    preemption = Preemption.watch()
    checkpoints = CheckpointSettings.from_environment().open()
    total, step = 0, 0
    with checkpoints.restore() as restored:
        if restored is not None:
            total, step = states_of(restored)["total"], restored.next_step - 1
    assert total == step * (step + 1) // 2, (total, step)
    with (folder / "log").open("a") as log:
        print("first", step + 1, file=log, flush=True)
        while True:
            step += 1
            total += step
            is_preempted = preemption.wait(0.3)
            if is_preempted:
                time.sleep(SAVE_SECONDS)
            checkpoints.save(step, parts_of({"total": total}))
            print("saved", step, file=log, flush=True)
            if is_preempted:
                print("preempted", preemption.seconds_left(), notice.read_text(), file=log, flush=True)
                return EXIT_PREEMPTED
            if (folder / "finish").exists():
                return 0


if __name__ == "__main__":
    sys.exit(main())
