"""The agent's use of the driver: it releases the driver for an upgrade and takes it up again, and it distinguishes a
failing library from an unhealthy card."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from agent.__main__ import handle_signals
from agent.driver_client import DriverWorker
from agent.node_agent import NodeAgent
from agent.nvml import NvmlBackend
from agent.observation import MachineObserver
from atoll.api import names
from atoll.cluster.driver_hold import UPGRADE_STATE, release_reason
from atoll.cluster.objects import Node
from devcluster.mock_nvml import MachineFile
from tests.agent.real_bindings import NOWHERE, STEP_SECONDS, machine_of
from tests.fakes.clock import until

WHY = "the driver was released: label gpu.scheduling/driver-hold"
MISMATCH, UNKNOWN, NOT_LOADED = 18, 999, 9
"""nvmlReturn_t."""


def node(labels: dict[str, str], *, cordoned: bool = False) -> Node:
    return msgspec.convert({"metadata": {"name": "n1", "labels": labels}, "spec": {"unschedulable": cordoned}}, Node)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (None, ""),
        (node({}), ""),
        (node({}, cordoned=True), ""),
        (node({names.DRIVER_HOLD: "released"}), WHY),
        (node({names.DRIVER_HOLD: "released"}, cordoned=True), WHY),
        (node({names.DRIVER_HOLD: "false"}), ""),
        (node({UPGRADE_STATE: "cordon-required"}), ""),
        (node({UPGRADE_STATE: "drain-required"}, cordoned=True),
         "the driver was released for its upgrade: drain-required"),
        (node({UPGRADE_STATE: "drain-required"}), ""),
        (node({UPGRADE_STATE: "pod-restart-required"}, cordoned=True),
         "the driver was released for its upgrade: pod-restart-required"),
        (node({UPGRADE_STATE: "validation-required"}, cordoned=True), ""),
        (node({UPGRADE_STATE: "upgrade-done"}), ""),
        (node({UPGRADE_STATE: "upgrade-failed"}, cordoned=True), ""),
    ],
    ids=["no Node", "as usual", "cordoned for something else", "by label", "by label, cordoned", "another value",
         "not cordoned yet", "drains", "drains without a cordon", "driver is loaded anew", "new driver is validated",
         "done", "failed"],
)  # fmt: skip
def test_when_the_driver_is_let_go(found: Node | None, reason: str) -> None:
    """By our own label, or by a cordon in a state of the operator's upgrade; a cordon alone is no reason."""
    assert release_reason(found) == reason


@pytest.fixture
async def machine(mock_environment: Path) -> MachineFile:
    found = machine_of("t4-4")
    found.write(mock_environment)
    return found


@pytest.fixture
async def backend(machine: MachineFile) -> AsyncIterator[NvmlBackend]:
    found = NvmlBackend(step_seconds=STEP_SECONDS, pci_devices=NOWHERE)
    yield found
    found.close()


def observer_of(backend: NvmlBackend, folder: Path) -> MachineObserver:
    return MachineObserver(backend, cgroup_mount=folder, timeout_seconds=20.0)


async def test_who_lets_go_holds_nothing_and_takes_up_the_new_driver(
    backend: NvmlBackend, machine: MachineFile, mock_environment: Path, tmp_path: Path
) -> None:
    """While it is let go no process of ours has the library open, nothing is read, and that is no failure; afterwards
    the machine is read as it is by then."""
    observer, steps = observer_of(backend, tmp_path), backend.steps
    assert isinstance(steps, DriverWorker)
    before = (await observer.observe()).machine
    held = steps.pid
    away = (await observer.observe(release_reason=WHY)).machine
    let_go = steps.pid
    machine.set(3, memory_total=str(24 << 30)).write(mock_environment)
    after = (await observer.observe()).machine

    assert (len(before.devices), away.devices, away.problem, len(after.devices)) == (4, (), WHY, 4)
    assert held is not None
    assert let_go is None
    assert steps.pid not in {None, held}
    assert (observer.problem, observer.failures) == ("", 0)


@pytest.mark.parametrize("code", [MISMATCH, UNKNOWN, NOT_LOADED], ids=["library and driver differ", "unknown", "none"])
async def test_a_library_that_refuses_as_a_whole_is_told_at_once(
    backend: NvmlBackend, machine: MachineFile, mock_environment: Path, tmp_path: Path, code: int
) -> None:
    """At the first look that fails, though that one still bears with what was read before; over when it answers."""
    observer = observer_of(backend, tmp_path)
    await observer.observe()
    backend.close()
    machine.fail("*", "nvmlInit_v2", code=code).fail("*", "nvmlInitWithFlags", code=code).write(mock_environment)
    await observer.observe()
    refused = (bool(observer.problem), observer.is_refused)
    machine.heal().write(mock_environment)
    await observer.observe()

    assert refused == (True, True)
    assert (observer.problem, observer.is_refused) == ("", False)


@pytest.mark.parametrize(
    ("ill", "code", "refused"),
    [(range(4), UNKNOWN, True), (range(1), UNKNOWN, False), (range(3), UNKNOWN, False), (range(4), 15, False)],
    ids=["every device is unknown", "one of four", "three of four", "every card is lost"],
)
async def test_a_fault_of_cards_is_not_the_containers(
    backend: NvmlBackend,
    machine: MachineFile,
    mock_environment: Path,
    tmp_path: Path,
    ill: range,
    code: int,
    *,
    refused: bool,
) -> None:
    """The container has lost its rights when every device is an unknown error; cards that are lost are lost."""
    for index in ill:
        machine.fail(index, "nvmlDeviceGetHandleByIndex_v2", code=code)
    machine.write(mock_environment)
    observer = observer_of(backend, tmp_path)

    await observer.observe()

    assert observer.is_refused is refused


@pytest.mark.parametrize("is_denied", [False, True], ids=["the card's fault", "the container lost its rights"])
async def test_the_only_card_of_a_machine_may_be_ill(
    mock_environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_denied: bool
) -> None:
    """All cards of a one-GPU machine answer with an unknown error when that one is ill: a new container would not help,
    and the report tells of it. The device file says whether the container lost access."""
    machine = machine_of("t4-4")
    machine.facts["count"] = "1"
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr("agent.nvml.os.access", lambda *_: not is_denied)
    backend = NvmlBackend(step_seconds=STEP_SECONDS, pci_devices=NOWHERE, device_files=tmp_path)
    machine.fail(0, "nvmlDeviceGetHandleByIndex_v2", code=UNKNOWN).write(mock_environment)
    observer = observer_of(backend, tmp_path)

    found = (await observer.observe()).machine
    backend.close()

    assert observer.is_refused is is_denied
    assert [device.fault for device in found.devices] == ([] if is_denied else ["Unknown Error"])


async def test_signals_let_go_and_take_up() -> None:
    """SIGUSR1 lets go, with a reason that the report tells; SIGUSR2 takes up. SIGTERM ends the process, see
    tests/service/test_runtime.py, and the driver with it."""
    reasons: list[str] = []
    loop = asyncio.get_running_loop()
    handle_signals(cast("NodeAgent", SimpleNamespace(release_driver=reasons.append)))
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        await until(lambda: reasons)
        os.kill(os.getpid(), signal.SIGUSR2)
        await until(lambda: len(reasons) == 2)
    finally:
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            loop.remove_signal_handler(number)

    assert reasons == ["the driver was released: SIGUSR1", ""]
