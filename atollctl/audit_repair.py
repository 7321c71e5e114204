"""The I/O of `atoll audit`: one fenced write per finding, and the extender's memory.

Each object is read again before it is written, because a finding is a moment old. No repair ends a Lease whose holder
may still run. The extender listens on its pod's loopback: `kubectl -n atoll-system port-forward
deployment/atoll-scheduler 8888` makes it reachable; the extender asks the API server whether the token may read its
memory.
"""

import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec

from atoll.api import names
from atoll.api.node_status import GpuNodeStatus
from atoll.api.times import format_microtime
from atoll.cluster.audit_remedies import AuditRepair, remedy
from atoll.cluster.consistency import NEVER, Finding
from atoll.cluster.errors import MalformedValue
from atoll.cluster.leases import Holder, Reservation, lease_body, parse_lease
from atoll.cluster.ledger_dump import LedgerDump, decode_memory
from atoll.cluster.objects import Pod, decode_lease, decode_node, decode_pod
from atoll.cluster.renumbering import stale_containers
from atoll.cluster.repairs import LeaseState, lease_state, required_leases
from atoll.cluster.request_history import RequestHistory, decode_past_asks
from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.kube.errors import AlreadyExists, KubeError, NotFound
from atoll.kube.patches import delete_options, eviction, merge_patch

CONTROLLERS = f"system:serviceaccount:{names.SYSTEM_NAMESPACE}:atoll-controllers"
"""The account that the policies let write. The caller needs the right to impersonate it; the API server's log shows
both."""


@dataclass(frozen=True, slots=True)
class RepairOutcome:
    """Result of a repair."""

    is_done: bool
    text: str


async def repair(client: ApiClient, finding: Finding) -> RepairOutcome:
    """Carry out the finding's remedy; leave what a person must do."""
    act = _ACTS.get(remedy(finding).repair)
    if act is None:
        return RepairOutcome(is_done=False, text="a person must decide")
    try:
        return await act(client, finding)
    except (KubeError, MalformedValue, ValueError, msgspec.MsgspecError) as error:
        return RepairOutcome(is_done=False, text=f"failed: {error}")


async def _ask(client: ApiClient, finding: Finding) -> RepairOutcome:
    """Request two fresh readings from the agent, after everything that has happened so far."""
    try:
        await client.get(paths.gpunodestatuses(finding.node))
    except NotFound:
        return RepairOutcome(is_done=False, text=f"no agent reports for node {finding.node}")
    listing = await client.list(paths.pods(names.SYSTEM_NAMESPACE), decode_pod)
    body = merge_patch(annotations={names.EVIDENCE_WANTED: listing.resource_version})
    await client.patch(paths.gpunodestatuses(finding.node), body)
    return RepairOutcome(
        is_done=True, text=f"asked the agent of {finding.node}; the controllers free the GPU once it is proven"
    )


async def _write(client: ApiClient, finding: Finding) -> RepairOutcome:
    pod = await _live(client, finding.pod)
    lacking = next((each for each in required_leases(pod) if each.name == finding.lease), None) if pod else None
    if lacking is None:
        return RepairOutcome(is_done=False, text="the pod no longer names that GPU")
    node = decode_node(await client.get(paths.nodes(lacking.node)))
    now = format_microtime(datetime.now(UTC))
    reservation = Reservation(lacking.node, node.metadata.uid, lacking.holder, lacking.claim, "audit", now, now)
    body = lease_body(reservation, lacking.device_id, lacking.device_uuid)
    try:
        await client.create(paths.leases(names.SYSTEM_NAMESPACE), body)
    except AlreadyExists:
        return RepairOutcome(is_done=False, text="there is a Lease by now")
    return RepairOutcome(is_done=True, text=f"wrote Lease {lacking.name} for {lacking.holder}")


async def _delete(client: ApiClient, finding: Finding) -> RepairOutcome:
    path = paths.leases(names.SYSTEM_NAMESPACE, finding.lease)
    record = parse_lease(decode_lease(await client.get(path)))
    pod = await _live(client, record.holder)
    if pod is None or lease_state(record, pod, NEVER) is not LeaseState.STRAY:
        return RepairOutcome(is_done=False, text="the Lease is no longer stray")
    await client.delete(path, delete_options(uid=record.lease_uid, resource_version=record.resource_version))
    return RepairOutcome(is_done=True, text=f"deleted Lease {finding.lease}: {record.holder} is bound to other GPUs")


async def _evict(client: ApiClient, finding: Finding) -> RepairOutcome:
    pod = await _live(client, finding.pod)
    if pod is None:
        return RepairOutcome(is_done=False, text="the pod is gone")
    status = GpuNodeStatus.model_validate_json(await client.get(paths.gpunodestatuses(pod.spec.node_name)))
    if not stale_containers(pod, status.status.devices if status.status is not None else ()):
        return RepairOutcome(is_done=False, text="the pod's device ids are correct by now")
    metadata = pod.metadata
    body = eviction(metadata.namespace, metadata.name, uid=metadata.uid)
    await client.create(paths.eviction(metadata.namespace, metadata.name), body)
    return RepairOutcome(is_done=True, text=f"evicted {metadata.namespace}/{metadata.name}")


async def _live(client: ApiClient, holder: Holder | None) -> Pod | None:
    """Return the current pod of that uid."""
    if holder is None:
        return None
    try:
        pod = decode_pod(await client.get(paths.pods(holder.namespace, holder.name)))
    except NotFound:
        return None
    return pod if pod.metadata.uid == holder.uid else None


_ACTS: Mapping[AuditRepair, Callable[[ApiClient, Finding], Awaitable[RepairOutcome]]] = {
    AuditRepair.ASK: _ask,
    AuditRepair.WRITE: _write,
    AuditRepair.DELETE: _delete,
    AuditRepair.EVICT: _evict,
}


MEMORY_PATH = "/debug/ledger"
PATH_OF_PAST = "/debug/snapshot"
SECONDS = 10.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ExtenderAddress:
    """Address and credentials of an extender. `token` is not shown."""

    url: str
    token: str
    authority: Path | None = None

    def __repr__(self) -> str:
        return f"ExtenderAddress({self.url!r})"


async def read_memory(address: ExtenderAddress) -> LedgerDump:
    """Return the memory. Raises OSError for no answer or a refusal."""
    return await _read(address, MEMORY_PATH, decode_memory)


async def read_past_asks(address: ExtenderAddress) -> RequestHistory:
    """Return past requests. Raises OSError for no answer or a refusal."""
    return await _read(address, PATH_OF_PAST, decode_past_asks)


async def _read(address: ExtenderAddress, path: str, decode: Callable[[bytes], T]) -> T:
    if not address.url.startswith(("http://", "https://")):
        raise OSError(f"--extender {address.url}: write an address such as http://127.0.0.1:8888")
    context = ssl.create_default_context(cafile=str(address.authority)) if address.authority is not None else True
    headers = {"Authorization": f"Bearer {address.token}"}
    url = address.url.rstrip("/") + path
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SECONDS)) as session,
            session.get(url, headers=headers, ssl=context) as answer,
        ):
            body = await answer.read()
            if answer.status != 200:
                raise OSError(f"{url} answers {answer.status}: {body[:200].decode(errors='replace').strip()}")
            return decode(body)
    except aiohttp.ClientConnectorError as error:
        raise OSError(f"no extender answers at {address.url} ({error.strerror}); is its port forwarded?") from error
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
        raise OSError(f"{url} cannot be read: {error}") from error
