"""The API server's address and our credentials, from a kubeconfig or the files that Kubernetes mounts into a pod.

Everything that rotates is reloaded without a restart: tokens and plugins' answers with the next request, changed files
(kubeconfig, CAs, client certificates, keys) as a new TLS context for new connections; open ones continue.
`kubernetes.aio.config` reads kubeconfigs (contexts, exec plugins, OIDC, token files). That import costs 20 MB and
0.3 s, so it happens only here, on connect; a pod's own account is read without it, to keep the agents small.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import structlog

from atoll.kube.errors import ConfigurationError, truncate


class _Configuration(Protocol):
    """The part of `kubernetes.aio.client.Configuration` that is used."""

    host: str
    proxy: str | None
    tls_server_name: str | None
    ssl_ca_cert: str | None
    ca_cert_data: str | bytes | None
    cert_file: str | None
    key_file: str | None
    verify_ssl: bool
    api_key: dict[str, str]


class _Loader(Protocol):
    """The part of `KubeConfigLoader` that is used: reading the same kubeconfig once more."""

    def load_and_set(self, client_configuration: object) -> Awaitable[None]: ...


log = structlog.get_logger(__name__)

RELOAD_SECONDS = 60.0
"""Interval of reading a source again; projected tokens are replaced long before they expire."""
CERTIFICATE_MARGIN_SECONDS = 600.0
"""A plugin is asked for a new certificate this long before the old one ends."""
FILE_BYTES_MAX = 1 << 20


ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Mount point of a pod's account: `token`, which Kubernetes replaces before it expires, and `ca.crt`."""


class _PodAccount:
    """The pod's own account, in the shape of the library's configuration. Raises ConfigurationError and OSError."""

    def __init__(self) -> None:
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
        if not host or not port:
            raise ConfigurationError("the pod's service account names no server: KUBERNETES_SERVICE_HOST and _PORT")
        self.host = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        self.proxy: str | None = None
        self.tls_server_name: str | None = None
        self.ssl_ca_cert: str | None = str(ACCOUNT_FOLDER / "ca.crt")
        self.ca_cert_data: str | bytes | None = None
        self.cert_file: str | None = None
        self.key_file: str | None = None
        self.verify_ssl = True
        self.api_key: dict[str, str] = {}

    def read_token(self) -> None:
        """Read the token again."""
        token = (ACCOUNT_FOLDER / "token").read_text().strip()
        if not token:
            raise ConfigurationError(f"the token of the pod's service account is empty: {ACCOUNT_FOLDER / 'token'}")
        self.api_key["BearerToken"] = f"Bearer {token}"


class Credentials:
    """One server and one identity. `host` has no trailing slash; `ssl_context` is None for plain HTTP."""

    def __init__(
        self,
        configuration: _Configuration,
        *,
        read_source: Callable[[], Awaitable[object]],
        read_anew: Callable[[], Awaitable[Credentials]],
        files: Mapping[Path, bytes | None],
        is_due: Callable[[], bool] = lambda: True,
    ) -> None:
        """read_source: renews the token of a plugin or file, or a plugin's certificate, in the same configuration.
        is_due: tells whether to do so although nobody refused the old one. read_anew: reads everything
        again; called when one of `files`, or a file named in the configuration, has changed. files: with the contents
        from before they were loaded, so that no change goes unnoticed."""
        self._read_anew = read_anew
        self._load(configuration, read_source, files, is_due)

    def _load(
        self,
        configuration: _Configuration,
        read_source: Callable[[], Awaitable[object]],
        files: Mapping[Path, bytes | None],
        is_due: Callable[[], bool],
    ) -> None:
        """Take over a configuration as a whole, or raise and change nothing. Contents are read before their use."""
        named = {path: _content_of(path) for path in _named_by(configuration)}
        host = configuration.host.rstrip("/")
        ssl_context = _ssl_context(configuration) if host.startswith("https://") else None
        self._configuration = configuration
        self._read_source = read_source
        self._is_due = is_due
        self._reload_at = asyncio.get_running_loop().time() + RELOAD_SECONDS
        self._files = files
        self._named = named
        self._certificate = configuration.cert_file
        self.host: str = host
        self.proxy: str | None = configuration.proxy
        self.server_hostname: str | None = configuration.tls_server_name
        self.ssl_context = ssl_context

    @classmethod
    async def load(cls, kubeconfig: Path | None = None, context: str | None = None) -> Credentials:
        """Read `kubeconfig`; without one $KUBECONFIG, the pod's own account, or ~/.kube/config, in this order.

        Raises ConfigurationError that names the source and what is wrong with it.
        """
        source = _source(kubeconfig)
        try:
            return await (cls._from_pod() if source is None else cls._from_file(source, context))
        except ConfigurationError:
            raise
        except Exception as error:
            where = source or "the pod's service account"
            raise ConfigurationError(f"cannot connect with {where}: {truncate(str(error)) or repr(error)}") from error

    @classmethod
    async def _from_pod(cls) -> Credentials:
        account = _PodAccount()

        async def read_source() -> None:
            account.read_token()

        await read_source()
        return cls(account, read_source=read_source, read_anew=cls._from_pod, files={})

    @classmethod
    async def _from_file(cls, source: str, context: str | None) -> Credentials:
        config, configuration = _import_library()
        files = {path: _content_of(path) for path in _paths_of(source)}
        loader: _Loader = await config.load_kube_config(
            config_file=source, context=context, client_configuration=configuration, persist_config=False
        )
        user = _user(loader)
        _check_plugin(user, configuration)
        plugin_expires = "exec" in user and hasattr(loader, "exec_plugin_expiry")
        rotates = "tokenFile" in user or "auth-provider" in user or "exec" in user
        is_asked_late = "exec" in user and not plugin_expires
        return cls(
            configuration,
            read_source=(lambda: loader.load_and_set(configuration)) if rotates else _nothing,
            read_anew=lambda: cls._from_file(source, context),
            files=files,
            is_due=(lambda: _ends_soon(configuration)) if is_asked_late else lambda: True,
        )

    async def headers(self) -> dict[str, str]:
        """Return the headers that authenticate one request; empty if the TLS certificate does."""
        if asyncio.get_running_loop().time() >= self._reload_at:
            await self.reload(was_refused=False)
        token = self._configuration.api_key.get("BearerToken")
        return {"Authorization": token.strip()} if token else {}

    def authority_context(self) -> ssl.SSLContext:
        """Return a context that trusts who signed the API server's certificate, for other servers of the cluster."""
        return ssl.create_default_context(
            cafile=self._configuration.ssl_ca_cert, cadata=self._configuration.ca_cert_data
        )

    async def reload(self, *, was_refused: bool = True) -> None:
        """Read the source again, also after a 401 or an untrusted certificate. If it cannot be read now, keep the old
        credentials. A plugin that tells no time of expiry runs only after a refusal, or when its certificate ends."""
        self._reload_at = asyncio.get_running_loop().time() + RELOAD_SECONDS
        try:
            if self._has_changed():
                fresh = await self._read_anew()
                self._load(fresh._configuration, fresh._read_source, fresh._files, fresh._is_due)
                log.info("Reloaded changed credentials", server=self.host)
                return
            if was_refused or self._is_due():
                await self._read_source()
            self._reload_certificate()
        except Exception as error:  # noqa: BLE001 - plugins, files and identity providers fail in any way they like
            log.warning("Kept old credentials", err=truncate(str(error)))

    def _has_changed(self) -> bool:
        """Return whether a file for TLS or identity differs from what was loaded."""
        known = {**self._files, **self._named}
        return any(_content_of(path) != content for path, content in known.items())

    def _reload_certificate(self) -> None:
        certificate, key = self._configuration.cert_file, self._configuration.key_file
        if self.ssl_context is not None and certificate and certificate != self._certificate:
            self.ssl_context.load_cert_chain(certificate, key)
            self._certificate = certificate


def default_namespace(kubeconfig: Path | None = None, context: str | None = None) -> str:
    """Return the namespace of the context or of the pod's own account; `default` without one.

    Raises ConfigurationError, and the library's errors for an unusable kubeconfig.
    """
    source = _source(kubeconfig)
    if source is None:
        account = ACCOUNT_FOLDER / "namespace"
        return (account.read_text().strip() if account.is_file() else "") or "default"
    listed, current = import_module("kubernetes.aio.config").list_kube_config_contexts(source)
    chosen = current if context is None else next((one for one in listed if one["name"] == context), {})
    return str(((chosen or {}).get("context") or {}).get("namespace") or "default")


def _paths_of(source: str) -> list[Path]:
    return [Path(path).expanduser() for path in source.split(os.pathsep) if path]


def _named_by(configuration: _Configuration) -> list[Path]:
    """Return the files for TLS that a configuration names."""
    named = (configuration.ssl_ca_cert, configuration.cert_file, configuration.key_file)
    return [Path(name) for name in named if name]


async def _nothing() -> None:
    """Renew nothing: the kubeconfig itself is read again when the file changes."""


def _ends_soon(configuration: _Configuration) -> bool:
    """Return whether the client certificate, if there is one, ends soon. Raises OSError and ValueError."""
    if not configuration.cert_file:
        return False
    x509 = import_module("cryptography.x509")
    certificate = x509.load_pem_x509_certificate(Path(configuration.cert_file).read_bytes())
    return bool(certificate.not_valid_after_utc.timestamp() - time.time() < CERTIFICATE_MARGIN_SECONDS)


def _content_of(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(FILE_BYTES_MAX)
    except OSError:
        return None


def _source(kubeconfig: Path | None) -> str | None:
    """Return the kubeconfig to read, or None for the pod's own account."""
    if kubeconfig is not None:
        if not kubeconfig.is_file():
            raise ConfigurationError(f"no such kubeconfig: {kubeconfig}")
        return str(kubeconfig)
    listed = os.environ.get("KUBECONFIG")
    if listed:
        if not any(Path(path).expanduser().is_file() for path in listed.split(os.pathsep) if path):
            raise ConfigurationError(f"no such kubeconfig: {listed}, as KUBECONFIG says")
        return listed
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return None
    home = Path.home() / ".kube" / "config"
    if not home.is_file():
        raise ConfigurationError("no cluster to talk to: pass --kubeconfig, set KUBECONFIG, or run inside a pod")
    return str(home)


def _import_library() -> tuple[Any, _Configuration]:
    """Import the heavy library now, and return its config module and an empty configuration."""
    configuration: _Configuration = import_module("kubernetes.aio.client").Configuration()
    return import_module("kubernetes.aio.config"), configuration


def _user(loader: _Loader) -> dict[str, Any]:
    user = getattr(loader, "_user", None)
    return dict(user.value) if user is not None else {}


def _check_plugin(user: Mapping[str, Any], configuration: _Configuration) -> None:
    """Raise if an exec plugin failed: the library only logs that, and every request would be an unexplained 401."""
    plugin = user.get("exec")
    if plugin and not configuration.api_key and not configuration.cert_file:
        command = truncate(str(plugin.get("command")))
        raise ConfigurationError(
            f"credential plugin {command!r} gave neither a token nor a certificate; run it by hand"
        )


def _ssl_context(configuration: _Configuration) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert, cadata=configuration.ca_cert_data)
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
