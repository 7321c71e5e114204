"""The model of a job: fetched from where it is, verified against the checksum that the job gives, then loaded.

A cache has one folder per source, in which the file appears whole and verified or not at all. Its name has a digest of
the URI and the checksum, so that no model stands for another.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlencode, urlsplit

from worker.downloads import download
from worker.errors import ModelMismatch, ModelRefused
from worker.places import BUCKET, SEGMENT, shown
from worker.termination import tell_failure, untell_failure

UNAVAILABLE: Final = "ModelUnavailable"
"""Reason of a failure that may pass; atoll.jobs.retries knows it."""
CHECKSUM: Final = "ML_MODEL_CHECKSUM"
URI: Final = "ML_MODEL_REGISTRY_URI"
CACHE: Final = "ATOLL_MODEL_CACHE"
HOSTS: Final = "ATOLL_MODEL_HOSTS"
HUB: Final = "HF_ENDPOINT"
"""Hugging Face's own variable."""
HUB_TOKEN: Final = "HF_TOKEN"  # noqa: S105 - the variable's name
CACHE_FOLDER: Final = "~/.cache/atoll/models"
HUGGING_FACE: Final = "https://huggingface.co"
MLFLOW: Final = "MLFLOW_TRACKING_URI"
"""MLflow's own variable; it says whether the server of that name speaks TLS."""
MLFLOW_TOKEN: Final = "MLFLOW_TRACKING_TOKEN"  # noqa: S105 - the variable's name
ANSWER_BYTES_MAX: Final = 64 * 1024
URI_LENGTH_MAX: Final = 1024
WAIT_SECONDS: Final = 0.2
BUCKETS: Final = ("s3", "gs", "az")

_URI: Final = re.compile(r"(?P<scheme>[a-z0-9]+)://(?P<authority>[A-Za-z0-9._:@\[\]-]*)/(?P<path>.+)")
_HINTS: Final = "mlflow://SERVER/NAME/VERSION needs the name of a file beside; wandb:// needs wandb's own client"
_NAME: Final = "[A-Za-z0-9][A-Za-z0-9._-]*"
_MLFLOW: Final = re.compile(rf"mlflow://[^/]+/[^/]+/{_NAME}")
_SERVED: Final = re.compile(r"mlflow-artifacts:(//)?/(?P<path>[^/].*)")
_HUB: Final = re.compile(rf"hf://(?P<name>{_NAME}(/{_NAME})?)(@(?P<revision>{_NAME}(/{_NAME})*))?")


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Bounds of one fetch: the size of the file, and the time with that of waiting for another process."""

    size_bytes: int = 10**12
    seconds: float = 3600.0


def verify_model(path: str | Path, variables: Mapping[str, str] = os.environ) -> None:
    """Compare a file with ML_MODEL_CHECKSUM, ALGORITHM:HEX; without that, accept it. Raises ModelMismatch, ValueError
    for a checksum that cannot be read, and OSError."""
    with _told_at_end():
        _verify(path, variables)


@contextmanager
def _told_at_end() -> Iterator[None]:
    """Leave the reason of a failure for whoever reads how the container ended. A model that is not there now, or whose
    registry does not answer, is `ModelUnavailable`: the job is tried again."""
    try:
        yield
    except (ModelMismatch, ValueError) as error:
        kind = ModelMismatch if isinstance(error, ModelMismatch) else ModelRefused
        tell_failure(f"{kind.__name__}: {error}")
        raise
    except Exception as error:
        own = str(error) if isinstance(error, OSError) else type(error).__name__  # others may show credentials
        tell_failure(f"{UNAVAILABLE}: {own}")
        raise
    untell_failure()


def _verify(path: str | Path, variables: Mapping[str, str]) -> None:
    expected = variables.get(CHECKSUM, "")
    if not expected:
        return
    algorithm, _, digits = expected.partition(":")
    if algorithm not in hashlib.algorithms_guaranteed or algorithm.startswith("shake") or not digits:
        raise ValueError(f"{CHECKSUM}={expected[:80]!r}: write an algorithm such as sha256, a colon, and hex digits")
    with Path(path).open("rb") as file:
        found = hashlib.file_digest(file, algorithm).hexdigest()
    if not hmac.compare_digest(found, digits.lower()):
        raise ModelMismatch(f"{path} has {algorithm} {found}, and the job wants {digits[:200]}: do not load it")


def fetch_model(
    uri: str = "",
    *,
    file: str = "",
    cache: str | Path = "",
    limits: FetchLimits | None = None,
    variables: Mapping[str, str] = os.environ,
) -> Path:
    """Return the path of a model's file that is verified as by `verify_model`, after fetching it if it is not cached.

    uri: ML_MODEL_REGISTRY_URI if empty; file://, s3://, gs://, az://, https://, hf:// or mlflow://. file: its name
    below the URI, which the last two need. A file:// is used where it lies. Processes that share a cache share one
    download. Raises ModelMismatch, ModelRefused, TimeoutError, and errors of the network and the disk; the container's
    termination message has the reason.
    """
    with _told_at_end():
        return _fetched(uri, file, cache, limits or FetchLimits(), variables)


def _fetched(uri: str, file: str, cache: str | Path, limits: FetchLimits, variables: Mapping[str, str]) -> Path:
    uri = uri or variables.get(URI, "")
    url = _resolved(uri, file, variables)
    scheme, _, path = url.partition("://")
    if scheme == "file":
        _verify(path, variables)
        return Path(path)
    deadline = time.monotonic() + limits.seconds
    key = hashlib.sha256(f"{url} {variables.get(CHECKSUM, '')}".encode()).hexdigest()
    folder = Path(cache or variables.get(CACHE) or CACHE_FOLDER, key).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    target, partial = folder / url.rpartition("/")[2], folder / ".partial"
    with _alone(folder / ".lock", deadline):
        if _is_cached(target, variables):
            return target
        try:
            with _source(url, variables, _token(uri, variables)) as (size, pieces):
                _write(partial, size, pieces, limits, deadline)
            _verify(partial, variables)
            partial.rename(target)
        finally:
            partial.unlink(missing_ok=True)
    return target


def _is_cached(path: Path, variables: Mapping[str, str]) -> bool:
    """Return whether the cache has a file; one that a disk has damaged is removed."""
    if not path.exists():
        return False
    try:
        _verify(path, variables)
    except ModelMismatch:
        path.unlink()
        return False
    return True


def _resolved(uri: str, file: str, variables: Mapping[str, str]) -> str:
    """Return the URI of one file, that of hf:// as a URL. Raises ModelRefused."""
    told = f"model URI {shown(uri)!r}"
    whole = f"{uri.removesuffix('/')}/{file}" if file else uri
    found = _URI.fullmatch(whole)
    if len(whole) > URI_LENGTH_MAX or found is None:
        raise ModelRefused(f"{told} must be SCHEME://PLACE/FILE of at most {URI_LENGTH_MAX} characters")
    wrong = [one for one in found["path"].split("/") if not SEGMENT.fullmatch(one)]
    if wrong:
        hint = "letters, digits and . _ = + @ ~ , - are taken, and no dot in front; name the file"
        raise ModelRefused(f"{told} has a segment {shown(wrong[0])[:80]!r}: {hint}")
    scheme, authority = found["scheme"], found["authority"]
    if scheme == "hf":
        return _hub_url(uri, file, variables.get(HUB) or HUGGING_FACE)
    if scheme == "mlflow" and authority and _MLFLOW.fullmatch(uri) and file:
        return whole
    if scheme in BUCKETS and not BUCKET.fullmatch(authority):
        raise ModelRefused(f"{told} has no valid bucket or container: write {scheme}://BUCKET/FILE")
    if scheme not in ("file", "http", "https", *BUCKETS) or bool(authority) == (scheme == "file"):
        raise ModelRefused(f"{told} must be file:///, s3://, gs://, az://, https://, hf:// or mlflow://; {_HINTS}")
    return whole if scheme != "file" else f"file:///{found['path']}"


def _hub_url(uri: str, file: str, endpoint: str) -> str:
    found = _HUB.fullmatch(uri)
    if found is None or not file:
        raise ModelRefused(f"model URI {shown(uri)!r} must be hf://ORG/NAME@REVISION, with the name of a file beside")
    revision = quote(found["revision"] or "main", safe="")
    return f"{endpoint.rstrip('/')}/{found['name']}/resolve/{revision}/{quote(file)}"


def _token(uri: str, variables: Mapping[str, str]) -> str:
    """Return the token for the host of a URI's registry, empty for none."""
    scheme, _, rest = uri.partition("://")
    if scheme == "hf":
        return variables.get(HUB_TOKEN, "")
    is_known = scheme == "mlflow" and rest.partition("/")[0] == urlsplit(variables.get(MLFLOW, "")).netloc
    return variables.get(MLFLOW_TOKEN, "") if is_known else ""


@contextmanager
def _source(url: str, variables: Mapping[str, str], token: str) -> Iterator[tuple[int | None, Iterator[bytes]]]:
    """Yield the size of a file, None if unknown, and its pieces."""
    hosts = (variables.get(HOSTS) or "").split()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if url.startswith("mlflow://"):
        server = _mlflow_server(url, variables)
        url = _mlflow_artifact(url, server, hosts, headers)
        headers = headers if url.startswith(f"{server}/") else {}
    scheme, _, path = url.partition("://")
    if scheme in BUCKETS:
        from worker.objects import connect

        yield connect(scheme).pieces(path)
        return
    with download(url, hosts=hosts, headers=headers) as found:
        yield found


def _mlflow_server(url: str, variables: Mapping[str, str]) -> str:
    """Return the URL of the server that a URI names."""
    authority = url.removeprefix("mlflow://").partition("/")[0]
    known = urlsplit(variables.get(MLFLOW, ""))
    return f"{known.scheme if known.netloc == authority else 'https'}://{authority}"


def _mlflow_artifact(url: str, server: str, hosts: Sequence[str], headers: Mapping[str, str]) -> str:
    """Ask a server where a version of a model lies; return the URL of the file in it. Raises ModelRefused and errors of
    the network."""
    name, version, file = url.removeprefix("mlflow://").split("/", 3)[1:]
    query = urlencode({"name": name, "version": version})
    question = f"{server}/api/2.0/mlflow/model-versions/get-download-uri?{query}"
    answer = bytearray()
    with download(question, hosts=hosts, headers=headers) as (_, pieces):
        for piece in pieces:
            answer += piece
            if len(answer) > ANSWER_BYTES_MAX:
                raise ModelRefused(f"{server} says more than {ANSWER_BYTES_MAX} bytes about {name} {version}")
    try:
        place = str(json.loads(answer)["artifact_uri"]).rstrip("/")
    except (ValueError, LookupError, TypeError) as error:
        raise ModelRefused(f"{server} does not say where {name} {version} lies") from error
    if found := _SERVED.fullmatch(place):
        place = f"{server}/api/2.0/mlflow-artifacts/artifacts/{quote(found['path'])}"
    found = _URI.fullmatch(f"{place}/{file}")
    if found is None or found["scheme"] not in ("http", "https", *BUCKETS) or ".." in found["path"].split("/"):
        raise ModelRefused(
            f"{name} {version} lies at {shown(place)!r}, where it cannot be fetched: {server} must serve it"
        )
    return found.string


def _write(path: Path, size: int | None, pieces: Iterator[bytes], limits: FetchLimits, deadline: float) -> None:
    """Write the pieces to the disk. Raises ModelRefused beyond the size, TimeoutError after the deadline."""
    told = f"the model has more than {limits.size_bytes} bytes, the limit of this fetch"
    if size is not None and size > limits.size_bytes:
        raise ModelRefused(told)
    written = 0
    with path.open("wb") as file:
        for piece in pieces:
            written += len(piece)
            if written > limits.size_bytes:
                raise ModelRefused(told)
            if time.monotonic() > deadline:
                raise TimeoutError(f"the model is not fetched after {limits.seconds:g} s: {written} bytes have come")
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _alone(path: Path, deadline: float) -> Iterator[None]:
    """Hold a lock that ends with the process. Raises TimeoutError."""
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process holds {path}: it has not fetched the model in time") from None
                time.sleep(WAIT_SECONDS)
        yield
