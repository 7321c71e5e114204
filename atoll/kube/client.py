"""One HTTP session to the API server: path and body in, the bytes of the answer or an error of `atoll.kube.errors` out.

It decodes nothing, so that callers decode only the fields they read. Every call is bounded in time and size; a
component stays within its own request rate; throttled and failed calls are repeated only if that is harmless, and only
within a retry budget.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Generic, Self, TypeVar
from urllib.parse import urlencode

import aiohttp
import msgspec
import orjson
from yarl import URL

from atoll.api.depth import at_any_depth
from atoll.kube.calls import UNANSWERED, ApiCall, CallObserver, code_of, ignore_call, resource_of, verb_of
from atoll.kube.credentials import Credentials
from atoll.kube.errors import (
    AnswerTooLarge,
    ApiError,
    Gone,
    MalformedAnswer,
    ServerError,
    TooManyRequests,
    Unanswered,
    Unauthorized,
    api_error,
    truncate,
)
from atoll.kube.limits import Backoff, RetryBudget, TokenBucket, in_turns
from atoll.kube.patches import MERGE_PATCH

T = TypeVar("T")
Params = Mapping[str, str | int]
Body = Mapping[str, object] | Sequence[Mapping[str, object]] | bytes

CONNECT_SECONDS = 5.0
CONNECTIONS_MAX = 48
"""Watches keep six of them; a burst shares the others instead of paying for a handshake per request."""
KEEPALIVE_SECONDS = 60.0
ANSWER_BYTES_MAX = 32 * 1024 * 1024
"""Larger pages are asked for again in smaller ones. One object has at most some megabytes."""
ERROR_BYTES_MAX = 64 * 1024
ATTEMPTS_MAX = 5
PAGE_SIZE = 500
SMALLER_PAGES = 8
"""By how much the next page is smaller after one that was too large; later ones double again."""
RETRIED_STATUSES = frozenset({429, 503, 504})
RETRY_AFTER_MAX_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Listing(Generic[T]):
    """A whole collection as of one resourceVersion."""

    items: Sequence[T]
    resource_version: str


class _PageMetadata(msgspec.Struct, rename="camel", gc=False):
    resource_version: str = ""
    continue_token: str = msgspec.field(name="continue", default="")


class _Page(msgspec.Struct):
    """One page of a list; the items stay raw."""

    metadata: _PageMetadata
    items: list[msgspec.Raw] | None = None


_decode_page = at_any_depth(msgspec.json.Decoder(_Page).decode)


class ApiClient:
    """Requests to one API server under one identity. Build with `connect`, end with `close`."""

    def __init__(
        self,
        credentials: Credentials,
        *,
        user_agent: str = "atoll",
        requests_per_second: float = 50.0,
        burst: int = 100,
        rng: random.Random | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        session: aiohttp.ClientSession | None = None,
    ) -> None:
        """`session` replaces the one that is opened by default: the single seam to the network."""
        self.credentials = credentials
        self._sleep = sleep
        self._rng = rng or random.Random()  # noqa: S311 - jitter
        self._limiter = TokenBucket(rate=requests_per_second, burst=burst, now=asyncio.get_running_loop().time)
        self._budget = RetryBudget()
        self._session = session or _open_session(user_agent)
        self.throttled_seconds = 0.0
        self._server_date = ("", 0.0)
        self.is_lost = False
        """Whether the last request got no answer, or the last watch was cut."""
        self.observer: CallObserver = ignore_call
        """Called for every request sent, including each repetition; must not block."""

    @classmethod
    async def connect(
        cls,
        kubeconfig: Path | None = None,
        context: str | None = None,
        *,
        user_agent: str = "atoll",
        requests_per_second: float = 50.0,
        burst: int = 100,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        impersonate: str = "",
    ) -> ApiClient:
        """Read the configuration (see Credentials.load) and open a session; nothing is sent yet.

        `impersonate`: the user in whose name to act, as far as our own identity may. Raises ConfigurationError.
        """
        credentials = await Credentials.load(kubeconfig, context)
        session = _open_session(user_agent)
        if impersonate:
            session.headers["Impersonate-User"] = impersonate
        return cls(
            credentials,
            user_agent=user_agent,
            requests_per_second=requests_per_second,
            burst=burst,
            sleep=sleep,
            session=session,
        )

    async def close(self) -> None:
        """Close every connection; calls in flight end with Unanswered."""
        await self._session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: Body | None = None,
        params: Params | None = None,
        content_type: str = "application/json",
        timeout_seconds: float = 10.0,
        retry: bool | None = None,
        check: Callable[[], None] | None = None,
    ) -> bytes:
        """Send one request and return the body of its 2xx answer.

        `timeout_seconds` bounds everything: waiting for the rate limit, connecting, repeating, reading.
        `check` is called before each sending, after the wait for the rate limit; what it raises is passed on.
        `retry` says whether 429, 503, 504 and cut connections may be repeated; by default only for GET.
        Raises Unanswered (with `sent`), ApiError and its kinds, MalformedAnswer.
        """
        call = _Call(
            method=method,
            url=_url(self.credentials.host, path, params),
            path=path,
            data=body if isinstance(body, bytes) else None if body is None else orjson.dumps(body),
            content_type=content_type,
            check=check,
        )
        try:
            async with asyncio.timeout(timeout_seconds) as limit:
                may_retry = method == "GET" if retry is None else retry
                return await self._send_until_answered(call, may_retry=may_retry, deadline=limit.when() or 0.0)
        except TimeoutError as error:
            message = f"{method} got no answer within {timeout_seconds:g} s"
            raise Unanswered(message, path=path, sent=call.sent) from error

    async def get(self, path: str, *, params: Params | None = None, timeout_seconds: float = 10.0) -> bytes:
        return await self.request("GET", path, params=params, timeout_seconds=timeout_seconds)

    async def create(
        self,
        path: str,
        body: Body,
        *,
        params: Params | None = None,
        timeout_seconds: float = 10.0,
        check: Callable[[], None] | None = None,
    ) -> bytes:
        """POST; never repeated automatically, because a second creation may conflict with the first."""
        return await self.request("POST", path, body=body, params=params, timeout_seconds=timeout_seconds, check=check)

    async def patch(
        self,
        path: str,
        body: Body,
        *,
        content_type: str = MERGE_PATCH,
        params: Params | None = None,
        timeout_seconds: float = 10.0,
        retry: bool = False,
        check: Callable[[], None] | None = None,
    ) -> bytes:
        return await self.request(
            "PATCH",
            path,
            body=body,
            params=params,
            content_type=content_type,
            timeout_seconds=timeout_seconds,
            retry=retry,
            check=check,
        )

    async def delete(
        self,
        path: str,
        options: Body | None = None,
        *,
        timeout_seconds: float = 10.0,
        retry: bool = False,
        check: Callable[[], None] | None = None,
    ) -> bytes:
        """DELETE with the preconditions of `patches.delete_options`.

        The HTTP library repeats a DELETE whose kept-alive connection broke, so NotFound may echo our own deletion.
        """
        return await self.request(
            "DELETE", path, body=options, timeout_seconds=timeout_seconds, retry=retry, check=check
        )

    async def list(
        self, path: str, decode: Callable[[bytes], T], *, params: Params | None = None, page_size: int = PAGE_SIZE
    ) -> Listing[T]:
        """Read a whole collection page by page, as of one moment; begins again once if its token expires.

        What `decode` raises is passed on.
        """
        try:
            return await self._list_once(path, decode, params=params or {}, page_size=page_size)
        except Gone:
            return await self._list_once(path, decode, params=params or {}, page_size=page_size)

    async def pages(
        self, path: str, *, params: Params | None = None, page_size: int = PAGE_SIZE
    ) -> AsyncGenerator[Listing[bytes], None]:
        """Yield a collection page by page, items raw; pages of large objects have fewer of them.

        Raises Gone if the continue token expires on the way.
        """
        token, size = "", page_size
        while True:
            query: dict[str, str | int] = {**(params or {}), "limit": size}
            if token:
                query["continue"] = token
            try:
                answer = await self.get(path, params=query, timeout_seconds=60.0)
            except AnswerTooLarge:
                if size == 1:
                    raise
                size = max(1, size // SMALLER_PAGES)
                continue
            page = _decode_answer(answer, path)
            size = min(page_size, 2 * size)
            yield Listing([bytes(item) for item in page.items or ()], page.metadata.resource_version)
            token = page.metadata.continue_token
            if not token:
                return

    async def current_version(self, path: str, params: Params | None = None) -> str:
        """Return the resourceVersion of a collection now. Asks once, so that a server which is away is noticed."""
        answer = await self.request("GET", path, params={**(params or {}), "limit": 1}, retry=False)
        return _decode_answer(answer, path).metadata.resource_version

    async def stream(self, path: str, params: Params, *, silence_seconds: float = 75.0) -> AsyncGenerator[bytes, None]:
        """Yield the chunks of a watch as they arrive; close it with contextlib.aclosing.

        Raises ApiError when the server refuses; Unanswered when it cannot be reached, cuts the connection, or says
        nothing for `silence_seconds`. Ends when the server ends the watch.
        """
        call = _Call(method="GET", url=_url(self.credentials.host, path, params), path=path, is_watch=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=silence_seconds)
        try:
            async with await self._open(call, timeout=timeout) as response:
                self._observe(call, code_of(response.status))
                if response.status == 401:
                    await self.credentials.reload()
                if response.status != 200:
                    raise await _refusal(response, call)
                async for chunk in response.content.iter_any():
                    yield chunk
        except (aiohttp.ClientError, OSError) as error:
            await self._distrusted(error)
            self._observe(call, UNANSWERED)
            raise Unanswered(f"watch failed: {_describe(error)}", path=path, sent=call.sent) from error

    async def _list_once(
        self, path: str, decode: Callable[[bytes], T], *, params: Params, page_size: int
    ) -> Listing[T]:
        items, version, decode_deep = list[T](), "", at_any_depth(decode)
        async for page in self.pages(path, params=params, page_size=page_size):
            version = page.resource_version
            items += [decode_deep(raw) async for raw in in_turns(page.items)]
        return Listing(items, version)

    async def _send_until_answered(self, call: _Call, *, may_retry: bool, deadline: float) -> bytes:
        backoff = Backoff(self._rng)
        has_renewed = False
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                answer = await self._send_once(call)
                self._budget.earn()
                return answer
            except Unauthorized:
                if has_renewed or attempt == ATTEMPTS_MAX:
                    raise
                has_renewed = True
                await self.credentials.reload()
            except (ApiError, Unanswered) as error:
                wait_seconds = max(backoff.next_seconds(), _retry_after(error))
                is_late = asyncio.get_running_loop().time() + wait_seconds >= deadline
                is_final = is_late or self._session.closed or attempt == ATTEMPTS_MAX or not _is_passing(error)
                if is_final or not may_retry or not self._budget.try_spend():
                    raise
                await self._sleep(wait_seconds)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _send_once(self, call: _Call) -> bytes:
        try:
            async with await self._open(call) as response:
                code = code_of(response.status)
                if response.status >= 300:
                    refusal = await _refusal(response, call)
                    self._observe(call, code)
                    raise refusal
                answer = await _read_bounded(response, call.path)
                self._observe(call, code)
                return answer
        except asyncio.CancelledError:
            self._observe(call, UNANSWERED)
            raise
        except (aiohttp.ClientError, OSError) as error:
            await self._distrusted(error)
            self._observe(call, UNANSWERED)
            raise Unanswered(f"{call.method} failed: {_describe(error)}", path=call.path, sent=call.sent) from error

    async def _open(self, call: _Call, *, timeout: aiohttp.ClientTimeout | None = None) -> aiohttp.ClientResponse:
        """Wait for our turn, then send `call` and return the answer's head."""
        await self._wait_for_turn()
        if self._session.closed:
            raise Unanswered(f"{call.method} failed: the client is closed", path=call.path, sent=call.sent)
        headers = await self.credentials.headers()
        if call.check is not None:
            call.check()
        call.began_seconds = asyncio.get_running_loop().time()
        if call.data is not None:
            headers["Content-Type"] = call.content_type
        try:
            response = await self._session.request(
                call.method,
                call.url,
                data=call.data,
                headers=headers,
                timeout=timeout or self._session.timeout,
                allow_redirects=False,
                server_hostname=self.credentials.server_hostname,
                ssl=self.credentials.ssl_context if self.credentials.ssl_context is not None else True,
                proxy=self.credentials.proxy,
                trace_request_ctx=call,
            )
        except RuntimeError as error:  # uvloop: a connection that is being cut still has this socket's number
            raise aiohttp.ClientConnectionError(str(error)) from error
        self._server_date = (response.headers.get("Date", ""), asyncio.get_running_loop().time())
        return response

    def server_seconds(self) -> float | None:
        """Return the API server's time from its last response, seconds since 1970; None if it sent none."""
        text, at_seconds = self._server_date
        try:
            seconds = parsedate_to_datetime(text).timestamp()
        except (ValueError, OverflowError):
            return None
        return seconds + asyncio.get_running_loop().time() - at_seconds

    async def _distrusted(self, error: BaseException) -> None:
        """Read the credentials again after a failed handshake: CAs may have been replaced on both sides."""
        if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientSSLError):
            await self.credentials.reload()

    def _observe(self, call: _Call, code: str) -> None:
        """Note whether there was an answer, and pass an attempt that was sent to the observer, with its outcome."""
        self.is_lost = code == UNANSWERED
        if call.began_seconds is None:
            return
        seconds = asyncio.get_running_loop().time() - call.began_seconds
        call.began_seconds = None
        verb = verb_of(call.method, call.path, is_watch=call.is_watch)
        self.observer(ApiCall(verb, resource_of(call.path), code, seconds))

    async def _wait_for_turn(self) -> None:
        seconds = self._limiter.reserve()
        if seconds <= 0:
            return
        self.throttled_seconds += seconds
        try:
            await self._sleep(seconds)
        except asyncio.CancelledError:
            self._limiter.give_back()
            raise


@dataclass(slots=True)
class _Call:
    """One request and whether any attempt of it has had a connection."""

    method: str
    url: URL
    path: str
    data: bytes | None = None
    content_type: str = "application/json"
    check: Callable[[], None] | None = None
    sent: bool = False
    is_watch: bool = False
    began_seconds: float | None = None


def _open_session(user_agent: str) -> aiohttp.ClientSession:
    async def note_connection(_session: aiohttp.ClientSession, context: SimpleNamespace, _parameters: object) -> None:
        context.trace_request_ctx.sent = True

    trace = aiohttp.TraceConfig()
    trace.on_connection_create_end.append(note_connection)
    trace.on_connection_reuseconn.append(note_connection)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=CONNECTIONS_MAX, keepalive_timeout=KEEPALIVE_SECONDS),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        headers={"User-Agent": user_agent, "Accept": "application/json", "Accept-Encoding": "identity"},
        trace_configs=[trace],
        cookie_jar=aiohttp.DummyCookieJar(),
    )


def _url(host: str, path: str, params: Params | None) -> URL:
    query = "?" + urlencode(params) if params else ""
    return URL(host + path + query, encoded=True)


async def _refusal(response: aiohttp.ClientResponse, call: _Call) -> ApiError:
    body = await response.content.read(ERROR_BYTES_MAX)
    seconds = response.headers.get("Retry-After", "")
    return api_error(
        body,
        path=call.path,
        status=response.status,
        retry_after_seconds=float(seconds) if seconds.isdecimal() and len(seconds) < 6 else None,
    )


async def _read_bounded(response: aiohttp.ClientResponse, path: str) -> bytes:
    chunks: list[bytes] = []
    size_bytes = 0
    async for chunk in response.content.iter_any():
        size_bytes += len(chunk)
        if size_bytes > ANSWER_BYTES_MAX:
            raise AnswerTooLarge(f"answer larger than {ANSWER_BYTES_MAX} bytes: {path}; list it in pages")
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _decode_answer(answer: bytes, path: str) -> _Page:
    try:
        return _decode_page(answer)
    except msgspec.MsgspecError as error:
        raise MalformedAnswer(f"not a list: {path}: {truncate(str(error))}") from error


def _is_passing(error: ApiError | Unanswered) -> bool:
    """True if the same call may succeed a moment later."""
    if isinstance(error, TooManyRequests | ServerError):
        return error.status in RETRIED_STATUSES
    return isinstance(error, Unanswered)


def _retry_after(error: ApiError | Unanswered) -> float:
    seconds = error.retry_after_seconds if isinstance(error, ApiError) else None
    return min(seconds or 0.0, RETRY_AFTER_MAX_SECONDS)


def _describe(error: BaseException) -> str:
    return truncate(f"{type(error).__name__}: {error}")
