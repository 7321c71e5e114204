"""Connects this terminal with a command in a container of a job: keys and size go there, output comes back."""

import asyncio
import json
import os
import signal
import sys
import termios
import tty
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import aiohttp

from atollctl.service_client import ServiceClient, ServiceUnreachable

STDIN, STDOUT, STATUS, SIZE = 0, 1, 3, 4
KEYS_BYTES_MAX: Final = 4096
MESSAGE_BYTES_MAX: Final = 4 * 1024 * 1024
ALIVE_SECONDS: Final = 30.0
REFUSALS: Final[Mapping[int, str]] = {
    401: "the token is not valid",
    403: "you may not run commands in this job",
    404: "there is no such job",
    409: "the job has no running pods, or the cluster refuses the command",
    422: "the command is too long",
    429: "too many requests, or too many open terminals",
}


class TerminalRefused(Exception):
    """The service opened no terminal, or the command did not run."""


def run_at_terminal(client: ServiceClient, path: str, query: Mapping[str, Any]) -> int | None:
    """Run a command until it ends; return its exit status, or None if the connection ended first.

    Raises TerminalRefused, ServiceUnreachable.
    """
    if not sys.stdin.isatty():
        raise TerminalRefused("standard input is no terminal: leave out -t")
    return asyncio.run(_talk(client, client.address(path, query)))


async def _talk(client: ServiceClient, url: str) -> int | None:
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(
                url,
                headers=client.identity(),
                ssl=client.context,
                heartbeat=ALIVE_SECONDS,
                max_msg_size=MESSAGE_BYTES_MAX,
            ) as socket,
        ):
            with _raw(sys.stdin.fileno()):
                return await _relay(socket, sys.stdin.fileno())
    except aiohttp.WSServerHandshakeError as error:
        raise TerminalRefused(REFUSALS.get(error.status, f"the response has status {error.status}")) from error
    except (aiohttp.ClientError, OSError) as error:
        raise ServiceUnreachable(f"cannot reach the job service at {client.url}: {error}") from error


@contextmanager
def _raw(descriptor: int) -> Iterator[None]:
    """Pass every key on as it is, and restore the terminal afterwards."""
    before = termios.tcgetattr(descriptor)
    tty.setraw(descriptor)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


async def _relay(socket: aiohttp.ClientWebSocketResponse, descriptor: int) -> int | None:
    """Pass keys and sizes on and print the output until the command ends. Raises TerminalRefused if it did not run."""
    loop, typed = asyncio.get_running_loop(), asyncio.Queue[bytes]()

    def resize() -> None:
        size = os.get_terminal_size(descriptor)
        typed.put_nowait(bytes([SIZE]) + json.dumps({"Width": size.columns, "Height": size.lines}).encode())

    def type_keys() -> None:
        keys = os.read(descriptor, KEYS_BYTES_MAX)
        if keys:
            typed.put_nowait(bytes([STDIN]) + keys)
        else:  # the terminal is gone
            loop.remove_reader(descriptor)

    async def send() -> None:
        while True:
            await socket.send_bytes(await typed.get())

    resize()
    loop.add_signal_handler(signal.SIGWINCH, resize)
    loop.add_reader(descriptor, type_keys)
    sender = asyncio.create_task(send())
    try:
        async for message in socket:
            if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
                continue
            if message.data[0] == STATUS:
                return _status(message.data[1:])
            if message.data[0] == STDOUT:
                sys.stdout.buffer.write(message.data[1:])
                sys.stdout.buffer.flush()
        return None
    finally:
        loop.remove_reader(descriptor)
        loop.remove_signal_handler(signal.SIGWINCH)
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)


def _status(data: bytes) -> int:
    told = json.loads(data)
    if told["exit_code"] is None:
        raise TerminalRefused(str(told["message"]))
    return int(told["exit_code"])
