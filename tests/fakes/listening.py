"""Servers that listen while a block runs, and a kubeconfig for one."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

TOKEN = {"token": "s3cret"}


@asynccontextmanager
async def listening(app: web.Application) -> AsyncIterator[str]:
    """Serve on a free port of this machine; yield the URL."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def kubeconfig(folder: Path, url: str, user: dict[str, Any] | None = None, *, name: str = "kubeconfig") -> Path:
    """Write a kubeconfig for `url` and return its path."""
    path = folder / name
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "clusters": [{"name": "test", "cluster": {"server": url}}],
        "users": [{"name": "test", "user": TOKEN if user is None else user}],
    }
    path.write_text(yaml.safe_dump(content))
    return path
