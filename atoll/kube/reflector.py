"""A live copy of one collection of the API server.

It keeps `store` and `by_uid`, and calls `on_event` once per change, in order. The reflector lists (as a stream if the
server can, else page by page), watches with bookmarks, and survives watches that close, break, fall silent or are too
old: it continues where it stopped, or lists again and reports missed changes. Consumers decide whether the copy is
fresh enough.

Versions go back when etcd is restored from a backup. A watch from a future version stays silent, so an interrupted
watch continues only after asking for the server's current version. After a gap the server may have been restored and
have moved past every version seen: everything is listed again. A list that is older than what was
seen, or that has an object in an older state than the one seen, means a restored server: `on_rewind` is called when
that list is complete.

`on_event` runs between two reads and must not block. What it raises ends `run`: a consumer that lost a change stays
wrong, while a restarted process does not. With a field or label selector a DELETED only means that the object no longer
matches.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Generic

import structlog

from atoll.api.depth import at_any_depth
from atoll.kube.cache import Cache, Change, Key, T, is_older
from atoll.kube.client import ApiClient
from atoll.kube.clock import Clock, end, within
from atoll.kube.errors import ApiError, Gone, KubeError, MalformedAnswer, Unanswered, api_error, truncate
from atoll.kube.limits import Backoff, in_turns
from atoll.kube.watch_events import (
    INITIAL_EVENTS_END,
    EventMeta,
    LineSplitter,
    WatchEvent,
    decode_metadata,
    parse_event,
)

log = structlog.get_logger(__name__)

GOOD_STREAM_SECONDS = 10.0
SILENCE_SECONDS = 75.0
GAP_SECONDS_MAX = 1.0
"""Without a watch for longer than this, a server may have been restored from a backup."""
EARLY_SECONDS = 5.0
"""A watch that ends at least this long before its timeout was interrupted."""
WATCH_SECONDS_MIN = 300
WATCH_SECONDS_MAX = 600


def _ignore() -> None:
    """Do nothing: no listener is set."""


class Reflector(Generic[T]):
    """Keeps `store` equal to the collection at `path`; start `run` as a task and wait for `synced`."""

    def __init__(
        self,
        client: ApiClient,
        path: str,
        decode: Callable[[bytes], T],
        *,
        on_event: Callable[[Change[T]], None],
        field_selector: str = "",
        label_selector: str = "",
        clock: Clock,
        silence_seconds: float = SILENCE_SECONDS,
        rng: random.Random | None = None,
        on_rewind: Callable[[], None] = _ignore,
    ) -> None:
        self._client = client
        self._path = path
        self._decode = at_any_depth(decode)
        self._on_event = on_event
        selectors = {"fieldSelector": field_selector, "labelSelector": label_selector}
        self._selectors = {name: value for name, value in selectors.items() if value}
        self._clock = clock
        self._silence_seconds = silence_seconds
        self._rng = rng or random.Random()  # noqa: S311 - jitter
        self._cache: Cache[T] = Cache()
        self._heard_at = self._ended_at = -math.inf
        self._must_list = True
        self._is_outdated = False
        """True if the current list began before the last call of `relist`."""
        self._page_next = False
        self._seen = ""
        """The newest version that was ever seen."""
        self._on_rewind = on_rewind
        self._watch_until = -math.inf
        """When the watch times out; one that ended earlier was interrupted."""
        self._waiters: list[tuple[str, asyncio.Future[None]]] = []
        self._stream: asyncio.Future[None] | None = None
        self.synced = asyncio.Event()
        self.resource_version = ""
        self.last_error = ""
        self.listings_count = 0
        self.undecodable_count = 0

    @property
    def store(self) -> Mapping[Key, T]:
        """Objects by (namespace, name), a live view."""
        return self._cache.objects

    @property
    def by_uid(self) -> Mapping[str, T]:
        """Objects by UID, a live view."""
        return self._cache.by_uid

    @property
    def untrusted(self) -> Mapping[Key, str]:
        """Objects whose latest state could not be decoded, with the reason."""
        return self._cache.untrusted

    def seconds_since_heard(self) -> float:
        """Age of the copy: seconds since the last event or bookmark, infinite before the first."""
        return self._clock.monotonic_seconds() - self._heard_at

    async def wait_for_resource_version(self, resource_version: str, timeout_seconds: float) -> bool:
        """Wait until everything up to `resource_version` has been seen; False if that takes too long.

        Without writes to this collection only bookmarks move the position, about once a minute.
        """
        if not is_older(self.resource_version or "0", resource_version):
            return True
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((resource_version, reached))
        try:
            await within(self._clock, timeout_seconds, _wait(reached))
        except TimeoutError:
            return False
        finally:
            self._waiters = [waiter for waiter in self._waiters if waiter[1] is not reached]
        return True

    def relist(self) -> None:
        """List again: only a list that begins after this call sets `synced` again."""
        self.synced.clear()
        self._must_list = self._is_outdated = True
        if self._stream is not None:
            self._stream.cancel()

    def begin_anew(self) -> None:
        """List again as `relist` does, without a known version: the server's versions have gone back."""
        self._seen = self.resource_version = ""
        self._cache.forget_deletions()
        self.relist()

    async def run(self) -> None:
        """Follow the collection until cancelled, whatever the server does; raise only errors of `on_event`."""
        backoff = Backoff(self._rng)
        while True:
            started = self._clock.monotonic_seconds()
            self._stream = asyncio.ensure_future(self._follow())
            try:
                await asyncio.wait({self._stream})
                if self._stream.cancelled():
                    continue
                self._stream.result()
            except Gone as error:
                self._must_list = True
                self._note(error)
            except (ApiError, Unanswered, MalformedAnswer) as error:
                self._note(error)
            finally:
                await end(self._stream)
            if self._heard_at >= started:
                self._ended_at = self._clock.monotonic_seconds()
            if self._clock.monotonic_seconds() - started > GOOD_STREAM_SECONDS:
                backoff.reset()
            await self._clock.sleep(backoff.next_seconds())

    async def _follow(self) -> None:
        """List if needed, then watch until the stream ends."""
        now = self._clock.monotonic_seconds()
        if now - self._ended_at > GAP_SECONDS_MAX or self.seconds_since_heard() > self._silence_seconds:
            self._must_list = True
        if not self._must_list and now < self._watch_until:
            await self._check_position()
        if not self._must_list:
            await self._watch({"resourceVersion": self.resource_version})
        elif self._page_next:
            await self._list_paged()
            await self._watch({"resourceVersion": self.resource_version})
        else:
            await self._list_streaming()

    async def _list_streaming(self) -> None:
        """List and watch in one stream; when it is refused or ends too early, the next attempt goes by pages."""
        self._page_next = True
        self._begin_listing()
        await self._watch({"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"})

    async def _list_paged(self) -> None:
        self._begin_listing()
        version = ""
        async for page in self._client.pages(self._path, params=self._selectors):
            version = page.resource_version
            async for raw in in_turns(page.items):
                self._observe("ADDED", raw)
        self._finish_listing(version)

    async def _check_position(self) -> None:
        """Ask for the server's current version, and list again if it is behind ours."""
        version = await self._client.current_version(self._path, self._selectors)
        if is_older(version, self.resource_version):
            log.warning(
                "The server is behind a version that it has sent", path=self._path, seen=self._seen, version=version
            )
            self._must_list = True

    async def _watch(self, params: Mapping[str, str]) -> None:
        seconds = self._rng.randint(WATCH_SECONDS_MIN, WATCH_SECONDS_MAX)
        self._watch_until = self._clock.monotonic_seconds() + seconds - EARLY_SECONDS
        query: dict[str, str | int] = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": seconds,
            **self._selectors,
            **params,
        }
        lines = LineSplitter()
        stream = self._client.stream(self._path, query, silence_seconds=self._silence_seconds)
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                for line in lines.feed(chunk):
                    if line.strip():
                        self._handle(parse_event(line))

    def _handle(self, event: WatchEvent) -> None:
        raw = bytes(event.object)
        if event.type == "ERROR":
            raise api_error(raw, path=self._path)
        self._heard_at = self._clock.monotonic_seconds()
        self.last_error = ""
        if event.type == "BOOKMARK":
            self._handle_bookmark(raw)
        elif event.type in {"ADDED", "MODIFIED", "DELETED"}:
            self._advance(self._observe(event.type, raw))
        else:
            raise MalformedAnswer(f"unknown watch event {truncate(event.type)!r}: {self._path}")

    def _handle_bookmark(self, raw: bytes) -> None:
        metadata = _metadata(raw)
        if metadata is None:
            return
        if self._must_list and (metadata.annotations or {}).get(INITIAL_EVENTS_END) == "true":
            self._finish_listing(metadata.resource_version)
        else:
            self._advance(metadata.resource_version)

    def _begin_listing(self) -> None:
        self._is_outdated = False
        self._cache.begin_listing()

    def _finish_listing(self, version: str) -> None:
        if self._is_outdated:  # what it showed made somebody call `begin_anew`, whose cancellation is yet to come
            return
        self._tell(self._cache.end_listing())
        self._must_list = False
        self._page_next = False
        self._heard_at = self._clock.monotonic_seconds()
        self.listings_count += 1
        self.resource_version = ""
        has_gone_back = bool(self._seen) and (is_older(version, self._seen) or self._cache.shows_the_past)
        if has_gone_back:
            log.error("Versions have gone back: etcd was restored", path=self._path, seen=self._seen, version=version)
            self._seen = ""
        if not self._seen:
            self._cache.forget_deletions()
        self._advance(version)
        self.synced.set()
        if has_gone_back:
            self._on_rewind()

    def _observe(self, kind: str, raw: bytes) -> str:
        """Apply one object to the cache, tell the consumer, and return the object's resourceVersion."""
        try:
            decoded = self._decode(raw)
        except Exception as error:  # noqa: BLE001 - any codec may be passed in, and one odd object must not stop the rest
            return self._observe_unreadable(kind, raw, reason=truncate(str(error)))
        metadata = decoded.metadata
        if kind == "DELETED":
            self._tell(self._cache.remove(metadata, decoded))
        else:
            self._tell(self._cache.put(decoded))
        return metadata.resource_version

    def _observe_unreadable(self, kind: str, raw: bytes, *, reason: str) -> str:
        self.undecodable_count += 1
        metadata = _metadata(raw)
        if metadata is None:
            log.warning("Skipped an object without metadata", path=self._path, err=reason)
            return ""
        log.warning(
            "Marked an object that cannot be decoded",
            path=self._path,
            object=f"{metadata.namespace}/{metadata.name}",
            err=reason,
        )
        if kind == "DELETED":
            self._tell(self._cache.remove(metadata, None))
        else:
            self._tell(self._cache.put_unreadable(metadata, reason))
        return metadata.resource_version

    def _tell(self, changes: Iterable[Change[T]]) -> None:
        for change in changes:
            self._on_event(change)

    def _advance(self, version: str) -> None:
        """Move the position forward, never back; while listing, single objects say nothing about it."""
        if self._must_list or not version or is_older(version, self.resource_version):
            return
        self.resource_version = version
        self._seen = version if not is_older(version, self._seen) else self._seen
        for wanted, reached in self._waiters:
            if not is_older(version, wanted) and not reached.done():
                reached.set_result(None)

    def _note(self, error: KubeError) -> None:
        self.last_error = str(error)
        log.info("Restarting a watch", path=self._path, err=str(error), relist=self._must_list)


def _metadata(raw: bytes) -> EventMeta | None:
    try:
        return decode_metadata(raw).metadata
    except Exception:  # noqa: BLE001 - whatever it is, it is not an object
        return None


async def _wait(future: asyncio.Future[None]) -> None:
    await future
