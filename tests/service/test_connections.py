"""Limits of a listener's connections, and which connections it closes beyond them."""

import asyncio

import pytest

from atoll.service.connections import Admission, Connection


class Wire(asyncio.Transport):
    """A transport that only remembers that it was aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = asyncio.Event()
        self.unread = 0

    def get_write_buffer_size(self) -> int:
        return self.unread

    def abort(self) -> None:
        self.aborted.set()


def connect(admission: Admission, sent: bytes = b"") -> tuple[Connection, Wire]:
    connection, wire = admission.guarded(asyncio.Protocol)(), Wire()
    connection.connection_made(wire)
    if sent:
        connection.data_received(sent)
    return connection, wire


def cut(*wires: Wire) -> list[bool]:
    return [wire.aborted.is_set() for wire in wires]


async def test_a_head_that_does_not_come_is_not_waited_for() -> None:
    """Neither after the connection nor after the first bytes of a later request."""
    admission = Admission(read_seconds=0.01, idle_seconds=0.01)
    kept, later = connect(admission, b"GET")
    kept.head_is_here()
    kept.work()
    kept.done()
    assert not later.aborted.is_set()
    kept.data_received(b"GE")
    _, silent = connect(admission)

    async with asyncio.timeout(20):
        await later.aborted.wait()
        await silent.aborted.wait()

    assert (admission.connections, admission.bytes_held) == (set(), 0)


async def test_only_clients_close_connections_that_are_idle() -> None:
    """One opened ahead of need, and one on which the body of the last request came after its head: a server that closes
    such a connection after a few seconds cuts off the request that is just being sent."""
    admission = Admission(read_seconds=0.01)
    _, unused = connect(admission)
    served, answered = connect(admission, b"POST / HTTP/1.1")
    served.head_is_here()
    served.data_received(b"body")
    served.work()
    served.done()
    slow, cut_off = connect(admission, b"POST / HTTP/1.1")

    async with asyncio.timeout(20):
        await cut_off.aborted.wait()

    assert cut(unused, answered) == [False, False]
    assert admission.connections.isdisjoint({slow})


async def test_too_many_connections_cost_the_one_that_waits_longest() -> None:
    """Whoever came last is answered; who is worked on counts elsewhere and is never cut."""
    admission = Admission(connections_max=2)
    worked_on, first = connect(admission, b"GET /")
    worked_on.work()
    (_, second), (_, third) = connect(admission), connect(admission)
    assert cut(first, second, third) == [False, False, False]

    _, fourth = connect(admission)

    assert cut(first, second, third, fourth) == [False, True, False, False]


async def test_too_many_bytes_cost_the_one_that_holds_most() -> None:
    """A small request goes through beside any number of large ones, and what is cut or answered is free again."""
    admission = Admission(bytes_max=100)
    (small, first), (_, second), (large, third) = (connect(admission, b"x" * size) for size in (5, 40, 50))
    assert cut(first, second, third) == [False, False, False]

    large.data_received(b"x" * 20)
    assert cut(first, second, third) == [False, False, True]
    assert admission.bytes_held == 45

    small.done()
    assert admission.bytes_held == 40


async def test_what_is_worked_on_is_not_cut_for_bytes() -> None:
    """It has been paid for already; the newcomer goes."""
    admission = Admission(bytes_max=100)
    old, first = connect(admission, b"x" * 90)
    old.work()

    _, second = connect(admission, b"x" * 20)

    assert cut(first, second) == [False, True]


def answer(connection: Connection, wire: Wire, size: int, *, is_written_first: bool) -> None:
    """Answer a request with so many bytes, which the application writes before or after it is done."""
    connection.head_is_here()
    connection.work()
    wire.unread = size
    if is_written_first:
        connection.pause_writing()
        connection.done()
    else:
        connection.done()
        connection.pause_writing()


@pytest.mark.parametrize("is_written_first", [True, False])
async def test_an_answer_that_nobody_reads_is_not_kept(is_written_first: bool) -> None:
    """Its client is cut off after a while, or at once where such answers take too many bytes; who reads, and slowly, is
    not."""
    admission = Admission(bytes_max=100, unread_seconds=0.01)
    clients = [connect(admission, b"GET /") for _ in range(3)]
    (slow, reading), (deaf, unread), (fast, read) = clients
    for connection, wire in clients:
        answer(connection, wire, 40 if connection is deaf else 20, is_written_first=is_written_first)
    assert admission.bytes_held == 80
    fast.resume_writing()
    assert admission.bytes_held == 60

    reading.unread = 10
    async with asyncio.timeout(20):
        await unread.aborted.wait()
    assert cut(reading, read) == [False, False]
    assert admission.bytes_held == slow.bytes_held == 10

    _, greedy = clients[2]
    answer(fast, greedy, 95, is_written_first=is_written_first)
    assert greedy.aborted.is_set()
