"""Kubelet over real HTTP: only complete answers to our token count."""

import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agent.evidence import KubeletReading
from agent.kubelet import Kubelet, parse_pod_list, tls_context
from atoll.service.http import application, listening

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
        kubelet = Kubelet(lambda: f"http://127.0.0.1:{port}", headers=bearer, context=tls_context(None))
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
        kubelet = Kubelet(lambda url=url: url, headers=bearer, context=tls_context(None))
        assert await kubelet.read() is None
        assert kubelet.last_problem
        await kubelet.close()


def test_verification_is_on_where_a_ca_is_given(tmp_path: Path) -> None:
    """Without a CA the self-signed certificate is taken; with one it must be signed by it."""
    assert tls_context(None).verify_mode.name == "CERT_NONE"
    with pytest.raises(OSError, match="No such file"):
        tls_context(tmp_path / "missing.pem")


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
def test_a_pod_counts_until_the_kubelet_itself_has_ended_it(status: dict[str, Any], is_listed: bool) -> None:
    """A Job's failed pod keeps its object for days and must not keep its GPUs; a third party's word ends nothing."""
    body = json.dumps({"kind": "PodList", "items": [{"metadata": {"uid": "a"}, "status": status}]})

    reading = parse_pod_list(body.encode())

    assert reading is not None
    assert ("a" in reading.listed) is is_listed
