"""Builders of pods and readings for the agent's tests."""

from agent.readings import DeviceReading, LinksReading, MachineReading
from atoll.api import names
from atoll.cluster.objects import (
    Container,
    ContainerState,
    ContainerStatus,
    Metadata,
    Pod,
    PodSpec,
    PodStatus,
    Present,
    Resources,
    Terminated,
)

NOW = "2026-01-31T12:00:00.000000Z"
LATER = "2026-01-31T12:30:00.000000Z"


def make_pod(
    uid: str,
    *,
    gpus: int | None = None,
    phase: str = "Running",
    state: str = "running",
    annotations: dict[str, str] | None = None,
    init_gpus: int = 0,
) -> Pod:
    """Return a pod with one container; gpus None requests none. state: running, waiting, terminated or absent."""
    requests: dict[str, str | int | float] = {names.GPU_RESOURCE: str(gpus)} if gpus is not None else {}
    init: dict[str, str | int | float] = {names.GPU_RESOURCE: str(init_gpus)} if init_gpus else {}
    shown = Terminated() if state == "terminated" else Present()
    statuses = () if state == "absent" else (ContainerStatus("main", ContainerState(**{state: shown})),)
    return Pod(
        metadata=Metadata(name=f"pod-{uid}", namespace="default", uid=uid, annotations=annotations or {}),
        spec=PodSpec(
            node_name="n1",
            containers=(Container("main", Resources(requests=requests, limits=requests)),),
            init_containers=(Container("prepare", Resources(requests=init, limits=init)),) if init_gpus else (),
        ),
        status=PodStatus(phase=phase, container_statuses=statuses),
    )


def make_reading(*devices: DeviceReading, cells: str = "NV2", nvswitch: bool = False) -> MachineReading:
    """Return a machine with the same link cell between all devices."""
    count = len(devices)
    rows = tuple(tuple("X" if row == column else cells for column in range(count)) for row in range(count))
    return MachineReading(
        devices, LinksReading(links=rows, nvswitch=nvswitch, nvlink_generation=2), expected_count=count
    )


def make_device(index: int, uuid: str | None = None, *, slot: int | None = None, **facts: object) -> DeviceReading:
    """Return a healthy 32 GB V100, by default in the PCI slot of its index; only `nameless` omits the uuid."""
    base: dict[str, object] = {
        "product_name": "Tesla V100-SXM2-32GB",
        "memory_bytes": 32 << 30,
        "compute_capability": "7.0",
        "numa_node": 0,
        "pci_bus_id": f"00000000:{(index if slot is None else slot) + 1:02x}:00.0",
        "minor": index,
        "process_ids": (),
    }
    return DeviceReading(index=index, uuid=uuid, **{**base, **facts})  # type: ignore[arg-type]
