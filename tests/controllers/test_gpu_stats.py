"""The controllers' gauges: no values until the mirror is complete, then the ledger's numbers."""

from dataclasses import dataclass, field
from typing import cast

from atoll.cluster.ledger import Ledger
from atoll.kube.mirror import ClusterMirror
from atoll.service.metrics import Metrics
from controllers.gpu_stats import FRESH_SECONDS, GpuStatsPublisher
from tests.builders import make_allocation, make_pod, make_report
from tests.fakes.clock import ManualClock
from tests.service.test_metrics import samples


@dataclass
class LateMirror:
    """A ledger that becomes complete when the test says so."""

    ledger: Ledger = field(default_factory=Ledger)
    complete: bool = False

    def is_ready(self) -> bool:
        return self.complete


async def test_gauges_follow_the_ledger() -> None:
    """Absent while lists are incomplete; then GPUs by state; a state that is over disappears."""
    clock, mirror, metrics = ManualClock(), LateMirror(), Metrics("controllers")
    GpuStatsPublisher(metrics, cast("ClusterMirror", mirror), clock)
    mirror.ledger.put_report(make_report("n1", "t4-4"))
    mirror.ledger.put_heartbeat("n1", clock.monotonic_seconds(), 180.0)
    mirror.ledger.put_pod(make_pod("a", uid="a", node="n1", allocation=make_allocation("n1", 0)))
    metrics.refresh()
    assert gpus(metrics) == {}

    mirror.complete = True
    metrics.refresh()
    assert gpus(metrics) == {"bound": 1.0, "free": 3.0}
    mirror.ledger.drop_pod("a")
    metrics.refresh()
    assert gpus(metrics) == {"bound": 1.0, "free": 3.0}, "asked again at once: the figures of a moment ago"
    await clock.advance(FRESH_SECONDS)
    metrics.refresh()
    assert gpus(metrics) == {"free": 4.0}


def gpus(metrics: Metrics) -> dict[str, float]:
    """Return the told GPUs by state."""
    return {key[-1]: value for key, value in samples(metrics).items() if key[0] == "atoll_controllers_gpus"}
