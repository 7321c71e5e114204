"""One observation: a driver that fails or hangs, and processes that are matched to pods."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from agent.cgroups import CgroupReading
from agent.errors import ReadingFailed
from agent.observation import MachineObserver, owners_of
from agent.readings import DeviceFault, MachineReading
from atoll.api.node_status import IncidentKind
from tests.agent.builders import make_device, make_reading

UID = "11111111-2222-3333-4444-555555555555"


class ScriptedBackend:
    """Plays its steps in order, the last one for ever: a reading, an error, or a gate that it waits at."""

    def __init__(self, *steps: MachineReading | Exception | threading.Event) -> None:
        self.steps = list(steps)
        self.reads = 0

    def read(self) -> MachineReading:
        self.reads += 1
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        if isinstance(step, threading.Event):
            assert step.wait(30)
            return make_reading(make_device(0, "late"))
        if isinstance(step, Exception):
            raise step
        return step

    def boot_id(self) -> str:
        return "b1"

    def close(self) -> None:
        """Nothing is open."""


def observer(backend: ScriptedBackend, folder: Path, *, timeout_seconds: float = 5.0) -> MachineObserver:
    return MachineObserver(
        backend, cgroup_mount=folder / "cgroup", proc_mount=folder / "proc", timeout_seconds=timeout_seconds
    )


def shown(reading: MachineReading) -> list[str | None]:
    return [device.uuid for device in reading.devices]


async def test_one_failure_is_borne_and_two_are_told(tmp_path: Path) -> None:
    """A single failed reading changes nothing; the second makes the devices unknown, the next good one ends it."""
    good, failed = make_reading(make_device(0, "a")), ReadingFailed("NVML", "gone")
    machine = observer(ScriptedBackend(good, failed, failed, good), tmp_path)

    readings = [(await machine.observe()).machine for _ in range(4)]

    assert [shown(reading) for reading in readings] == [["a"], ["a"], [], ["a"]]
    assert ["gone" in reading.problem for reading in readings] == [False, False, True, False]


async def test_what_had_happened_is_not_told_again_by_a_borne_failure(tmp_path: Path) -> None:
    """A reading that stands in for a failed one says who is there, not who used it just then, nor its events again."""
    event = DeviceFault(IncidentKind.XID, 48, stands=False)
    good = make_reading(replace(make_device(0, "a"), process_ids=(7,), signs=(event,)))
    machine = observer(ScriptedBackend(good, ReadingFailed("NVML", "gone")), tmp_path)

    looks = [await machine.observe() for _ in range(2)]

    assert [look.machine.devices[0].signs for look in looks] == [(event,), ()]
    assert looks[1].machine.devices[0].signs_unread == frozenset(IncidentKind)
    assert looks[1].use.unread == {"a"}


async def test_a_machine_that_was_never_read_is_told_at_once(tmp_path: Path) -> None:
    """Without a driver from the start there is nothing to bear."""
    look = await observer(ScriptedBackend(ReadingFailed("NVML", "no driver")), tmp_path).observe()

    assert "no driver" in look.machine.problem


async def test_whatever_the_bindings_raise_is_an_unreadable_machine(tmp_path: Path) -> None:
    """A sick driver makes its bindings fail in ways that nobody foresaw; the agent lives on and says so."""
    look = await observer(ScriptedBackend(UnicodeDecodeError("utf-8", b"x", 0, 1, "odd name")), tmp_path).observe()

    assert "odd name" in look.machine.problem


async def test_a_hanging_driver_holds_one_thread_and_not_the_agent(tmp_path: Path) -> None:
    """Looks go on with the machine unknown; no second reading is started; when it answers, the answer counts."""
    gate = threading.Event()
    backend = ScriptedBackend(gate)
    machine = observer(backend, tmp_path, timeout_seconds=0.01)
    try:
        problems = [(await machine.observe()).machine.problem for _ in range(3)]
    finally:
        gate.set()

    assert all("no answer" in problem for problem in problems)
    assert backend.reads == 1
    machine = observer(backend, tmp_path)
    assert shown((await machine.observe()).machine) == ["late"]


async def test_processes_are_matched_to_pods(tmp_path: Path) -> None:
    """The pod of a process on a GPU is read from its cgroup; a process outside of pods, or gone, is nobody's."""
    for pid, text in {1: f"0::/kubepods/pod{UID}/c\n", 2: "0::/system.slice/x.service\n"}.items():
        (tmp_path / "proc" / str(pid)).mkdir(parents=True)
        (tmp_path / "proc" / str(pid) / "cgroup").write_text(text)
    reading = make_reading(make_device(0, "a", process_ids=(1, 2, 3)), make_device(1, "b", process_ids=None))

    look = await observer(ScriptedBackend(reading), tmp_path).observe()

    assert look.use.pods == {UID: frozenset({"a"})}
    assert look.cgroups is None


@pytest.mark.parametrize("error", [FileNotFoundError, ProcessLookupError])
def test_a_process_that_ended_is_left_out(error: type[OSError]) -> None:
    """Processes end while they are looked at."""

    def read(pid: int) -> str:
        if pid == 1:
            raise error
        return f"0::/kubepods/pod{UID}/c\n"

    assert owners_of([1, 2], read=read) == ({2: UID}, frozenset())


async def test_a_process_that_hides_leaves_its_gpu_unknown(tmp_path: Path) -> None:
    """A process whose cgroup may not be read might be anybody's: its GPU is not told to be unused."""

    def read(pid: int) -> str:
        raise PermissionError

    assert owners_of([7], read=read) == ({}, frozenset({7}))

    (tmp_path / "proc" / "7" / "cgroup").mkdir(parents=True)
    reading = make_reading(make_device(0, "a", process_ids=(7,)), make_device(1, "b", process_ids=()))
    look = await observer(ScriptedBackend(reading), tmp_path).observe()

    assert look.use.unread == {"a"}


async def test_a_cancelled_look_can_be_taken_again(tmp_path: Path) -> None:
    """Stopping the agent in the middle of a look leaves nothing that blocks the next one."""
    gate = threading.Event()
    machine = observer(ScriptedBackend(gate, make_reading(make_device(0, "a"))), tmp_path)
    task = asyncio.ensure_future(machine.observe())
    await asyncio.sleep(0)
    task.cancel()
    gate.set()
    await asyncio.gather(task, return_exceptions=True)

    assert shown((await machine.observe()).machine)


async def test_evidence_that_hangs_is_unknown_and_is_not_taken_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that does not answer costs one thread and a deadline; what it answers too late is thrown away."""
    gate, reads = threading.Event(), []

    def read(root: str, *, mount: Path) -> CgroupReading:
        reads.append(root)
        assert gate.wait(30)
        return CgroupReading(frozenset({f"read {len(reads)}"}), frozenset())

    monkeypatch.setattr("agent.observation.read_cgroups", read)
    machine = observer(ScriptedBackend(make_reading(make_device(0, "a"))), tmp_path, timeout_seconds=0.05)
    looks = [await machine.observe() for _ in range(3)]
    gate.set()
    assert machine._hanging_evidence is not None
    await machine._hanging_evidence
    late = await machine.observe()

    assert [(look.cgroups, look.use.unread) for look in looks] == [(None, {"a"})] * 3
    assert len(reads) == 2
    assert late.cgroups == CgroupReading(frozenset({"read 2"}), frozenset())


async def test_a_driver_that_answers_late_does_not_say_who_uses_the_machine(tmp_path: Path) -> None:
    """A reading that was begun before this look tells the machine; its processes are of another time."""
    gate = threading.Event()
    machine = observer(ScriptedBackend(gate), tmp_path, timeout_seconds=0.05)
    await machine.observe()
    gate.set()
    assert machine._hanging is not None
    await machine._hanging
    late = await machine.observe()

    assert shown(late.machine) == ["late"]
    assert late.use.unread == {"late"}


async def test_where_no_process_is_listed_none_has_ended(tmp_path: Path) -> None:
    """A wrong proc mount shows no process at all: those that the driver names are unknown then, not gone."""
    backend = ScriptedBackend(make_reading(replace(make_device(0, "a"), process_ids=(7,))))
    look = await observer(backend, tmp_path).observe()
    assert look.use.unread == {"a"}

    (tmp_path / "proc/1").mkdir(parents=True)
    assert (await observer(backend, tmp_path).observe()).use.unread == frozenset()
