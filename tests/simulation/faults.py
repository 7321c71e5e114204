"""Kinds of faults, their frequency, and the random draws.

A draw depends on the seed and its purpose, not on earlier draws: without one step of a history, the other steps get the
same faults, so a failing history can shrink.
"""

from collections import Counter
from dataclasses import dataclass, field
from zlib import crc32

REQUEST_FAULTS = {
    "never sent": "the connection is refused; the server hears nothing",
    "cut before": "the connection breaks before the server hears of the request",
    "answer lost": "the server acts, and its answer never arrives",
    "late": "the request is held up for seconds to a minute and then carried out, long after its sender gave up",
    "twice": "the request is carried out, and once more later",
    "slow": "the request waits for seconds before it is carried out, so that others overtake it",
    "error 500": "the server fails without acting",
    "error 503": "the server is unavailable",
    "error 429": "the server asks to slow down",
    "error 504": "the server acts and says that it took too long",
}
"""What can happen to one request."""
BINDING_FAULTS = {
    "late Binding": "the same as late, for Bindings alone",
    "lost Binding": "the same as answer lost, for Bindings alone",
}
CALL_FAULTS = {
    "call lost": "kube-scheduler gives up a bind call that goes on",
    "call twice": "kube-scheduler's bind call arrives twice",
}
WATCH_FAULTS = {
    "replayed": "a watch that begins anew shows events again that were seen before",
    "expired": "the server has forgotten the version at which a watch wants to go on: 410",
}

_MIX = 2_654_435_761


@dataclass(slots=True)
class FaultPlan:
    """Rates of faults by kind, between 0 and 1, and how many of each have happened. `is_calm` ends them all."""

    seed: int
    rates: dict[str, float]
    counts: Counter[str] = field(default_factory=Counter)
    is_calm: bool = False
    _uses: dict[str, int] = field(default_factory=dict)

    def draw(self, what: str) -> float:
        """Return a number in [0, 1): the next one for this purpose."""
        use = self._uses.get(what, 0)
        self._uses[what] = use + 1
        return crc32(f"{what}/{use}/{self.seed}".encode()) * _MIX % 2**32 / 2**32

    def between(self, what: str, low: float, high: float) -> float:
        """Return a number between the two."""
        return low + (high - low) * self.draw(what)

    def request_fault(self, what: str) -> str:
        """Return the fault that this request meets; an empty text for none."""
        if self.is_calm:
            return ""
        left = self.draw(what)
        for kind in REQUEST_FAULTS:
            rate = self.rates.get(kind, 0.0)
            if left < rate:
                self.counts[kind] += 1
                return kind
            left -= rate
        return ""

    def strikes(self, kind: str, what: str) -> bool:
        """Tell whether a fault of this kind happens now, and count it."""
        if self.is_calm or self.draw(f"{kind} {what}") >= self.rates.get(kind, 0.0):
            return False
        self.counts[kind] += 1
        return True
