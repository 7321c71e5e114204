"""Computes before the first call what only the first one would compute, so that it need not wait.

That is the quality of every set of each machine shape, beside the event loop, and the place of every node in the
arrays, a few nodes at a time: a thousand nodes at once would keep the loop busy for a fifth of a second.
"""

import asyncio
from collections.abc import Collection
from typing import Final

import numpy as np

from atoll.cluster.ledger import Ledger
from atoll.cluster.machines import NodeShape
from atoll.cluster.weakness import weaknesses
from atoll.kube.clock import Clock
from topology.choice import choose
from topology.demand import Demand
from topology.device_requests import DeviceRequest

NODES_AT_ONCE: Final = 32
COUNTS: Final = (1, 2, 4, 8)
"""The usual requests; the first one of another size takes some milliseconds more."""


async def warm_up(ledger: Ledger, clock: Clock) -> None:
    """Bring the arrays of a complete ledger up to date. A call that comes meanwhile does what is left by itself."""
    shapes = {devices.shape for devices in ledger.nodes.values()}
    await asyncio.to_thread(_build_tables, shapes, ledger.demand)
    while ledger.renew(clock.monotonic_seconds(), nodes_max=NODES_AT_ONCE):  # noqa: ASYNC110 - this is the work
        await asyncio.sleep(0)


def _build_tables(shapes: Collection[NodeShape], demand: Demand) -> None:
    np.unique(np.zeros(1))  # the first call imports a large module
    weaknesses(shapes)
    for machine in {shape.machine for shape in shapes}:
        for count in COUNTS:
            choose(machine, machine.full, DeviceRequest(count=count), demand=demand)
