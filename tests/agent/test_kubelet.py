"""Kubelet over real HTTP: only complete answers to our token count."""

import json
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agent.evidence import KubeletReading
from agent.kubelet import UNSIGNED, Kubelet, unverified_context
from atoll.service.http import application, listening
from atoll.service.tls import TlsFiles, server_context
from tests.service.certificates import Authority

PODS = '{"kind":"PodList","items":[{"metadata":{"uid":"a"}}]}'
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def bearer() -> Mapping[str, str]:
    return {"Authorization": "Bearer s3cret"}


async def answer_pods(request: web.Request) -> web.StreamResponse:
    allowed = request.headers.get("Authorization") == "Bearer s3cret"
    return web.Response(text=PODS) if allowed else web.Response(status=401, text="Unauthorized")


async def refuse(_request: web.Request) -> web.StreamResponse:
    return web.Response(status=403, text="Forbidden (user=agent, verb=get, resource=nodes, subresource=proxy)")


async def redirect(_request: web.Request) -> web.StreamResponse:
    raise web.HTTPFound("/elsewhere")


async def cut(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "9999"})
    await response.prepare(request)
    await response.write(PODS.encode())
    assert request.transport is not None
    request.transport.abort()
    return response


async def asked(handler: Handler, times: int = 1) -> list[KubeletReading | None]:
    """Read from a kubelet that answers with `handler`."""
    app = application()
    app.router.add_get("/pods", handler)
    app.router.add_get("/elsewhere", answer_pods)
    async with listening(app, "127.0.0.1", 0) as port:
        kubelet = Kubelet(lambda: f"http://127.0.0.1:{port}", headers=bearer, context=unverified_context)
        try:
            return [await kubelet.read() for _ in range(times)]
        finally:
            await kubelet.close()


async def test_the_pod_list_is_read_with_our_token() -> None:
    """Two readings over one connection, both whole."""
    assert await asked(answer_pods, 2) == [KubeletReading(frozenset({"a"}), frozenset())] * 2


@pytest.mark.parametrize("handler", [refuse, redirect, cut])
async def test_anything_else_is_unknown(handler: Handler) -> None:
    """A refusal, a redirect and a cut answer read as unknown, never as a node without pods."""
    assert await asked(handler) == [None]


async def test_an_unreachable_or_unknown_kubelet_is_unknown() -> None:
    """Nobody listens, or the Node has no address yet."""
    for url in ("http://127.0.0.1:1", ""):
        kubelet = Kubelet(lambda url=url: url, headers=bearer, context=unverified_context)
        assert await kubelet.read() is None
        assert kubelet.last_problem
        await kubelet.close()


@asynccontextmanager
async def serving(app: web.Application, authority: Authority, address: str, folder: Path) -> AsyncIterator[int]:
    """Serve with a certificate of `authority` for `address`."""
    files = TlsFiles(folder / "kubelet.crt", folder / "kubelet.key")
    authority.issue("system:node:n1", files.certificate, files.key, address=address)
    context = server_context(files, monotonic_seconds=time.monotonic)
    async with listening(app, "127.0.0.1", 0, context) as port:
        yield port


@pytest.mark.parametrize(
    ("signer", "address", "is_asked"),
    [
        pytest.param("cluster", "127.0.0.1", True, id="signed by the cluster"),
        pytest.param("stranger", "127.0.0.1", False, id="signed by somebody else"),
        pytest.param("cluster", "127.0.0.2", False, id="of another node"),
    ],
)
async def test_the_token_goes_to_a_verified_kubelet_only(
    tmp_path: Path, signer: str, address: str, is_asked: bool
) -> None:
    """Nothing is sent to a server that the trusted CA did not sign for this address, and its words are no evidence."""
    authorities = {name: Authority(name) for name in ("cluster", "stranger")}
    trusted = authorities["cluster"].write_certificate(tmp_path / "ca.crt")
    seen: list[str] = []

    async def note(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.get("Authorization", ""))
        return web.Response(text=PODS)

    app = application()
    app.router.add_get("/pods", note)
    async with serving(app, authorities[signer], address, tmp_path) as port:
        verified = partial(ssl.create_default_context, cafile=str(trusted))
        verifying, insecure = (
            Kubelet(lambda: f"https://127.0.0.1:{port}", headers=bearer, context=context)
            for context in (verified, unverified_context)
        )
        reading = await verifying.read()
        assert (reading is not None, seen, verifying.last_problem) == (
            is_asked,
            ["Bearer s3cret"] if is_asked else [],
            "" if is_asked else UNSIGNED,
        )
        assert await insecure.read() is not None
        await verifying.close()
        await insecure.close()


async def test_plain_http_is_not_asked(tmp_path: Path) -> None:
    """A kubelet's URL without TLS cannot be verified, so it needs the same consent."""
    trusted = Authority("cluster").write_certificate(tmp_path / "ca.crt")
    app = application()
    app.router.add_get("/pods", answer_pods)
    async with listening(app, "127.0.0.1", 0) as port:
        context = partial(ssl.create_default_context, cafile=str(trusted))
        kubelet = Kubelet(lambda: f"http://127.0.0.1:{port}", headers=bearer, context=context)
        assert await kubelet.read() is None
        assert "not https" in kubelet.last_problem
        await kubelet.close()


async def test_a_missing_ca_is_a_problem_and_no_crash(tmp_path: Path) -> None:
    """The file may come later; until then nothing is known."""
    context = partial(ssl.create_default_context, cafile=str(tmp_path / "missing.pem"))
    kubelet = Kubelet(lambda: "https://127.0.0.1:1", headers=bearer, context=context)
    assert await kubelet.read() is None
    assert "No such file" in kubelet.last_problem


async def test_a_list_of_any_length_is_read() -> None:
    """A tenant's large pods make the list longer than the agent's memory; that must not end the evidence for ever."""
    labels = json.dumps({f"label-{number}": "x" * 60 for number in range(15_000)})

    async def answer_large(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'{"kind":"PodList","items":[')
        for number in range(60):
            await response.write(f'{"," * (number > 0)}{{"metadata":{{"uid":"u{number}","labels":{labels}}}}}'.encode())
        await response.write(b"]}")
        return response

    (reading,) = await asked(answer_large)

    assert reading == KubeletReading(frozenset(f"u{number}" for number in range(60)), frozenset())


async def read(body: bytes) -> KubeletReading | None:
    """Read an answer with this body."""

    async def answer(_request: web.Request) -> web.StreamResponse:
        return web.Response(body=body)

    (reading,) = await asked(answer)
    return reading


@pytest.mark.parametrize(
    ("body", "want"),
    [
        pytest.param(b'{"kind":"PodList","items":null}', KubeletReading(frozenset(), frozenset()), id="no pods"),
        pytest.param(
            b'{"kind":"PodList","items":[{"metadata":{"uid":"a"},"status":{"containerStatuses":[{"state":{"running":{}}}]}},'
            b'{"metadata":{"uid":"b"},"status":{"containerStatuses":[{"state":{"waiting":{}}}]}},{"metadata":{"uid":"c"}}]}',
            KubeletReading(frozenset({"a", "b", "c"}), frozenset({"a"})),
            id="running, waiting and untouched pods",
        ),
        pytest.param(
            b'{"kind":"PodList","items":[{"metadata":{"uid":"f","annotations":{"kubernetes.io/config.source":"file"}}},'
            b'{"metadata":{"uid":"a","annotations":{"kubernetes.io/config.source":"api","x":"y"}}}]}',
            KubeletReading(frozenset({"f", "a"}), frozenset(), frozenset({"f"})),
            id="a pod from a file of the machine, and one from the API server",
        ),
        pytest.param(b'{"kind":"Status","code":403}', None, id="a refusal is no empty list"),
        pytest.param(b'{"kind":"PodList","items":[{"metadata":{}}]}', None, id="a pod without uid"),
        pytest.param(b"Unauthorized", None, id="plain text"),
        pytest.param(b'{"kind":"PodList","items":[', None, id="cut"),
    ],
)
async def test_only_a_whole_pod_list_counts(body: bytes, want: KubeletReading | None) -> None:
    """Whatever is not a complete PodList reads as unknown."""
    assert await read(body) == want


def condition(kind: str, reason: str) -> dict[str, str]:
    return {"type": kind, "status": "False", "reason": reason}


REJECTED = {"phase": "Failed", "reason": "NodeAffinity", "message": "Pod was rejected: Predicate NodeAffinity failed"}


@pytest.mark.parametrize(
    ("status", "is_listed"),
    [
        pytest.param({"phase": "Running", "conditions": [condition("Ready", "ContainersNotReady")]}, True, id="runs"),
        pytest.param({"phase": "Failed", "conditions": [condition("Ready", "PodFailed")]}, False, id="init failed"),
        pytest.param({"phase": "Succeeded", "conditions": [condition("Ready", "PodCompleted")]}, False, id="completed"),
        pytest.param(REJECTED, False, id="refused by the kubelet before it started"),
        pytest.param({**REJECTED, "conditions": [condition("DisruptionTarget", "")]}, False, id="refused when evicted"),
        pytest.param({"phase": "Failed", "conditions": [condition("PodScheduled", "")]}, True, id="phase set by hand"),
        pytest.param({**REJECTED, "conditions": [condition("PodScheduled", "")]}, True, id="rejection set by hand"),
        pytest.param({"phase": "Running", "conditions": [condition("Ready", "PodFailed")]}, True, id="not ended yet"),
        pytest.param({"phase": "Failed"}, True, id="phase and nothing else"),
    ],
)
async def test_a_pod_counts_until_the_kubelet_itself_has_ended_it(status: dict[str, Any], is_listed: bool) -> None:
    """A Job's failed pod keeps its object for days and must not keep its GPUs; a third party's word ends nothing."""
    body = json.dumps({"kind": "PodList", "items": [{"metadata": {"uid": "a"}, "status": status}]})

    reading = await read(body.encode())

    assert reading is not None
    assert ("a" in reading.listed) is is_listed
