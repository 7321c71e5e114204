"""Demand: the sizes that pods ask for, as shares that weigh fragmentation.

Newer requests weigh more (each fades by FADE), and a prior keeps the result sensible while few were seen. Shares are
rounded to STEP, so that tables built for one Demand serve until the mix changes. Pure values: the caller keeps the
Histogram and decides when to derive a new Demand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from topology.errors import DeviceRequestError
from topology.model import DEVICES_MAX

FADE: Final = 0.999
"""Weight that a request keeps with every later one: about the last thousand count."""
PRIOR_ASKS: Final = 50.0
"""Number of requests that the prior counts as."""
STEP: Final = 0.05


@dataclass(frozen=True, slots=True)
class Demand:
    """Frequency of each size: (count, share) pairs, ascending; shares sum to about one."""

    shares: tuple[tuple[int, float], ...]


PRIOR: Final = Demand(shares=((1, 0.35), (2, 0.25), (3, 0.05), (4, 0.20), (5, 0.02), (6, 0.03), (8, 0.10)))
"""Sizes of a mixed training and inference cluster, used until a cluster's own requests have been counted."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Faded counts of requests by size, ascending."""

    weights: tuple[tuple[int, float], ...] = ()

    def observed(self, count: int) -> Histogram:
        """The histogram after one more request. Raises DeviceRequestError for a size that no machine has."""
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
