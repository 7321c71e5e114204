"""Proxy between kube-scheduler and the extender that records the time of each answer.

Run as `python -m bench.timing_proxy --upstream URL --log FILE`. The log has one line `verb seconds` per call, from
the whole call received to the whole answer received. The extender itself stays unchanged.
"""

import argparse
import sys
import time
from pathlib import Path

import aiohttp
from aiohttp import web

from atoll.service.http import add_health, application, serve
from atoll.service.runtime import run
from extender.app import BODY_BYTES_MAX


async def _serve(upstream: str, log: Path, port: int) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        with log.open("a", buffering=1) as lines:

            async def relay(request: web.Request) -> web.Response:
                body = await request.read()
                started = time.perf_counter()
                async with session.post(upstream + request.path, data=body) as answer:
                    content = await answer.read()
                    lines.write(f"{request.path[1:]} {time.perf_counter() - started:.6f}\n")
                    return web.Response(status=answer.status, body=content, content_type=answer.content_type)

            app = application(body_bytes_max=BODY_BYTES_MAX)
            app.router.add_post("/{verb}", relay)
            add_health(app)
            await serve(app, "127.0.0.1", port)


def main() -> int:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream", required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--port", type=int, default=8888)
    arguments = parser.parse_args()
    return run(lambda: _serve(arguments.upstream, arguments.log, arguments.port))


if __name__ == "__main__":
    sys.exit(main())
