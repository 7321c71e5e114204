"""Connections to the registered clusters, opened when first needed and closed when a cluster changes or goes.

A kubeconfig is a reference: a file in one folder of the service, or a key of a Secret in the service's own cluster. A
Secret's content is only kept in a file that nobody else can read, for as long as the process runs.
"""

import base64
import binascii
import re
import tempfile
from pathlib import Path
from typing import Final

import msgspec
import yaml

from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.kube.errors import ConfigurationError, KubeError
from jobs.records import RegisteredCluster

FILE: Final = re.compile(r"file:([A-Za-z0-9][A-Za-z0-9._-]{0,252})", re.ASCII)
SECRET: Final = re.compile(r"secret:([a-z0-9-]{1,63})/([a-z0-9][a-z0-9.-]{0,252})/([A-Za-z0-9._-]{1,253})", re.ASCII)


class _Secret(msgspec.Struct):
    data: dict[str, str] = {}


class ClusterLinks:
    """The API clients of all clusters."""

    def __init__(self, home: ApiClient, *, folder: Path | None) -> None:
        self._home = home
        self._folder = folder
        self._open: dict[str, tuple[str, ApiClient]] = {}
        self._own_files = tempfile.TemporaryDirectory(prefix="atoll-jobs-")

    async def client(self, cluster: RegisteredCluster) -> ApiClient:
        """Return the client of a cluster. Raises KubeError."""
        if not cluster.kubeconfig:
            return self._home
        known = self._open.get(cluster.id)
        if known is not None and known[0] == cluster.kubeconfig:
            return known[1]
        client = await ApiClient.connect(await self._file(cluster), user_agent="atoll-jobs")
        if known is not None:
            await known[1].close()
        self._open[cluster.id] = (cluster.kubeconfig, client)
        return client

    async def forget(self, name: str) -> None:
        """Close the connection to a cluster."""
        known = self._open.pop(name, None)
        if known is not None:
            await known[1].close()

    async def close(self) -> None:
        """Close every connection."""
        for name in list(self._open):
            await self.forget(name)
        self._own_files.cleanup()

    async def _file(self, cluster: RegisteredCluster) -> Path:
        """Return the kubeconfig's file. Raises KubeError."""
        file, secret = FILE.fullmatch(cluster.kubeconfig), SECRET.fullmatch(cluster.kubeconfig)
        if file is not None and self._folder is not None:
            return self._folder / file[1]
        if secret is not None:
            return await self._from_secret(cluster.id, *secret.groups())
        where = "the service has no setting kubeconfig_folder" if file is not None else "it is no such reference"
        raise ConfigurationError(f"cannot use kubeconfig {cluster.kubeconfig} of cluster {cluster.id}: {where}")

    async def _from_secret(self, cluster: str, namespace: str, name: str, key: str) -> Path:
        found = msgspec.json.decode(await self._home.get(paths.secrets(namespace, name)), type=_Secret)
        if key not in found.data:
            raise ConfigurationError(f"Secret {namespace}/{name} has no key {key}")
        try:
            content = base64.b64decode(found.data[key], validate=True)
            users = (yaml.safe_load(content) or {}).get("users") or ()
            runs = any({"exec", "auth-provider"} & set(one.get("user") or ()) for one in users)
        except (binascii.Error, yaml.YAMLError, AttributeError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"Secret {namespace}/{name}: key {key} is no kubeconfig") from error
        if runs:
            raise ConfigurationError(
                f"Secret {namespace}/{name}: key {key} runs a program for its token: use a token or a certificate"
            )
        path = Path(self._own_files.name) / cluster
        path.touch(mode=0o600)
        path.write_bytes(content)
        return path


def told(error: BaseException) -> str:
    """Return an error of a cluster in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return "does not answer in time"
    text = str(error) if isinstance(error, KubeError | OSError) else f"{type(error).__name__}: {error}"
    return text.partition("\n")[0][:512]
