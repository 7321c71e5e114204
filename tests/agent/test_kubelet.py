"""The kubelet over real HTTP: only a whole answer with our token counts, whatever else it may say."""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import pytest
from aiohttp import web

from agent.evidence import KubeletReading
from agent.kubelet import Kubelet, tls_context
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
