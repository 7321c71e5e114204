"""Times of events of the benchmark's pods, from two watches.

Times are on this process's monotonic clock, by the pod's name (each name is used once in a run). The watches run in
their own thread, so that creating pods does not delay them.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from atoll.api import names
from atoll.cluster import pods
from atoll.cluster.objects import Lease, Pod, decode_lease, decode_pod
from atoll.cluster.wakeups import is_rejected
from atoll.kube import paths
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.client import ApiClient
from atoll.kube.reflector import Reflector
from atoll.service.clock import SystemClock

CHECK_SECONDS = 0.5


class TooSlow(Exception):
    """Something did not happen in time; `args[0]` says what."""


class Journal:
    """A context manager that watches one namespace's pods and all GPU Leases."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        self._kubeconfig = kubeconfig
        self._namespace = namespace
        self._changed = threading.Condition()
        self._stop: Callable[[], object] = lambda: None
        self._synced = False
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.present: set[str] = set()
        self.rejected: set[str] = set()
        self.bound_at: dict[str, float] = {}
        self.ended_at: dict[str, float] = {}
        """Time at which the pod could no longer use its GPUs: terminal, or deleted without a bind."""
        self.freed_at: dict[str, float] = {}
        """Time at which the pod's last Lease was deleted."""
        self.leases: dict[str, str] = {}
        """The Leases of GPUs, with the names of the pods that hold them."""
        self.nodes: dict[str, str] = {}
        """The node of each pod that was bound."""

    def __enter__(self) -> Self:
        self._thread.start()
        self.wait(lambda: self._synced, "the journal's first lists", 60.0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._thread.join(10.0)

    def wait(self, question: Callable[[], bool], what: str, timeout_seconds: float) -> None:
        """Wait until `question` is true, checked after every change. Raises TooSlow, or the watches' error."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while not question():
                if self._fault is not None:
                    raise self._fault
                if time.monotonic() > deadline:
                    raise TooSlow(f"{what} did not come within {timeout_seconds:.0f} s")
                self._changed.wait(CHECK_SECONDS)

    def _run(self) -> None:
        try:
            asyncio.run(self._follow())
        except asyncio.CancelledError:
            pass
        except BaseException as fault:  # noqa: BLE001 - told to whoever waits
            self._fault = fault

    async def _follow(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._stop = lambda: loop.call_soon_threadsafe(task.cancel)
        clock = SystemClock()
        async with await ApiClient.connect(self._kubeconfig, user_agent="atoll-bench") as client:
            leases: Reflector[Lease] = Reflector(
                client, paths.leases(names.SYSTEM_NAMESPACE), decode_lease, on_event=self._take_lease, clock=clock
            )
            ours: Reflector[Pod] = Reflector(
                client, paths.pods(self._namespace), decode_pod, on_event=self._take_pod, clock=clock
            )
            async with asyncio.TaskGroup() as group:
                group.create_task(leases.run())
                group.create_task(ours.run())
                await leases.synced.wait()
                await ours.synced.wait()
                self._synced = True

    def _take_pod(self, change: Change[Any]) -> None:
        pod: Pod = change.object
        name, now = pod.metadata.name, time.monotonic()
        with self._changed:
            if pod.spec.node_name:
                self.bound_at.setdefault(name, now)
                self.nodes[name] = pod.spec.node_name
            if pods.is_terminal(pod) or (change.kind is ChangeKind.DELETED and not pod.spec.node_name):
                self.ended_at.setdefault(name, now)
            if is_rejected(pod):
                self.rejected.add(name)
            if change.kind is ChangeKind.DELETED:
                self.present.discard(name)
            else:
                self.present.add(name)
            self._changed.notify_all()

    def _take_lease(self, change: Change[Any]) -> None:
        lease: Lease = change.object
        if not lease.metadata.name.startswith("gpu-"):
            return
        holder = lease.spec.holder_identity.split("/")[1]
        with self._changed:
            if change.kind is ChangeKind.DELETED:
                self.leases.pop(lease.metadata.name, None)
                self.freed_at[holder] = time.monotonic()
            else:
                self.leases[lease.metadata.name] = holder
            self._changed.notify_all()
