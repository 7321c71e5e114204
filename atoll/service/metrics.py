"""One registry per process, and names that all begin with `atoll_<component>_`.

In: names and help texts. Out: prometheus-client metrics, and the page that Prometheus reads. An own registry keeps
tests apart and the page free of what libraries register.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

PREFIX = "atoll"
_NAME = re.compile(r"[a-z][a-z0-9_]*")
CALL_SECONDS_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

__all__ = ["CALL_SECONDS_BUCKETS", "CONTENT_TYPE_LATEST", "Metrics"]


class Metrics:
    """Makes metrics of one component; a second one of the same name is a ValueError."""

    def __init__(self, component: str) -> None:
        self._component = component
        self.registry = CollectorRegistry()
        ProcessCollector(namespace=f"{PREFIX}_{component}", registry=self.registry)

    def counter(self, name: str, help_text: str, *, labels: Sequence[str] = ()) -> Counter:
        """Count of events; the page shows the name with `_total`."""
        return Counter(self._full(name), help_text, labels, registry=self.registry)

    def gauge(self, name: str, help_text: str, *, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(self._full(name), help_text, labels, registry=self.registry)

    def gauge_of(self, name: str, help_text: str, read: Callable[[], float]) -> Gauge:
        """Gauge whose value is read when the page is."""
        gauge = self.gauge(name, help_text)
        gauge.set_function(read)
        return gauge

    def histogram(
        self,
        name: str,
        help_text: str,
        *,
        labels: Sequence[str] = (),
        buckets: Sequence[float] = CALL_SECONDS_BUCKETS,
    ) -> Histogram:
        return Histogram(self._full(name), help_text, labels, buckets=buckets, registry=self.registry)

    def page(self) -> bytes:
        """Return the metrics in the text format of Prometheus; slow with many series, so call it in a thread."""
        return generate_latest(self.registry)

    def _full(self, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError(f"metric name {name!r} must be lower-case words joined by underscores")
        return f"{PREFIX}_{self._component}_{name}"
