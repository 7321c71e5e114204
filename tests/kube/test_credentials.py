"""Credentials: one clear sentence if there are none, and rotation without a restart."""

import json
import ssl
import subprocess
import sys
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from aiohttp import web

from atoll.kube import credentials as module
from atoll.kube.client import ApiClient
from atoll.kube.credentials import Credentials, default_namespace
from atoll.kube.errors import ConfigurationError, Unanswered
from tests.fakes.listening import kubeconfig, listening
from tests.kube.conftest import no_wait
from tests.service.certificates import Authority

URL = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No kubeconfig of the machine is found by accident."""
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def write_plugin(folder: Path, body: str) -> dict[str, object]:
    """Write an exec plugin and return the kubeconfig user that calls it."""
    script = folder / "plugin.py"
    script.write_text(body)
    api = "client.authentication.k8s.io/v1"
    return {"exec": {"apiVersion": api, "command": sys.executable, "args": [str(script)], "interactiveMode": "Never"}}


async def test_nothing_configured_names_the_ways_in() -> None:
    """A user without any configuration is told what to do, not shown a stack."""
    with pytest.raises(ConfigurationError, match="--kubeconfig, set KUBECONFIG, or run inside a pod"):
        await Credentials.load()


async def test_missing_file_is_named(tmp_path: Path) -> None:
    """The path that does not exist stands in the message."""
    with pytest.raises(ConfigurationError, match=r"no such kubeconfig: .*/nowhere"):
        await Credentials.load(tmp_path / "nowhere")


async def test_missing_file_of_the_environment_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A KUBECONFIG that points nowhere is told as such, and of several files one is enough."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigurationError, match=r"no such kubeconfig: .*/nowhere, as KUBECONFIG says"):
        await Credentials.load()

    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'nowhere'}:{kubeconfig(tmp_path, URL)}")
    assert (await Credentials.load()).host == URL


@pytest.mark.parametrize("content", ["", "{", "[]", "current-context: x", "just text"])
async def test_broken_file_is_one_error_class(tmp_path: Path, content: str) -> None:
    """Whatever stands in the file, the caller sees ConfigurationError."""
    (tmp_path / "kubeconfig").write_text(content)

    with pytest.raises(ConfigurationError, match="cannot connect with"):
        await Credentials.load(tmp_path / "kubeconfig")


async def test_unknown_context_is_named(tmp_path: Path) -> None:
    """A misspelled context is repeated in the message."""
    with pytest.raises(ConfigurationError, match="typo"):
        await Credentials.load(kubeconfig(tmp_path, URL), "typo")


async def test_environment_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KUBECONFIG is used where no file is given."""
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, URL)))

    credentials = await Credentials.load()

    assert credentials.host == URL
    assert await credentials.headers() == {"Authorization": "Bearer s3cret"}


async def test_home_is_the_last_resort(tmp_path: Path) -> None:
    """On a workstation ~/.kube/config works as with kubectl."""
    (tmp_path / ".kube").mkdir()
    kubeconfig(tmp_path, URL).rename(tmp_path / ".kube" / "config")

    assert (await Credentials.load()).host == URL


async def test_pod_without_its_mounts_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a pod without a service account the message names the account."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")

    with pytest.raises(ConfigurationError, match="service account"):
        await Credentials.load()


async def test_pod_reads_its_mounts_and_their_rotation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Inside a pod the mounted account is used, and a token that kubelet replaced is read again."""
    token, authority = tmp_path / "token", tmp_path / "ca.crt"
    token.write_text("t1")
    Authority("cluster").write_certificate(authority)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setattr(module, "ACCOUNT_FOLDER", tmp_path)

    credentials = await Credentials.load()
    first = await credentials.headers()
    token.write_text("t2\n")
    await credentials.reload()

    assert credentials.host == "https://[::1]:443"
    assert credentials.ssl_context is not None
    assert credentials.ssl_context.verify_mode is ssl.CERT_REQUIRED
    assert [first["Authorization"], (await credentials.headers())["Authorization"]] == ["Bearer t1", "Bearer t2"]


async def test_rotating_source_is_read_again_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a projected token expires the new one is in use, without waiting for a refusal."""
    token = tmp_path / "token"
    token.write_text("t1")
    monkeypatch.setattr(module, "RELOAD_SECONDS", 0.0)
    credentials = await Credentials.load(kubeconfig(tmp_path, URL, {"tokenFile": str(token)}))
    token.write_text("t2")

    assert await credentials.headers() == {"Authorization": "Bearer t2"}


async def test_plugin_gives_the_token(tmp_path: Path) -> None:
    """A credential plugin is run as kubectl runs it."""
    answer = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "t1"}}
    user = write_plugin(tmp_path, f"print({json.dumps(json.dumps(answer))})")

    credentials = await Credentials.load(kubeconfig(tmp_path, URL, user))

    assert await credentials.headers() == {"Authorization": "Bearer t1"}


@pytest.mark.parametrize("gives", ["a token without a time", "a certificate"])
@pytest.mark.parametrize(
    ("margin_seconds", "was_refused", "runs"),
    [
        pytest.param(600.0, False, {"a token without a time": 1, "a certificate": 1}, id="all is well"),
        pytest.param(600.0, True, {"a token without a time": 2, "a certificate": 2}, id="the server refused it"),
        pytest.param(1e12, False, {"a token without a time": 1, "a certificate": 2}, id="a certificate ends soon"),
    ],
)
async def test_plugin_runs_again_when_what_it_gave_is_used_up(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    gives: str,
    margin_seconds: float,
    was_refused: bool,
    runs: dict[str, int],
) -> None:
    """It tells no time of expiry: the server's refusal, or the end of the certificate, says that it must run again."""
    Authority("clients").issue("me", tmp_path / "me.crt", tmp_path / "me.key")
    pair = {
        "clientCertificateData": (tmp_path / "me.crt").read_text(),
        "clientKeyData": (tmp_path / "me.key").read_text(),
    }
    given = pair if gives == "a certificate" else {"token": "t1"}
    answer = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": given}
    ran = tmp_path / "ran"
    program = f"open({str(ran)!r}, 'a').write('x')\nprint({json.dumps(json.dumps(answer))})"
    monkeypatch.setattr(module, "CERTIFICATE_MARGIN_SECONDS", margin_seconds)
    credentials = await Credentials.load(kubeconfig(tmp_path, URL, write_plugin(tmp_path, program)))

    await credentials.reload(was_refused=was_refused)

    assert len(ran.read_text()) == runs[gives]


async def test_plugin_that_fails_is_an_error_at_once(tmp_path: Path) -> None:
    """A plugin without an answer is named now, instead of a puzzling 401 at every request later."""
    user = write_plugin(tmp_path, "raise SystemExit(3)")

    with pytest.raises(ConfigurationError, match=r"credential plugin .* gave neither"):
        await Credentials.load(kubeconfig(tmp_path, URL, user))


async def test_source_that_breaks_later_leaves_the_old_credentials(tmp_path: Path) -> None:
    """A token file that vanishes for a moment during its rotation does not lock us out."""
    token = tmp_path / "token"
    token.write_text("t1")
    credentials = await Credentials.load(kubeconfig(tmp_path, URL, {"tokenFile": str(token)}))
    token.unlink()

    await credentials.reload()

    assert await credentials.headers() == {"Authorization": "Bearer t1"}


def test_heavy_library_is_imported_only_on_connect() -> None:
    """Importing this package costs an agent nothing of the Kubernetes library."""
    root = Path(__file__).parents[2]
    modules = [f"atoll.kube.{path.stem}" for path in sorted((root / "atoll" / "kube").glob("[a-z]*.py"))]
    program = f"import sys, {', '.join(modules)}; sys.exit('kubernetes' in sys.modules)"

    result = subprocess.run([sys.executable, "-c", program], cwd=root, check=False, capture_output=True, text=True)

    assert result.returncode == 0, result.stderr


def test_namespace_is_that_of_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with kubectl: the current context's, that of the context named, or default; in a pod that of its account."""
    file = kubeconfig(tmp_path, URL)
    assert default_namespace(file) == "default"

    config = yaml.safe_load(file.read_text())
    told = {**config["contexts"][0]["context"], "namespace": "team"}
    config["contexts"] += [{"name": "other", "context": told}]
    file.write_text(yaml.safe_dump(config))
    assert (default_namespace(file), default_namespace(file, "other")) == ("default", "team")

    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setattr(module, "ACCOUNT_FOLDER", tmp_path)
    (tmp_path / "namespace").write_text("jobs\n")
    assert default_namespace() == "jobs"


class TlsServer:
    """An API server behind TLS whose certificate and trusted client authority can be replaced."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.users: list[str] = []

    def serve(self, authority: Authority, *, clients: Authority | None = None) -> None:
        """Present a new certificate from now on, to clients of an authority alone where one is named."""
        paths = self.folder / "server.crt", self.folder / "server.key"
        authority.issue("server", *paths)
        self.context.load_cert_chain(*paths)
        if clients is not None:
            self.context.load_verify_locations(clients.write_certificate(self.folder / "clients.crt"))
            self.context.verify_mode = ssl.CERT_REQUIRED

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        async def answer(request: web.Request) -> web.Response:
            certificate = request.transport.get_extra_info("peercert") if request.transport is not None else None
            subject = (certificate or {}).get("subject", ((("commonName", "nobody"),),))
            self.users.append(subject[0][0][1])
            token = request.headers.get("Authorization", "")
            # Every answer ends its connection, as the end of an API server does.
            return web.json_response({"token": token}, headers={"Connection": "close"})

        app = web.Application()
        app.router.add_get("/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=self.context)
        await site.start()
        try:
            yield f"https://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def tls_kubeconfig(folder: Path, url: str, *, inline: bool, **user: str) -> Path:
    """Write a kubeconfig that trusts ca.crt, by its path or by its content."""
    ca = folder / "ca.crt"
    trusted = {"certificate-authority-data": b64encode(ca.read_bytes()).decode()} if inline else {}
    path = kubeconfig(folder, url, dict(user))
    content = yaml.safe_load(path.read_text())
    content["clusters"][0]["cluster"] |= trusted or {"certificate-authority": str(ca)}
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize("inline", [False, True], ids=["a file of its own", "inside the kubeconfig"])
async def test_a_new_authority_is_taken_up_without_a_restart(tmp_path: Path, *, inline: bool) -> None:
    """The server's authority is replaced, and on disk too: the next call that finds a stranger reads anew, and
    afterwards the old authority is trusted no more."""
    old, new = Authority("old"), Authority("new")
    old.write_certificate(tmp_path / "ca.crt")
    server = TlsServer(tmp_path)
    server.serve(old)
    async with (
        server.running() as url,
        await ApiClient.connect(tls_kubeconfig(tmp_path, url, inline=inline, token="t1"), sleep=no_wait) as client,
    ):
        await client.get("/before")
        server.serve(new)
        with pytest.raises(Unanswered):
            await client.request("GET", "/stranger", retry=False)
        new.write_certificate(tmp_path / "ca.crt")
        tls_kubeconfig(tmp_path, url, inline=inline, token="t2")
        answer = await client.get("/after")
        server.serve(old)
        with pytest.raises(Unanswered):
            await client.request("GET", "/stranger", retry=False)

    assert json.loads(answer) == {"token": "Bearer t2"}


async def test_a_new_client_certificate_is_taken_up_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaced in place, under the same names: the next connection shows it, before anybody was refused."""
    authority = Authority("cluster")
    authority.write_certificate(tmp_path / "ca.crt")
    certificate, key = tmp_path / "me.crt", tmp_path / "me.key"
    authority.issue("first", certificate, key)
    server = TlsServer(tmp_path)
    server.serve(authority, clients=authority)
    user = {"client-certificate": str(certificate), "client-key": str(key)}
    async with server.running() as url:
        config = tls_kubeconfig(tmp_path, url, inline=False, **user)
        monkeypatch.setattr(module, "RELOAD_SECONDS", 0.0)
        async with await ApiClient.connect(config, sleep=no_wait) as client:
            await client.get("/before")
            authority.issue("second", certificate, key)
            await client.get("/after")

    assert server.users == ["first", "second"]


async def test_a_kubeconfig_that_is_replaced_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server and another token: both hold from the next request on."""
    monkeypatch.setattr(module, "RELOAD_SECONDS", 0.0)
    credentials = await Credentials.load(kubeconfig(tmp_path, URL, {"token": "t1"}))
    kubeconfig(tmp_path, "http://127.0.0.1:2", {"token": "t2"})

    assert await credentials.headers() == {"Authorization": "Bearer t2"}
    assert credentials.host == "http://127.0.0.1:2"


async def test_another_proxy_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`proxy-url` of the kubeconfig changes, or goes: the next request follows."""
    monkeypatch.setattr(module, "RELOAD_SECONDS", 0.0)

    async def seen(request: web.Request) -> web.Response:
        return web.json_response({"by": request.url.host, "port": request.transport.get_extra_info("sockname")[1]})

    def configure(proxy: str | None) -> Path:
        path = kubeconfig(tmp_path, "http://api.example", {"token": "t1"})
        content = yaml.safe_load(path.read_text())
        content["clusters"][0]["cluster"] |= {"proxy-url": proxy} if proxy else {}
        path.write_text(yaml.safe_dump(content))
        return path

    app = web.Application()
    app.router.add_get("/{path:.*}", seen)
    async with (
        listening(app) as first,
        listening(app) as second,
        await ApiClient.connect(configure(first), sleep=no_wait) as client,
    ):
        answers = [json.loads(await client.get("/x"))]
        configure(second)
        answers.append(json.loads(await client.get("/x")))
        configure(None)
        with pytest.raises(Unanswered):
            await client.request("GET", "/x", retry=False)

    assert [f"http://127.0.0.1:{one['port']}" for one in answers] == [first, second]


@pytest.mark.parametrize("fails_at", [1, 2], ids=["first reading", "second reading"])
async def test_a_certificate_that_is_half_written_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    """Server, token and trust stay together as they were, whenever a file turns out to be broken, and the whole is
    taken up once it can be read."""
    monkeypatch.setattr(module, "RELOAD_SECONDS", 0.0)
    Authority("cluster").write_certificate(tmp_path / "ca.crt")
    credentials = await Credentials.load(tls_kubeconfig(tmp_path, "https://127.0.0.1:1", inline=False, token="t1"))
    trusted, readings, make_context = credentials.ssl_context, list[object](), module._ssl_context

    def broken_context(configuration: Any) -> ssl.SSLContext:
        readings.append(configuration)
        if len(readings) == fails_at:
            raise ssl.SSLError("no start line")
        return make_context(configuration)

    monkeypatch.setattr(module, "_ssl_context", broken_context)
    tls_kubeconfig(tmp_path, "https://127.0.0.1:2", inline=False, token="t2")
    broken = await credentials.headers(), credentials.host, credentials.ssl_context is trusted

    assert broken == ({"Authorization": "Bearer t1"}, "https://127.0.0.1:1", True)
    assert await credentials.headers() == {"Authorization": "Bearer t2"}
    assert credentials.host == "https://127.0.0.1:2"


async def test_a_file_that_changes_while_it_is_loaded_is_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever compares with what is there after loading takes the old content for the new."""
    monkeypatch.setattr(module, "RELOAD_SECONDS", 0.0)
    load = module._import_library

    def load_slowly() -> Any:
        config, configuration = load()

        async def load_kube_config(**options: Any) -> Any:
            loader = await config.load_kube_config(**options)
            monkeypatch.setattr(module, "_import_library", load)
            kubeconfig(tmp_path, URL, {"token": "t2"})
            return loader

        return SimpleNamespace(load_kube_config=load_kube_config), configuration

    monkeypatch.setattr(module, "_import_library", load_slowly)
    credentials = await Credentials.load(kubeconfig(tmp_path, URL, {"token": "t1"}))

    assert await credentials.headers() == {"Authorization": "Bearer t2"}


@pytest.mark.parametrize("content", ["", "{", "gone"])
async def test_a_kubeconfig_that_breaks_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    """Half-written or missing for a moment: what was read last holds, until the whole file is there."""
    monkeypatch.setattr(module, "RELOAD_SECONDS", 0.0)
    path = kubeconfig(tmp_path, URL, {"token": "t1"})
    credentials = await Credentials.load(path)
    path.write_text(content)
    if content == "gone":
        path.unlink()
    broken = await credentials.headers()
    kubeconfig(tmp_path, URL, {"token": "t2"})

    assert [broken, await credentials.headers()] == [{"Authorization": f"Bearer {token}"} for token in ("t1", "t2")]


async def test_pod_takes_up_a_new_authority(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The authority that Kubernetes mounts beside the token is trusted as it is by then."""
    (tmp_path / "token").write_text("t1")
    Authority("old").write_certificate(tmp_path / "ca.crt")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setattr(module, "ACCOUNT_FOLDER", tmp_path)
    credentials = await Credentials.load()
    before = credentials.ssl_context
    await credentials.reload()
    unchanged = credentials.ssl_context
    Authority("new").write_certificate(tmp_path / "ca.crt")
    await credentials.reload()

    assert unchanged is before
    assert credentials.ssl_context is not before
    assert credentials.ssl_context is not None
    assert [one["subject"][0][0][1] for one in credentials.ssl_context.get_ca_certs() if "new" in str(one)] == ["new"]
