"""Which devices the kubelet handed to pods, by its pod-resources API.

In: the kubelet's socket. Out: device ids by namespace and pod, or None where it does not answer. Atoll hands nothing
out by device plugins, so whoever shows up here with a GPU got it from somebody else, and holds it though no process of
his may run on it yet. The API tells no uid; the names are those of pods that run now.

One unary call of gRPC, by hand: a length-prefixed message in HTTP/2 frames over a Unix socket. A gRPC library would
cost the agent more memory than everything else it does. Headers of the answer are not read: a complete message at the
end of the stream is a success, anything else is none.
"""

import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from atoll.api.node_status import Device

PATH: Final = "/v1.PodResourcesLister/List"
ANSWER_BYTES_MAX: Final = 16 << 20
PODS_MAX: Final = 4096
DEVICES_MAX: Final = 4096

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GO_AWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACKNOWLEDGE, _END_HEADERS, _PADDED = 0x1, 0x1, 0x4, 0x8
_STREAM: Final = 1
_FRAME_BYTES_MAX: Final = 1 << 14
_LENGTH_DELIMITED, _VARINT = 2, 0

PluginAllocations = Mapping[tuple[str, str], frozenset[str]]
"""Namespace and name of a pod to the ids of its devices."""


def list_allocations(path: Path, *, timeout_seconds: float) -> PluginAllocations | None:
    """Ask the kubelet once; None where that fails in whatever way."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            return pods_of(_call(connection, str(path), time.monotonic() + timeout_seconds))
    except (OSError, ValueError, UnicodeDecodeError):
        return None


def plugin_names(devices: Iterable[Device]) -> dict[str, str]:
    """Uuids by the PCI slots that AMD's device plugin calls its cards by; NVIDIA's uses uuids."""
    amd = (one for one in devices if one.vendor == "amd" and one.pci_bus_id)
    return {spelling: one.uuid for one in amd for spelling in (one.pci_bus_id, one.pci_bus_id.removeprefix("0000"))}


def pods_of(message: bytes) -> PluginAllocations:
    """Pods with devices in a ListPodResourcesResponse. Raises ValueError for what is none."""
    found: dict[tuple[str, str], frozenset[str]] = {}
    for number, pod in _fields(message):
        if number == 1 and len(found) < PODS_MAX:
            names = {key: value.decode() for key, value in _fields(pod) if key in {1, 2}}
            devices = frozenset(_device_ids(pod))
            if devices:
                found[names.get(2, ""), names.get(1, "")] = devices
    return found


def _device_ids(pod: bytes) -> list[str]:
    """Ids of all devices of all containers; a plugin that shares a card adds `::N` to its uuid."""
    found = []
    for container in (value for number, value in _fields(pod) if number == 3):
        for devices in (value for number, value in _fields(container) if number == 2):
            found += [value.decode().partition("::")[0] for number, value in _fields(devices) if number == 2]
    return found[:DEVICES_MAX]


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Length-delimited fields of a protobuf message; numbers are passed over. Raises ValueError."""
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        if key & 7 == _VARINT:
            _, position = _varint(message, position)
        elif key & 7 == _LENGTH_DELIMITED:
            length, position = _varint(message, position)
            if position + length > len(message):
                raise ValueError("a field is longer than its message")
            yield key >> 3, message[position : position + length]
            position += length
        else:
            position += {1: 8, 5: 4}.get(key & 7, len(message) + 1)


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(message):
            break
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, position
    raise ValueError("a number does not end")


def _call(connection: socket.socket, path: str, deadline: float) -> bytes:
    """Send the call, take its answer. Raises OSError and ValueError."""
    connection.settimeout(_left(deadline))
    connection.connect(path)
    connection.sendall(_PREFACE + _frame(_SETTINGS) + _request())
    body = b""
    while True:
        kind, flags, stream, payload = _read_frame(connection, deadline)
        if kind == _SETTINGS and not flags & _ACKNOWLEDGE:
            connection.sendall(_frame(_SETTINGS, _ACKNOWLEDGE))
        elif kind == _PING and not flags & _ACKNOWLEDGE:
            connection.sendall(_frame(_PING, _ACKNOWLEDGE, payload=payload))
        elif kind in {_RESET, _GO_AWAY}:
            raise ValueError("the kubelet ended the call")
        elif kind == _DATA and stream == _STREAM:
            body += _unpadded(payload, flags)
            if len(body) > ANSWER_BYTES_MAX:
                raise ValueError("the answer is too long")
            if payload:
                more = struct.pack(">I", len(payload))
                connection.sendall(_frame(_WINDOW, payload=more) + _frame(_WINDOW, stream=_STREAM, payload=more))
        if kind in {_DATA, _HEADERS} and stream == _STREAM and flags & _END_STREAM:
            return _message(body)


def _request() -> bytes:
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": PATH,
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    block = b"".join(b"\0" + _literal(name) + _literal(value) for name, value in headers.items())
    empty = struct.pack(">BI", 0, 0)
    return _frame(_HEADERS, _END_HEADERS, _STREAM, block) + _frame(_DATA, _END_STREAM, _STREAM, empty)


def _literal(text: str) -> bytes:
    """A string of a header, neither compressed nor indexed; shorter than 127 bytes."""
    return bytes([len(text)]) + text.encode()


def _frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _read_frame(connection: socket.socket, deadline: float) -> tuple[int, int, int, bytes]:
    head = _read(connection, 9, deadline)
    length = int.from_bytes(head[:3], "big")
    if length > _FRAME_BYTES_MAX:
        raise ValueError("a frame is too long")
    kind, flags, stream = struct.unpack(">BBI", head[3:])
    return kind, flags, stream & 0x7FFF_FFFF, _read(connection, length, deadline)


def _read(connection: socket.socket, length: int, deadline: float) -> bytes:
    found = b""
    while len(found) < length:
        connection.settimeout(_left(deadline))
        more = connection.recv(length - len(found))
        if not more:
            raise ConnectionError("the kubelet hung up")
        found += more
    return found


def _unpadded(payload: bytes, flags: int) -> bytes:
    return payload[1 : len(payload) - payload[0]] if flags & _PADDED and payload else payload


def _message(body: bytes) -> bytes:
    """The one message of a complete answer. Raises ValueError for an answer that is cut, compressed or an error."""
    if len(body) < 5 or body[0] != 0 or int.from_bytes(body[1:5], "big") != len(body) - 5:
        raise ValueError("the kubelet gave no complete answer")
    return body[5:]


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
