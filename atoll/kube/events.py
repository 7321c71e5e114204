"""events.k8s.io/v1 Events about Atoll's actions and their reasons, for people who look at an object.

API calls are few: the first occurrence is created, repetitions are counted and written as a series now and then,
changing messages of one reason about one object share one more event, and events beyond the rate or the memory are
dropped and counted. What concerns nodes has room of its own and goes first; namespaces share the rest evenly. Recording
never waits and never raises: no decision depends on an event. Run `run` beside the work.
"""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

import structlog

from atoll.api.times import format_microtime
from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.kube.clock import Clock, within
from atoll.kube.errors import KubeError, NotFound, truncate
from atoll.kube.limits import TokenBucket

log = structlog.get_logger(__name__)

EventType = Literal["Normal", "Warning"]

NOTE_LENGTH_MAX = 1024
WORD_LENGTH_MAX = 128
KEYS_MAX = 4096
RESERVED_KEYS = 1024
"""Of these, for facts about objects without a namespace, such as nodes: no number of tenants' facts pushes them out."""
NAMESPACE_KEYS_MAX = 1024
"""Facts about the objects of one namespace: its tenant decides how many there are to tell."""
SIMILAR_MAX = 10
"""Limit of different messages of one reason about one object with their own events; further ones share one."""
SIMILAR_NOTE = "the messages of this reason keep changing; the first ones are events of their own"
SERIES_SECONDS = 60.0
FORGET_SECONDS = 360.0
GOODBYE_SECONDS = 1.0
"""Of a process that ends: how long its last events may take. Who lost leadership has a few seconds for everything."""


@dataclass(frozen=True, slots=True)
class ObjectReference:
    """The object of an event."""

    api_version: str
    kind: str
    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""

    def to_json(self) -> dict[str, str]:
        pairs = {
            "apiVersion": self.api_version,
            "kind": self.kind,
            "name": self.name,
            "namespace": self.namespace,
            "uid": self.uid,
            "resourceVersion": self.resource_version,
        }
        return {key: value for key, value in pairs.items() if value}


@dataclass(frozen=True, slots=True)
class _Fact:
    """A recorded fact; equal facts are one event."""

    regarding: ObjectReference
    type: EventType
    reason: str
    action: str
    note: str
    related: ObjectReference | None

    @property
    def kind(self) -> tuple[ObjectReference, str]:
        """Key shared by similar facts."""
        return self.regarding, self.reason


@dataclass(slots=True)
class _Series:
    """Occurrences of one fact, and how many the API server knows."""

    first_at: datetime
    last_at: datetime
    last_seconds: float
    count: int = 1
    name: str = ""
    written_count: int = 0
    written_seconds: float = field(default=0.0)


class EventRecorder:
    """Records events as `component` (such as `gpu.scheduling/extender`) of the process `identity`."""

    def __init__(
        self,
        client: ApiClient,
        component: str,
        identity: str,
        clock: Clock,
        *,
        events_per_second: float = 5.0,
        burst: int = 50,
    ) -> None:
        self._client = client
        self._component = component[:WORD_LENGTH_MAX]
        self._identity = identity[:WORD_LENGTH_MAX]
        self._clock = clock
        self._bucket = TokenBucket(rate=events_per_second, burst=burst, now=clock.monotonic_seconds)
        self._series: OrderedDict[_Fact, _Series] = OrderedDict()
        self._similar: Counter[tuple[ObjectReference, str]] = Counter()
        self._by_namespace: Counter[str] = Counter()
        self.dropped_count = 0

    def record(
        self,
        regarding: ObjectReference,
        *,
        reason: str,
        note: str,
        action: str,
        type: EventType = "Normal",  # noqa: A002 - the API's word
        related: ObjectReference | None = None,
    ) -> None:
        """Record a fact. `reason` and `action` are PascalCase words, `note` is for humans."""
        fact = _Fact(
            regarding=regarding,
            type=type,
            reason=reason[:WORD_LENGTH_MAX],
            action=action[:WORD_LENGTH_MAX],
            note=truncate(note, length_max=NOTE_LENGTH_MAX),
            related=related,
        )
        if fact not in self._series and self._similar[fact.kind] >= SIMILAR_MAX:
            fact = replace(fact, note=SIMILAR_NOTE, related=None)
        series = self._series.get(fact)
        now, now_seconds = self._clock.now(), self._clock.monotonic_seconds()
        if series is not None:
            series.count += 1
            series.last_at, series.last_seconds = now, now_seconds
        elif not self._has_room(regarding.namespace):
            self.dropped_count += 1
        else:
            self._series[fact] = _Series(first_at=now, last_at=now, last_seconds=now_seconds)
            self._similar[fact.kind] += 1
            self._by_namespace[regarding.namespace] += 1

    def _has_room(self, namespace: str) -> bool:
        if not namespace:
            return len(self._series) < KEYS_MAX
        of_namespaces = len(self._series) - self._by_namespace[""]
        return of_namespaces < KEYS_MAX - RESERVED_KEYS and self._by_namespace[namespace] < NAMESPACE_KEYS_MAX

    async def run(self, *, flush_seconds: float = 1.0) -> None:
        """Write what was recorded until cancelled; then write the rest once, briefly."""
        try:
            while True:
                await self._clock.sleep(flush_seconds)
                await self.flush()
        finally:
            with contextlib.suppress(Exception):
                await within(self._clock, GOODBYE_SECONDS, self.flush())

    async def flush(self) -> None:
        """Write new events and due repetitions, within the rate; forget facts that have not recurred for long."""
        now = self._clock.monotonic_seconds()
        for fact, series in list(self._series.items()):
            if now - series.last_seconds > FORGET_SECONDS and series.written_count == series.count:
                self._forget(fact)
        for fact, series in self._due(now):
            if not self._bucket.try_take():
                return
            await self._write(fact, series)

    def _due(self, now: float) -> list[tuple[_Fact, _Series]]:
        """Return what is to be written now: about nodes first, then one of each namespace after the other."""
        turns: Counter[str] = Counter()
        ranked = []
        for fact, series in self._series.items():
            if self._is_due(series, now):
                namespace = fact.regarding.namespace
                ranked.append((bool(namespace), turns[namespace], fact, series))
                turns[namespace] += 1
        ranked.sort(key=lambda row: row[0] * (1 + row[1]))
        return [(fact, series) for _, _, fact, series in ranked]

    def _forget(self, fact: _Fact) -> None:
        if self._series.pop(fact, None) is not None:
            self._by_namespace[fact.regarding.namespace] -= 1
            if self._by_namespace[fact.regarding.namespace] <= 0:
                del self._by_namespace[fact.regarding.namespace]
            self._similar[fact.kind] -= 1
            if self._similar[fact.kind] <= 0:
                del self._similar[fact.kind]

    def _is_due(self, series: _Series, now: float) -> bool:
        if series.written_count == 0:
            return True
        return series.count > series.written_count and now - series.written_seconds >= SERIES_SECONDS

    async def _write(self, fact: _Fact, series: _Series) -> None:
        series.written_seconds = self._clock.monotonic_seconds()
        count = series.count
        try:
            if series.name:
                await self._client.patch(
                    paths.events(_namespace(fact), series.name),
                    {"series": {"count": count, "lastObservedTime": format_microtime(series.last_at)}},
                    timeout_seconds=5.0,
                )
            else:
                name = _event_name(fact, series.first_at)
                body = self._body(fact, series, name)
                await self._client.create(paths.events(_namespace(fact)), body, timeout_seconds=5.0)
                series.name = name
            series.written_count = count
        except NotFound:
            self._forget(fact)
        except KubeError as error:
            self.dropped_count += 1
            self._forget(fact)
            log.debug("Dropped an event", reason=fact.reason, err=str(error))

    def _body(self, fact: _Fact, series: _Series, name: str) -> dict[str, object]:
        body: dict[str, object] = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": _namespace(fact)},
            "eventTime": format_microtime(series.first_at),
            "reportingController": self._component,
            "reportingInstance": self._identity,
            "regarding": fact.regarding.to_json(),
            "type": fact.type,
            "reason": fact.reason,
            "action": fact.action,
            "note": fact.note,
        }
        if fact.related is not None:
            body["related"] = fact.related.to_json()
        if series.count > 1:
            body["series"] = {"count": series.count, "lastObservedTime": format_microtime(series.last_at)}
        return body


def _namespace(fact: _Fact) -> str:
    """Events about cluster-scoped objects live in `default`, as the API demands."""
    return fact.regarding.namespace or "default"


def _event_name(fact: _Fact, moment: datetime) -> str:
    """Object's name, cut so that the whole is a valid name, and a suffix by fact and time."""
    suffix = f"{int(moment.timestamp() * 1_000_000):x}{hash(fact) & 0xFFFFFFFF:08x}"
    return f"{fact.regarding.name[: 252 - len(suffix)].rstrip('.-')}.{suffix}"
