"""Demand: which sizes pods really ask for, as shares that fragmentation is weighed with.

In: the sizes of asks, one by one. Out: a Demand. Newer asks weigh more (each ask fades by FADE), and a prior keeps
the answer sane while few were seen. Shares are rounded to STEP, so that tables built for one Demand serve until the
mix really changes. Pure values: the caller keeps the Histogram and decides when to derive a new Demand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from topology.errors import DeviceRequestError
from topology.model import DEVICES_MAX

FADE: Final = 0.999
"""Weight that an ask keeps with every later one: about the last thousand asks count."""
PRIOR_ASKS: Final = 50.0
"""How many asks the prior counts as."""
STEP: Final = 0.05


@dataclass(frozen=True, slots=True)
class Demand:
    """How often pods ask for each size: (count, share) pairs, ascending; shares sum to about one."""

    shares: tuple[tuple[int, float], ...]


PRIOR: Final = Demand(shares=((1, 0.35), (2, 0.25), (3, 0.05), (4, 0.20), (5, 0.02), (6, 0.03), (8, 0.10)))
"""Sizes of a mixed training and inference cluster, used until a cluster's own asks have been counted."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Faded counts of asks by size, ascending."""

    weights: tuple[tuple[int, float], ...] = ()

    def observed(self, count: int) -> Histogram:
        """The histogram after one more ask. Raises AskError for a size that no machine has."""
        if not 1 <= count <= DEVICES_MAX:
            raise DeviceRequestError(f"count must be 1 to {DEVICES_MAX}", value=count)
        faded = [(size, weight * FADE + (size == count)) for size, weight in self.weights]
        if all(size != count for size, _ in faded):
            faded.append((count, 1.0))
            faded.sort()
        return Histogram(weights=tuple(faded))

    def demand(self) -> Demand:
        """Shares of the sizes, the prior included; sizes below half a STEP are left out."""
        weights = {size: share * PRIOR_ASKS for size, share in PRIOR.shares}
        for size, weight in self.weights:
            weights[size] = weights.get(size, 0.0) + weight
        total = sum(weights.values())
        shares = {size: round(round(weight / total / STEP) * STEP, 6) for size, weight in weights.items()}
        return Demand(shares=tuple(sorted((size, share) for size, share in shares.items() if share)))
