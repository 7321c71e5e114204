"""Of which agents was heard, when, and which have been silent for too long since.

In: heartbeats as they arrive, on our own monotonic clock. Out: which nodes are stale, and when the next one will be.
Part of the ledger, which asks for every node at once.
"""

import math


class Heartbeats:
    """The last heartbeat of every node's agent. `next_silent_seconds`: until then no node becomes stale."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[float, float]] = {}
        self.next_silent_seconds = math.inf

    def put(self, node: str, now_seconds: float, silence_seconds_max: float) -> None:
        """Note that the node's agent was heard at `now_seconds`, and for how long its report stays fresh."""
        self._heard[node] = (now_seconds, silence_seconds_max)
        self.next_silent_seconds = min(self.next_silent_seconds, now_seconds + silence_seconds_max)

    def is_stale(self, node: str, now_seconds: float) -> bool:
        """Tell whether the agent was silent for too long, or was never heard."""
        heard = self._heard.get(node)
        return heard is None or now_seconds - heard[0] > heard[1]

    def look_ahead(self, now_seconds: float) -> None:
        """Find anew when the next node may become stale."""
        ends = (at + silence for at, silence in self._heard.values() if at + silence >= now_seconds)
        self.next_silent_seconds = min(ends, default=math.inf)
