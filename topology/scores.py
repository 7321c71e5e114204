"""What a request costs on many free masks of a machine at once, and what weighs nodes against each other.

The costs come from topology.tables, so the node named by them gives exactly the set that `choose` takes. A machine of
more devices than a table holds is asked mask by mask. `atoll.cluster.fleet` keeps the results per node.

Two more costs weigh nodes against each other. They are the same for every set of one node, so that the set is still
that of the tables.

- A machine is whole again when the last of its pods has ended, and with n pods that run equally long that takes
  1 + 1/2 + ... + 1/n of their time. One more pod adds 1/(n + 1) of it, EMPTYING x which it pays: machines with few pods
  are left to become empty, and those that stay broken up for long take what comes.
- The last whole machines of a class are reserved: one in RESERVED_ONE_IN of its nodes is kept for asks of the whole
  machine, and a smaller ask that would break one of them pays RESERVE, more than what links are worth and less than a
  set that spans islands. Few nodes reserve nothing.

Asks that spread pay neither.
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
"""What one more pod pays on a machine with so many pods; more than PODS_MAX are as many."""

Indices = npt.NDArray[np.integer]


def reserves(machine: Machine, ask: DeviceRequest, demand: Demand = PRIOR) -> bool:
    """Whether an ask must leave the last whole machines alone: it takes less than one, packs, and whole ones are asked
    for."""
    smaller = ask.count < machine.count and ask.policy is not Policy.SPREAD
    return smaller and any(count == machine.count for count, _ in demand.shares)


def costs_of(machine: Machine, free: Indices, ask: DeviceRequest, demand: Demand = PRIOR) -> Floats:
    """Return the cost of the request for many free masks of one machine, as `choose` gives it; inf where no set fits.

    Costs are in GPUs lost and the weights of topology.policies.
    """
    if ask.count > machine.count:
        return np.full(len(free), np.inf)
    if machine.count <= TABLE_DEVICES_MAX:
        return table(machine, ask, demand).costs_of(free.astype(np.int64))
    answers = {mask: choose(machine, mask, ask, demand=demand) for mask in {int(mask) for mask in free}}
    costs = {mask: answer.cost if isinstance(answer, Choice) else np.inf for mask, answer in answers.items()}
    return np.array([costs[int(mask)] for mask in free])
