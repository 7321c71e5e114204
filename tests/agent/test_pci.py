"""The machine's PCI tree: adapters near the GPUs are reported and break ties of sets, and a missing GPU is noticed."""

from pathlib import Path

import pytest

from agent.nvml import NvmlBackend
from agent.pci import LOOKED_FOR_EVERY, PciPlace, PciTree, relation
from agent.readings import NicReading
from atoll.api import names
from atoll.api.base import ObjectMeta
from atoll.api.node_status import GpuNodeStatus, GpuNodeStatusReport
from atoll.cluster.machines import node_devices
from devcluster.mock_nvml.machine_file import bus_id
from devcluster.pci_tree import ETHERNET_CLASS, INFINIBAND_CLASS
from devcluster.pci_tree import PlayedPciTree as PlayedTree
from tests.agent.real_bindings import Bench, machine_of
from topology.choice import Choice, choose
from topology.device_requests import DeviceRequest
from topology.links import direct_links
from topology.model import Machine

SWITCH = ("pci0000:00", "0000:00:01.0", "0000:01:00.0")
GPU = "00000000:03:00.0"
FOUR_PAIRS = ((0, 2), (1, 3), (4, 7), (5, 6))
"""GPUs of an NVSwitch machine below one PCIe switch each, unlike their numbering."""


@pytest.fixture
def pci(tmp_path: Path) -> PlayedTree:
    """A tree with one GPU below a switch."""
    made = PlayedTree(tmp_path / "sys")
    made.plug(*SWITCH, "0000:02:00.0", "0000:03:00.0")
    return made


def looked(devices: Path) -> PciTree:
    """A tree that was read once."""
    tree = PciTree(devices)
    tree.refresh()
    return tree


@pytest.mark.parametrize(
    ("path", "numa", "want"),
    [
        pytest.param((*SWITCH, "0000:02:01.0", "0000:04:00.0"), 0, "PIX", id="another port of the same switch"),
        pytest.param((*SWITCH, "0000:02:01.0", "0000:04:00.0", "0000:05:00.0", "n"), 0, "PXB", id="a switch below"),
        pytest.param(("pci0000:00", "0000:00:02.0", "n"), 0, "PHB", id="another root port"),
        pytest.param(("pci0000:80", "0000:80:01.0", "n"), 0, "NODE", id="another host bridge of the NUMA node"),
        pytest.param(("pci0000:80", "0000:80:01.0", "n"), 1, "SYS", id="another NUMA node"),
        pytest.param(("pci0000:80", "0000:80:01.0", "n"), None, "SYS", id="a NUMA node that nobody knows"),
    ],
)
def test_relations_are_those_of_the_tree(path: tuple[str, ...], numa: int | None, want: str) -> None:
    """How far an adapter is follows from the bridges that it shares with the GPU, whichever of the two is asked."""
    gpu, nic = PciPlace((*SWITCH, "0000:02:00.0", "0000:03:00.0"), 0), PciPlace(path, numa)

    assert relation(gpu, nic) == relation(nic, gpu) == want


def test_adapters_that_do_rdma_hide_the_others(pci: PlayedTree) -> None:
    """What counts are the adapters that collectives use; a port for logging in is named where there are no others."""
    pci.plug("pci0000:00", "0000:00:09.0", kind=ETHERNET_CLASS, network="eno1")
    assert looked(pci.devices).nics([GPU]) == (NicReading("eno1", ("PHB",)),)

    pci.plug(*SWITCH, "0000:02:01.0", "0000:04:00.0", kind=INFINIBAND_CLASS, network="ib0", rdma="mlx5_0")
    assert looked(pci.devices).nics([GPU]) == (NicReading("mlx5_0", ("PIX",)),)


def test_a_virtual_function_is_where_its_adapter_is(pci: PlayedTree) -> None:
    """A hundred functions of one adapter are one adapter."""
    pci.plug(*SWITCH, "0000:02:01.0", "0000:04:00.0", kind=ETHERNET_CLASS, rdma="mlx5_0")
    pci.plug(*SWITCH, "0000:02:01.0", "0000:04:00.1", kind=ETHERNET_CLASS, rdma="mlx5_1", function_of="0000:04:00.0")

    assert looked(pci.devices).nics([GPU]) == (NicReading("mlx5_0", ("PIX",)),)


def test_what_the_kernel_does_not_tell_is_unknown(pci: PlayedTree, tmp_path: Path) -> None:
    """No tree, or one without these GPUs (a VM that hides them): nothing is said, which is not "no adapters"."""
    pci.plug(*SWITCH, "0000:02:01.0", "0000:04:00.0", kind=INFINIBAND_CLASS, rdma="mlx5_0")

    assert looked(tmp_path / "nowhere").nics([GPU]) is None
    assert looked(pci.devices).nics(["00000000:99:00.0", None]) is None
    assert looked(pci.devices).nics([GPU, None]) == (NicReading("mlx5_0", ("PIX", None)),)


def test_the_tree_is_read_now_and_then(pci: PlayedTree) -> None:
    """Adapters are plugged in by hand: a new one is told soon, and not looked for at every look."""
    tree = looked(pci.devices)
    assert tree.nics([GPU]) == ()
    pci.plug(*SWITCH, "0000:02:01.0", "0000:04:00.0", kind=INFINIBAND_CLASS, rdma="mlx5_0")
    for _ in range(LOOKED_FOR_EVERY - 1):
        tree.refresh()
        assert tree.nics([GPU]) == ()
    tree.refresh()

    assert tree.nics([GPU]) == (NicReading("mlx5_0", ("PIX",)),)


@pytest.fixture
def bench(mock_environment: Path, tmp_path: Path) -> Bench:
    """An NVSwitch machine that has an adapter below each PCIe switch, read through the real bindings."""
    pci = PlayedTree(tmp_path / "machine")
    pci.below_switches([bus_id(position) for position in range(8)], FOUR_PAIRS)
    return Bench(mock_environment, machine_of("dgx-h100"), NvmlBackend(pci_devices=pci.devices))


def near(report: GpuNodeStatusReport) -> dict[str, tuple[int, ...]]:
    """Positions of the GPUs that share a switch with each adapter."""
    return {
        nic.name: tuple(position for position, cell in enumerate(nic.cells) if cell == "PIX")
        for nic in report.links.nics
    }


def test_the_report_tells_which_gpu_is_near_which_adapter(bench: Bench) -> None:
    """By device, in the order of the devices; a GPU that is lost keeps its place, and so does a MIG instance."""
    report = bench.look()
    want = {f"mlx5_{number}": pair for number, pair in enumerate(FOUR_PAIRS)}
    assert near(report) == want
    assert GpuNodeStatusReport.model_validate(report.to_json()) == report

    bench.machine.fail(2)
    assert near(bench.look()) == want
    bench.machine.heal().split(0, ("3g.40gb", 40448))
    assert near(bench.look())["mlx5_0"] == (0, 2, 8)
    bench.backend.close()


def test_sets_that_tie_share_an_adapter(bench: Bench) -> None:
    """Behind switches every pair is as good as every other by NVLink: two GPUs below one adapter are taken, and the
    pairs of the others are left whole."""
    devices = node_devices(GpuNodeStatus(metadata=ObjectMeta(name="n1"), status=bench.look()))
    bench.backend.close()
    assert devices is not None
    geometry = devices.shape.machine
    assert {direct_links(cell) for row in geometry.links for cell in row} == {0, 18}

    assert chosen(geometry, free=0b11111111) in FOUR_PAIRS
    assert chosen(geometry, free=0b00001111) == (0, 2)
    assert chosen(geometry, free=0b00001110) == (1, 3)
    assert chosen(geometry, free=0b11100001) == (5, 6)


def chosen(geometry: Machine, *, free: int) -> tuple[int, ...]:
    answer = choose(geometry, free, DeviceRequest(2))
    assert isinstance(answer, Choice)
    return answer.positions


def test_a_gpu_that_the_driver_does_not_count_is_missed(bench: Bench) -> None:
    """The kernel lists eight, the driver counts seven, without any error and from the first look on: seven are in
    use, and the condition names the slot."""
    bench.machine.facts["count"] = "7"
    report = bench.look()
    bench.backend.close()
    readable = next(one for one in report.conditions if one.type == names.CONDITION_DEVICES_READABLE)

    assert report.healthy_count == len(report.devices) == 7
    assert readable.status == "False"
    assert readable.message.endswith(f"the driver misses what sits in PCI slot {bus_id(7)}")


def test_a_gpu_of_another_driver_is_not_missed(pci: PlayedTree) -> None:
    """One that is handed to a virtual machine, another vendor's, or a machine that hides its tree: nothing to tell."""
    pci.plug("pci0000:00", "0000:00:05.0", driver="vfio-pci")
    pci.plug("pci0000:00", "0000:00:06.0", driver="ast")
    tree = looked(pci.devices)

    assert tree.slots_unseen([GPU], kernel_driver="nvidia") == ()
    assert tree.slots_unseen(["00000000:99:00.0"], kernel_driver="nvidia") == ()


def test_a_slot_that_is_listed_no_more_was_emptied(pci: PlayedTree) -> None:
    """What the bus was told to let go is told until it is there again; what was never listed is not missed."""
    pci.plug("pci0000:00", "0000:00:05.0", driver="nvidia")
    tree = looked(pci.devices)
    at_first = tree.slots_removed
    (pci.devices / "0000:00:05.0").unlink()
    for _ in range(LOOKED_FOR_EVERY):
        tree.refresh()
    removed = tree.slots_removed
    pci.plug("pci0000:00", "0000:00:05.0", driver="nvidia")
    for _ in range(LOOKED_FOR_EVERY):
        tree.refresh()

    assert (at_first, removed, tree.slots_removed) == (frozenset(), {"00000000:00:05.0"}, frozenset())
