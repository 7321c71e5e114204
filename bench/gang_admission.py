"""Time of a gang from its last pod's creation to its last bind: `python -m bench.gang_admission`.

Uses a real control plane and all of Atoll, as in `bench.scale`. Gangs and as many single pods of the same claim
take turns on one cluster; the ratio is the cost of starting together: the decision, every Lease before the first gate,
and two more writes per member. The controllers create the GpuGang meanwhile, from the size on the pods. Exits 1 if
something was not bound in time.
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field

from atoll.api import names
from bench.figures import Row, table
from bench.journal import TooSlow
from bench.stand import GPUS, Stand, open_stand
from devcluster.errors import DevclusterError


@dataclass(slots=True)
class Times:
    """Seconds from the last pod created to the last one bound, round by round."""

    gang: list[float] = field(default_factory=list)
    single: list[float] = field(default_factory=list)


def bind_all(stand: Stand, count: int, gang: str) -> float:
    """Create pods, wait until all are bound, delete them; return the seconds between the last of each. Raises
    TooSlow."""
    notes = {names.GANG: gang, names.GANG_SIZE: str(count)} if gang else {}
    with stand.paused("kwok"):
        pods = stand.create(count, annotations=notes)
        created = time.monotonic()
        stand.wait_bound(pods)
        seconds = max(stand.journal.bound_at[pod] for pod in pods) - created
    stand.clear()
    return max(seconds, 1e-3)


def rows_of(times: Times, members: int) -> list[Row]:
    """Return the table's lines."""
    ratios = [one / other for one, other in zip(times.gang, times.single, strict=True)]
    how = f"from the last of {members} pods created to the last bound; median of {len(ratios)} rounds"
    return [
        Row("gang", f"{statistics.median(times.gang):.2f} s", how),
        Row(
            "single pods",
            f"{statistics.median(times.single):.2f} s",
            "the same; the first are bound before the last come",
        ),
        Row("ratio", f"{statistics.median(ratios):.2f}", ", ".join(f"{ratio:.2f}" for ratio in ratios)),
    ]


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=64, help="fake nodes of 8 GPUs")
    parser.add_argument("--members", type=int, default=64, help="members of a gang, one GPU each")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of a gang and single pods")
    parser.add_argument("--name", default="bench-gangs", help="name of the cluster")
    arguments = parser.parse_args()
    if not 1 <= arguments.members <= arguments.nodes * GPUS or arguments.rounds < 1:
        parser.error("needs from 1 to 8 x nodes members, and a round")
    times, status = Times(), 0
    try:
        with open_stand(arguments.name, arguments.nodes) as stand:
            bind_all(stand, arguments.members, "")
            for number in range(arguments.rounds):
                times.single.append(bind_all(stand, arguments.members, ""))
                times.gang.append(bind_all(stand, arguments.members, f"gang-{number}"))
    except (TooSlow, DevclusterError, OSError) as failure:
        print(f"FAILED: {failure}", file=sys.stderr)
        status = 1
    if times.gang:
        times.single = times.single[: len(times.gang)]
        print(table(rows_of(times, arguments.members)))
    return status


if __name__ == "__main__":
    sys.exit(main())
