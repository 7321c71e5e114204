"""Fetching a model: what is in the cache is whole and the job's, and only allowed places are contacted."""

import fcntl
import hashlib
import json
import re
import socket
import ssl
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv4Address, IPv6Address, ip_network
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.jobs.retries import RETRYABLE
from atoll.ml import uris
from tests.ml.special_addresses import SPECIAL
from tests.service.certificates import Authority
from tests.worker.s3_server import BUCKET
from worker import FetchLimits, ModelMismatch, ModelRefused, fetch_model
from worker.downloads import REDIRECTS_MAX, is_public
from worker.models import CACHE, CHECKSUM, HOSTS, HUB, HUB_TOKEN, MLFLOW, MLFLOW_TOKEN, URI, _token
from worker.objects import connect

WEIGHTS = b"weights" * 1000
SHA256 = f"sha256:{hashlib.sha256(WEIGHTS).hexdigest()}"


class Registry:
    """A server on this machine. bodies: by path; redirects: by path, to a URL. asked: paths and tokens."""

    def __init__(self) -> None:
        self.bodies = {"/m.bin": WEIGHTS}
        self.redirects: dict[str, str] = {}
        self.asked: list[tuple[str, str]] = []
        self.tells_size = True
        self.cuts = 0
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                registry.answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        self.asked.append((request.path, request.headers.get("Authorization", "")))
        body = self.bodies.get(request.path)
        if request.path in self.redirects:
            request.send_response(302)
            request.send_header("Location", self.redirects[request.path])
            request.end_headers()
        elif body is None:
            request.send_error(403 if request.path == "/secret" else 404)
        else:
            request.send_response(200)
            if self.tells_size:
                request.send_header("Content-Length", str(len(body)))
            request.end_headers()
            request.wfile.write(body[: len(body) - self.cuts])


@pytest.fixture
def registry() -> Iterator[Registry]:
    """A registry that serves until the test ends."""
    found = Registry()
    thread = Thread(target=found.server.serve_forever, args=(0.01,))
    thread.start()
    yield found
    found.server.shutdown()
    thread.join()
    found.server.server_close()


@pytest.fixture
def variables(tmp_path: Path, registry: Registry) -> dict[str, str]:
    """Variables of a container that may fetch from the registry."""
    return {
        CACHE: str(tmp_path / "cache"),
        HOSTS: f"127.0.0.1 localhost:{registry.port}",
        URI: f"{registry.url}/m.bin",
        CHECKSUM: SHA256,
    }


def files_in(variables: dict[str, str]) -> list[str]:
    """Return the names of the files in the cache, without locks."""
    found = Path(variables[CACHE]).rglob("*")
    return sorted(path.name for path in found if path.is_file() and path.name != ".lock")


def test_a_file_is_used_where_it_lies(tmp_path: Path) -> None:
    """A mounted volume is not copied; its checksum counts all the same."""
    path = tmp_path / "m.bin"
    path.write_bytes(WEIGHTS)

    assert fetch_model(f"file://{path}", variables={CHECKSUM: SHA256}) == path
    assert fetch_model(f"file://{tmp_path}/", file="m.bin", variables={}) == path
    with pytest.raises(ModelMismatch):
        fetch_model(f"file://{path}", variables={CHECKSUM: f"sha256:{'0' * 64}"})


def test_a_model_is_fetched_once(registry: Registry, variables: dict[str, str]) -> None:
    """As the job names it; the next process finds it in the cache."""
    first, second = fetch_model(variables=variables), fetch_model(variables=variables)

    assert first == second
    assert first.name == "m.bin"
    assert first.read_bytes() == WEIGHTS
    assert registry.asked == [("/m.bin", "")]
    assert files_in(variables) == ["m.bin"]


def test_processes_at_once_share_one_download(registry: Registry, variables: dict[str, str]) -> None:
    """One fetches, and the others wait for it."""
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: fetch_model(variables=variables), range(8)))

    assert len(found) == len(registry.asked) == 1


def test_a_process_that_waits_too_long_gives_up(variables: dict[str, str]) -> None:
    """The lock of one that hangs holds up nobody for ever."""
    path = fetch_model(variables=variables)
    with (path.parent / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match="another process holds"):
            fetch_model(variables=variables, limits=FetchLimits(seconds=0))


def test_what_differs_from_the_checksum_never_enters_the_cache(registry: Registry, variables: dict[str, str]) -> None:
    """Nothing of it stays, and the right one is taken later."""
    registry.bodies["/m.bin"] = b"others"
    with pytest.raises(ModelMismatch):
        fetch_model(variables=variables)
    assert files_in(variables) == []

    registry.bodies["/m.bin"] = WEIGHTS
    assert fetch_model(variables=variables).read_bytes() == WEIGHTS


def test_a_file_that_the_disk_damaged_is_fetched_again(registry: Registry, variables: dict[str, str]) -> None:
    """A cache is verified at each start, as a download is."""
    fetch_model(variables=variables).write_bytes(b"damaged")

    assert fetch_model(variables=variables).read_bytes() == WEIGHTS
    assert len(registry.asked) == 2


def test_another_checksum_is_another_model(registry: Registry, variables: dict[str, str]) -> None:
    """Jobs of two versions under one URI share no file."""
    old = fetch_model(variables=variables)
    registry.bodies["/m.bin"] = b"new"
    new = fetch_model(variables=variables | {CHECKSUM: f"sha256:{hashlib.sha256(b'new').hexdigest()}"})

    assert (old.read_bytes(), new.read_bytes()) == (WEIGHTS, b"new")


@pytest.mark.parametrize("tells_size", [True, False])
def test_a_model_that_is_too_large_is_refused(
    registry: Registry, variables: dict[str, str], *, tells_size: bool
) -> None:
    """By the size that the server tells, or else by what comes."""
    registry.tells_size = tells_size
    assert fetch_model(variables=variables | {CHECKSUM: ""}, limits=FetchLimits(size_bytes=len(WEIGHTS))).exists()

    with pytest.raises(ModelRefused, match="more than 6999 bytes"):
        fetch_model(variables=variables, limits=FetchLimits(size_bytes=len(WEIGHTS) - 1))
    assert files_in(variables) == ["m.bin"]


def test_a_download_that_takes_too_long_ends(variables: dict[str, str]) -> None:
    """Nothing of it stays."""
    with pytest.raises(TimeoutError, match="not fetched after 0 s"):
        fetch_model(variables=variables, limits=FetchLimits(seconds=0))
    assert files_in(variables) == []


def test_a_download_that_breaks_off_is_no_model(registry: Registry, variables: dict[str, str]) -> None:
    """Without a checksum too."""
    registry.cuts = 10
    with pytest.raises(ConnectionError, match="ended 10 bytes too early"):
        fetch_model(variables=variables | {CHECKSUM: ""})
    assert files_in(variables) == []


@pytest.mark.parametrize(("path", "error"), [("/other", FileNotFoundError), ("/secret", PermissionError)])
def test_the_servers_no_is_told(
    registry: Registry, variables: dict[str, str], path: str, error: type[Exception]
) -> None:
    """A program can tell a wrong name from a missing right."""
    with pytest.raises(error, match="the server answers 40"):
        fetch_model(registry.url + path, variables=variables)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/other", "ModelUnavailable: .*the server answers 404"),
        ("/secret", "ModelUnavailable: .*the server answers 403"),
        ("/wrong", "ModelMismatch: .* do not load it"),
        ("/.hidden", "ModelRefused: .*a segment"),
    ],
)
def test_a_model_that_cannot_be_resolved_is_why_the_container_ends(
    registry: Registry,
    variables: dict[str, str],
    path: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """EDGE-18, REG-3: an unknown model is told in the termination message, in the word that makes the job service try
    again; a wrong model and a refused URI are told, and not tried again. A later success takes it back."""
    message = tmp_path / "message"
    message.touch()
    monkeypatch.setenv("ATOLL_TERMINATION_LOG", str(message))
    registry.bodies["/wrong"] = b"others"
    with pytest.raises((OSError, ModelMismatch, ModelRefused)):
        fetch_model(registry.url + path, variables=variables)
    failed = message.read_text()
    fetch_model(variables=variables)

    assert re.match(told, failed)
    assert any(one in failed for one in RETRYABLE) is told.startswith("ModelUnavailable")
    assert message.read_text() == ""


def test_a_checkpoint_in_the_termination_message_outlives_a_model(
    variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is worth more than the reason."""
    message = tmp_path / "message"
    message.write_text('{"last_checkpoint": {}}')
    monkeypatch.setenv("ATOLL_TERMINATION_LOG", str(message))
    with pytest.raises(ModelMismatch):
        fetch_model(variables=variables | {CHECKSUM: f"sha256:{'0' * 64}"})

    assert message.read_text() == '{"last_checkpoint": {}}'


def test_hugging_face_gives_one_file_of_a_revision(registry: Registry, variables: dict[str, str]) -> None:
    """The token goes to the hub alone, and not to the store that it redirects to."""
    resolved = "/org/name/resolve/refs%2Fpr%2F1/onnx/m.bin"
    registry.redirects[resolved] = f"http://localhost:{registry.port}/m.bin?signature=s"
    registry.bodies["/m.bin?signature=s"] = WEIGHTS
    hub = variables | {HUB: registry.url, HUB_TOKEN: "hf_secret"}
    path = fetch_model("hf://org/name@refs/pr/1", file="onnx/m.bin", variables=hub)

    assert (path.name, path.read_bytes()) == ("m.bin", WEIGHTS)
    assert registry.asked == [(resolved, "Bearer hf_secret"), ("/m.bin?signature=s", "")]


ASKED = "/api/2.0/mlflow/model-versions/get-download-uri?name=llama&version=7"
ARTIFACTS = "/api/2.0/mlflow-artifacts/artifacts/1/abc"


@pytest.mark.parametrize(
    ("place", "path", "token"),
    [
        ("mlflow-artifacts:/1/abc", f"{ARTIFACTS}/m.bin", "Bearer secret"),
        ("http://localhost:PORT/elsewhere/", "/elsewhere/m.bin", ""),
    ],
    ids=["on the server", "on another"],
)
def test_mlflow_says_where_a_version_lies(
    registry: Registry, variables: dict[str, str], place: str, path: str, token: str
) -> None:
    """The token goes to the server alone. A version does not change: what is cached needs no server."""
    registry.bodies |= {ASKED: json.dumps({"artifact_uri": place.replace("PORT", str(registry.port))}).encode()}
    registry.bodies[path] = WEIGHTS
    server = variables | {MLFLOW: registry.url, MLFLOW_TOKEN: "secret"}
    for _ in range(2):
        found = fetch_model(f"mlflow://127.0.0.1:{registry.port}/llama/7", file="m.bin", variables=server)
        assert (found.name, found.read_bytes()) == ("m.bin", WEIGHTS)

    assert registry.asked == [(ASKED, "Bearer secret"), (path, token)]


def test_the_token_of_one_mlflow_server_goes_to_no_other() -> None:
    """The URI is the job's, the token that of the server in MLFLOW_TRACKING_URI."""
    known = {MLFLOW: "https://mlflow.example.com", MLFLOW_TOKEN: "secret"}

    assert _token("mlflow://mlflow.example.com/llama/7", known) == "secret"
    assert not _token("mlflow://mlflow.example.com.evil.example/llama/7", known)
    assert not _token("mlflow://mlflow.example.com/llama/7", {MLFLOW_TOKEN: "secret"})


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"{", "does not say where llama 7 lies"),
        (b"[]", "does not say where llama 7 lies"),
        (b" " * 70_000, "more than 65536 bytes"),
        (b'{"artifact_uri": "/mnt/models"}', "must serve it"),
        (b'{"artifact_uri": "file:///etc"}', "must serve it"),
        (b'{"artifact_uri": "sftp://user:secret@files/1"}', r"lies at 'sftp://files/1'"),
        (b'{"artifact_uri": "mlflow-artifacts:/../secrets"}', "must serve it"),
        (b'{"artifact_uri": "mlflow-artifacts://other/1/abc"}', "must serve it"),
        (b'{"artifact_uri": "https://169.254.169.254/latest"}', "which is not public"),
    ],
)
def test_what_mlflow_says_is_judged(registry: Registry, variables: dict[str, str], answer: bytes, told: str) -> None:
    """Nonsense, and places that no job may read."""
    registry.bodies[ASKED] = answer
    with pytest.raises(ModelRefused, match=told):
        fetch_model(
            f"mlflow://127.0.0.1:{registry.port}/llama/7", file="m.bin", variables=variables | {MLFLOW: registry.url}
        )


def test_a_token_goes_to_no_other_registry(registry: Registry, variables: dict[str, str]) -> None:
    """HF_TOKEN is set in many containers."""
    fetch_model(variables=variables | {HUB_TOKEN: "hf_secret"})

    assert registry.asked == [("/m.bin", "")]


@pytest.mark.parametrize(
    ("address", "is_trusted", "is_taken"),
    [("127.0.0.1", True, True), ("127.0.0.1", False, False), ("127.0.0.2", True, False)],
    ids=["its own", "of an unknown authority", "of another host"],
)
def test_a_registry_shows_the_certificate_of_its_host(
    registry: Registry,
    variables: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    address: str,
    is_trusted: bool,
    is_taken: bool,
) -> None:
    """The connection goes to an address, and the certificate must be of the host in the URI."""
    authority = Authority("registries")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    authority.issue("registry", certificate, key, address=address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    registry.server.socket = context.wrap_socket(registry.server.socket, server_side=True)
    trusted = authority if is_trusted else Authority("others")
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted.write_certificate(tmp_path / "ca.pem")))
    uri = f"https://127.0.0.1:{registry.port}/m.bin"

    if is_taken:
        assert fetch_model(uri, variables=variables).read_bytes() == WEIGHTS
    else:
        with pytest.raises(ssl.SSLCertVerificationError):
            fetch_model(uri, variables=variables)


@pytest.mark.parametrize(
    ("uri", "file", "told"),
    [
        ("", "", "must be SCHEME"),
        ("/models/m.bin", "", "must be SCHEME"),
        ("https://example.com", "", "must be SCHEME"),
        ("https://example.com/", "", "must be SCHEME"),
        ("https://example.com/" + "a" * 1100, "", "at most 1024"),
        ("https://example.com/a/../m.bin", "", "segment '..'"),
        ("https://example.com/a", "../m.bin", "segment '..'"),
        ("https://example.com/%2e%2e/m.bin", "", "segment '%2e%2e'"),
        ("https://example.com/m.bin?x=1", "", "segment"),
        ("https://example.com/a//m.bin", "", "segment ''"),
        ("https://example.com/a/", "", "name the file"),
        ("https://user:pass@example.com/m.bin", "", "without a user"),
        ("https://example.com:99999/m.bin", "", "is no URL"),
        ("https://[::1/m.bin", "", "is no URL"),
        ("file://host/m.bin", "", "must be file"),
        ("ftp://example.com/m.bin", "", "must be file"),
        ("mlflow://example.com/m/1", "", "needs the name of a file"),
        ("mlflow://example.com/m", "m.bin", "mlflow://SERVER/NAME/VERSION"),
        ("wandb://entity/project/m", "m.bin", "wandb's own client"),
        ("s3://169.254.169.254:80/m.bin", "", "no valid bucket"),
        ("s3://user@bucket/m.bin", "", "no valid bucket"),
        ("hf://org/name@main", "", "with the name of a file"),
        ("hf://org/name/more", "m.bin", "must be hf"),
        ("hf://org@../name", "m.bin", "must be hf"),
        ("http://example.com/m.bin", "", "for hosts in ATOLL_MODEL_HOSTS"),
    ],
)
def test_a_uri_that_is_none_of_a_model_is_refused(variables: dict[str, str], uri: str, file: str, told: str) -> None:
    """Before anything is contacted."""
    with pytest.raises(ModelRefused, match=told):
        fetch_model(uri, file=file, variables=variables | {URI: ""})


@pytest.mark.parametrize(
    ("host", "addresses"),
    [
        pytest.param("127.0.0.1", ["127.0.0.1"], id="this machine"),
        pytest.param("2852039166", ["169.254.169.254"], id="a cloud's metadata, disguised"),
        pytest.param("registry.example.com", ["10.0.0.1"], id="a name that leads inwards"),
        pytest.param("registry.example.com", ["93.184.216.34", "::ffff:10.0.0.1"], id="one of two addresses"),
    ],
)
def test_a_host_inside_is_contacted_only_if_it_is_listed(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, host: str, addresses: list[str]
) -> None:
    """Whatever its name, its addresses decide, and no connection is made."""
    resolved = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 443)) for address in addresses]
    contacted: list[Any] = []

    def connected(address: tuple[str, int], **_: Any) -> socket.socket:
        contacted.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: resolved)
    monkeypatch.setattr(socket, "create_connection", connected)
    with pytest.raises(ModelRefused, match="which is not public"):
        fetch_model(f"https://{host}/m.bin", variables=variables | {HOSTS: ""})
    assert contacted == []
    with pytest.raises(ConnectionRefusedError):
        fetch_model(f"https://{host}/m.bin", variables=variables | {HOSTS: host})
    assert contacted == [(address, 443) for address in addresses]


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("https://169.254.169.254/latest", "which is not public"),
        ("http://example.com/m.bin", "for hosts in"),
        ("file:///etc/passwd", "for hosts in"),
        ("https://[", "to no URL"),
        ("https://" + "a" * 70 + ".com/", "no name of a host"),
        ("/m\u00e9.bin", "other characters than a URL has"),
        ("/m.bin?a=\u00e9", "other characters than a URL has"),
        ("/m.bin?a=\u0001", "other characters than a URL has"),
        ("/again", f"more than {REDIRECTS_MAX} times"),
    ],
)
def test_a_redirect_leads_no_further_than_a_uri(
    registry: Registry, variables: dict[str, str], target: str, told: str
) -> None:
    """Each is judged like the first."""
    registry.redirects |= {"/m.bin": target, "/again": target}
    with pytest.raises(ModelRefused, match=told):
        fetch_model(variables=variables)


@pytest.mark.parametrize(
    "target",
    [
        "/none.bin?signature=",
        "/secret?signature=",
        "/again?signature=",
        "/m\u00e9.bin?signature=",
        "/cut.bin?signature=",
        "https://169.254.169.254/m.bin?signature=",
        "https://user:hush@example.com/m.bin?signature=",
        "https://hush@[::1/m.bin?signature=",
        "https://example.com:x/m.bin?signature=",
        "ftp://example.com/m.bin#signature=",
        "//[/m.bin?signature=",
    ],
)
def test_no_error_shows_what_a_signed_url_carries(registry: Registry, variables: dict[str, str], target: str) -> None:
    """Whoever reads the log of a job could use it; a whole traceback has none of it either."""
    registry.redirects |= {"/m.bin": f"{target}hush", "/again?signature=hush": "/again?signature=hush"}
    registry.bodies["/cut.bin?signature=hush"] = WEIGHTS
    registry.cuts = 10
    with pytest.raises((ModelRefused, OSError)) as caught:
        fetch_model(variables=variables)

    assert "hush" not in "".join(traceback.format_exception(caught.value))


def test_a_uri_that_is_refused_is_shown_without_its_query(variables: dict[str, str]) -> None:
    """A signed URL is no URI of a model, and still a secret."""
    with pytest.raises(ModelRefused) as caught:
        fetch_model("https://hush@example.com/m.bin?signature=hush", variables=variables)

    assert "hush" not in str(caught.value)


@given(
    st.one_of(
        st.ip_addresses(v=4),
        st.ip_addresses(v=6),
        st.sampled_from(["64:ff9b::", "2002::", "2001::", "::", "::ffff:0:0", "fc00::", "fe80::"]).flatmap(
            lambda start: st.integers(0, 2**32 - 1).map(lambda low: IPv6Address(start) + low)
        ),
        st.sampled_from(SPECIAL).flatmap(lambda network: st.ip_addresses(network=ip_network(network))),
    )
)
def test_the_rule_is_the_one_of_submission(address: IPv4Address | IPv6Address) -> None:
    """The library cannot import Atoll; what both call public is the same."""
    assert is_public(str(address)) == uris.is_public(str(address))


@pytest.mark.e2e
def test_a_model_comes_from_a_bucket(
    s3: dict[str, str], variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, verified, and bounded."""
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    connect("s3").pipe_file(f"{BUCKET}/models/m.bin", WEIGHTS)

    assert fetch_model(f"s3://{BUCKET}/models/m.bin", variables=variables).read_bytes() == WEIGHTS
    with pytest.raises(ModelRefused, match="more than 6999 bytes"):
        fetch_model(
            f"s3://{BUCKET}/models/",
            file="m.bin",
            cache=f"{variables[CACHE]}-other",
            variables=variables,
            limits=FetchLimits(size_bytes=len(WEIGHTS) - 1),
        )
    with pytest.raises(FileNotFoundError):
        fetch_model(f"s3://{BUCKET}/models/none.bin", variables=variables)
