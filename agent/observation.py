"""One look at the machine: every blocking read, bounded in time and off the event loop.

A reading that hangs is abandoned with its thread, and no second one starts beside it, so that a faulty driver cannot
use up the process.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import structlog

from agent.backends import Backend
from agent.cgroups import CGROUP_MOUNT, CgroupReading, pod_uid_of, read_cgroups
from agent.errors import ReadingFailed
from agent.evidence import GpuUse, gpu_use
from agent.pod_resources import PluginAllocations, list_allocations
from agent.readings import MachineReading

CGROUP_TEXT_BYTES_MAX = 65_536
POD_RESOURCES_SECONDS = 5.0
FAILURES_BORNE = 1
"""Up to this many failed readings in a row keep the devices as last read; one more makes them unknown."""

log = structlog.get_logger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Observation:
    """Result of one look. cgroups None: unknown. use: users of each GPU by processes. handed: the kubelet's device
    plugin allocations; None if not asked."""

    machine: MachineReading
    boot_id: str
    cgroups: CgroupReading | None
    use: GpuUse
    plugin_allocations: PluginAllocations | None = None


class MachineObserver:
    """Looks at one machine repeatedly."""

    def __init__(
        self,
        backend: Backend,
        *,
        cgroup_root: str = "/",
        cgroup_mount: Path = CGROUP_MOUNT,
        proc_mount: Path = Path("/proc"),
        timeout_seconds: float,
        pod_resources: Path | None = None,
    ) -> None:
        self._backend = backend
        self._cgroup_root = cgroup_root
        self._cgroup_mount = cgroup_mount
        self._proc_mount = proc_mount
        self._timeout_seconds = timeout_seconds
        self._pod_resources = pod_resources
        self._hanging: asyncio.Future[MachineReading] | None = None
        self._hanging_evidence: asyncio.Future[Observation] | None = None
        self._last: MachineReading | None = None
        self._boot_id = ""
        self._is_released = False
        self.failures = 0
        self.problem = ""
        """Why the last observation could not read the machine; empty if it could, or if it must not."""
        self.is_refused = False
        """Whether the driver library as a whole failed: see ReadingFailed."""

    async def observe(self, *, release_reason: str = "") -> Observation:
        """Read everything once. Failures are marked in the Observation, never raised. release_reason: why the driver
        must not be read or kept open; empty if it may be."""
        machine = await self._release_driver(release_reason) if release_reason else await self._machine()
        boot_id = await self._boot()
        return await self._evidence(machine, boot_id)

    async def _release_driver(self, reason: str) -> MachineReading:
        if not self._is_released:
            await asyncio.to_thread(self._backend.close)
            log.info("Released the driver", reason=reason)
        self._is_released, self._last = True, None
        self.failures, self.problem, self.is_refused = 0, "", False
        return MachineReading(devices=(), problem=reason)

    async def _machine(self) -> MachineReading:
        self._is_released = False
        try:
            self._last = await self._read_within_time()
            self.failures, self.problem, self.is_refused = 0, "", False
            return self._last
        except ReadingFailed as error:
            self.failures += 1
            self.problem, self.is_refused = str(error), error.is_refused
            log.warning("Machine cannot be read", err=str(error), failures=self.failures)
            if self._last is not None and self.failures <= FAILURES_BORNE:
                return self._last.as_remembered()
            return MachineReading(devices=(), problem=str(error))

    async def _read_within_time(self) -> MachineReading:
        """Read, or wait for an earlier reading that hangs; its users are too old and dropped."""
        is_late = self._hanging is not None
        reading = self._hanging or asyncio.ensure_future(asyncio.to_thread(self._read))
        try:
            self._hanging = reading
            answer = await asyncio.wait_for(asyncio.shield(reading), self._timeout_seconds)
        except TimeoutError as error:
            raise ReadingFailed("machine", f"no answer within {self._timeout_seconds:g} s") from error
        except BaseException:
            self._hanging = None
            raise
        self._hanging = None
        return answer.without_users() if is_late else answer

    def _read(self) -> MachineReading:
        try:
            return self._backend.read()
        except ReadingFailed:
            raise
        except Exception as error:
            raise ReadingFailed("machine", f"{type(error).__name__}: {error}") from error

    async def _boot(self) -> str:
        """The boot id, or the last known one if it cannot be read."""
        try:
            self._boot_id = await asyncio.to_thread(self._backend.boot_id)
        except ReadingFailed as error:
            log.warning("Boot id cannot be read", err=str(error))
        return self._boot_id

    async def _evidence(self, machine: MachineReading, boot_id: str) -> Observation:
        """Read the evidence anew. While an earlier reading hangs, nothing is known; its result is dropped as too
        old."""
        unknown = Observation(
            machine, boot_id, None, GpuUse(unread=frozenset(machine.pids_by_uuid()) | machine.uuids_unread())
        )
        if self._hanging_evidence is not None and not self._hanging_evidence.done():
            return unknown
        reading = asyncio.ensure_future(asyncio.to_thread(self._with_evidence, machine, boot_id))
        self._hanging_evidence = reading
        try:
            return await asyncio.wait_for(asyncio.shield(reading), self._timeout_seconds)
        except TimeoutError:
            log.warning("Evidence cannot be read", err=f"no answer within {self._timeout_seconds:g} s")
            return unknown

    def _with_evidence(self, machine: MachineReading, boot_id: str) -> Observation:
        cgroups = read_cgroups(self._cgroup_root, mount=self._cgroup_mount)
        pids_by_uuid = machine.pids_by_uuid()
        owners, hidden = owners_of({pid for pids in pids_by_uuid.values() for pid in pids}, read=self._read_process)
        unread = machine.uuids_unread() | {uuid for uuid, pids in pids_by_uuid.items() if hidden.intersection(pids)}
        if not self._lists_processes():
            unread |= frozenset(pids_by_uuid)
        plugin_allocations: PluginAllocations | None = None
        if self._pod_resources is not None:
            plugin_allocations = list_allocations(self._pod_resources, timeout_seconds=POD_RESOURCES_SECONDS)
            unread |= frozenset(pids_by_uuid) if plugin_allocations is None else frozenset()
        return Observation(machine, boot_id, cgroups, gpu_use(pids_by_uuid, owners, unread=unread), plugin_allocations)

    def _lists_processes(self) -> bool:
        """True if any process is listed. If none is, the GPUs' processes are invisible, not ended."""
        try:
            return any(entry.name.isdecimal() for entry in self._proc_mount.iterdir())
        except OSError:
            return False

    def _read_process(self, pid: int) -> str:
        with (self._proc_mount / str(pid) / "cgroup").open(encoding="utf-8", errors="replace") as file:
            return file.read(CGROUP_TEXT_BYTES_MAX)


def owners_of(pids: Iterable[int], *, read: Callable[[int], str]) -> tuple[dict[int, str | None], frozenset[int]]:
    """Pod uid by process id, None outside pods; and the processes that do not show their cgroup. Processes that have
    ended are in neither."""
    found: dict[int, str | None] = {}
    hidden = set()
    for pid in pids:
        try:
            found[pid] = pod_uid_of(read(pid))
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError:
            hidden.add(pid)
    return found, frozenset(hidden)
