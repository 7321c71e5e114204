"""The extender/v1 wire: Go-cased JSON of kube-scheduler to frozen requests, and replies back to bytes.

The Go types carry no JSON tags, so keys are Go field names, while the Pod inside is ordinary v1 JSON. Only HTTP 200
counts as an answer; reasons travel in `Error`.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
import orjson

from atoll.cluster.objects import Pod


class MalformedCall(Exception):
    """kube-scheduler's body cannot be read; `args[0]` says why."""


class FilterCall(msgspec.Struct, frozen=True, rename="pascal"):
    """Arguments of filter and prioritize. `node_names` is None unless nodeCacheCapable is set."""

    pod: Pod
    node_names: tuple[str, ...] | None = None


class BindCall(msgspec.Struct, frozen=True, rename={"pod_name": "PodName", "pod_namespace": "PodNamespace",
                                                    "pod_uid": "PodUID", "node": "Node"}):  # fmt: skip
    """Arguments of bind."""

    pod_name: str
    pod_namespace: str
    pod_uid: str
    node: str


class Victim(msgspec.Struct, frozen=True, rename={"uid": "UID"}):
    """One pod that would be evicted."""

    uid: str


class Victims(msgspec.Struct, frozen=True, rename={"pods": "Pods", "pdb_violations": "NumPDBViolations"}):
    """Pods that would be evicted from one node; the list may be null or empty."""

    pods: tuple[Victim, ...] | None = None
    pdb_violations: int = 0


class VictimPods(msgspec.Struct, frozen=True, rename={"pods": "Pods", "pdb_violations": "NumPDBViolations"}):
    """Pods that would be evicted from one node, as a scheduler sends them that takes the extender for one without a
    cache."""

    pods: tuple[Pod, ...] | None = None
    pdb_violations: int = 0


class PreemptCall(msgspec.Struct, frozen=True, rename="pascal"):
    """Arguments of preempt: by uid where nodeCacheCapable is set, whole pods where it is not."""

    pod: Pod
    node_name_to_victims: dict[str, VictimPods] | None = None
    node_name_to_meta_victims: dict[str, Victims] | None = None

    def candidates(self) -> dict[str, Victims]:
        """Return the candidate nodes in whichever form they came."""
        whole = {
            node: Victims(tuple(Victim(pod.metadata.uid) for pod in victims.pods or ()), victims.pdb_violations)
            for node, victims in (self.node_name_to_victims or {}).items()
        }
        return {**whole, **(self.node_name_to_meta_victims or {})}


_NAMES = b'"NodeNames":['
"""Nothing in a Pod is written like this: within texts the quotes would be escaped, and no field has this name."""

T = TypeVar("T")

_filter_decoder = msgspec.json.Decoder(FilterCall)
_bind_decoder = msgspec.json.Decoder(BindCall)
_preempt_decoder = msgspec.json.Decoder(PreemptCall)


def read_filter(body: bytes) -> FilterCall:
    """Read the arguments of filter or prioritize. Raises MalformedCall."""
    call = _read(_filter_decoder, body)
    if call.node_names is None:
        raise MalformedCall("NodeNames is null; set nodeCacheCapable: true for this extender")
    return call


def before_names(body: bytes) -> bytes:
    """Return what stands before the names in the arguments of filter: the same for the prioritize that follows."""
    return body[: body.find(_NAMES) + len(_NAMES)] if _NAMES in body else b""


def is_followed_by(body: bytes, before: bytes, name: str) -> bool:
    """Tell whether a call begins with `before` and has the node among its names; nothing is decoded for that."""
    return bool(before) and body.startswith(before) and body.find(f'"{name}"'.encode(), len(before)) >= 0


def read_bind(body: bytes) -> BindCall:
    """Read the arguments of bind. Raises MalformedCall."""
    call = _read(_bind_decoder, body)
    if not (call.pod_name and call.pod_namespace and call.pod_uid and call.node):
        raise MalformedCall(f"bind without pod, uid or node: {call}")
    if any("/" in name for name in (call.pod_name, call.pod_namespace, call.node)):
        raise MalformedCall(f"bind with a name that no object has: {call}")
    return call


def read_preempt(body: bytes) -> PreemptCall:
    """Read the arguments of preempt. Raises MalformedCall."""
    return _read(_preempt_decoder, body)


def _read(decoder: "msgspec.json.Decoder[T]", body: bytes) -> T:
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise MalformedCall(f"cannot read the call: {error}") from error


def filter_reply(feasible: Sequence[str], unresolvable: Mapping[str, str]) -> bytes:
    """Return the reply of filter: names that fit, and the reasons of nodes that preemption cannot help either."""
    return orjson.dumps(
        {
            "NodeNames": feasible,
            "FailedNodes": {},
            "FailedAndUnresolvableNodes": unresolvable,
            "Error": "",
        }
    )


def prioritize_reply(best: str | None, score: int) -> bytes:
    """Return the reply of prioritize: `score` for the best node; a node that is not named scores 0."""
    return orjson.dumps([{"Host": best, "Score": score}] if best is not None else [])


def bind_reply(error: str) -> bytes:
    """Return the reply of bind; an empty text is success."""
    return orjson.dumps({"Error": error})


def preempt_reply(victims: Mapping[str, Victims]) -> bytes:
    """Return the reply of preempt: the nodes that remain, with their victims."""
    return msgspec.json.encode({"NodeNameToMetaVictims": dict(victims)})
