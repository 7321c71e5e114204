"""Which labels and annotations of a watched object stay in memory.

Pure; used by every model of watched objects while it is decoded. Kubernetes bounds the annotations of one object by 256
KiB and its labels only by the size of the object, so a tenant could fill the memory of every part that watches.
"""

import re
from collections.abc import Callable, Mapping
from itertools import chain, islice
from typing import Final, TypeVar

import msgspec

from atoll.api import names
from atoll.api.depth import at_any_depth

T = TypeVar("T")

LABELS_MAX: Final = 256
"""Labels kept of one object. Selectors may name any of them, so Atoll's and Kueue's come first, then the others in the
order of the API server, which is that of the alphabet."""
RANKS_MAX: Final = 64
"""Foreign annotations kept of one object. Only ranks in a gang are read, whose keys a GpuGang chooses."""
RANK_DIGITS_MAX: Final = 6
TEXT_MAX: Final = 8192
"""Characters kept of an annotation that Atoll reads; 64 uuids of devices are shorter."""
MODELS_TEXT_MAX: Final = 65_536
"""The same for lists of loaded models, which are JSON."""
KUEUE_WORKLOAD: Final = "kueue.x-k8s.io/workload"
"""Kueue writes the name of the Workload on the pods of whatever it has admitted."""
KUEUE_PODSET: Final = "kueue.x-k8s.io/podset-"
_KUEUE: Final = (
    KUEUE_WORKLOAD,
    *(f"{KUEUE_PODSET}{mode}-topology" for mode in ("required", "preferred", "unconstrained", "slice-required")),
    f"{KUEUE_PODSET}slice-size",
    f"{KUEUE_PODSET}group-name",
)
_READ: Final = frozenset(
    (*_KUEUE, *(text for text in vars(names).values() if isinstance(text, str) and "/" in text and text != names.HOSTS))
)
_DOMAINS: Final = (f"{names.GROUP}/", f"job.{names.GROUP}/", "kueue.x-k8s.io/")

_EXCESS_BYTES: Final = 128 * 1024
"""Size as JSON from which on labels are cut before they are decoded; LABELS_MAX of the longest take less."""
_OWN_LABEL: Final = re.compile(rb'"(?:%s)[^"\\]*":"[^"\\]*"' % "|".join(map(re.escape, _DOMAINS)).encode())
_FIELDS_BYTES: Final = 256 * 1024
"""Size as JSON up to which fields of a spec are read, the smallest first; the names of 5,000 nodes in a term of node
affinity are smaller."""
_LISTED: Final = frozenset(
    ("affinity", "nodeSelector", "overhead", "resources", "selector", "tolerations", "topologySpreadConstraints")
)
"""Fields of a spec that may have so many small entries that to decode them takes longest."""
ENTRIES_MAX: Final = 1024
"""Entries kept of the containers of one large pod, of its affinity, and of each list of its container statuses."""
_LONG: Final = frozenset(
    (
        *("containers", "initContainers", "resourceClaims", "schedulingGates", "volumes"),
        *("conditions", "containerStatuses", "ephemeralContainerStatuses", "initContainerStatuses"),
    )
)
"""Lists of a pod of which no more entries are decoded than are kept."""
_CONTAINERS_BYTES: Final = 64 * 1024
"""Size as JSON of the ports of all containers that are read, and of their resources."""
OWNERS_MAX: Final = 16
_EMPTY: Final = {b"[": msgspec.Raw(b"[]"), b"{": msgspec.Raw(b"{}")}
_APART: Final = msgspec.Raw(
    b'{"podAntiAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":[{"topologyKey":"kubernetes.io/hostname",'
    b'"labelSelector":{},"namespaceSelector":{}}]}}'
)
"""Stands for an affinity that is too large to read, which may keep any other pod off the node."""
_Fields = dict[str, msgspec.Raw]


class _Sections(msgspec.Struct, rename="camel"):
    metadata: _Fields
    api_version: str | msgspec.UnsetType = msgspec.UNSET
    kind: str | msgspec.UnsetType = msgspec.UNSET
    spec: _Fields | msgspec.UnsetType = msgspec.UNSET
    status: _Fields | msgspec.UnsetType = msgspec.UNSET


_decode_sections = at_any_depth(msgspec.json.Decoder(_Sections).decode)
_decode_entries = at_any_depth(msgspec.json.Decoder(list[msgspec.Raw]).decode)
_decode_fields = at_any_depth(msgspec.json.Decoder(_Fields).decode)


_CHARGED: Final = ("cpu", "memory", "ephemeral-storage", names.GPU_RESOURCE)
"""What a container takes from others, however much else it names."""
_Charged = msgspec.defstruct(
    "_Charged",
    [(f"amount_{number}", msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for number in range(len(_CHARGED))],
    rename={f"amount_{number}": resource for number, resource in enumerate(_CHARGED)},
)
_ChargedResources = msgspec.defstruct(
    "_ChargedResources",
    [(part, _Charged | msgspec.UnsetType, msgspec.UNSET) for part in ("requests", "limits")],
)
_decode_charged = at_any_depth(msgspec.json.Decoder(_ChargedResources).decode)


def without_excess(raw: bytes, *, bytes_max: int = _EXCESS_BYTES) -> bytes:
    """Return an object of more than `bytes_max`, as JSON, without managed fields and most of what is too much to read.

    At least those of its labels stay that `kept_labels` keeps, and one entry of a long list more than ENTRIES_MAX, so
    that whoever decodes it sees that there were more. The API server takes 35,000 labels and 500,000 terms of affinity:
    to decode them all would hold an event loop for longer than it may be held.
    """
    if len(raw) <= bytes_max:
        return raw
    try:
        sections = _decode_sections(raw)
        for fields in (sections.spec, sections.status):
            if isinstance(fields, dict):
                _cut(fields)
        metadata = sections.metadata
        metadata.pop("managedFields", None)
        _cut_list(metadata, "ownerReferences", OWNERS_MAX)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return raw  # whoever decodes it says what is wrong
    if "labels" in metadata:
        metadata["labels"] = msgspec.Raw(_first_labels(bytes(metadata["labels"])))
    return msgspec.json.encode(sections)


def cutting_decoder(kind: type[T]) -> Callable[[bytes], T]:
    """Return the decoder of a kind of which large objects are cut before they are decoded, of any depth."""
    decode = at_any_depth(msgspec.json.Decoder(kind).decode)
    return lambda raw: decode(without_excess(raw))


def _cut(fields: _Fields) -> None:
    room = _FIELDS_BYTES
    for name in sorted(_LISTED & fields.keys(), key=lambda name: len(bytes(fields[name]))):
        room -= len(bytes(fields[name]))
        if room < 0:
            fields[name] = _APART if name == "affinity" else _EMPTY.get(bytes(fields[name])[:1], fields[name])
    for name in _LONG & fields.keys():
        _cut_list(fields, name, ENTRIES_MAX + 1)
        if "ontainer" in name and len(bytes(fields[name])) > _CONTAINERS_BYTES and bytes(fields[name]).startswith(b"["):
            fields[name] = msgspec.Raw(msgspec.json.encode(_slim_containers(bytes(fields[name]))))


def _cut_list(fields: _Fields, name: str, entries_max: int) -> None:
    entries = bytes(fields.get(name, b""))
    if entries.startswith(b"[") and len(entries) > 2 * entries_max:  # an entry and its comma take two bytes at least
        fields[name] = msgspec.Raw(msgspec.json.encode(_decode_entries(entries)[:entries_max]))


def _slim_containers(entries: bytes) -> list[_Fields]:
    """Containers, or their statuses, with as much of their ports and resources as is read."""
    containers = [_decode_fields(bytes(entry)) for entry in _decode_entries(entries)]
    ports_room = resources_room = _CONTAINERS_BYTES
    for fields in containers:
        for name in ("allocatedResources", "ports"):
            ports_room -= len(bytes(fields.get(name, b"")))
            if ports_room < 0:
                fields.pop(name, None)
        resources = bytes(fields.get("resources", b""))
        resources_room -= len(resources)
        if resources_room < 0 and resources:
            fields["resources"] = msgspec.Raw(msgspec.json.encode(_decode_charged(resources)))
    return containers


def _first_labels(labels: bytes) -> bytes:
    first = labels[1 : 1 + labels.rfind(b'","', 0, _EXCESS_BYTES)]
    if len(labels) <= _EXCESS_BYTES or not first:
        return labels
    own = islice((one[0] for one in _OWN_LABEL.finditer(labels)), LABELS_MAX)
    return b"{" + b",".join((*own, first)) + b"}"


def kept_labels(labels: dict[str, str]) -> dict[str, str]:
    """Return at most LABELS_MAX labels, the given mapping itself if it has no more."""
    if len(labels) <= LABELS_MAX:
        return labels
    first = (key for key in labels if key.startswith(_DOMAINS))
    others = (key for key in labels if not key.startswith(_DOMAINS))
    return {key: labels[key] for key in islice(chain(first, others), LABELS_MAX)}


def kept_annotations(annotations: Mapping[str, str]) -> tuple[dict[str, str], int]:
    """Return the annotations that some decision may read, and the bytes of keys and values of all others.

    Of a text that is too long for its meaning only the beginning stays, and the rest counts as left out.
    """
    if not annotations:
        return {}, 0
    ranks = (key for key, text in annotations.items() if len(text) <= RANK_DIGITS_MAX and text.isdecimal())
    devices = (key for key in annotations if key.startswith(names.OWN_ANNOTATION_PREFIXES))
    wanted = {*(_READ & annotations.keys()), *devices, *islice((key for key in ranks if key not in _READ), RANKS_MAX)}
    kept = {
        key: text[: MODELS_TEXT_MAX if key in names.MODEL_ANNOTATIONS else TEXT_MAX]
        for key, text in annotations.items()
        if key in wanted
    }
    return kept, _bytes(annotations) - _bytes(kept)


def _bytes(annotations: Mapping[str, str]) -> int:
    return len("".join(chain(annotations, annotations.values())).encode())
