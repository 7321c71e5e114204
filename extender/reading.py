"""What a call is about: the pod, what it asks for, and what it was given already.

A live read asks the API server, not a watch. An answer that cannot be decoded looks like a failed API server, never
like a missing object.
"""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from atoll.cluster import pods
from atoll.cluster.allocations import Allocation, bound_allocation
from atoll.cluster.errors import MalformedValue
from atoll.cluster.objects import Pod, decode_pod
from atoll.cluster.requests import Rejection, Request, request_of
from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.kube.errors import MalformedAnswer, NotFound, truncate
from atoll.kube.mirror import ClusterMirror
from extender.errors import BindRefused
from extender.wire import BindCall

READ_SECONDS = 5.0

T = TypeVar("T")


async def read_live(client: ApiClient, path: str, decode: Callable[[bytes], T]) -> T | None:
    """Return the object at `path`, None when there is none. Raises KubeError."""
    try:
        raw = await client.request("GET", path, timeout_seconds=READ_SECONDS, retry=True)
    except NotFound:
        return None
    return decode_answer(raw, path, decode)


def decode_answer(raw: bytes, path: str, decode: Callable[[bytes], T]) -> T:
    """Decode an answer. Raises MalformedAnswer."""
    try:
        return decode(raw)
    except msgspec.MsgspecError as error:
        raise MalformedAnswer(f"cannot read the answer of {path}: {truncate(str(error))}") from error


async def read_pod(client: ApiClient, call: BindCall) -> Pod:
    """Read the pod of a bind call live.

    Raises BindRefused when it is gone or another pod of the same name took its place, and KubeError.
    """
    pod = await read_live(client, paths.pods(call.pod_namespace, call.pod_name), decode_pod)
    if pod is None:
        raise BindRefused(f"pod {call.pod_namespace}/{call.pod_name} no longer exists")
    if pod.metadata.uid != call.pod_uid:
        raise BindRefused(f"pod {call.pod_namespace}/{call.pod_name} was replaced by another one of the same name")
    return pod


def resolve_request(mirror: ClusterMirror, pod: Pod) -> Request | Rejection:
    """Return what the pod asks for, by its claim and by the Leases that its gang's admission reserved for it."""
    claim = mirror.claim(pod.metadata.namespace, pods.claim_name(pod))
    holds = mirror.ledger.leases_of(pod.metadata.uid)
    return request_of(pod, claim, is_admitted=bool(holds), reservation=mirror.reservation_of(pod), holds=holds)


def standing_allocation(pod: Pod, node: str) -> Allocation:
    """Return what a bound pod was given on `node`. Raises BindRefused when that is not a bind of ours to this node."""
    if pod.spec.node_name != node:
        raise BindRefused(f"{describe(pod)} is already bound to node {pod.spec.node_name}")
    try:
        allocation = bound_allocation(pod)
    except MalformedValue as error:
        raise BindRefused(f"{describe(pod)} is bound to node {node}, and nobody can read its GPUs: {error}") from error
    if allocation is None:
        raise BindRefused(f"{describe(pod)} was bound to node {node} without GPUs by somebody else")
    return allocation


def describe(pod: Pod) -> str:
    """Return the pod's name for messages."""
    return f"pod {pod.metadata.namespace}/{pod.metadata.name}"
