"""Cost of a request on many free masks of a machine at once, and the costs that compare nodes.

The costs come from topology.tables, so the node chosen by them gives exactly the set that `choose` takes. A machine
with more devices than a table holds is evaluated mask by mask. `atoll.cluster.fleet` keeps the results per node.

Two more costs compare nodes. They are the same for every set of one node, so that the tables still decide the set.

- A machine is whole again after its last pod ends. With n pods of equal mean run time that takes 1 + 1/2 + ... + 1/n of
  it. One more pod adds 1/(n + 1) and costs EMPTYING x that: machines with few pods can become empty, and machines that
  stay in use for long take new pods.
- The last whole machines of a class are reserved: one in RESERVED_ONE_IN of its nodes is kept for requests of the whole
  machine. A smaller request that would break one of them pays RESERVE, more than links are worth and less than a set
  that spans islands. Classes of few nodes reserve nothing.

Requests that spread pay neither.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from topology.choice import Choice, choose
from topology.demand import PRIOR, Demand
from topology.device_requests import DeviceRequest, Policy
from topology.model import Machine
from topology.quality import TABLE_DEVICES_MAX, Floats
from topology.tables import table

EMPTYING: Final = 1.0
RESERVED_ONE_IN: Final = 64
RESERVE: Final = 40.0
ALIKE: Final = 1e-7
"""Costs of sets are rounded to a millionth; sums that should be equal differ by less than this."""
DECIMALS: Final = 6
PODS_MAX: Final = 64
EMPTYING_BY_PODS: Final[Floats] = np.round(EMPTYING / np.arange(1, PODS_MAX + 2), DECIMALS)
"""Cost of one more pod by the number of pods on the machine, capped at PODS_MAX."""

Indices = npt.NDArray[np.integer]


def reserves(machine: Machine, ask: DeviceRequest, demand: Demand = PRIOR) -> bool:
    """True if a request must avoid the last whole machines: it takes less than one and packs, and there is demand for
    whole ones."""
    smaller = ask.count < machine.count and ask.policy is not Policy.SPREAD
    return smaller and any(count == machine.count for count, _ in demand.shares)


def costs_of(machine: Machine, free: Indices, ask: DeviceRequest, demand: Demand = PRIOR) -> Floats:
    """Cost of the request for many free masks of one machine, as `choose` gives it; inf if no set fits.

    Costs are in GPUs lost and the weights of topology.policies.
    """
    if ask.count > machine.count:
        return np.full(len(free), np.inf)
    if machine.count <= TABLE_DEVICES_MAX:
        return table(machine, ask, demand).costs_of(free.astype(np.int64))
    answers = {mask: choose(machine, mask, ask, demand=demand) for mask in {int(mask) for mask in free}}
    costs = {mask: answer.cost if isinstance(answer, Choice) else np.inf for mask, answer in answers.items()}
    return np.array([costs[int(mask)] for mask in free])
