"""Metrics of the controllers."""

from dataclasses import dataclass

from prometheus_client import Counter, Gauge, Histogram

from atoll.cluster.release import Proof
from atoll.service.metrics import Metrics


@dataclass(frozen=True, slots=True)
class ControllerMetrics:
    """Counters, gauges and histograms of one process. The gauges belong to a leadership term."""

    leases_released: Counter
    departures_in_doubt: Gauge
    evidence_requests: Counter
    orphans: Counter
    leases_recreated: Counter
    leases_rewritten: Counter
    double_uses: Counter
    pods_woken: Counter
    pods_evicted: Counter
    preemptions: Counter
    preemption_victims: Counter
    foreign_gpus: Gauge
    stranded_pods: Gauge
    claim_writes: Counter
    reserved_gpus: Counter
    gang_admissions: Counter
    gang_evictions: Counter
    reconcile_failures: Counter
    reconcile_seconds: Histogram
    queue_seconds: Histogram
    queue_keys: Gauge

    def end_term(self) -> None:
        """Reset every gauge: rules take the maximum over replicas, also over those that do not lead any more."""
        for gauge in (self.departures_in_doubt, self.foreign_gpus, self.stranded_pods):
            gauge.set(0)
        self.queue_keys.clear()


def controller_metrics(metrics: Metrics) -> ControllerMetrics:
    """Register the metrics; once per process."""
    return ControllerMetrics(
        leases_released=metrics.counter(
            "leases_released", "GPU Leases deleted, by the proof", labels=("proof",), values=Proof
        ),
        departures_in_doubt=metrics.gauge(
            "departures_in_doubt", "Pods that are gone without proof that they have ended"
        ),
        evidence_requests=metrics.counter("evidence_requests", "Readings requested from agents"),
        orphans=metrics.counter(
            "orphan_leases",
            "Deleted Leases that no bind stands behind",
            labels=("outcome",),
            values=("stray", "taken-back"),
        ),
        leases_recreated=metrics.counter("leases_recreated", "Leases of bound pods that were written again"),
        leases_rewritten=metrics.counter("leases_rewritten", "Unreadable Leases that were written again"),
        double_uses=metrics.counter("double_uses", "GPUs that two holders name; nothing was released"),
        pods_woken=metrics.counter("pods_woken", "Waiting pods woken because they fit"),
        pods_evicted=metrics.counter("pods_evicted", "Pods evicted because their GPUs were renumbered or are gone"),
        preemptions=metrics.counter(
            "preemptions",
            "Waiting pods for which GPUs were freed by evictions",
            labels=("outcome",),
            values=("begun", "placed", "failed"),
        ),
        preemption_victims=metrics.counter("preemption_victims", "Pods evicted for one of higher priority"),
        foreign_gpus=metrics.gauge("foreign_gpus", "GPUs used by somebody who does not hold them"),
        stranded_pods=metrics.gauge("stranded_pods", "Pods whose GPUs are gone from their machine"),
        claim_writes=metrics.counter("claim_status_writes", "Writes of a GpuClaim's status"),
        reserved_gpus=metrics.counter(
            "reserved_gpus",
            "GPUs that GpuReservations took and freed",
            labels=("outcome",),
            values=("taken", "freed"),
        ),
        gang_admissions=metrics.counter(
            "gang_admissions", "Admissions of gangs, by outcome", labels=("outcome",), values=("admitted", "undone")
        ),
        gang_evictions=metrics.counter("gang_evictions", "Gangs evicted, by the reason", labels=("reason",)),
        reconcile_failures=metrics.counter(
            "reconcile_failures", "Failed reconciliations, which are repeated", labels=("loop",)
        ),
        reconcile_seconds=metrics.histogram("reconcile_seconds", "Time to reconcile one key", labels=("loop",)),
        queue_seconds=metrics.histogram(
            "queue_wait_seconds", "Time that a due key waited for a worker", labels=("loop",)
        ),
        queue_keys=metrics.gauge("queue_keys", "Keys waiting for a worker", labels=("loop",)),
    )
