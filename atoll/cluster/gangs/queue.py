"""The order in which waiting gangs are tried: priority, waiting time, name.

Fairness between gangs is decided here alone. Waiting time counts from the creation, or from the eviction where the
policy says so.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from atoll.api import names
from atoll.api.gangs import RequeueTimestamp
from atoll.api.times import seconds_of
from atoll.cluster.gangs import conditions
from atoll.cluster.gangs.lifecycle import GangView
from atoll.cluster.gangs.membership import GangKey, key_of
from atoll.cluster.requests import Verdict

PAUSE_SECONDS = 0.5
PAUSE_SECONDS_MAX = 10.0
ROOM_PAUSE_SECONDS_MAX = 1.0


@dataclass(frozen=True, slots=True)
class AdmissionAttempts:
    """How often in a row a gang found no place, when it was tried last, and what was found then. They belong to one
    generation of one gang: whoever is created anew or edited starts afresh."""

    gang: tuple[str, int] = ("", 0)
    count: int = 0
    at_seconds: float = 0.0
    verdict: Verdict = Verdict.BUSY
    contends: bool = True
    """Whether the gang could use GPUs of the cluster: then nobody may take them before it under strict order."""

    def next(self, now_seconds: float, verdict: Verdict, *, contends: bool) -> "AdmissionAttempts":
        """Return the record after one more attempt in vain."""
        return AdmissionAttempts(self.gang, self.count + 1, now_seconds, verdict, contends)

    def wait_seconds(self, now_seconds: float, *, room_at_seconds: float) -> float:
        """Return how long the gang must not be tried: ever longer, and shorter once something made room since."""
        if not self.count:
            return 0.0
        pause = min(PAUSE_SECONDS_MAX, PAUSE_SECONDS * 2.0 ** min(self.count - 1, 10))
        if room_at_seconds > self.at_seconds and self.verdict is not Verdict.NEVER:
            pause = min(pause, ROOM_PAUSE_SECONDS_MAX)
        return max(0.0, self.at_seconds + pause - now_seconds)


@dataclass(frozen=True, slots=True)
class Ahead:
    """What gangs that wait could use, under strict order: nobody behind them takes it. `positions`: masks by node."""

    gangs: tuple[tuple[str, Mapping[str, int]], ...] = ()
    positions: Mapping[str, int] = field(default_factory=dict)

    def with_gang(self, name: str, usable: Mapping[str, int]) -> "Ahead":
        """Return the same with one gang more."""
        positions = dict(self.positions)
        for node, mask in usable.items():
            positions[node] = positions.get(node, 0) | mask
        return Ahead((*self.gangs, (name, usable)), positions)

    def in_the_way(self, usable: Mapping[str, int]) -> str:
        """Return the first gang that could use any of these positions, too; empty for none."""
        found = (name for name, own in self.gangs if any(mask & own.get(node, 0) for node, mask in usable.items()))
        return next(found, "")


NOBODY = Ahead()


def place_in_queue(view: GangView) -> tuple[int, float, GangKey]:
    """Return the key of the total order: the smallest is tried first. Only a gang that was not ready in time goes to
    the end of its priority; one that was preempted keeps its place."""
    metadata = view.gang.metadata
    priority = max((member.pod.spec.priority for member in view.members), default=0)
    waits_since = seconds_of(metadata.creation_timestamp or "") or 0.0
    evicted = conditions.find(view.status.conditions, names.CONDITION_EVICTED)
    if (
        view.policy.requeuing.timestamp is RequeueTimestamp.EVICTION
        and evicted is not None
        and evicted.status == "True"
        and evicted.reason == "PodsReadyTimeout"
    ):
        waits_since = conditions.since_seconds(view.status.conditions, names.CONDITION_EVICTED) or waits_since
    return (-priority, waits_since, (metadata.namespace, metadata.name))


def in_order(candidates: Iterable[GangView]) -> tuple[GangView, ...]:
    """Return the candidates, the first to be tried first."""
    return tuple(sorted(candidates, key=place_in_queue))


def blocker(admitted: Sequence[GangView]) -> GangView | None:
    """Return the first admitted gang that keeps all others waiting, because it must be ready before them."""
    waiting = [
        view
        for view in admitted
        if view.policy.enable
        and view.policy.block_admission
        and not conditions.is_true(view.status.conditions, names.CONDITION_PODS_READY)
    ]
    return min(waiting, key=lambda view: key_of(view.gang), default=None)
