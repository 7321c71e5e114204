"""Replaces every name in a snapshot by a number, for users who may not share names.

Decisions stay the same: equal names stay equal, and order, sizes and counts stay. Names
from Kubernetes and Atoll themselves stay readable: the prefixes in KEPT_GROUPS, effects, operators, models of GPUs.
Free text for people is left out.

A word is replaced only where it can be a name: a claim may be called `nvlink`, a namespace `amd`, a pod `0`, but a
claim's interconnect and counts must not change. So fields of fixed words (PLAIN_FIELDS) and quantities stay, and a
number is replaced only in the place of a name.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from atoll.api import names
from atoll.cluster.gangs import kueue_topology
from atoll.cluster.gangs.membership import LEADER, WORKER
from atoll.cluster.leases import lease_name
from atoll.cluster.reports import BOOT_ID_LENGTH
from atoll.cluster.volume_fit import STATIC
from atoll.explain.codec import document_of, snapshot_of
from atoll.explain.snapshot import ClusterSnapshot

KEPT_GROUPS: Final = ("kubernetes.io", "k8s.io", "x-k8s.io", names.GROUP, "nvidia.com", "amd.com")
KINDS: Final = (
    "nodes",
    "pods",
    "claims",
    "reports",
    "gangs",
    "topologies",
    "heartbeats",
    "leases",
    "budgets",
    "priorityClasses",
    "volumes",
    "volumeClaims",
    "storageClasses",
    "csiNodes",
    "csiDrivers",
    "storageCapacities",
    "namespaces",
)
PLAIN_FIELDS: Final = frozenset(
    {
        "accessModes",
        "agentVersion",
        "apiVersion",
        "architecture",
        "capacity",
        "cells",
        "computeCapability",
        "cpuAffinity",
        "creationTimestamp",
        "deletionTimestamp",
        "effect",
        "endedBy",
        "endedTime",
        "firstTime",
        "interconnect",
        "island",
        "kind",
        "lastTime",
        "lastTransitionTime",
        "maximumVolumeSize",
        "memory",
        "migProfile",
        "mode",
        "model",
        "models",
        "nodeAffinityPolicy",
        "nodeTaintsPolicy",
        "nvlink",
        "nvlinks",
        "observedTime",
        "operator",
        "pcie",
        "phase",
        "podResourceVersion",
        "policy",
        "preemptionPolicy",
        "productName",
        "profile",
        "protocol",
        "quietSince",
        "reason",
        "recoveryTimeout",
        "requeueAt",
        "resourceVersion",
        "restartPolicy",
        "since",
        "state",
        "status",
        "time",
        "timeout",
        "timestamp",
        "type",
        "vendor",
        "visibleDevices",
        "volumeBindingMode",
        "volumeMode",
        "whenUnsatisfiable",
    }
)
"""Fields with a word of a fixed list, a time, a size, or driver output: never a name that somebody gave."""
_QUANTITIES: Final = frozenset({"limits", "requests", "allocatable", "capacity", "overhead"})
_MAPS: Final = frozenset({"labels", "annotations", "matchLabels", "nodeSelector"})
_KEYS: Final = frozenset(
    {"key", "topologyKey", "nodeLabel", "level", "podIndexLabel", "subGroupIndexLabel", "matchLabelKeys"}
    | {"mismatchLabelKeys"}
)
_PARTS: Final = re.compile(r"([:,/@])")
_NUMBER: Final = re.compile(r"-?[0-9]+(\.[0-9]+)?")
_TEXTS: Final = frozenset({"reason", "message", "by", "serial", "pciBusId"})
_NAMING: Final = frozenset({names.CLAIM, names.GANG, names.POD_SET, names.CLAIM_UID, names.GANG_MADE_FOR})
_NAMING_LEASE: Final = frozenset(
    {names.LEASE_NODE, names.LEASE_NODE_UID, names.LEASE_ATTEMPT, names.LEASE_DEVICE_UUID, names.GANG_SUSPENDED}
)
_ON_NODE: Final = (names.ALLOCATED, names.KEPT)
"""Annotations of the form NODE:ID,ID."""
FOREIGN_KIND: Final = "Foreign"
_FIXED: Final = frozenset({LEADER, WORKER, "pods"})
"""Pod sets whose names have a meaning."""


def anonymize(snapshot: ClusterSnapshot) -> ClusterSnapshot:
    """Replace the names."""
    document = document_of(snapshot)
    words = _Pseudonyms(document)
    masked = {key: words.masked(value, key) if isinstance(value, list) else value for key, value in document.items()}
    for number, (lease, hidden) in enumerate(zip(document["leases"], masked["leases"], strict=True)):
        hidden["metadata"]["name"] = words.lease(lease["metadata"]["name"], number)
    return snapshot_of(masked)


class _Pseudonyms:
    """Replacement of each word: numbered in order per kind, so that sorted names stay sorted."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        found: dict[str, set[str]] = {kind: set() for kind in ("node", "name", "uid", "label")}
        for key in KINDS:
            _collect(document.get(key, []), found, key)
        found["name"] -= found["node"] | _FIXED
        found["uid"] -= found["name"] | found["node"]
        found["label"] -= found["name"] | found["node"] | found["uid"]
        self._words = {
            word: f"00000000-0000-0000-0000-{number:012d}" if _is_uuid(word) else f"{kind}-{number:06d}"
            for kind, all_words in found.items()
            for number, word in enumerate(sorted(all_words))
        }
        self._leases = {
            lease_name(node, device_id): lease_name(self._words[node], device_id)
            for node, device_id in _devices(document, found["node"])
        }

    def name(self, text: str) -> str:
        """Return the replacement of a text that is only a name."""
        return self._words.get(text, text)

    def word(self, text: str) -> str:
        """Return the replacement of a word, or of the words of a list; numbers stay."""
        if text in self._words and not _is_number(text):
            return self._words[text]
        return "".join(part if _is_number(part) else self._words.get(part, part) for part in _PARTS.split(text))

    def key(self, key: str) -> str:
        """Return the replacement of a label or annotation key."""
        for prefix in names.OWN_ANNOTATION_PREFIXES:
            if key.startswith(prefix):
                return prefix + self.name(key.removeprefix(prefix))
        return key if _is_kept(key.rpartition("/")[0]) else self.name(key)

    def resource(self, resource: str) -> str:
        """Return the replacement of a counted resource; Kubernetes' own have no group."""
        return self.key(resource) if "/" in resource else resource

    def lease(self, text: str, number: int) -> str:
        """Return the replacement of a GPU Lease's name, which must still give node and device."""
        return self._leases.get(text, f"gpu-unknown-{number:06d}")

    def entry(self, key: str, text: str) -> str:
        """Return the replacement of a label or annotation value."""
        if key in _ON_NODE:
            node, colon, ids = text.partition(":")
            return self.name(node) + colon + ids
        if key in _NAMING or key in _NAMING_LEASE:
            return "/".join(map(self.name, text.split("/")))
        if key == names.LEASE_IN_DOUBT:
            return text.partition(" ")[0]
        is_own = key.rpartition("/")[0] == names.GROUP and key != names.UUIDS
        return text if is_own else self.word(text)

    def masked(self, value: Any, key: str = "") -> Any:  # noqa: ANN401 - a JSON document
        """Return a document with its names replaced."""
        if isinstance(value, dict):
            return self._masked_object(value, key)
        if isinstance(value, list):
            return [self.masked(entry, key) for entry in value]
        if not isinstance(value, str) or key in PLAIN_FIELDS:
            return value
        if key in _KEYS:
            return self.key(value)
        if key == "holderIdentity":
            return "/".join(map(self.name, value.split("/", 2)))
        if key == "name" and value.partition("/")[0] == names.GROUP:  # a gate of Atoll's
            return value
        return self.name(value) if key in _RULES else self.word(value)

    def _masked_object(self, value: Mapping[str, Any], key: str) -> dict[str, Any]:
        if key in _QUANTITIES:
            return {self.resource(k): v for k, v in value.items()}
        if key in _MAPS:
            return {self.key(k): self.entry(k, v) for k, v in value.items()}
        left_out = _TEXTS - {"reason"} if {"type", "status"} <= value.keys() else _TEXTS  # a condition's is a word
        masked = {k: self.masked(v, k) for k, v in value.items() if k not in left_out}
        if key == "ownerReferences" and not _is_public(str(value.get("apiVersion", ""))):
            masked |= {"apiVersion": f"{FOREIGN_KIND.lower()}/v1", "kind": FOREIGN_KIND}
        return masked


def _devices(document: Mapping[str, Any], nodes: Iterable[str]) -> Iterable[tuple[str, int]]:
    """Yield (node, device id) of every device that a report has or an object with a node's name could mean."""
    ids = {report["metadata"]["name"]: _ids(report) for report in document["reports"]}
    for lease in document["leases"]:
        told = lease["metadata"].get("annotations", {})
        node, number = told.get(names.LEASE_NODE, ""), told.get(names.LEASE_DEVICE_ID, "")
        if number.isascii() and number.isdigit() and len(number) < 6:
            ids.setdefault(node, set()).add(int(number))
    for node in nodes:
        yield from ((node, device_id) for device_id in ids.get(node, ()))


def _ids(report: Mapping[str, Any]) -> set[int]:
    return {device["id"] for device in report.get("status", {}).get("devices", ())}


def _collect(value: Any, found: dict[str, set[str]], key: str) -> None:  # noqa: ANN401 - a JSON document
    """Collect every word that is a name."""
    if isinstance(value, dict):
        for name, entry in value.items():
            _collect_entry(name, entry, found, key)
        return
    for entry in value if isinstance(value, list) else ():
        _collect(entry, found, key)


def _collect_entry(name: str, entry: Any, found: dict[str, set[str]], key: str) -> None:  # noqa: ANN401
    if name in ("labels", "matchLabels", "nodeSelector") and isinstance(entry, dict):
        found["label"].update(_own_keys(entry))
        values = (value for k, value in entry.items() if k.rpartition("/")[0] != names.GROUP)
        found["label"].update(value for value in values if value and not _is_number(value))
    elif name == "annotations" and isinstance(entry, dict):
        _collect_annotations(entry, found)
    elif name in _QUANTITIES and isinstance(entry, dict):
        found["label"].update(resource for resource in _own_keys(entry) if "/" in resource)
    elif name in ("matchLabelKeys", "mismatchLabelKeys") and isinstance(entry, list):
        found["label"].update(_own_keys(entry))
    elif name == "namespaces" and isinstance(entry, list):
        found["name"].update(entry)
    elif name in ("values", "uuids") and isinstance(entry, list):
        found["label"].update(value for value in entry if isinstance(value, str) and not _is_number(value))
    elif isinstance(entry, str) and entry:
        rule = _RULES.get(name)
        if rule is not None:
            rule(entry, found, key)
    else:
        _collect(entry, found, key if name == "metadata" else name)


def _collect_annotations(entry: Mapping[str, str], found: dict[str, set[str]]) -> None:
    for key in (names.CLAIM, names.GANG, names.POD_SET):
        found["name"].update(filter(None, entry.get(key, "").split("/")))
    for key in _ON_NODE:
        found["node"].update(filter(None, (entry.get(key, "").partition(":")[0],)))
    found["node"].update(filter(None, (entry.get(names.LEASE_NODE),)))
    for key in (_NAMING | _NAMING_LEASE) - {names.CLAIM, names.GANG, names.POD_SET, names.LEASE_NODE}:
        found["uid"].update(filter(None, (entry.get(key),)))
    found["name"].update(filter(None, (entry.get(kueue_topology.GROUP),)))
    found["label"].update(_own_keys(entry[key] for key in kueue_topology.LEVELS if entry.get(key)))
    for key, value in entry.items():
        if key == names.UUIDS or key.startswith(names.CONTAINER_UUIDS_PREFIX):
            found["uid"].update(filter(None, value.split(",")))
        if key.startswith(names.OWN_ANNOTATION_PREFIXES):
            found["name"].update(filter(None, (key.partition("/")[2],)))


def _is_number(text: str) -> bool:
    return _NUMBER.fullmatch(text) is not None


def _is_uuid(text: str) -> bool:
    """True for a uid, which keeps its form: boot ids are compared only if both are the kernel's own."""
    return len(text) == BOOT_ID_LENGTH and text.count("-") == 4


def _own_keys(keys: Iterable[str]) -> set[str]:
    return {key for key in keys if not _is_kept(key.rpartition("/")[0])}


def _is_kept(group: str) -> bool:
    return any(group == kept or group.endswith("." + kept) for kept in KEPT_GROUPS)


def _is_public(api_version: str) -> bool:
    """True if a kind is Kubernetes' own or of a well-known group."""
    group = api_version.rpartition("/")[0]
    return "." not in group or _is_kept(group)


def _note_name(text: str, found: dict[str, set[str]], key: str) -> None:
    if key in ("nodes", "reports", "heartbeats", "csiNodes"):
        found["node"].add(text)
    elif key != "leases" and text.partition("/")[0] != names.GROUP:
        found["name"].add(text)


def _note(kind: str) -> Callable[[str, dict[str, set[str]], str], None]:
    def note(text: str, found: dict[str, set[str]], _key: str) -> None:
        found[kind].add(text)

    return note


def _note_scheduler(text: str, found: dict[str, set[str]], _key: str) -> None:
    if text not in (names.SCHEDULER_NAME, names.DEFAULT_SCHEDULER_NAME):
        found["name"].add(text)


def _note_class(text: str, found: dict[str, set[str]], _key: str) -> None:
    if text != names.RUNTIME_CLASS:
        found["name"].add(text)


def _note_provisioner(text: str, found: dict[str, set[str]], _key: str) -> None:
    if text != STATIC:
        found["name"].add(text)


def _note_holder(text: str, found: dict[str, set[str]], _key: str) -> None:
    *shown, uid = text.split("/", 2)
    found["name"].update(filter(None, shown or (uid,)))
    found["uid"].update(filter(None, (uid,)))


def _note_key(text: str, found: dict[str, set[str]], _key: str) -> None:
    found["label"].update(_own_keys([text]))


_RULES: Final[Mapping[str, Callable[[str, dict[str, set[str]], str], None]]] = {
    "name": _note_name,
    "namespace": _note("name"),
    "claimName": _note("name"),
    "volumeName": _note("name"),
    "volumeHandle": _note("name"),
    "driver": _note("name"),
    "provisioner": _note_provisioner,
    "gangRef": _note("name"),
    "group": _note("name"),
    "topologyName": _note("name"),
    "pod": _note("name"),
    "schedulerName": _note_scheduler,
    "runtimeClassName": _note_class,
    "node": _note("node"),
    "nodeName": _note("node"),
    "nominatedNodeName": _note("node"),
    "uid": _note("uid"),
    "uuid": _note("uid"),
    "parentUuid": _note("uid"),
    "nodeUid": _note("uid"),
    "bootId": _note("uid"),
    "bootID": _note("uid"),
    "clusterUUID": _note("uid"),
    "holderIdentity": _note_holder,
    "key": _note_key,
    "topologyKey": _note_key,
    "nodeLabel": _note_key,
    "level": _note_key,
    "podIndexLabel": _note_key,
    "subGroupIndexLabel": _note_key,
    "value": _note("label"),
}
