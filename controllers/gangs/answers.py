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

    uid: str = ""
    resource_version: str = ""
    annotations: dict[str, str] | None = None
    owner_references: tuple[OwnerReference, ...] | None = None


class _Section(msgspec.Struct, frozen=True):
    suspend: Any = None


class _OwnerSpec(msgspec.Struct, frozen=True, rename="camel"):
    suspend: Any = None
    active: Any = None
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


def decode(raw: bytes, kind: type[T], path: str) -> T:
    """Read an answer. Raises MalformedAnswer, also where its fields are nested beyond measure."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise MalformedAnswer(f"{path}: {error}") from error
