"""Kubeconfig files with an API server's address, its CA and credentials.

Each file has mode 0600 and embeds its certificates, so it can be moved.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from devcluster.certificates import KeyPairFiles, write_private


def write_kubeconfig(
    path: Path, *, server: str, authority: Path, client: KeyPairFiles | None = None, token: str | None = None
) -> Path:
    """Write a kubeconfig with a client certificate or a bearer token, as JSON, which is valid YAML."""
    user: dict[str, Any] = {"token": token} if token is not None else {}
    if client is not None:
        user = {"client-certificate-data": _encoded(client.certificate), "client-key-data": _encoded(client.key)}
    name = "devcluster"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": name, "cluster": {"server": server, "certificate-authority-data": _encoded(authority)}},
        ],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "current-context": name,
    }
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_private(path, json.dumps(config, indent=1).encode())
    return path


def replace_authority(path: Path, authority: Path) -> None:
    """Replace the CA in a kubeconfig, atomically; address and credentials stay."""
    config = json.loads(path.read_bytes())
    for entry in config["clusters"]:
        entry["cluster"]["certificate-authority-data"] = _encoded(authority)
    unfinished = path.with_name(f".{path.name}")
    write_private(unfinished, json.dumps(config, indent=1).encode())
    unfinished.replace(path)


def _encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
