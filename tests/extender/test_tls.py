"""The extender outside loopback: it accepts only kube-scheduler's certificate, and rotation needs no restart."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest

from atoll.kube.mirror import ClusterMirror
from atoll.service.clock import SystemClock
from atoll.service.errors import SettingsError
from atoll.service.http import listening
from atoll.service.metrics import Metrics
from atoll.service.tls import TlsFiles, server_context
from extender.__main__ import _tls
from extender.app import ExtenderParts, build_app
from extender.binder import Binder
from extender.settings import ExtenderSettings
from tests.builders import make_report
from tests.extender.test_app import FakeBinder, FakeMirror, arguments
from tests.fakes.clock import ManualClock
from tests.service.certificates import Authority

PATHS = ("/filter", "/prioritize", "/bind", "/preempt", "/debug/ledger", "/debug/snapshot", "/metrics", "/readyz")


class Served:
    """The extender behind certificates that the test rewrites."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority("cluster authority")
        self.files = TlsFiles(folder / "tls.crt", folder / "tls.key", folder / "client-ca.crt")
        self.trusted = self.authority.write_certificate(folder / "ca.crt")
        self.authority.write_certificate(folder / "client-ca.crt")
        self.authority.issue("atoll-extender", self.files.certificate, self.files.key)
        self.seconds = 1000.0
        self.port = 0

    async def call(self, path: str, client: Authority | None, body: Any = None) -> tuple[int, str]:
        """Call under a certificate of that authority; return the status and the body."""
        context = ssl.create_default_context(cafile=str(self.trusted))
        if client is not None:
            client.issue("kube-scheduler", self.folder / "client.crt", self.folder / "client.key")
            context.load_cert_chain(self.folder / "client.crt", self.folder / "client.key")
        method = "GET" if body is None else "POST"
        connector = aiohttp.TCPConnector(ssl=context, force_close=True)
        url = f"https://127.0.0.1:{self.port}{path}"
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.request(method, url, json=body) as answer,
        ):
            return answer.status, await answer.text()


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """The extender with one node."""
    served, mirror, clock = Served(tmp_path), FakeMirror(), ManualClock()
    mirror.ledger.put_report(make_report("n1", "t4-4"))
    mirror.ledger.put_heartbeat("n1", clock.monotonic_seconds(), 180.0)
    parts = ExtenderParts(cast("ClusterMirror", mirror), cast("Binder", FakeBinder()), clock, Metrics("extender"), 10.0)
    context = server_context(served.files, monotonic_seconds=lambda: served.seconds)
    async with listening(build_app(parts), "127.0.0.1", 0, context) as served.port:
        yield served


async def test_scheduler_s_certificate_gets_an_answer(served: Served) -> None:
    """Mutual TLS with real certificates: kube-scheduler's client asks filter as on loopback."""
    status, text = await served.call("/filter", served.authority, arguments(nodes=["n1"]))
    assert status == 200
    assert json.loads(text)["NodeNames"] == ["n1"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stranger", [None, Authority("stranger")], ids=["no-certificate", "foreign-certificate"])
async def test_nobody_else_reaches_any_path(served: Served, stranger: Authority | None, path: str) -> None:
    """Neither verbs nor metrics nor memory are told to a client without the right certificate."""
    with pytest.raises((aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError)):
        await served.call(path, stranger, arguments(nodes=["n1"]) if path in PATHS[:4] else None)


async def test_rotation_of_both_sides_needs_no_restart(served: Served) -> None:
    """A new client authority counts from the next handshake on, and the one that was withdrawn no longer does."""
    new = Authority("new scheduler authority")
    new.write_certificate(served.folder / "client-ca.crt")
    served.authority.issue("atoll-extender-2", served.files.certificate, served.files.key)
    served.seconds += 2
    assert (await served.call("/filter", new, arguments(nodes=["n1"])))[0] == 200
    with pytest.raises((aiohttp.ClientError, ConnectionError)):
        await served.call("/filter", served.authority, arguments(nodes=["n1"]))


@pytest.mark.parametrize("missing", ["tls_cert", "tls_key", "client_ca"])
def test_extender_listens_nowhere_else_without_certificates(tmp_path: Path, missing: str) -> None:
    """Half of the settings is as bad as none: the process ends and names them."""
    paths = {name: tmp_path / name for name in ("tls_cert", "tls_key", "client_ca") if name != missing}
    with pytest.raises(SettingsError, match="tls_cert, tls_key and client_ca"):
        _tls(ExtenderSettings(host="0.0.0.0", **paths), SystemClock())
    assert _tls(ExtenderSettings(), SystemClock()) is None
