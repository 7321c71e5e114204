"""The kubelet's own pod list.

Gives a KubeletReading, or None (nothing is known) without a complete answer. Only `GET /pods` is used, which RBAC can
grant alone (`nodes/pods` if the kubelet has fine-grained authorization; else `nodes/proxy`).

A pod in a terminal phase stays in that list until its object is deleted, although the kubelet is done with it: it
counts as listed only while a third party may have written the phase. The kubelet marks its own: a pod that it refused
has its message and no condition of a bound pod; any other has a reason on its Ready condition.

The answer frees GPUs and the request carries the agent's token, so the kubelet's serving certificate is verified: by
the cluster's own CA unless another one is given. Where the cluster does not sign it, nothing is asked unless the
settings say that an unverified kubelet may get the token.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import aiohttp
import msgspec
import structlog

from agent.evidence import KubeletReading
from agent.list_items import ItemSplitter, ListTooLarge
from atoll.api.depth import at_any_depth
from atoll.cluster.pods import ENDED_BY_KUBELET, TERMINAL_PHASES

ANSWER_BYTES_MAX = 1024 * 1024 * 1024
"""More than 500 pods of the largest size; they are read one by one."""
CHUNK_BYTES_MAX: Final = 64 * 1024
"""Read of an answer in one step of the event loop."""
PROBLEM_BYTES_MAX = 120
SILENCE_SECONDS = 5.0
ANSWER_SECONDS_MAX = 60.0
"""For a whole answer, which a tenant may make hundreds of megabytes long."""
UNSIGNED: Final = (
    "its certificate is not signed by the CA that the agent trusts, so it is not asked; set agent.kubeletCA, or let "
    "the cluster sign kubelet certificates (serverTLSBootstrap), or accept any with agent.kubeletInsecure"
)
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


class _Annotations(msgspec.Struct):
    source: str = msgspec.field(name="kubernetes.io/config.source", default="api")


class _Metadata(msgspec.Struct):
    uid: str
    annotations: _Annotations | None = None


class _Pod(msgspec.Struct):
    metadata: _Metadata
    status: _Status = msgspec.field(default_factory=_Status)


class _PodList(msgspec.Struct):
    kind: str = ""


_decode_head = msgspec.json.Decoder(_PodList).decode
_decode_pod = at_any_depth(msgspec.json.Decoder(_Pod).decode)
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


class PodListReader:
    """Reads a PodList chunk by chunk, pod by pod."""

    def __init__(self) -> None:
        self._items = ItemSplitter()
        self._listed: set[str] = set()
        self._running: set[str] = set()
        self._static: set[str] = set()

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes. Raises ListTooLarge and msgspec.MsgspecError."""
        for item in self._items.feed(chunk):
            pod = _decode_pod(item)
            if not _is_over(pod.status):
                self._listed.add(pod.metadata.uid)
            if pod.metadata.annotations is not None and pod.metadata.annotations.source != "api":
                self._static.add(pod.metadata.uid)
            if any(one.state.running is not None for one in pod.status.container_statuses or ()):
                self._running.add(pod.metadata.uid)

    def reading(self) -> KubeletReading | None:
        """Return what was read; None if that was no complete PodList."""
        try:
            head = _decode_head(bytes(self._items.head))
        except msgspec.MsgspecError:
            return None
        if head.kind != "PodList":
            return None
        return KubeletReading(frozenset(self._listed), frozenset(self._running), frozenset(self._static))


def _is_over(status: _Status) -> bool:
    """True if the kubelet itself ended or refused the pod; a third party may have written the phase alone."""
    if status.phase not in TERMINAL_PHASES:
        return False
    reasons = {one.type: one.reason for one in status.conditions or ()}
    is_refused = status.message.startswith(REJECTION) and "PodScheduled" not in reasons
    return is_refused or reasons.get("Ready") in ENDED_BY_KUBELET


def unverified_context() -> ssl.SSLContext:
    """Accept any certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class Kubelet:
    """One kubelet. `url` gives its address, empty while unknown; `headers` gives one request's headers, usually a
    bearer token; `context` says what certificate is trusted, anew for each connection after one that was not."""

    def __init__(
        self,
        url: Callable[[], str],
        *,
        headers: Callable[[], Awaitable[Mapping[str, str]]],
        context: Callable[[], ssl.SSLContext],
    ) -> None:
        self._url = url
        self._headers = headers
        self._context = context
        self._session: aiohttp.ClientSession | None = None
        self._verifies = True
        self.last_problem = ""

    async def read(self) -> KubeletReading | None:
        """Ask once; None if there is no answer, a refusal, or something other than a pod list."""
        url = self._url().rstrip("/")
        if not url:
            self._note("the address of the kubelet is not known yet")
            return None
        try:
            reading, problem = await self._get(url + "/pods")
        except (aiohttp.ClientConnectorCertificateError, ssl.SSLCertVerificationError):
            await self.close()
            reading, problem = None, UNSIGNED
        except (aiohttp.ClientError, TimeoutError, OSError, ListTooLarge, msgspec.MsgspecError) as error:
            reading, problem = None, f"{type(error).__name__}: {error}"
        self._note(problem)
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
        """Close the connection; the next reading opens another."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            context = self._context()
            self._verifies = context.verify_mode is ssl.CERT_REQUIRED
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=context, limit=1),
                timeout=aiohttp.ClientTimeout(
                    total=ANSWER_SECONDS_MAX, sock_connect=SILENCE_SECONDS, sock_read=SILENCE_SECONDS
                ),
            )
        return self._session

    async def _get(self, url: str) -> tuple[KubeletReading | None, str]:
        """Return the reading and an empty text, or None and the problem."""
        session = self._open()
        if self._verifies and not url.startswith("https://"):
            return (
                None,
                f"{url} is not https and cannot be verified; accept that with agent.kubeletInsecure",
            )
        async with session.get(url, headers=await self._headers(), allow_redirects=False) as response:
            if response.status != 200:
                text = await response.content.read(PROBLEM_BYTES_MAX)
                return None, f"answer {response.status} is not a pod list: {text!r}"
            reading = await _whole(response)
            return reading, "" if reading is not None else "its answer is not a pod list"


async def _whole(response: aiohttp.ClientResponse) -> KubeletReading | None:
    reader, size_bytes = PodListReader(), 0
    async for chunk in response.content.iter_chunked(CHUNK_BYTES_MAX):
        size_bytes += len(chunk)
        if size_bytes > ANSWER_BYTES_MAX:
            raise aiohttp.ClientPayloadError(f"pod list larger than {ANSWER_BYTES_MAX} bytes")
        reader.feed(chunk)
        await asyncio.sleep(0)  # what has arrived already is read without a pause otherwise
    return reader.reading()
