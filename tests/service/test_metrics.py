"""The metrics registry: ended series disappear, and counters exist from the start."""

from dataclasses import dataclass, field
from typing import Any

from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from atoll.service.api_metrics import count_calls, register_watch_metrics
from atoll.service.http import add_health, application
from atoll.service.metrics import Metrics, Series


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Return every sample of the page by its name and the values of its labels."""
    families = text_string_to_metric_families(metrics.page().decode())
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_series_that_are_not_told_any_more_disappear() -> None:
    """A model that left the cluster leaves the page; those that stay are never missing."""
    metrics = Metrics("tester")
    series = Series(metrics.gauge("gpus", "GPUs", labels=("model",)))

    series.tell({("a",): 2.0, ("b",): 1.0})
    series.tell({("b",): 3.0})

    told = samples(metrics)
    assert told["atoll_tester_gpus", "b"] == 3.0
    assert ("atoll_tester_gpus", "a") not in told


def test_known_values_are_told_before_anything_happens() -> None:
    """An outcome that never occurred is 0, so that its first occurrence is an increase."""
    metrics = Metrics("tester")
    metrics.counter("binds", "Binds", labels=("outcome",), values=("bound", "failed"))

    assert samples(metrics)["atoll_tester_binds_total", "failed"] == 0.0


@dataclass
class FakeClient:
    """A client that was throttled for three seconds."""

    throttled_seconds: float = 3.0
    observer: Any = None


@dataclass
class FakeWatch:
    """A watch that heard something nine seconds ago."""

    listings_count: int = 2
    undecodable_count: int = 1

    def seconds_since_heard(self) -> float:
        return 9.0


@dataclass
class Call:
    """One call."""

    verb: str = "get"
    resource: str = "pods"
    code: str = "200"
    seconds: float = 0.02


def test_calls_throttling_and_watches_are_told() -> None:
    """Calls count by verb, resource and code; a watch tells its age."""
    metrics, client = Metrics("tester"), FakeClient()
    count_calls(metrics, client)
    register_watch_metrics(metrics, {"pod": FakeWatch()})
    client.observer(Call())
    client.observer(Call())

    told = samples(metrics)
    assert told["atoll_tester_api_calls_total", "200", "pods", "get"] == 2.0
    assert told["atoll_tester_api_call_seconds_count", "get"] == 2.0
    assert told["atoll_tester_api_throttled_seconds_total",] == 3.0
    assert told["atoll_tester_watch_age_seconds", "pod"] == 9.0
    assert told["atoll_tester_watch_lists", "pod"] == 2.0
    assert told["atoll_tester_watch_undecodable", "pod"] == 1.0


@dataclass
class GaugedPart:
    """What a part knows of itself."""

    reason: str | None = "not listed yet"
    refreshed: list[str] = field(default_factory=list)


async def test_page_tells_readiness_and_computes_what_must_be_computed() -> None:
    """The gauge says what /readyz says, and computed gauges are brought up to date before each page."""
    metrics, part = Metrics("tester"), GaugedPart()
    metrics.before_page(lambda: part.refreshed.append("page"))
    app = application()
    add_health(app, ready={"ledger": lambda: part.reason}, metrics=metrics)
    async with TestClient(TestServer(app)) as http:
        for status, value in ((503, "0.0"), (200, "1.0")):
            assert (await http.get("/readyz")).status == status
            assert f"atoll_tester_ready {value}" in await (await http.get("/metrics")).text()
            part.reason = None

    assert part.refreshed == ["page", "page"]
