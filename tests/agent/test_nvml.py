"""Real answers of the driver: lost cards, hidden switches, bridges to unexpected cards, single calls that fail."""

import pynvml
import pytest

from agent.errors import ReadingFailed
from agent.links import link_matrix, plain_bus_id, rows_by_uuid
from agent.nvml import NvmlBackend
from agent.readings import NvLink, Remote
from tests.agent.fake_nvml import FakeGpu, FakeNvml

GPU, SWITCH, UNKNOWN = pynvml.NVML_NVLINK_DEVICE_TYPE_GPU, pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH, 0xFF
LOST = pynvml.NVML_ERROR_GPU_IS_LOST


def machine(count: int) -> list[FakeGpu]:
    return [FakeGpu(f"GPU-{position}", bus=position + 1, numa=position // 4) for position in range(count)]


def switched(count: int, *, links: int = 18, remote: int = SWITCH) -> list[FakeGpu]:
    gpus = machine(count)
    for gpu in gpus:
        gpu.links = [(remote, f"00000000:F{link % 4}:00.0") for link in range(links)]
        gpu.architecture = pynvml.NVML_DEVICE_ARCH_HOPPER
    return gpus


def bridge(gpus: list[FakeGpu], first: int, second: int, *, links: int = 4) -> None:
    gpus[first].links += [(GPU, gpus[second].bus_id)] * links
    gpus[second].links += [(GPU, gpus[first].bus_id)] * links


def cells(gpus: list[FakeGpu]) -> tuple[tuple[str, ...], ...]:
    links = NvmlBackend(FakeNvml(gpus)).read().links.links
    assert links is not None
    return links


def test_a_healthy_device_is_read_in_full() -> None:
    """Every field of a device comes from the call that is meant for it; index, minor and bus id are three things."""
    gpus = machine(3)
    gpus[1].pids = (41, 42)

    reading = NvmlBackend(FakeNvml(gpus, minors=[1, 3, 5])).read()

    device = reading.devices[1]
    assert (device.index, device.uuid, device.minor, device.pci_bus_id) == (1, "GPU-1", 3, "00000000:02:00.0")
    assert (device.memory_bytes, device.compute_capability, device.numa_node) == (32 << 30, "7.0", 0)
    assert (device.process_ids, device.mig_enabled, device.fault) == ((41, 42), False, "")
    assert (reading.expected_count, reading.links.pcie_generation) == (3, 3)


def test_bridged_cards_are_joined_only_to_whom_the_bridge_leads() -> None:
    """An active link proves that a bridge is there, not where it leads: two bridged pairs are two islands."""
    gpus = machine(4)
    bridge(gpus, 0, 1)
    bridge(gpus, 2, 3)

    assert cells(gpus) == (
        ("X", "NV4", "SYS", "SYS"),
        ("NV4", "X", "SYS", "SYS"),
        ("SYS", "SYS", "X", "NV4"),
        ("SYS", "SYS", "NV4", "X"),
    )


def test_switch_machines_join_everyone() -> None:
    """Links into switches join all, though no address is a GPU's; a card with fewer links is joined by fewer."""
    gpus = switched(8)
    gpus[5].links = gpus[5].links[:12]

    reading = NvmlBackend(FakeNvml(gpus)).read()

    assert reading.links.links is not None
    assert reading.links.links[0] == ("X", "NV18", "NV18", "NV18", "NV18", "NV12", "NV18", "NV18")
    assert reading.links.links[5] == ("NV12",) * 5 + ("X", "NV12", "NV12")
    assert (reading.links.nvswitch, reading.links.nvlink_generation, reading.links.link_gbps) == (True, 4, 25.781)


def test_hidden_switches_count_only_if_all_agree() -> None:
    """In a VM the far end may be unknown: that is a switch if every card says so, and nothing if one disagrees."""
    hidden = switched(4, remote=UNKNOWN)
    assert cells(hidden)[0] == ("X", "NV18", "NV18", "NV18")

    hidden[3].links = []
    assert cells(hidden)[0] == ("X", "SYS", "SYS", "SYS")


def test_inactive_links_do_not_count() -> None:
    """A dead lane lowers the count of its pair, and only that."""
    gpus = machine(2)
    bridge(gpus, 0, 1)
    gpus[0].links[2] = None

    assert cells(gpus) == (("X", "NV3"), ("NV4", "X"))


@pytest.mark.parametrize(
    ("broken", "has_uuid"),
    [
        pytest.param({"nvmlDeviceGetHandleByIndex": LOST}, False, id="at the handle"),
        pytest.param({"nvmlDeviceGetUUID": LOST}, False, id="at the uuid"),
        pytest.param({"nvmlDeviceGetNvLinkState": LOST}, True, id="at the links"),
    ],
)
def test_one_lost_gpu_never_hides_the_others(broken: dict[str, int], has_uuid: bool) -> None:
    """XID 79 on one card: seven healthy devices with their links, one that is lost."""
    gpus = switched(8)
    gpus[3].broken = broken

    reading = NvmlBackend(FakeNvml(gpus)).read()

    lost = reading.devices[3]
    assert (lost.is_lost, bool(lost.fault), lost.uuid is not None) == (True, True, has_uuid)
    assert [device.fault for device in reading.devices if device.index != 3] == [""] * 7
    assert reading.links.links is not None
    assert reading.links.links[0][:3] == ("X", "NV18", "NV18")
    assert reading.links.unread == {3}


FIELDS = {
    "nvmlDeviceGetName": "product_name",
    "nvmlDeviceGetMemoryInfo": "memory_bytes",
    "nvmlDeviceGetCudaComputeCapability": "compute_capability",
    "nvmlDeviceGetPciInfo": "pci_bus_id",
    "nvmlDeviceGetMinorNumber": "minor",
    "nvmlDeviceGetMigMode": "mig_enabled",
    "nvmlDeviceGetMemoryAffinity": "numa_node",
    "nvmlDeviceGetUUID": "uuid",
}


@pytest.mark.parametrize("call", FIELDS)
@pytest.mark.parametrize(
    "code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND]
)
def test_one_bad_call_costs_one_field(call: str, code: int) -> None:
    """A call that a card or a driver does not support makes that field unknown, and nothing else."""
    whole = NvmlBackend(FakeNvml(machine(2))).read().devices[0]
    gpus = machine(2)
    gpus[0].broken = {call: code}

    device = NvmlBackend(FakeNvml(gpus)).read().devices[0]

    changed = {name for name in type(device).__slots__ if getattr(device, name) != getattr(whole, name)}
    assert changed == {FIELDS[call]}
    assert getattr(device, FIELDS[call]) is None


def test_processes_unread_are_unknown() -> None:
    """No list of processes is not an empty list."""
    gpus = machine(1)
    code = pynvml.NVML_ERROR_NOT_SUPPORTED
    gpus[0].broken = {"nvmlDeviceGetComputeRunningProcesses": code, "nvmlDeviceGetGraphicsRunningProcesses": code}

    assert NvmlBackend(FakeNvml(gpus)).read().devices[0].process_ids is None


def test_a_driver_error_at_the_links_is_not_an_absence_of_links() -> None:
    """Unreadable links are marked as unread, so that the last known ones stand; absent links are simply none."""
    gpus = switched(2)
    gpus[0].broken = {"nvmlDeviceGetNvLinkState": pynvml.NVML_ERROR_UNKNOWN}
    gpus[1].broken = {"nvmlDeviceGetNvLinkState": pynvml.NVML_ERROR_NOT_SUPPORTED}

    assert NvmlBackend(FakeNvml(gpus)).read().links.unread == {0}


def test_pcie_levels_and_peer_access() -> None:
    """PCIe relations are told in their own words; a pair that cannot reach each other is as far as can be."""
    nvml = FakeNvml(machine(4))
    nvml.levels = {
        frozenset({0, 1}): pynvml.NVML_TOPOLOGY_SINGLE,
        frozenset({0, 2}): pynvml.NVML_TOPOLOGY_HOSTBRIDGE,
        frozenset({0, 3}): pynvml.NVML_TOPOLOGY_NODE,
        frozenset({1, 2}): pynvml.NVML_TOPOLOGY_MULTIPLE,
    }
    nvml.p2p = {frozenset({1, 2}): pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED}

    rows = NvmlBackend(nvml).read().links.pcie

    assert rows == (
        ("X", "PIX", "PHB", "NODE"),
        ("PIX", "X", "SYS", "SYS"),
        ("PHB", "SYS", "X", "SYS"),
        ("NODE", "SYS", "SYS", "X"),
    )


@pytest.mark.parametrize(
    ("mask", "want"),
    [
        pytest.param(0b1, 0, id="node 0"),
        pytest.param(0b1000, 3, id="node 3"),
        pytest.param(0b11, None, id="a VM that shows both"),
    ],
)
def test_a_hidden_numa_node_is_unknown(mask: int, want: int | None) -> None:
    """A card that is near to several NUMA nodes is near to none in particular."""
    gpus = machine(1)
    gpus[0].numa_mask = mask

    assert NvmlBackend(FakeNvml(gpus)).read().devices[0].numa_node == want


@pytest.mark.parametrize(
    ("state", "want"),
    [
        pytest.param(pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED, None, id="no fabric"),
        pytest.param(pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS, "inProgress", id="fabric manager not ready"),
        pytest.param(pynvml.NVML_GPU_FABRIC_STATE_COMPLETED, "completed", id="ready"),
    ],
)
def test_fabric_is_told_with_both_ids(state: int, want: str | None) -> None:
    """Cluster uuid and clique id name a fabric together; a machine without one has no fabric at all."""
    gpus = switched(4)
    for gpu in gpus:
        gpu.fabric_state = state

    fabric = NvmlBackend(FakeNvml(gpus)).read().fabric

    assert (fabric.state if fabric else None) == want
    if fabric:
        assert (fabric.cluster_uuid, fabric.clique_id) == ("01020304-0506-0708-090a-0b0c0d0e0f10", "7")


def test_a_missing_driver_is_one_clear_error_and_is_tried_again() -> None:
    """Without a driver the reading fails with its reason; when the driver comes, the next reading works."""
    nvml = FakeNvml(machine(1))
    nvml.init_error = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    backend = NvmlBackend(nvml)
    with pytest.raises(ReadingFailed, match="NVML"):
        backend.read()

    nvml.init_error = None

    assert len(backend.read().devices) == 1
    backend.close()
    assert not nvml.is_open


@pytest.mark.parametrize(
    ("text", "want"),
    [
        pytest.param("0000:07:00.0", "00000000:07:00.0", id="short domain"),
        pytest.param("00000000:0F:00.0", "00000000:0f:00.0", id="upper case"),
        pytest.param("0f:00.0", "00000000:0f:00.0", id="no domain"),
        pytest.param("odd", "odd", id="not a bus id"),
    ],
)
def test_bus_ids_have_one_spelling(text: str, want: str) -> None:
    """Two calls of one library spell an address differently; they still mean one slot."""
    assert plain_bus_id(text) == want


def test_links_to_oneself_or_nowhere_count_for_nobody() -> None:
    """Odd far ends leave the PCIe relation."""
    nvlinks = [(NvLink(Remote.GPU, "a"), NvLink(Remote.GPU, None), NvLink(Remote.OTHER, "b")), None]

    matrix = link_matrix(nvlinks, bus_ids=["a", "b"], pcie=(("X", "PIX"), ("PIX", "X")))

    assert matrix.cells == (("X", "PIX"), ("PIX", "X"))


def test_rows_are_taken_from_the_first_source_that_knows_both() -> None:
    """A lost card's links are those of the last report; a pair that nobody ever saw is as far as can be."""
    now = ((("X", "NV2"), ("NV2", "X")), ["a", "b"])
    last = ((("X", "NV1"), ("NV1", "X")), ["b", "c"])

    rows = rows_by_uuid(["a", "b", "c"], now, last)

    assert rows == (("X", "NV2", "SYS"), ("NV2", "X", "NV1"), ("SYS", "NV1", "X"))
