"""Objects that a watch has shown so far, and the changes between two states.

Pure. Identity is the UID: a successor of the same name is a deletion and an addition.

Terms: a *listing* is a complete view of the collection; objects that it lacks at its end are gone, with an unknown last
state. Such deletions are *synthetic*: they prove that the object left the API, and nothing about its last state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

Key = tuple[str, str]
"""Namespace (empty for cluster-scoped objects) and name."""

TOMBSTONES_MAX = 4096


class CachedMetadata(Protocol):
    """The part of an object's metadata that is read."""

    @property
    def name(self) -> str: ...
    @property
    def namespace(self) -> str: ...
    @property
    def uid(self) -> str: ...
    @property
    def resource_version(self) -> str: ...


class HasMetadata(Protocol):
    """Any decoded API object."""

    @property
    def metadata(self) -> CachedMetadata: ...


T = TypeVar("T", bound=HasMetadata)


class ChangeKind(StrEnum):
    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


@dataclass(frozen=True, slots=True)
class Change(Generic[T]):
    """One step from one state of the cache to the next.

    `object` is the new state; for a DELETED the last state known: the event's own, or the cached one if `synthetic`.
    `old` is the cached object of this UID, None for ADDED and for a deletion of an unknown object.
    `synthetic` marks deletions inferred from a gap, which prove nothing about the object's end.
    """

    kind: ChangeKind
    object: T
    old: T | None = None
    synthetic: bool = False


class Cache(Generic[T]):
    """Objects by key and by UID. Every method that observes something returns the changes, in order."""

    def __init__(self) -> None:
        self._objects: dict[Key, T] = {}
        self._by_uid: dict[str, T] = {}
        self._untrusted: dict[Key, str] = {}
        self._tombstones: dict[str, str] = {}
        self._listed: set[Key] | None = None
        self.shows_the_past = False
        """True if a listing had an object in an older state than the one held, or than its own deletion: the server
        was restored from a backup, whatever its current version is."""

    @property
    def objects(self) -> Mapping[Key, T]:
        return self._objects

    @property
    def by_uid(self) -> Mapping[str, T]:
        return self._by_uid

    @property
    def untrusted(self) -> Mapping[Key, str]:
        """Keys whose latest state could not be decoded, with the reason; `objects` may hold an older state."""
        return self._untrusted

    def begin_listing(self) -> None:
        """Start a complete view; `end_listing` deletes objects that it lacks. An unfinished one is dropped."""
        self._listed = set()

    def end_listing(self) -> list[Change[T]]:
        listed, self._listed = self._listed or set(), None
        self._untrusted = {key: reason for key, reason in self._untrusted.items() if key in listed}
        return [self._drop(key) for key in list(self._objects) if key not in listed]

    def forget_deletions(self) -> None:
        """Forget all deletions: versions have gone back, and deleted objects may exist again."""
        self._tombstones.clear()
        self.shows_the_past = False

    def put(self, new: T) -> list[Change[T]]:
        """Observe an existing object. A state older than the one held, or than its own deletion, changes nothing."""
        key = key_of(new.metadata)
        self._note_listed(key)
        old = self._objects.get(key)
        if self._is_late(new.metadata, old):
            self.shows_the_past |= self._listed is not None
            if self._listed is None:
                return []
        self._untrusted.pop(key, None)
        changes: list[Change[T]] = []
        if old is not None and old.metadata.uid != new.metadata.uid:
            changes.append(self._drop(key))
            old = None
        self._objects[key] = new
        self._by_uid[new.metadata.uid] = new
        if old is None:
            changes.append(Change(ChangeKind.ADDED, new))
        elif old.metadata.resource_version != new.metadata.resource_version:
            changes.append(Change(ChangeKind.MODIFIED, new, old))
        return changes

    def put_unreadable(self, metadata: CachedMetadata, reason: str) -> list[Change[T]]:
        """Observe an existing object that cannot be decoded: keep its older state, but mark it."""
        key = key_of(metadata)
        self._note_listed(key)
        self._untrusted[key] = reason
        old = self._objects.get(key)
        return [self._drop(key)] if old is not None and old.metadata.uid != metadata.uid else []

    def remove(self, metadata: CachedMetadata, last: T | None) -> list[Change[T]]:
        """Observe a deletion; `last` is the object's final state, None when it cannot be decoded.

        A deletion of an unknown UID is passed on, because its final state may be a proof of release; a successor of the
        same name stays.
        """
        key = key_of(metadata)
        old = self._by_uid.get(metadata.uid)
        if old is not None and is_older(metadata.resource_version, old.metadata.resource_version):
            return []
        self._bury(metadata)
        if old is not None:
            del self._by_uid[metadata.uid]
            del self._objects[key_of(old.metadata)]
        if old is not None or key not in self._objects:
            self._untrusted.pop(key, None)
        final = last if last is not None else old
        return [] if final is None else [Change(ChangeKind.DELETED, final, old, synthetic=last is None)]

    def _drop(self, key: Key) -> Change[T]:
        old = self._objects.pop(key)
        del self._by_uid[old.metadata.uid]
        self._bury(old.metadata)
        return Change(ChangeKind.DELETED, old, old, synthetic=True)

    def _bury(self, metadata: CachedMetadata) -> None:
        self._tombstones[metadata.uid] = metadata.resource_version
        if len(self._tombstones) > TOMBSTONES_MAX:
            del self._tombstones[next(iter(self._tombstones))]

    def _is_late(self, new: CachedMetadata, old: T | None) -> bool:
        """Return whether this state is older than the object's deletion or than the state held. Versions of different
        objects under one name tell that only between events: a listing may show a successor."""
        if is_older(new.resource_version, self._tombstones.get(new.uid, "")):
            return True
        is_same = old is not None and (self._listed is None or old.metadata.uid == new.uid)
        return old is not None and is_same and is_older(new.resource_version, old.metadata.resource_version)

    def _note_listed(self, key: Key) -> None:
        if self._listed is not None:
            self._listed.add(key)


def key_of(metadata: CachedMetadata) -> Key:
    return metadata.namespace, metadata.name


def is_older(version: str, other: str) -> bool:
    """True if one resourceVersion is provably older; False if one is not a number."""
    return version.isdecimal() and other.isdecimal() and int(version) < int(other)
