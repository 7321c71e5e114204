"""Thousands of observations of a machine that keeps breaking: nothing leaks, and every report is valid.

Real bindings over the mock library, in the real worker process. The seed is printed; ATOLL_SEED repeats a run.

Memory is compared between two equal states: a healthy machine after one observation, with bounded caches emptied. A
machine that keeps breaking has hundreds of geometries, which fill the caches; a plain limit on memory would have to
allow for those and could not detect smaller leaks.
"""

import functools
import gc
import mmap
import os
import random
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent.driver_client import DriverWorker
from agent.errors import ReadingFailed
from agent.nvml import NvmlBackend
from atoll.api.base import ObjectMeta
from atoll.api.node_status import GpuNodeStatus, GpuNodeStatusReport
from atoll.cluster.health import judge
from atoll.cluster.machines import node_devices
from devcluster.mock_nvml import MachineFile
from tests.agent.real_bindings import NOWHERE, Bench, machine_of

LOOKS_FAULTY_EVERY = 3
BLOCKS_GROWTH_MAX = 2_000
"""Blocks of Python's allocator. One word kept per look would be five times that after ten thousand looks."""
MEMORY_GROWTH_KIB_MAX = 24 * 1024
"""Resident, for what Python's allocator does not see; the heap does not give back what caches once took."""
WORKER_GROWTH_KIB_MAX = 2 * 1024
XIDS = (13, 31, 43, 48, 63, 74, 79, 94, 95, 119)
NONSENSE = (
    ("uuid", "a,b"),
    ("uuid", machine_of("dgx-h100").facts["gpu.0.uuid"]),
    ("memory_mib", 1 << 43),
    ("minor", (1 << 32) - 1),
    ("pcie_generation", (1 << 32) - 1),
    ("compute_capability", "4294967.4294967"),
    ("field.230", (1 << 32) - 1),
    ("ecc_uncorrected_volatile", (1 << 63) - 1),
    ("pids", "0 4294967295"),
)
CALLS = (
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetTopologyCommonAncestor",
    "nvmlEventSetWait_v2",
    "*",
)


def memory_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the agent's process holds."""

    threads: int
    descriptors: int
    children: int
    blocks: int
    memory_kib: int
    worker_kib: int


def grown(before: Holdings, after: Holdings) -> list[str]:
    """What is held in excess: threads, descriptors and children exactly, the rest beyond its limit."""
    counted = ("threads", "descriptors", "children")
    found = [name for name in counted if getattr(after, name) != getattr(before, name)]
    found += ["blocks"] if after.blocks > before.blocks + BLOCKS_GROWTH_MAX else []
    return found + (["memory_kib"] if after.memory_kib > before.memory_kib + MEMORY_GROWTH_KIB_MAX else [])


def holdings(stage: Bench) -> Holdings:
    """What is held after one look of a new worker at a whole machine."""
    stage.backend.close()
    stage.machine, stage.report, stage.boot_id = machine_of("dgx-h100"), None, "whole"
    stage.backend = NvmlBackend(step_seconds=5.0, pci_devices=NOWHERE)
    stage.look()
    worker = stage.backend.steps
    assert isinstance(worker, DriverWorker)
    assert worker.pid is not None
    for one in gc.get_objects():
        if isinstance(one, functools._lru_cache_wrapper):
            one.cache_clear()
    gc.collect()
    return Holdings(
        threads=threading.active_count(),
        descriptors=len(list(Path("/proc/self/fd").iterdir())),
        children=len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
        blocks=sys.getallocatedblocks(),
        memory_kib=memory_kib(os.getpid()),
        worker_kib=memory_kib(worker.pid),
    )


def break_something(machine: MachineFile, rng: random.Random, *, hangs: bool) -> MachineFile:
    """One random fault, or everything healed."""
    gpu = rng.randrange(len(machine.order))
    kind = rng.randrange(12 if hangs else 10)
    if kind == 0:
        return machine.heal()
    if kind in {1, 2}:
        return machine.fail(gpu, rng.choice(CALLS), code=rng.choice((15, 3, 999, 16, 7)), each=rng.randint(1, 3))
    if kind == 3:
        return machine.event(gpu, rng.choice(XIDS))
    if kind == 4:
        return machine.set(
            gpu, ecc_uncorrected_volatile=rng.choice((0, 1, 5000)), remapped=f"0 1 {rng.randint(0, 1)} 0"
        )
    if kind == 5:
        return machine.set(gpu, pids=" ".join(str(rng.randint(2, 99_999)) for _ in range(rng.randint(0, 5))) or None)
    if kind == 6:
        return machine.set(gpu, throttle=rng.choice(("0x0", "0x40")), fabric=f"{rng.randint(1, 3)} 0 0 0x0 {'0' * 32}")
    if kind == 7:
        machine.facts["count"] = str(rng.choice((8, 8, 7, 1)))
        return machine
    if kind == 8:
        return machine_of("dgx-h100").split(gpu, ("3g.40gb", 40448), ("1g.10gb", 9856))
    if kind == 9:
        name, value = rng.choice(NONSENSE)
        return machine.set(gpu, **{name: value})
    return machine.hang(gpu, rng.choice(CALLS), seconds=0.3) if kind == 10 else machine.crash(gpu, rng.choice(CALLS))


def check(report: GpuNodeStatusReport) -> None:
    """A report that any reader can use: it validates, ids and uuids are unique, every device has a standing."""
    again = GpuNodeStatusReport.model_validate(report.to_json())
    assert again == report
    status = GpuNodeStatus(metadata=ObjectMeta(name="n1"), status=report)
    assert node_devices(status) is not None
    assert set(judge(status).standings) == {device.uuid for device in report.devices}
    assert len(report.links.nvlink) == len(report.devices)


def soak(stage: Bench, rng: random.Random, looks: int, *, hang_share: float) -> int:
    """Look so often while things break; returns how many looks gave no report at all."""
    failed = 0
    for number in range(looks):
        if number % LOOKS_FAULTY_EVERY == 0:
            stage.machine = break_something(stage.machine, rng, hangs=rng.random() < hang_share)
        if number % 50 == 49:
            stage.machine.heal()
            stage.machine.facts = {k: v for k, v in stage.machine.facts.items() if not k.startswith("event.")}
            stage.boot_id = f"b{number}"
        stage.minute += 1
        try:
            check(stage.look())
        except ReadingFailed:
            failed += 1
    return failed


def impatient() -> NvmlBackend:
    return NvmlBackend(step_seconds=0.15, pci_devices=NOWHERE)


def run(mock_environment: Path, *, warm_up: int, looks: int, hang_share: float) -> None:
    seed = int(os.environ.get("ATOLL_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)
    print(f"ATOLL_SEED={seed}")
    rng = random.Random(seed)
    stage = Bench(mock_environment, machine_of("dgx-h100"), impatient())
    soak(stage, rng, warm_up, hang_share=hang_share)
    before = holdings(stage)

    stage.backend.close()
    stage.backend = impatient()
    worker = stage.backend.steps
    assert isinstance(worker, DriverWorker)
    failed = soak(stage, rng, looks, hang_share=hang_share)

    after = holdings(stage)
    print(f"{failed} of {looks} looks gave no report, {worker.starts} workers\n{before}\n{after}")
    assert failed < looks / 2
    assert grown(before, after) == []
    for _ in range(18):
        stage.machine, stage.boot_id = machine_of("dgx-h100"), "last"
        stage.minute += 120
        report = stage.look()
    worker = stage.backend.steps
    assert isinstance(worker, DriverWorker)
    stage.backend.close()
    assert worker.pid is None
    assert report.healthy_count == 8
    assert [one for device in report.devices for one in device.incidents if not one.ended_time] == []


def test_a_short_soak(mock_environment: Path) -> None:
    """Some hundred looks with faults of every kind."""
    run(mock_environment, warm_up=40, looks=160, hang_share=0.05)


class Leak:
    """Keeps something at every look; `give_back` ends it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.kept: list[Any] = []
        self.over = threading.Event()

    def look(self) -> None:
        if self.kind == "threads":
            self.kept.append(threading.Thread(target=self.over.wait, daemon=True))
            self.kept[-1].start()
        elif self.kind == "descriptors":
            self.kept.append(os.open("/dev/null", os.O_RDONLY))
        elif self.kind == "children" and not self.kept:
            self.kept.append(subprocess.Popen(("sleep", "1000")))
        elif self.kind == "blocks":
            self.kept += [(number, self) for number in range(LEAKED_LOOKS // LEAKING_LOOKS)]
        elif self.kind == "memory_kib":
            self.kept.append(mmap.mmap(-1, LEAKED_LOOKS // LEAKING_LOOKS * mmap.PAGESIZE))
            self.kept[-1].write(b"x" * len(self.kept[-1]))

    def give_back(self) -> None:
        self.over.set()
        for one in self.kept:
            if self.kind == "threads":
                one.join()
            elif self.kind == "descriptors":
                os.close(one)
            elif self.kind == "children":
                one.kill()
                one.wait()
            elif self.kind == "memory_kib":
                one.close()


LEAKED_LOOKS, LEAKING_LOOKS = 10_000, 10
"""Looks of the long soak, and of the test of its limits: what one keeps per look, the other keeps a thousand times."""


@pytest.mark.parametrize("kind", ["none", "threads", "descriptors", "children", "blocks", "memory_kib"])
def test_the_limits_of_the_soak_find_a_leak(mock_environment: Path, kind: str) -> None:
    """A thread or a descriptor per look, one process left over, or, as often as in ten thousand looks, one object or
    one page of memory per look: each breaks its own limit and no other, and without a leak none is broken."""
    stage = Bench(mock_environment, machine_of("dgx-h100"), impatient())
    soak(stage, random.Random(1), LEAKING_LOOKS, hang_share=0.0)
    before, leak = holdings(stage), Leak(kind)
    try:
        for _ in range(LEAKING_LOOKS):
            soak(stage, random.Random(2), 1, hang_share=0.0)
            leak.look()
        found = grown(before, holdings(stage))
    finally:
        leak.give_back()
        stage.backend.close()

    assert found == ([] if kind == "none" else [kind])


def test_one_worker_lives_long(mock_environment: Path) -> None:
    """Where nothing hangs one worker answers every look, whatever else goes wrong, and does not grow."""
    stage = Bench(mock_environment, machine_of("dgx-h100"))
    before = holdings(stage)
    worker = stage.backend.steps
    assert isinstance(worker, DriverWorker)
    assert worker.pid is not None
    soak(stage, random.Random(1), 120, hang_share=0.0)

    assert worker.starts == 1
    assert memory_kib(worker.pid) <= before.worker_kib + WORKER_GROWTH_KIB_MAX
    stage.backend.close()


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_ten_thousand_looks(mock_environment: Path) -> None:
    """Ten thousand looks with random faults: no handle, thread or process is left over, memory is flat, and every
    report is valid."""
    run(mock_environment, warm_up=500, looks=10_000, hang_share=0.02)
