"""A snapshot in which every name is a number, for those who may not show theirs.

In: a snapshot. Out: one of the same decisions: equal names stay equal, their order stays, sizes and counts stay. What
Kubernetes and Atoll themselves name stays readable, also where somebody gave a pod or a label the same word: the
prefixes in KEPT_GROUPS, the fields of VOCABULARY, quantities, and numbers. Free text for people is left out.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from atoll.api import names
from atoll.cluster.leases import lease_name
from atoll.cluster.reports import BOOT_ID_LENGTH
from atoll.explain.codec import FILLER, document_of, snapshot_of
from atoll.explain.snapshot import ClusterSnapshot

KEPT_GROUPS: Final = ("kubernetes.io", "k8s.io", names.GROUP, "nvidia.com")
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
)
VOCABULARY: Final = frozenset({
    "apiVersion", "architecture", "cells", "computeCapability", "effect", "health", "interconnect", "island",
    "kind", "memory", "migProfile", "mode", "model", "models", "nvlink", "nvlinks", "operator", "pcie", "phase",
    "policy", "preemptionPolicy", "productName", "profile", "protocol", "reason", "restartPolicy", "state",
    "status", "timestamp", "type", "vendor", "visibleDevices",
})  # fmt: skip
"""Fields whose text is a word of Kubernetes', Atoll's or the vendors', never somebody's name."""
QUANTITIES: Final = frozenset({"allocatable", "capacity", "requests", "limits", "overhead"})
_PARTS: Final = re.compile(r"([:,/@])")
_TEXTS: Final = frozenset({"reason", "message", "by", "serial", "pciBusId"})
_LISTED: Final = ("name", "namespace", "uid", "uuid", "generateName")


def disguised(snapshot: ClusterSnapshot) -> ClusterSnapshot:
    """Replace the names."""
    document = document_of(snapshot)
    words = _Words(document)
    masked = {key: words.masked(value, key) if isinstance(value, list) else value for key, value in document.items()}
    for lease in masked["leases"]:
        told = lease["metadata"].get("annotations", {})
        number = told.get(names.LEASE_DEVICE_ID, "")
        if names.LEASE_NODE in told and number.isdigit():
            lease["metadata"]["name"] = lease_name(told[names.LEASE_NODE], int(number))
    return snapshot_of(masked)


class _Words:
    """Which word stands for which: per kind numbered in order, so that whatever is sorted stays sorted."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        found: dict[str, set[str]] = {kind: set() for kind in ("node", "name", "uid", "label")}
        for key in KINDS:
            _collect(document[key], found, key)
        for words in found.values():
            words.difference_update([word for word in words if _is_number(word)])
        found["name"] -= found["node"]
        found["uid"] -= found["name"] | found["node"]
        found["label"] -= found["name"] | found["node"] | found["uid"]
        self._words = {
            word: f"00000000-0000-0000-0000-{number:012d}" if _is_uuid(word) else f"{kind}-{number:06d}"
            for kind, all_words in found.items()
            for number, word in enumerate(sorted(all_words))
        }

    def word(self, text: str) -> str:
        """Return what stands for a word, or for the words of a list such as NODE:0,1."""
        if text in self._words:
            return self._words[text]
        return "".join(self._words.get(part, part) for part in _PARTS.split(text))

    def key(self, key: str) -> str:
        """Return what stands for the key of a label or an annotation."""
        group, slash, name = key.rpartition("/")
        if slash and _is_kept(group):
            return f"{group}/{self._words.get(name, name)}"
        return key if key == FILLER else self.word(key)

    def masked(self, value: Any, key: str = "") -> Any:  # noqa: ANN401 - a JSON document
        """Return a document with its names replaced."""
        if key in QUANTITIES:
            return value
        if isinstance(value, dict):
            is_map = key in ("labels", "annotations", "matchLabels", "nodeSelector")
            left_out = _TEXTS - {"reason"} if {"type", "status"} <= value.keys() else _TEXTS  # a condition's is a word
            return {self.key(k) if is_map else k: self.masked(v, k) for k, v in value.items() if k not in left_out}
        if isinstance(value, list):
            return [self.masked(entry, key) for entry in value]
        if not isinstance(value, str) or key == FILLER or key in VOCABULARY:
            return value
        return self.key(value) if key in ("key", "topologyKey", "nodeLabel", "level") else self.word(value)


def _collect(value: Any, found: dict[str, set[str]], key: str) -> None:  # noqa: ANN401 - a JSON document
    """Note every word that names something."""
    if isinstance(value, dict):
        for name, entry in value.items():
            _collect_entry(name, entry, found, key)
        return
    for entry in value if isinstance(value, list) else ():
        _collect(entry, found, key)


def _collect_entry(name: str, entry: Any, found: dict[str, set[str]], key: str) -> None:  # noqa: ANN401
    if name in ("labels", "matchLabels", "nodeSelector") and isinstance(entry, dict):
        found["label"].update(_own_keys(entry))
        found["label"].update(value for k, value in entry.items() if value and not k.startswith(names.GROUP))
    elif name == "annotations" and isinstance(entry, dict):
        _collect_annotations(entry, found)
    elif isinstance(entry, str) and entry:
        rule = _RULES.get(name)
        if rule is not None:
            rule(entry, found, key)
    elif name == "values" and isinstance(entry, list):
        found["label"].update(value for value in entry if isinstance(value, str))
    else:
        _collect(entry, found, name if name in ("metadata", "containers", "initContainers") else key)


def _collect_annotations(entry: Mapping[str, str], found: dict[str, set[str]]) -> None:
    for key in (names.CLAIM, names.GANG, names.POD_SET):
        found["name"].update(part for part in entry.get(key, "").split("/") if part)
    found["uid"].update(filter(None, (entry.get(names.CLAIM_UID), entry.get(names.LEASE_ATTEMPT))))
    found["uid"].update(filter(None, entry.get(names.UUIDS, "").split(",")))
    found["uid"].update(filter(None, (entry.get(names.LEASE_DEVICE_UUID), entry.get(names.LEASE_NODE_UID))))


def _is_uuid(text: str) -> bool:
    """A uid keeps its form, because boot ids are compared only where both are the kernel's own."""
    return len(text) == BOOT_ID_LENGTH and text.count("-") == 4


def _is_number(text: str) -> bool:
    """A number names nobody, and stands as an id, a count or a size elsewhere."""
    return text.lstrip("-").isdigit()


def _own_keys(keys: Iterable[str]) -> set[str]:
    return {key for key in keys if not _is_kept(key.rpartition("/")[0])}


def _is_kept(group: str) -> bool:
    return any(group == kept or group.endswith("." + kept) for kept in KEPT_GROUPS)


def _note_name(text: str, found: dict[str, set[str]], key: str) -> None:
    if key in ("nodes", "reports", "heartbeats"):
        found["node"].add(text)
    elif key != "leases" and not _is_kept(text.rpartition("/")[0]):  # a gate of Atoll's is a word of Atoll's
        found["name"].add(text)


def _note(kind: str) -> Callable[[str, dict[str, set[str]], str], None]:
    def note(text: str, found: dict[str, set[str]], _key: str) -> None:
        found[kind].add(text)

    return note


def _note_holder(text: str, found: dict[str, set[str]], _key: str) -> None:
    namespace, _, rest = text.partition("/")
    name, _, uid = rest.partition("/")
    found["name"].update(filter(None, (namespace, name) if rest else ()))
    found["uid"].update(filter(None, (uid,)))


def _note_key(text: str, found: dict[str, set[str]], _key: str) -> None:
    found["label"].update(_own_keys([text]))


_RULES: Final[Mapping[str, Callable[[str, dict[str, set[str]], str], None]]] = {
    "name": _note_name,
    "namespace": _note("name"),
    "claimName": _note("name"),
    "gangRef": _note("name"),
    "topologyName": _note("name"),
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
    "value": _note("label"),
}
