"""An extender without decisions: every node fits, all score the same, and bind posts a bare Binding.

Run as `python -m bench.noop_extender --kubeconfig FILE`. It replaces Atoll's extender under the same
scheduler configuration, so that the difference between the two is Atoll's cost.
"""

import argparse
import sys
from pathlib import Path

from aiohttp import web

from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.kube.errors import KubeError
from atoll.service.http import add_health, application, serve
from atoll.service.runtime import run
from extender import wire
from extender.app import BODY_BYTES_MAX

UNLIMITED = 100_000


def build_app(client: ApiClient) -> web.Application:
    """Return the application with the four verbs."""

    async def filter_nodes(request: web.Request) -> web.Response:
        call = wire.read_filter(await request.read())
        return _answer(wire.filter_reply(call.node_names or (), {}))

    async def prioritize(request: web.Request) -> web.Response:
        await request.read()
        return _answer(wire.prioritize_reply(None, 0))

    async def preempt(request: web.Request) -> web.Response:
        await request.read()
        return _answer(wire.preempt_reply({}))

    async def bind(request: web.Request) -> web.Response:
        call = wire.read_bind(await request.read())
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": call.pod_name, "namespace": call.pod_namespace, "uid": call.pod_uid},
            "target": {"apiVersion": "v1", "kind": "Node", "name": call.node},
        }
        try:
            await client.create(paths.binding(call.pod_namespace, call.pod_name), body)
        except KubeError as error:
            return _answer(wire.bind_reply(str(error)))
        return _answer(wire.bind_reply(""))

    app = application(body_bytes_max=BODY_BYTES_MAX)
    for verb, handler in {"filter": filter_nodes, "prioritize": prioritize, "preempt": preempt, "bind": bind}.items():
        app.router.add_post(f"/{verb}", handler)
    add_health(app)
    return app


def _answer(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


async def _serve(kubeconfig: Path, port: int) -> None:
    async with await ApiClient.connect(kubeconfig, requests_per_second=UNLIMITED, burst=UNLIMITED) as client:
        await serve(build_app(client), "127.0.0.1", port)


def main() -> int:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--port", type=int, default=8888)
    arguments = parser.parse_args()
    return run(lambda: _serve(arguments.kubeconfig, arguments.port))


if __name__ == "__main__":
    sys.exit(main())
