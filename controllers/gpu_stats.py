"""Publishes what the mirror's ledger amounts to: GPUs by state, the largest asks that fit, pods that wait.

In: a mirror and the process's Metrics. Out: gauges, brought up to date when the page is asked for. Every replica tells
the same, whether it leads or not, so that rules take the maximum over replicas. A thin shell: the numbers are those of
`atoll.cluster.gpu_stats`.
"""

import math

from atoll.api.times import parse_microtime
from atoll.cluster.gpu_stats import GpuStats, gpu_stats_of
from atoll.kube.clock import Clock
from atoll.kube.mirror import ClusterMirror
from atoll.service.metrics import Metrics, Series

FRESH_SECONDS = 5.0
"""Whoever asks more often gets the figures of a moment ago: they cost some microseconds per GPU."""


class GpuStatsPublisher:
    """The gauges, and when they were computed last."""

    def __init__(self, metrics: Metrics, mirror: ClusterMirror, clock: Clock) -> None:
        self._mirror = mirror
        self._clock = clock
        self._at_seconds = -math.inf
        gauge = metrics.gauge
        self._gpus = Series(gauge("gpus", "GPUs by what they are now", labels=("model", "mig", "state")))
        self._asks = Series(
            gauge("largest_ask_gpus", "GPUs of the largest claim that would fit now", labels=("model", "policy"))
        )
        self._waiting = Series(gauge("waiting_pods", "GPU pods without a node", labels=("state",)))
        self._oldest = gauge("oldest_waiting_pod_seconds", "Age of the oldest GPU pod without a node; 0 without one")
        self._leases = gauge("leases", "GPU Leases")
        self._in_doubt = gauge("leases_in_doubt", "GPU Leases whose holder is gone without proof of its end")
        self._unreadable = gauge("leases_unreadable", "GPU Leases that do not say what they should")
        self._silent = gauge("silent_nodes", "Nodes with GPUs whose agent was not heard of for three periods")
        metrics.before_page(self.refresh)

    def refresh(self) -> None:
        """Compute and tell the figures, unless they are fresh or the mirror is not complete yet."""
        now_seconds = self._clock.monotonic_seconds()
        if now_seconds - self._at_seconds < FRESH_SECONDS or not self._mirror.is_ready():
            return
        self._at_seconds = now_seconds
        self._tell(gpu_stats_of(self._mirror.ledger, now_seconds))

    def _tell(self, figures: GpuStats) -> None:
        self._gpus.tell({(model, mig, str(state)): count for (model, mig, state), count in figures.gpus.items()})
        self._asks.tell({(model, str(policy)): count for (model, policy), count in figures.largest_ask.items()})
        self._waiting.tell({(str(state),): count for state, count in figures.waiting.items()})
        self._oldest.set(self._age_seconds(figures.oldest_created))
        self._leases.set(figures.leases)
        self._in_doubt.set(figures.leases_in_doubt)
        self._unreadable.set(figures.leases_unreadable)
        self._silent.set(figures.silent_nodes)

    def _age_seconds(self, created: str) -> float:
        """Return the age of an object by two clocks; 0 where it does not tell."""
        try:
            return max(0.0, (self._clock.now() - parse_microtime(created)).total_seconds())
        except (ValueError, OverflowError):
            return 0.0
