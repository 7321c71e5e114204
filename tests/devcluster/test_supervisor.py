"""The supervisor in real namespaces, without Kubernetes: it owns processes, and none outlives it."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from devcluster import state
from devcluster.control import Control
from devcluster.control_plane import Layout
from devcluster.errors import ControlError
from devcluster.launch import Launched, launch
from devcluster.state import ClusterRecord

pytestmark = pytest.mark.skipif(
    sys.platform != "linux"
    or shutil.which("ip") is None
    or subprocess.run(["unshare", "--user", "--map-root-user", "--net", "true"], check=False).returncode != 0,
    reason="needs Linux namespaces and iproute2",
)

WAIT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Supervised:
    """A running supervisor and how to reach it."""

    folder: Path
    launched: Launched
    control: Control

    def spawn(self, name: str, *argv: str) -> None:
        """Start a process that logs into the folder."""
        self.control.spawn(name, argv, log=self.folder / "logs" / f"{name}.log", cwd=Path("/"))


@pytest.fixture
def supervised(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervised]:
    """A supervisor that this test owns."""
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path_factory.mktemp("s")))
    folder, lock = state.claim_folder("one")
    launched = launch(Layout(folder), lock=lock)
    record = ClusterRecord(name="one", kubernetes="", port=launched.port, persistent=False, binaries={})
    state.write_record(folder, record)
    yield Supervised(folder=folder, launched=launched, control=Control(folder))
    launched.release()
    launched.process.wait(timeout=WAIT_SECONDS)


def eventually(question: Callable[[], bool], what: str) -> None:
    """Wait for a condition; fail with its name."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not question():
        assert time.monotonic() < deadline, f"{what} did not come true"
        time.sleep(0.02)


def host_processes(mark: str) -> list[int]:
    """Processes of the whole machine whose command line holds the mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        if mark.encode() in line:
            found.append(int(path.parent.name))
    return found


def test_an_exit_code_is_kept(supervised: Supervised) -> None:
    """Who asks later still learns how a process ended."""
    supervised.spawn("short", "sh", "-c", "exit 7")

    assert supervised.control.wait("short", timeout_seconds=WAIT_SECONDS) == 7
    status = supervised.control.status()["short"]
    assert (status.running, status.exit_code) == (False, 7)


def test_a_killed_process_shows_the_signal_and_its_name_is_free_again(supervised: Supervised) -> None:
    """A component that was killed can be killed again, and started anew under its name; nothing restarts by itself."""
    supervised.spawn("part", "sleep", "600")
    supervised.control.signal("part", "KILL")

    assert supervised.control.wait("part", timeout_seconds=WAIT_SECONDS) == -9
    assert not supervised.control.status()["part"].running
    supervised.control.signal("part", "KILL")
    with pytest.raises(ControlError, match="process 'part' has ended with -9"):
        supervised.control.signal("part", "TERM")
    supervised.spawn("part", "sleep", "600")
    assert supervised.control.status()["part"].running


@pytest.mark.parametrize(
    ("action", "message"),
    [
        pytest.param(lambda c, log: c.spawn("part", ["true"], log=log), "'part' runs already", id="a name in use"),
        pytest.param(
            lambda c, log: c.signal("none", "TERM"), "no process 'none'; there are: part", id="no such process"
        ),
        pytest.param(lambda c, log: c.spawn("x", ["/none"], log=log), "cannot start 'x'", id="no such program"),
        pytest.param(lambda c, log: c.signal("part", "NOPE"), "bad request", id="no such signal"),
        pytest.param(
            lambda c, log: c.spawn("x", ["true"], log=log, node="n"), "no process 'node@n'", id="no such node"
        ),
    ],
)
def test_impossible_requests_are_refused_in_words(
    supervised: Supervised, action: Callable[[Control, Path], object], message: str
) -> None:
    """A refusal names what is wrong, and the supervisor lives on."""
    supervised.spawn("part", "sleep", "600")

    with pytest.raises(ControlError, match=message):
        action(supervised.control, supervised.folder / "x.log")

    assert supervised.control.status()["part"].running


@pytest.mark.parametrize(
    "line", [b"\n", b"nonsense\n", b"[]\n", b'{"op": "spawn"}\n', b'{"op": "fly"}\n', b"\xff\xfe\n"]
)
def test_nonsense_is_answered_and_survived(supervised: Supervised, line: bytes) -> None:
    """Whatever arrives on the socket, the cluster does not fall over it."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(state.socket_path(supervised.folder)))
        connection.sendall(line)
        answer = json.loads(connection.makefile().readline())

    assert answer["ok"] is False
    assert supervised.control.status() == {}


def test_a_command_runs_inside_and_its_output_comes_out(supervised: Supervised) -> None:
    """Input, both outputs and the exit code pass the border of the namespaces."""
    result = supervised.control.run(["sh", "-c", "cat; echo problem >&2; exit 3"], stdin="given\n")

    assert (result.returncode, result.stdout, result.stderr) == (3, "given\n", "problem\n")
    assert supervised.control.status() == {}


def test_a_command_that_hangs_is_ended(supervised: Supervised) -> None:
    """A helper command that never returns costs its time and no more."""
    with pytest.raises(ControlError, match="sleep did not end within"):
        supervised.control.run(["sleep", "600"], timeout_seconds=0.2)

    assert supervised.control.status() == {}


def test_orphans_are_reaped(supervised: Supervised) -> None:
    """Children that daemons leave behind become nobody's zombies."""
    supervised.control.run(["sh", "-c", "(sleep 0.05; exit 0) & exit 0"])

    def no_other_process() -> bool:
        listed = supervised.control.run(["sh", "-c", "ls -d /proc/[0-9]*"]).stdout.split()
        return len(listed) <= 3  # the supervisor, sh and ls

    eventually(no_other_process, "an empty process table")


def test_the_host_reaches_the_api_servers_address_through_the_relay(supervised: Supervised) -> None:
    """A port on the host's loopback address leads to 10.255.0.1:6443 inside, whatever listens there."""
    server = [sys.executable, "-m", "http.server", "6443", "--bind", "10.255.0.1", "--directory", "/proc/sys/kernel"]
    supervised.spawn("server", *server)

    def fetched() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{supervised.launched.port}/ostype", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    eventually(fetched, "an answer through the relay")


def test_nothing_outlives_an_owner_that_lets_go(supervised: Supervised) -> None:
    """The kernel closes the owner's end of the pipe however the owner dies; then all processes and files go."""
    mark = f"{600 + supervised.launched.port}.125"
    supervised.spawn("daemon", "sh", "-c", f"setsid sleep {mark} & exec sleep {mark}")
    eventually(lambda: len(host_processes(f"sleep\0{mark}")) == 2, "both processes")

    supervised.launched.release()

    supervised.launched.process.wait(timeout=WAIT_SECONDS)
    assert host_processes(mark) == []
    assert not supervised.folder.exists()


def test_a_disowned_supervisor_lives_on_until_it_is_stopped(supervised: Supervised) -> None:
    """`dev up` lets go of a cluster once it is whole; killed before that, it leaves no half cluster."""
    supervised.control.disown()

    supervised.launched.release()

    supervised.spawn("still", "true")
    assert supervised.control.wait("still", timeout_seconds=WAIT_SECONDS) == 0
    supervised.control.stop()
    supervised.launched.process.wait(timeout=WAIT_SECONDS)
    assert not supervised.folder.exists()


def test_nothing_outlives_a_killed_supervisor_but_what_the_next_sweep_takes(supervised: Supervised) -> None:
    """SIGKILL leaves no time to tidy up: the kernel ends the processes, the next command removes the files."""
    mark = f"{600 + supervised.launched.port}.25"
    supervised.spawn("daemon", "sh", "-c", f"setsid sleep {mark} & exec sleep {mark}")
    eventually(lambda: len(host_processes(f"sleep\0{mark}")) == 2, "both processes")

    supervised.launched.process.kill()

    supervised.launched.process.wait(timeout=WAIT_SECONDS)
    eventually(lambda: not state.is_alive(supervised.folder), "the end of the supervisor")
    eventually(lambda: host_processes(mark) == [], "the end of its processes, which the kernel kills after it")
    assert state.sweep() == ["one"]
    assert not supervised.folder.exists()
