"""What CSI drivers say of nodes and storage: how many volumes a node takes, and where there is room for new ones. Pure.

As kube-scheduler's NodeVolumeLimits and VolumeBinding see it. Inline volumes and volumes of in-tree plugins are not
counted.
"""

from collections.abc import Iterator, Mapping

import msgspec

from atoll.api.kept import ENTRIES_MAX
from atoll.cluster.bounded import LARGE_BYTES, first
from atoll.cluster.objects import LabelSelector, Metadata, NodeSelectorTerm, Requirement
from atoll.cluster.quantities import parse_amount
from atoll.cluster.storage import StorageClass


class VolumeCount(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Number of volumes of a driver that a node takes; None for any number."""

    count: int | None = None


class NodeDriver(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """A driver on a node."""

    name: str
    allocatable: VolumeCount = VolumeCount()


class NodeDriversSpec(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """The drivers of a node; None, which the API server writes, for none."""

    drivers: tuple[NodeDriver, ...] | None = None


class CsiNode(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """A CSINode: the drivers of the node of its name."""

    metadata: Metadata
    spec: NodeDriversSpec = NodeDriversSpec()

    def limits(self) -> dict[str, int]:
        """Return how many volumes the node takes, of the drivers that say so."""
        return {one.name: one.allocatable.count for one in self.spec.drivers or () if one.allocatable.count is not None}


class CsiDriverSpec(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """What counts of a driver."""

    storage_capacity: bool = False


class CsiDriver(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """A CSIDriver."""

    metadata: Metadata
    spec: CsiDriverSpec = CsiDriverSpec()


class StorageCapacity(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """A CSIStorageCapacity: room for new volumes of a class, for the nodes of a selector."""

    metadata: Metadata
    storage_class_name: str = ""
    node_topology: LabelSelector | None = None
    capacity: str = "0"
    maximum_volume_size: str = ""

    def holds(self, wanted: int) -> bool:
        """Tell whether a volume of so many bytes can be made."""
        return parse_amount("storage", self.maximum_volume_size or self.capacity) >= wanted

    def term(self) -> NodeSelectorTerm | None:
        """Return what a node must match to reach this storage; None for every node."""
        selector = self.node_topology or LabelSelector()
        labels = (Requirement(key, "In", (value,)) for key, value in sorted(selector.match_labels.items()))
        rows = (*labels, *selector.match_expressions)
        return NodeSelectorTerm(match_expressions=rows) if rows else None


def capacity_terms(
    capacities: Mapping[tuple[str, str], StorageCapacity], storage_class: str, wanted: int
) -> Iterator[NodeSelectorTerm | None]:
    """Yield what nodes must match for a new volume of a class; None for every node. Storage that names no nodes is
    reached by none."""
    for one in capacities.values():
        if one.storage_class_name == storage_class and one.node_topology is not None and one.holds(wanted):
            yield one.term()


decode_csi_node = msgspec.json.Decoder(CsiNode).decode
decode_csi_driver = msgspec.json.Decoder(CsiDriver).decode
decode_storage_capacity = msgspec.json.Decoder(StorageCapacity).decode


_decode_whole_class = msgspec.json.Decoder(StorageClass).decode


def decode_storage_class(raw: bytes) -> StorageClass:
    """Read a storage class; of a large one only so much as of a large pod."""
    kind = _decode_whole_class(raw)
    return kind if len(raw) <= LARGE_BYTES else first(kind, entries_max=ENTRIES_MAX)
