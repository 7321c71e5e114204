"""An extender that records calls and answers as files require, for tests of kube-scheduler's own behaviour.

Run as `python stub_extender.py FOLDER`. It writes calls to FOLDER/calls, one `verb pod` per line. While FOLDER/reject
exists, filter refuses every node. Binds wait until FOLDER/answer-binds exists, then fail and write `answered pod`.
"""

import asyncio
import sys
from pathlib import Path

from aiohttp import web

PORT = 8888


def application(folder: Path) -> web.Application:
    """Return the stub's web application."""

    def record(verb: str, pod: str) -> None:
        with (folder / "calls").open("a") as calls:
            calls.write(f"{verb} {pod}\n")

    async def filter_nodes(request: web.Request) -> web.Response:
        call = await request.json()
        record("filter", call["Pod"]["metadata"]["name"])
        names = call["NodeNames"]
        refused = names if (folder / "reject").exists() else []
        reply = {"NodeNames": [name for name in names if name not in refused], "Error": ""}
        return web.json_response(reply | {"FailedAndUnresolvableNodes": dict.fromkeys(refused, "refused by the stub")})

    async def bind(request: web.Request) -> web.Response:
        pod = (await request.json())["PodName"]
        record("bind", pod)
        while not (folder / "answer-binds").exists():  # noqa: ASYNC110 - another process makes the file
            await asyncio.sleep(0.05)
        record("answered", pod)
        return web.json_response({"Error": "refused by the stub"})

    async def prioritize(request: web.Request) -> web.Response:
        return web.json_response([])

    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/filter", filter_nodes)
    app.router.add_post("/prioritize", prioritize)
    app.router.add_post("/bind", bind)
    return app


if __name__ == "__main__":
    web.run_app(application(Path(sys.argv[1])), host="127.0.0.1", port=PORT, print=None)
