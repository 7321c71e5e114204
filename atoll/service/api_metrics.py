"""Metrics of every part's traffic with the API server: calls, throttling, and the age of its caches.

The names are the same in every part.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from atoll.service.metrics import Metrics


class ObservedCall(Protocol):
    """One request as it was sent; labels from bounded sets."""

    @property
    def verb(self) -> str: ...
    @property
    def resource(self) -> str: ...
    @property
    def code(self) -> str: ...
    @property
    def seconds(self) -> float: ...


class Client(Protocol):
    """The client of the API server."""

    observer: Callable[[Any], None]
    throttled_seconds: float


class ObservedWatch(Protocol):
    """One watched collection."""

    @property
    def listings_count(self) -> int:
        """Return how often it was listed."""
        ...

    @property
    def undecodable_count(self) -> int:
        """Return how many objects could not be read."""
        ...

    def seconds_since_heard(self) -> float:
        """Return the age of the copy."""
        ...


def count_calls(metrics: Metrics, client: Client) -> None:
    """Count every request of `client` from now on."""
    calls = metrics.counter(
        "api_calls",
        "Requests to the API server, by the HTTP status or `none` for no answer",
        labels=("verb", "resource", "code"),
    )
    seconds = metrics.histogram("api_call_seconds", "Time until the API server answered", labels=("verb",))

    def observe(call: ObservedCall) -> None:
        calls.labels(call.verb, call.resource, call.code).inc()
        seconds.labels(call.verb).observe(call.seconds)

    client.observer = observe
    metrics.counter_of(
        "api_throttled_seconds", "Time that requests waited for our own rate limit", lambda: client.throttled_seconds
    )


def register_watch_metrics(metrics: Metrics, watches: Mapping[str, ObservedWatch]) -> None:
    """Register metrics per watched collection: age of the copy, number of lists, unreadable objects."""
    ages = metrics.gauge(
        "watch_age_seconds", "Time since the last news of a watched collection; +Inf before the first", labels=("kind",)
    )
    listings = metrics.gauge("watch_lists", "Times that the collection was listed since the start", labels=("kind",))
    odd = metrics.gauge(
        "watch_undecodable", "Objects since the start that could not be read, each change counted", labels=("kind",)
    )
    for kind, watch in watches.items():
        ages.labels(kind).set_function(watch.seconds_since_heard)
        listings.labels(kind).set_function(partial(_lists, watch))
        odd.labels(kind).set_function(partial(_undecodable, watch))


def _lists(watch: ObservedWatch) -> float:
    return float(watch.listings_count)


def _undecodable(watch: ObservedWatch) -> float:
    return float(watch.undecodable_count)
