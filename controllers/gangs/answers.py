"""What is read of the API server's answers about owners, members and gangs.

Users write these objects, up to 1.5 MB each, and the answers are decoded between other work of the event loop. So only
the few fields that count are decoded; the rest is skipped.
"""

from typing import Any, TypeVar

import msgspec

from atoll.cluster.objects import OwnerReference
from atoll.kube.errors import MalformedAnswer

T = TypeVar("T")


class ObjectIdentity(msgspec.Struct, frozen=True, rename="camel"):
    """Of any object."""

    name: str = ""
    uid: str = ""
    namespace: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    owner_references: tuple[OwnerReference, ...] | None = None


class _Section(msgspec.Struct, frozen=True):
    suspend: Any = None


class _OwnerSpec(msgspec.Struct, frozen=True, rename="camel"):
    suspend: Any = None
    active: Any = None
    shutdown_after_job_finishes: Any = None
    run_policy: _Section | None = None


class SwitchedOwner(msgspec.Struct, frozen=True):
    """An object that makes pods, with every switch that any kind has."""

    metadata: ObjectIdentity
    spec: _OwnerSpec | None = None


class _PinnedSpec(msgspec.Struct, frozen=True, rename="camel"):
    affinity: dict[str, Any] | None = None
    scheduling_gates: list[dict[str, Any]] | None = None


class _Nomination(msgspec.Struct, frozen=True, rename="camel"):
    nominated_node_name: str = ""


class NominatedMember(msgspec.Struct, frozen=True):
    """A gated pod as the write of its nomination left it."""

    metadata: ObjectIdentity
    spec: _PinnedSpec
    status: _Nomination


class Written(msgspec.Struct, frozen=True):
    """Any object, as our own write left it."""

    metadata: ObjectIdentity


class _Condition(msgspec.Struct, frozen=True):
    type: str = ""
    status: str = ""


class _Conditions(msgspec.Struct, frozen=True):
    conditions: tuple[_Condition, ...] = ()


class KueueWorkload(msgspec.Struct, frozen=True):
    """A Workload of Kueue."""

    metadata: ObjectIdentity
    status: _Conditions = _Conditions()

    @property
    def is_finished(self) -> bool:
        """Whether it is over: its owner has ended, or a larger slice of an elastic owner has taken its place."""
        return any(one.type == "Finished" and one.status == "True" for one in self.status.conditions)


class _Suspended(msgspec.Struct, frozen=True):
    uid: str = ""


class _Suspensions(msgspec.Struct, frozen=True, rename="camel"):
    suspended_owners: tuple[_Suspended, ...] = ()


class GangSuspensions(msgspec.Struct, frozen=True):
    """A GpuGang, as far as it says which owners are suspended for it."""

    metadata: ObjectIdentity
    status: _Suspensions = _Suspensions()


class _ServedVersion(msgspec.Struct, frozen=True, rename="camel"):
    group_version: str = ""


class _ServedGroup(msgspec.Struct, frozen=True):
    name: str = ""
    versions: tuple[_ServedVersion, ...] = ()


class ServedGroups(msgspec.Struct, frozen=True):
    """The API groups of a server, each with its versions, as they stand in paths; the preferred one first."""

    groups: tuple[_ServedGroup, ...] = ()


def decode(raw: bytes, kind: type[T], path: str) -> T:
    """Read an answer. Raises MalformedAnswer, also where its fields are nested beyond measure."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise MalformedAnswer(f"{path}: {error}") from error
