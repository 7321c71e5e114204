"""The kubelet's own pod list.

Gives a KubeletReading, or None (nothing is known) without a complete answer. Only `GET /pods` is used, which RBAC can
grant alone (`nodes/pods` if the kubelet has fine-grained authorization; else `nodes/proxy`).

A pod in a terminal phase stays in that list until its object is deleted, although the kubelet is done with it: it
counts as listed only while a third party may have written the phase. The kubelet marks its own: a pod that it refused
has its message and no condition of a bound pod; any other has a reason on its Ready condition.

The kubelet's serving certificate is self-signed unless the cluster signs it, and the connection never leaves the node,
so the certificate is verified only if a CA file is set.
"""

import ssl
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import structlog

from agent.evidence import KubeletReading
from atoll.cluster.pods import ENDED_BY_KUBELET, TERMINAL_PHASES

ANSWER_BYTES_MAX = 64 * 1024 * 1024
TIMEOUT_SECONDS = 5.0
REJECTION = "Pod was rejected: "

log = structlog.get_logger(__name__)


class _Address(msgspec.Struct):
    type: str
    address: str


class _KubeletEndpoint(msgspec.Struct):
    port: int = msgspec.field(name="Port", default=10250)


class _Endpoints(msgspec.Struct, rename="camel"):
    kubelet_endpoint: _KubeletEndpoint = msgspec.field(default_factory=_KubeletEndpoint)


class _NodeStatus(msgspec.Struct, rename="camel"):
    addresses: list[_Address] = msgspec.field(default_factory=list)
    daemon_endpoints: _Endpoints = msgspec.field(default_factory=_Endpoints)


class _Node(msgspec.Struct):
    status: _NodeStatus = msgspec.field(default_factory=_NodeStatus)


class _State(msgspec.Struct):
    running: dict[str, Any] | None = None


class _ContainerStatus(msgspec.Struct):
    state: _State = msgspec.field(default_factory=_State)


class _Condition(msgspec.Struct):
    type: str = ""
    reason: str = ""


class _Status(msgspec.Struct, rename="camel"):
    phase: str = ""
    message: str = ""
    conditions: list[_Condition] | None = None
    container_statuses: list[_ContainerStatus] | None = None


class _Metadata(msgspec.Struct):
    uid: str


class _Pod(msgspec.Struct):
    metadata: _Metadata
    status: _Status = msgspec.field(default_factory=_Status)


class _PodList(msgspec.Struct):
    items: list[_Pod] | None = None
    kind: str = ""


_decode = msgspec.json.Decoder(_PodList).decode
_decode_node = msgspec.json.Decoder(_Node).decode


def kubelet_url(node: bytes) -> str:
    """URL of a Node's kubelet (node: its JSON), at its internal address; empty while it has none."""
    try:
        status = _decode_node(node).status
    except msgspec.MsgspecError:
        return ""
    address = next((one.address for one in status.addresses if one.type == "InternalIP"), "")
    host = f"[{address}]" if ":" in address else address
    return f"https://{host}:{status.daemon_endpoints.kubelet_endpoint.port}" if address else ""


def parse_pod_list(body: bytes) -> KubeletReading | None:
    """Read a PodList; None if it is not one."""
    try:
        pods = _decode(body)
    except msgspec.MsgspecError:
        return None
    if pods.kind != "PodList":
        return None
    items = pods.items or ()
    running = (
        pod.metadata.uid
        for pod in items
        if any(one.state.running is not None for one in pod.status.container_statuses or ())
    )
    return KubeletReading(frozenset(pod.metadata.uid for pod in items if not _is_over(pod.status)), frozenset(running))


def _is_over(status: _Status) -> bool:
    """True if the kubelet itself ended or refused the pod; a third party may have written the phase alone."""
    if status.phase not in TERMINAL_PHASES:
        return False
    reasons = {one.type: one.reason for one in status.conditions or ()}
    is_refused = status.message.startswith(REJECTION) and "PodScheduled" not in reasons
    return is_refused or reasons.get("Ready") in ENDED_BY_KUBELET


def tls_context(ca_file: Path | None) -> ssl.SSLContext:
    """Verify against the CA file if there is one; otherwise accept the kubelet's own certificate."""
    if ca_file is not None:
        return ssl.create_default_context(cafile=str(ca_file))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class Kubelet:
    """One kubelet. `url` gives its address, empty while unknown; `headers` gives one request's headers, usually a
    bearer token."""

    def __init__(
        self,
        url: Callable[[], str],
        *,
        headers: Callable[[], Awaitable[Mapping[str, str]]],
        context: ssl.SSLContext,
    ) -> None:
        self._url = url
        self._headers = headers
        self._context = context
        self._session: aiohttp.ClientSession | None = None
        self.last_problem = ""

    async def read(self) -> KubeletReading | None:
        """Ask once; None if there is no answer, a refusal, or something other than a pod list."""
        url = self._url().rstrip("/")
        if not url:
            self._note("the address of the kubelet is not known yet")
            return None
        try:
            status, body = await self._get(url + "/pods")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._note(f"{type(error).__name__}: {error}")
            return None
        reading = parse_pod_list(body) if status == 200 else None
        self._note("" if reading is not None else f"answer {status} is not a pod list: {body[:120]!r}")
        return reading

    def _note(self, problem: str) -> None:
        """Log changes between success and failure, not every try."""
        if problem == self.last_problem:
            return
        self.last_problem = problem
        if problem:
            log.warning("Kubelet cannot be read", err=problem)
        else:
            log.info("Kubelet answers again")

    async def close(self) -> None:
        """Close the connection."""
        if self._session is not None:
            await self._session.close()

    async def _get(self, url: str) -> tuple[int, bytes]:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=self._context, limit=1),
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS),
            )
        async with self._session.get(url, headers=await self._headers(), allow_redirects=False) as response:
            return response.status, await _whole(response)


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > ANSWER_BYTES_MAX:
            raise aiohttp.ClientPayloadError(f"pod list larger than {ANSWER_BYTES_MAX} bytes")
    return bytes(body)
