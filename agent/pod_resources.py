"""Devices that the kubelet's device plugins gave to pods, by the kubelet's pod-resources API.

Gives device ids by namespace and pod, or None if the kubelet does not answer. Atoll allocates nothing by device
plugins, so a pod listed here with a GPU got it from another scheduler, and holds it even before its first process runs.
The API gives no uid, only names of pods that run now.

It is one unary gRPC call: h2 speaks HTTP/2, and the few fields of the answer are parsed here. Response headers are
ignored: a complete message at the end of the stream is a success, anything else a failure.
"""

import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, DataReceived, StreamEnded, StreamReset
from h2.exceptions import H2Error

from atoll.api.node_status import Device

PATH: Final = "/v1.PodResourcesLister/List"
ANSWER_BYTES_MAX: Final = 16 << 20
PODS_MAX: Final = 4096
DEVICES_MAX: Final = 4096

_HEADERS: Final = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", PATH),
    (":authority", "localhost"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
)
_EMPTY: Final = struct.pack(">BI", 0, 0)
_STREAM: Final = 1
_READ_BYTES: Final = 1 << 16
_LENGTH_DELIMITED, _VARINT = 2, 0

PluginAllocations = Mapping[tuple[str, str], frozenset[str]]
"""Device ids by a pod's namespace and name."""


def list_allocations(path: Path, *, timeout_seconds: float) -> PluginAllocations | None:
    """Ask the kubelet once; None without a valid answer in time."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            return pods_of(_call(connection, str(path), time.monotonic() + timeout_seconds))
    except (OSError, ValueError, H2Error):
        return None


def plugin_names(devices: Iterable[Device]) -> dict[str, str]:
    """Uuids by their names in device plugins: AMD's plugin uses PCI slots, NVIDIA's uuids."""
    amd = (one for one in devices if one.vendor == "amd" and one.pci_bus_id)
    return {spelling: one.uuid for one in amd for spelling in (one.pci_bus_id, one.pci_bus_id.removeprefix("0000"))}


def pods_of(message: bytes) -> PluginAllocations:
    """Pods with devices in a ListPodResourcesResponse. Raises ValueError for anything else."""
    found: dict[tuple[str, str], frozenset[str]] = {}
    for number, pod in _fields(message):
        if number == 1 and len(found) < PODS_MAX:
            names = {key: value.decode() for key, value in _fields(pod) if key in {1, 2}}
            devices = frozenset(_device_ids(pod))
            if devices:
                found[names.get(2, ""), names.get(1, "")] = devices
    return found


def _device_ids(pod: bytes) -> list[str]:
    """Device ids of all containers; a plugin that shares a card appends `::N` to its uuid."""
    found = []
    for container in (value for number, value in _fields(pod) if number == 3):
        for devices in (value for number, value in _fields(container) if number == 2):
            found += [value.decode().partition("::")[0] for number, value in _fields(devices) if number == 2]
    return found[:DEVICES_MAX]


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Length-delimited fields of a protobuf message; numbers are skipped. Raises ValueError."""
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
    """Send the call and return its answer. Raises OSError, ValueError and H2Error."""
    connection.settimeout(_left(deadline))
    connection.connect(path)
    http = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
    http.initiate_connection()
    http.send_headers(_STREAM, _HEADERS)
    http.send_data(_STREAM, _EMPTY, end_stream=True)
    body, is_complete = b"", False
    while not is_complete:
        connection.settimeout(_left(deadline))
        connection.sendall(http.data_to_send())
        data = connection.recv(_READ_BYTES)
        if not data:
            raise ConnectionError("the kubelet hung up")
        more, is_complete = _received(http, data)
        body += more
        if len(body) > ANSWER_BYTES_MAX:
            raise ValueError("the answer is too long")
    return _message(body)


def _received(http: H2Connection, data: bytes) -> tuple[bytes, bool]:
    """Part of the answer in these bytes; True if it is the last. Raises OSError and H2Error."""
    part, is_complete = b"", False
    for event in http.receive_data(data):
        if isinstance(event, StreamReset | ConnectionTerminated):
            raise ConnectionError("the kubelet ended the call")
        if isinstance(event, DataReceived):
            part += event.data
            http.acknowledge_received_data(event.flow_controlled_length, _STREAM)
        is_complete |= isinstance(event, StreamEnded)
    return part, is_complete


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
