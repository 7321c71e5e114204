"""Thin, frozen views of volumes, claims for them and their classes, as atoll.cluster.objects has them of pods."""

import msgspec

from atoll.api.kept import ENTRIES_MAX, cutting_decoder
from atoll.cluster.bounded import LARGE_BYTES, TEXT_MAX, first
from atoll.cluster.objects import LabelSelector, Metadata, NodeSelector, Resources


class TopologyRow(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Values of a node label where a class may make volumes."""

    key: str
    values: tuple[str, ...] = ()


class TopologyTerm(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Conditions that all hold."""

    match_label_expressions: tuple[TopologyRow, ...] = ()


class VolumeNodeAffinity(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Which nodes can reach a volume."""

    required: NodeSelector | None = None


class ObjectName(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Another object, by namespace and name."""

    name: str = ""
    namespace: str = ""


class CsiSource(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """A volume of a CSI driver."""

    driver: str = ""
    volume_handle: str = ""


class PersistentVolumeSpec(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Where a volume lies, and for whom."""

    node_affinity: VolumeNodeAffinity | None = None
    storage_class_name: str = ""
    capacity: dict[str, str] = {}
    access_modes: tuple[str, ...] = ()
    volume_mode: str = "Filesystem"
    csi: CsiSource | None = None
    claim_ref: ObjectName | None = None


class VolumeStatus(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """What became of a volume or a claim."""

    phase: str = ""


class PersistentVolume(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """A volume as the API server stores it."""

    metadata: Metadata
    spec: PersistentVolumeSpec = PersistentVolumeSpec()
    status: VolumeStatus = VolumeStatus()


class StorageClass(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """A storage.k8s.io/v1 StorageClass: how claims that name it find their volumes."""

    metadata: Metadata
    provisioner: str = ""
    volume_binding_mode: str = "Immediate"
    allowed_topologies: tuple[TopologyTerm, ...] = ()


class PersistentVolumeClaimSpec(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """What a claim asks for, and which volume it is bound to; empty before."""

    volume_name: str = ""
    storage_class_name: str | None = None
    access_modes: tuple[str, ...] = ()
    volume_mode: str = "Filesystem"
    resources: Resources = Resources()
    selector: LabelSelector | None = None

    def __post_init__(self) -> None:
        """Cut what is no name of a volume: the API server takes any text of a tenant."""
        msgspec.structs.force_setattr(self, "volume_name", self.volume_name[:TEXT_MAX])


class PersistentVolumeClaim(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """A claim for a volume as the API server stores it."""

    metadata: Metadata
    spec: PersistentVolumeClaimSpec = PersistentVolumeClaimSpec()
    status: VolumeStatus = VolumeStatus()


_decode_whole_claim = cutting_decoder(PersistentVolumeClaim)


def decode_volume_claim(raw: bytes) -> PersistentVolumeClaim:
    """Read a claim for a volume; of a large one only so much that no number of them fills the memory."""
    claim = _decode_whole_claim(raw)
    if len(raw) <= LARGE_BYTES:
        return claim
    spec = first(claim.spec, entries_max=ENTRIES_MAX)
    return PersistentVolumeClaim(claim.metadata, spec, first(claim.status, entries_max=ENTRIES_MAX))


decode_volume = msgspec.json.Decoder(PersistentVolume).decode
