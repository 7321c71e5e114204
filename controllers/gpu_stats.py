"""Publishes GPUs by state, the largest claims that fit, and waiting pods as gauges, computed when metrics are scraped.

Every replica publishes the same numbers, whether it leads or not, so that rules take the maximum over replicas.
"""

import math
from collections import Counter

from atoll.api.times import parse_microtime
from atoll.cluster.gpu_stats import GpuStats, gpu_stats_of
from atoll.cluster.machine_life import MachineFacts, MachinePhase, phase_of
from atoll.kube.clock import Clock
from atoll.kube.mirror import ClusterMirror
from atoll.service.metrics import Metrics, Series

FRESH_SECONDS = 5.0
"""More frequent scrapes get the last numbers: computing them costs some microseconds per GPU."""


class GpuStatsPublisher:
    """The gauges, and when they were computed last."""

    def __init__(self, metrics: Metrics, mirror: ClusterMirror, clock: Clock) -> None:
        self._mirror = mirror
        self._clock = clock
        self._at_seconds = -math.inf
        gauge = metrics.gauge
        self._gpus = Series(gauge("gpus", "GPUs by state", labels=("model", "mig", "state")))
        self._asks = Series(
            gauge("largest_ask_gpus", "GPUs of the largest claim that would fit now", labels=("model", "policy"))
        )
        self._waiting = Series(gauge("waiting_pods", "GPU pods without a node", labels=("state",)))
        self._oldest = gauge("oldest_waiting_pod_seconds", "Age of the oldest GPU pod without a node; 0 without one")
        self._leases = gauge("leases", "GPU Leases")
        self._in_doubt = gauge("leases_in_doubt", "GPU Leases whose holder is gone without proof that it has ended")
        self._unreadable = gauge("leases_unreadable", "GPU Leases whose annotations cannot be read")
        self._silent = gauge("silent_nodes", "Nodes with GPUs whose agent has sent no heartbeat for three periods")
        self._unknown = gauge("gpu_uses_unknown", "GPUs whose users are unknown")
        self._machines = Series(
            gauge("machines", "Machines that have or had GPUs, by phase of their life", labels=("phase",))
        )
        metrics.before_page(self.refresh)

    def refresh(self) -> None:
        """Compute and set the gauges, unless they are fresh or the mirror is incomplete."""
        now_seconds = self._clock.monotonic_seconds()
        if now_seconds - self._at_seconds < FRESH_SECONDS or not self._mirror.is_ready():
            return
        self._at_seconds = now_seconds
        self._set_gauges(gpu_stats_of(self._mirror.ledger, now_seconds, gone=self._gone()))
        phases = self._count_phases(now_seconds)
        self._machines.tell({(str(phase),): phases[phase] for phase in MachinePhase})

    def _set_gauges(self, stats: GpuStats) -> None:
        self._gpus.tell({(model, mig, str(state)): count for (model, mig, state), count in stats.gpus.items()})
        self._asks.tell({(model, str(policy)): count for (model, policy), count in stats.largest_ask.items()})
        self._waiting.tell({(str(state),): count for state, count in stats.waiting.items()})
        self._oldest.set(self._age_seconds(stats.oldest_created))
        self._leases.set(stats.leases)
        self._in_doubt.set(stats.leases_in_doubt)
        self._unreadable.set(stats.leases_unreadable)
        self._silent.set(stats.silent_nodes)
        self._unknown.set(stats.uses_unknown)

    def _gone(self) -> set[str]:
        """Return the nodes without Node and heartbeat, of which only a report is kept."""
        present = {name for _, name in self._mirror.nodes.store} | {name for _, name in self._mirror.heartbeats.store}
        return set(self._mirror.reports) - present

    def _count_phases(self, now_seconds: float) -> Counter[MachinePhase]:
        """Count the machines that have a report, a heartbeat or Leases, by phase."""
        mirror = self._mirror
        found = {name for _, name in mirror.heartbeats.store} | set(mirror.reports)
        found |= {record.node for record in mirror.ledger.leases.values()}
        return Counter(
            phase_of(
                MachineFacts(
                    mirror.nodes.store.get(("", name)),
                    mirror.reports.get(name),
                    is_heard=not mirror.ledger.is_stale(name, now_seconds),
                    refusal=mirror.ledger.uncounted.get(name, ""),
                )
            )
            for name in found
        )

    def _age_seconds(self, created: str) -> float:
        """Return the age of an object by the clocks of two machines; 0 for an unreadable time."""
        try:
            return max(0.0, (self._clock.now() - parse_microtime(created)).total_seconds())
        except (ValueError, OverflowError):
            return 0.0
