"""At most one leader, on a coordination.k8s.io Lease.

`work(term)` runs only while we lead. All time uses the local monotonic clock: clocks of other machines are never
compared. A Lease counts as expired when its content has not changed for its own duration *as watched
from here*; our leadership counts from the moment *before* the last successful renewal was sent. Any failure, of
whatever kind, is a failed renewal.

    campaign ──acquired──► lead ──not renewed in time, or taken──► cancel work, wait, raise LeadershipLost
                            └──work ended, or we were cancelled──► cancel work, wait, release

The leader stops at `renew_deadline_seconds`, others start no earlier than `lease_duration_seconds`; between the two the
cancelled work must end. Work that does not end by then would run beside its successor, so the process is ended at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
import structlog

from atoll.api.times import format_microtime
from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.kube.clock import Clock, end, within
from atoll.kube.errors import AlreadyExists, Conflict, LeadershipLost, MalformedAnswer, NotFound, truncate
from atoll.kube.patches import merge_patch

log = structlog.get_logger(__name__)

EXIT_STATUS_OVERRUN = 75


class _LeaseMetadata(msgspec.Struct, rename="camel", frozen=True):
    uid: str = ""
    resource_version: str = ""


class _LeaseSpec(msgspec.Struct, rename="camel", frozen=True):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class _Lease(msgspec.Struct, frozen=True):
    metadata: _LeaseMetadata
    spec: _LeaseSpec = _LeaseSpec()


_decode_lease = msgspec.json.Decoder(_Lease).decode


@dataclass(frozen=True, slots=True)
class _Held:
    """A Lease that is ours, as the server last returned it, and when the request for that was sent."""

    lease: _Lease
    since_seconds: float


class LeaderElector:
    """Leads on Lease `namespace/name` as `identity`, which must differ between any two processes."""

    def __init__(
        self,
        client: ApiClient,
        namespace: str,
        name: str,
        identity: str,
        *,
        clock: Clock,
        lease_duration_seconds: float = 15.0,
        renew_deadline_seconds: float = 10.0,
        retry_seconds: float = 2.0,
        rng: random.Random | None = None,
        on_overrun: Callable[[], None] | None = None,
    ) -> None:
        if not retry_seconds < renew_deadline_seconds < lease_duration_seconds:
            raise ValueError(
                "need retry < renew deadline < lease duration, not "
                f"{retry_seconds:g}, {renew_deadline_seconds:g}, {lease_duration_seconds:g} s"
            )
        self._client = client
        self._namespace = namespace
        self._name = name
        self._path = paths.leases(namespace, name)
        self._identity = identity
        self._clock = clock
        self._duration = lease_duration_seconds
        self._deadline = renew_deadline_seconds
        self._retry = retry_seconds
        self._rng = rng or random.Random()  # noqa: S311 - jitter
        self._on_overrun = on_overrun or _end_process
        self._held: _Held | None = None
        self._seen: _LeaseSpec | None = None
        self._seen_at = 0.0

    @property
    def is_leader(self) -> bool:
        """True if we may write now. Turns False at the renewal deadline, before any other process may lead."""
        return self._remaining_seconds() > 0

    async def lead(self, work: Callable[[int], Awaitable[None]]) -> None:
        """Wait until we lead, run `work(term)`, renew the Lease meanwhile, and release it when the work has ended.

        The term is the Lease's transition count: it grows with every change of leader and fences decisions.
        Raises LeadershipLost after the work was cancelled and has ended; what the work raises is passed on.
        """
        term = await self._campaign()
        log.info("Became leader", lease=self._path, term=term)
        task = asyncio.ensure_future(work(term))
        try:
            await self._keep_while(task)
        finally:
            await self._stop(task)
        task.result()

    async def _campaign(self) -> int:
        while True:
            try:
                held = await within(self._clock, self._deadline / 2, self._try_acquire())
            except Exception as error:  # noqa: BLE001 - whatever failed, we do not lead
                log.info("Could not campaign", lease=self._path, err=truncate(str(error)))
                held = None
            if held is not None:
                self._held = held
                return held.lease.spec.lease_transitions or 0
            await self._clock.sleep(self._retry * (0.8 + 0.4 * self._rng.random()))

    async def _try_acquire(self) -> _Held | None:
        sent_at = self._clock.monotonic_seconds()
        try:
            lease = _decode(await self._client.get(self._path))
        except NotFound:
            with contextlib.suppress(AlreadyExists):
                return _Held(await self._create(), sent_at)
            return None
        if not self._may_take(lease.spec):
            return None
        transitions = (lease.spec.lease_transitions or 0) + 1
        sent_at = self._clock.monotonic_seconds()
        try:
            return _Held(await self._write(lease, self._spec(transitions, acquired=True)), sent_at)
        except Conflict:
            return None

    def _may_take(self, spec: _LeaseSpec) -> bool:
        """True if the Lease is free: it has no holder, we hold it from an attempt whose answer was lost, or it has not
        changed for its own duration while we watched."""
        now = self._clock.monotonic_seconds()
        if spec != self._seen:
            self._seen, self._seen_at = spec, now
        duration = max(self._duration, float(spec.lease_duration_seconds or 0))
        return spec.holder_identity in {None, "", self._identity} or now - self._seen_at > duration

    async def _keep_while(self, task: asyncio.Future[None]) -> None:
        """Renew until the task has ended; raise LeadershipLost when that does not succeed in time."""
        while not task.done():
            pause = asyncio.ensure_future(self._clock.sleep(min(self._retry, self._remaining_seconds())))
            try:
                await asyncio.wait({task, pause}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await end(pause)
            if not task.done():
                await self._renew()

    def _remaining_seconds(self) -> float:
        """Return how long we still lead without another renewal."""
        if self._held is None:
            return 0.0
        return max(0.0, self._held.since_seconds + self._deadline - self._clock.monotonic_seconds())

    async def _renew(self) -> None:
        held = self._held
        assert held is not None
        now, remaining = self._clock.monotonic_seconds(), self._remaining_seconds()
        if remaining <= 0:
            raise LeadershipLost(f"could not renew {self._path} for {self._deadline:g} s")
        try:
            renewed = await within(self._clock, min(remaining, self._deadline / 2), self._try_renew(held.lease))
        except LeadershipLost:
            raise
        except Exception as error:  # noqa: BLE001 - whatever failed, the Lease was not renewed
            log.warning("Could not renew", lease=self._path, err=truncate(str(error)) or type(error).__name__)
            return
        self._held = _Held(renewed, now)

    async def _try_renew(self, lease: _Lease) -> _Lease:
        """Write a new renewal time; if somebody touched the Lease meanwhile, only if it is still ours in this term."""
        spec = self._spec(lease.spec.lease_transitions or 0, acquired=False)
        try:
            return await self._write(lease, spec)
        except Conflict:
            current = _decode(await self._client.get(self._path))
        except NotFound as error:
            raise LeadershipLost(f"{self._path} was deleted") from error
        mine = (self._identity, lease.spec.lease_transitions, lease.metadata.uid)
        if (current.spec.holder_identity, current.spec.lease_transitions, current.metadata.uid) != mine:
            raise LeadershipLost(f"{self._path} is held by {truncate(str(current.spec.holder_identity))}")
        return await self._write(current, spec)

    async def _stop(self, task: asyncio.Future[None]) -> None:
        """Cancel the work and wait until it has ended, at most until others may lead; then give the Lease back."""
        held, self._held = self._held, None
        assert held is not None
        task.cancel()
        left = held.since_seconds + self._duration - self._clock.monotonic_seconds()
        try:
            await asyncio.shield(within(self._clock, max(left, 0.0), _wait_for(task)))
        except TimeoutError:
            log.critical("Work goes on after leadership was lost", lease=self._path)
            self._on_overrun()
        else:
            _ = task.cancelled() or task.exception()
            await self._release(held.lease)

    async def _release(self, lease: _Lease) -> None:
        """Let others lead at once. Failing is harmless: the Lease expires."""
        spec = {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": format_microtime(self._clock.now())}
        with contextlib.suppress(Exception):
            await within(self._clock, self._retry, self._write(lease, spec))

    async def _create(self) -> _Lease:
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"namespace": self._namespace, "name": self._name},
            "spec": self._spec(1, acquired=True),
        }
        return _decode(await self._client.create(paths.leases(self._namespace), body))

    async def _write(self, lease: _Lease, spec: dict[str, object]) -> _Lease:
        fence = lease.metadata
        body = merge_patch(uid=fence.uid, resource_version=fence.resource_version, spec=spec)
        return _decode(await self._client.patch(self._path, body))

    def _spec(self, transitions: int, *, acquired: bool) -> dict[str, object]:
        now = format_microtime(self._clock.now())
        spec: dict[str, object] = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(self._duration),
            "renewTime": now,
            "leaseTransitions": transitions,
        }
        return {**spec, "acquireTime": now} if acquired else spec


def _decode(answer: bytes) -> _Lease:
    try:
        return _decode_lease(answer)
    except msgspec.MsgspecError as error:
        raise MalformedAnswer(f"not a Lease: {truncate(str(error))}") from error


async def _wait_for(task: asyncio.Future[None]) -> None:
    await asyncio.wait({task})


def _end_process() -> None:
    os._exit(EXIT_STATUS_OVERRUN)
