"""One registry per process, and names that all begin with `atoll_<component>_`.

A separate registry isolates tests and keeps libraries' metrics off the page. `refresh` computes gauges from a part's
memory, on the event loop that owns it; the page is then written in a thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector
from prometheus_client.core import CounterMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

PREFIX = "atoll"
_NAME = re.compile(r"[a-z][a-z0-9_]*")
CALL_SECONDS_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

__all__ = ["CALL_SECONDS_BUCKETS", "CONTENT_TYPE_LATEST", "Metrics", "Series"]


class Metrics:
    """Makes metrics of one component; a second one of the same name is a ValueError."""

    def __init__(self, component: str) -> None:
        self._component = component
        self._tells_readiness = False
        self._refreshers: list[Callable[[], None]] = []
        self.registry = CollectorRegistry()
        ProcessCollector(namespace=f"{PREFIX}_{component}", registry=self.registry)

    def counter(self, name: str, help_text: str, *, labels: Sequence[str] = (), values: Iterable[str] = ()) -> Counter:
        """Count of events; the page shows the name with `_total`.

        `values`: known values of the only label; they are 0 from the start, so that the first event of a kind shows as
        an increase.
        """
        counter = Counter(self._full(name), help_text, labels, registry=self.registry)
        for value in values:
            counter.labels(value)
        return counter

    def gauge(self, name: str, help_text: str, *, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(self._full(name), help_text, labels, registry=self.registry)

    def gauge_of(self, name: str, help_text: str, read: Callable[[], float]) -> Gauge:
        """Gauge whose value is read at each scrape."""
        gauge = self.gauge(name, help_text)
        gauge.set_function(read)
        return gauge

    def counter_of(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """Counter kept elsewhere, read at each scrape; the page shows the name with `_total`."""
        self.registry.register(_ReadCounter(self._full(name), help_text, read))

    def register_readiness(self, is_ready: Callable[[], bool]) -> None:
        """Show the part's readiness."""
        if not self._tells_readiness:
            self.gauge_of("ready", "1 while /readyz says yes", lambda: float(is_ready()))
            self._tells_readiness = True

    def before_page(self, refresh: Callable[[], None]) -> None:
        """Call `refresh` on the event loop at each scrape; it must be quick."""
        self._refreshers.append(refresh)

    def refresh(self) -> None:
        """Bring computed gauges up to date."""
        for refresh in self._refreshers:
            refresh()

    def histogram(
        self,
        name: str,
        help_text: str,
        *,
        labels: Sequence[str] = (),
        values: Iterable[str] = (),
        buckets: Sequence[float] = CALL_SECONDS_BUCKETS,
    ) -> Histogram:
        """Distribution of a quantity; `values` as of a counter."""
        histogram = Histogram(self._full(name), help_text, labels, buckets=buckets, registry=self.registry)
        for value in values:
            histogram.labels(value)
        return histogram

    def page(self) -> bytes:
        """Return the metrics in the text format of Prometheus; slow with many series, so call it in a thread."""
        return generate_latest(self.registry)

    def _full(self, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError(f"metric name {name!r} must be lower-case words joined by underscores")
        return f"{PREFIX}_{self._component}_{name}"


class Series:
    """A gauge whose series are replaced as a whole: series that are missing in an update disappear, the others stay."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._told: set[tuple[str, ...]] = set()

    def tell(self, values: Mapping[tuple[str, ...], float]) -> None:
        """Show these values, by the values of the labels."""
        for labels, value in values.items():
            self._gauge.labels(*labels).set(value)
        for labels in self._told - values.keys():
            self._gauge.remove(*labels)
        self._told = set(values)


class _ReadCounter(Collector):
    """A counter whose value is read from elsewhere."""

    def __init__(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        self._name = name
        self._help_text = help_text
        self._read = read

    def describe(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._help_text)

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._help_text, value=self._read())
