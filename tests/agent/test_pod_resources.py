"""The kubelet's pod-resources API."""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hpack import Encoder
from hypothesis import given
from hypothesis import strategies as st

from agent.evidence import GpuUse, with_allocations
from agent.pod_resources import list_allocations, plugin_names, pods_of
from atoll.api.node_status import Device
from tests.agent.builders import make_pod

DATA, HEADERS, SETTINGS, PING, END = 0, 1, 4, 6, 1


def field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2]) + length(len(value)) + value


def length(number: int) -> bytes:
    found = b""
    while number > 0x7F:
        found += bytes([number & 0x7F | 0x80])
        number >>= 7
    return found + bytes([number])


def pod(namespace: str, name: str, *ids: str) -> bytes:
    """A PodResources message; beside the devices there are CPUs and a topology that nobody asks for."""
    devices = field(1, b"nvidia.com/gpu") + b"".join(field(2, one.encode()) for one in ids) + field(3, b"\x08\x01")
    container = field(1, b"main") + field(2, devices) + b"\x18\x07"
    return field(1, field(1, name.encode()) + field(2, namespace.encode()) + field(3, container))


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 1) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def headers(**fields: str) -> bytes:
    """A block of headers; `status` is the pseudo-header."""
    named = {key.replace("_", "-") if key != "status" else ":status": value for key, value in fields.items()}
    return Encoder().encode(named)


def grpc(message: bytes) -> bytes:
    return struct.pack(">BI", 0, len(message)) + message


def serve(path: Path, *answers: bytes) -> Callable[[], bytes]:
    """A kubelet that says this to whoever connects, one part after each reply; returns what it was sent."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(path))
    server.listen()
    heard: list[bytes] = []

    def talk() -> None:
        connection, _ = server.accept()
        with server, connection, contextlib.suppress(ConnectionError):
            heard.append(connection.recv(65_536))
            for answer in answers:
                connection.sendall(answer)
                if answer is not answers[-1]:
                    heard.append(connection.recv(65_536))
            connection.shutdown(socket.SHUT_WR)
            while more := connection.recv(65_536):
                heard.append(more)

    thread = threading.Thread(target=talk, daemon=True)
    thread.start()

    def end() -> bytes:
        thread.join(timeout=10)
        return b"".join(heard)

    return end


OK = headers(status="200", content_type="application/grpc")
START = frame(SETTINGS, stream=0) + frame(HEADERS, OK, flags=4)
MESSAGE = pod("team", "p", "GPU-a", "GPU-b::3") + pod("team", "plain")


def test_devices_are_read_from_an_answer_in_pieces(tmp_path: Path) -> None:
    """The message may come in any number of frames, with settings, pings and headers between; both are answered."""
    whole = grpc(MESSAGE)
    end = serve(
        tmp_path / "s",
        frame(SETTINGS, stream=0) + frame(HEADERS, OK, flags=4),
        frame(DATA, whole[:7]) + frame(PING, b"12345678", stream=0),
        frame(DATA, whole[7:]) + frame(HEADERS, headers(grpc_status="0"), flags=END | 4),
    )

    assert list_allocations(tmp_path / "s", timeout_seconds=5) == {("team", "p"): {"GPU-a", "GPU-b"}}
    sent = end()
    assert sent.startswith(b"PRI * HTTP/2.0")
    assert Encoder().encode({":path": "/v1.PodResourcesLister/List"})[2:] in sent
    assert frame(PING, b"12345678", flags=1, stream=0) in sent


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param((), id="hangs up"),
        pytest.param(
            (frame(SETTINGS, stream=0), frame(HEADERS, headers(status="200", grpc_status="12"), flags=END | 4)),
            id="an error without a message",
        ),
        pytest.param(
            (
                START,
                frame(DATA, grpc(MESSAGE)[:-3], flags=END),
            ),
            id="a message that is cut",
        ),
        pytest.param(
            (
                START,
                frame(3, b"\0\0\0\2"),
            ),
            id="a reset stream",
        ),
        pytest.param(
            (
                START,
                frame(DATA, struct.pack(">BI", 1, 0), flags=END),
            ),
            id="a compressed message",
        ),
        pytest.param((b"\xff" * 64,), id="no HTTP at all"),
        pytest.param(
            (
                START,
                frame(DATA, grpc(b"\x0a\xff\xff\xff\xff"), flags=END),
            ),
            id="a broken message",
        ),
    ],
)
def test_anything_else_is_no_answer(tmp_path: Path, answers: tuple[bytes, ...]) -> None:
    """What is not understood is unknown, and never an empty list."""
    serve(tmp_path / "s", *answers)

    assert list_allocations(tmp_path / "s", timeout_seconds=5) is None


def test_no_socket_is_no_answer(tmp_path: Path) -> None:
    """Without a kubelet nothing is known."""
    assert list_allocations(tmp_path / "none", timeout_seconds=1) is None


@given(st.binary(max_size=200))
def test_nonsense_is_an_error_or_nothing(noise: bytes) -> None:
    """Whatever the bytes are: an answer or a ValueError, and always an end."""
    try:
        pods_of(noise)
    except ValueError:
        return


def test_an_empty_answer_is_known_to_be_empty() -> None:
    """A kubelet that runs nothing says so."""
    assert pods_of(b"") == {}


def test_what_a_plugin_gave_counts_as_used() -> None:
    """A pod that got a GPU from a device plugin uses it, though no process shows; a NIC is none of ours."""
    running = make_pod("p", gpus=0)
    handed = {
        (running.metadata.namespace, running.metadata.name): frozenset({"GPU-a", "nic-7"}),
        ("x", "y"): frozenset({"GPU-b"}),
    }

    use = with_allocations(
        GpuUse(pods={"q": frozenset({"GPU-b"})}), handed, [running], {"GPU-a": "GPU-a", "GPU-b": "GPU-b"}
    )

    assert use.pods == {"q": {"GPU-b"}, running.metadata.uid: {"GPU-a"}}


def test_amds_plugin_calls_cards_by_their_slot() -> None:
    """The ids of AMD's device plugin are PCI slots as the kernel writes them; those of NVIDIA's cards mean nothing."""
    amd = Device(id=0, uuid="GPU-a", model="", index=0, vendor="amd", pci_bus_id="00000000:03:00.0")
    nvidia = amd.model_copy(update={"uuid": "GPU-b", "vendor": "nvidia", "pci_bus_id": "00000000:04:00.0"})

    pod = make_pod("p")
    handed = {(pod.metadata.namespace, pod.metadata.name): frozenset({"0000:03:00.0", "0000:04:00.0"})}
    assert with_allocations(GpuUse(), handed, [pod], plugin_names([amd, nvidia])).pods == {"p": frozenset({"GPU-a"})}
