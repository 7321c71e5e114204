"""Lists PodDisruptionBudgets, with a short cache.

They are listed for each planned eviction instead of watched: that is rare, and the eviction API checks again.
"""

import math

from atoll.cluster.budgets import DisruptionBudgets, decode_budget
from atoll.kube import paths
from atoll.kube.api import ApiReader
from atoll.kube.clock import Clock

FRESH_SECONDS = 1.0


class BudgetList:
    """The budgets of the cluster, at most `FRESH_SECONDS` old."""

    def __init__(self, client: ApiReader, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._budgets = DisruptionBudgets()
        self._listed_seconds = -math.inf

    async def read(self) -> DisruptionBudgets:
        """Return the budgets. Raises KubeError."""
        now = self._clock.monotonic_seconds()
        if now - self._listed_seconds > FRESH_SECONDS:
            listing = await self._client.list(paths.poddisruptionbudgets(), decode_budget)
            self._budgets, self._listed_seconds = DisruptionBudgets(tuple(listing.items)), now
        return self._budgets
