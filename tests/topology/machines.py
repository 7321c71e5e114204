"""Random machines for property tests: any cells, any NUMA nodes, any adapters, NVIDIA or AMD."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from topology.model import Machine, machine

CELLS = ("NV1", "NV2", "PIX", "PHB", "NODE", "SYS", "NS")


@st.composite
def random_machines(draw: st.DrawFn, *, devices_max: int = 5) -> Machine:
    """A machine of 1 to `devices_max` devices."""
    count = draw(st.integers(1, devices_max))
    pairs = list(itertools.combinations(range(count), 2))
    told = draw(st.lists(st.sampled_from(CELLS), min_size=len(pairs), max_size=len(pairs)))
    cells = [["X"] * count for _ in range(count)]
    for (first, second), cell in zip(pairs, told, strict=True):
        cells[first][second] = cells[second][first] = cell
    adapters = draw(st.integers(0, 3))
    rows = st.lists(st.sampled_from(CELLS), min_size=adapters, max_size=adapters)
    amd = draw(st.booleans())
    return machine(
        cells,
        numa=draw(st.lists(st.sampled_from((None, 0, 1)), min_size=count, max_size=count)),
        nvlink_generation=None if amd else draw(st.sampled_from((1, 2, 3, 4))),
        link_gbps=50.0 if amd else None,
        pcie_generation=draw(st.sampled_from((3, 4))),
        inter_socket_gbps=draw(st.sampled_from((None, 10.0))),
        vendor="amd" if amd else "nvidia",
        nics=draw(st.lists(rows, min_size=count, max_size=count)),
    )
