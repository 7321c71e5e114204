"""Preemption notices: from the signal, from the file, with other signal handlers, in real processes."""

import os
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

import pytest

from tests.worker.conftest import REPOSITORY, Run
from worker import EXIT_PREEMPTED, Preemption

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
WAIT_SECONDS = 60
Watch = Callable[..., Preemption]


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    """Begin a watch whose clocks stand still, on a file of the test."""
    begun: list[Preemption] = []
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def start(**settings: object) -> Preemption:
        found = Preemption(
            **{
                "notice_file": tmp_path / "notice",
                "grace_seconds": 30.0,
                "monotonic": lambda: 1000.0,
                "now": lambda: NOW,
                "poll_seconds": 0.01,
                **settings,
            }
        )
        found.start()
        begun.append(found)
        return found

    yield start
    for one in reversed(begun):
        one.close()
    assert signal.signal(signal.SIGTERM, before or signal.SIG_DFL) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


def hear_out(preemption: Preemption) -> None:
    """Let the watch take in every signal that has come, and end."""
    while select.select([preemption._reads], [], [], 0)[0]:
        preemption._thread.join(0.01)
    preemption.close()


def test_nobody_has_said_anything(watch: Watch) -> None:
    """Without a notice there is no number of seconds."""
    preemption = watch()
    assert preemption.seconds_left() is None
    assert not preemption.wait(0)


def test_the_signal_leaves_the_grace_period(watch: Watch) -> None:
    """SIGTERM begins the grace period; a second one begins no new one, and time passes."""
    seconds = [1000.0]
    preemption = watch(monotonic=lambda: seconds[0])
    os.kill(os.getpid(), signal.SIGTERM)
    assert preemption.wait(WAIT_SECONDS)
    assert preemption.seconds_left() == 30
    seconds[0] = 1020
    os.kill(os.getpid(), signal.SIGTERM)
    hear_out(preemption)
    assert preemption.seconds_left() == 10
    seconds[0] = 2000
    assert preemption.seconds_left() == 0


@pytest.mark.parametrize(
    ("text", "left"),
    [
        pytest.param("2026-01-01T12:01:30Z", 90, id="when it ends"),
        pytest.param("2026-01-01T13:01:30+01:00\n", 90, id="in another zone"),
        pytest.param("45", 45, id="in how many seconds"),
        pytest.param("2026-01-01T11:00:00Z", 0, id="an end that is past"),
        pytest.param("soon", 30, id="nonsense is a notice all the same"),
        pytest.param("2026-01-01T12:01:30", 30, id="without a zone nobody knows when"),
        pytest.param("1" * 10_000, 1e9, id="numbers without an end"),
        pytest.param("\x00\xff", 30, id="bytes"),
    ],
)
def test_the_file_tells_when(watch: Watch, tmp_path: Path, text: str, left: float) -> None:
    """The annotation's text is a time or a number of seconds."""
    (tmp_path / "notice").write_text(text, encoding="latin-1")
    preemption = watch()
    assert preemption.wait(WAIT_SECONDS)
    told = preemption.seconds_left()
    assert told == left or (left == 1e9 and told > left)


def test_the_nearer_end_counts(watch: Watch, tmp_path: Path) -> None:
    """A file that gives more time than the signal does not prolong it."""
    (tmp_path / "notice").write_text("600")
    preemption = watch()
    assert preemption.wait(WAIT_SECONDS)
    assert preemption.seconds_left() == 600
    os.kill(os.getpid(), signal.SIGTERM)
    hear_out(preemption)
    assert preemption.seconds_left() == 30


def test_a_notice_may_be_taken_back(watch: Watch, tmp_path: Path) -> None:
    """kubelet swaps the file, and empties it when the annotation goes: the training goes on; each notice calls once."""
    calls: queue.Queue[float] = queue.Queue()
    preemption = watch(callback=calls.put)
    for seconds in (40.0, 50.0):
        (tmp_path / "..data").write_text(str(int(seconds)))
        (tmp_path / "..data").rename(tmp_path / "notice")
        assert calls.get(timeout=WAIT_SECONDS) == seconds
        (tmp_path / "notice").write_text("")
        while preemption.seconds_left() is not None:
            preemption._thread.join(0.01)
        assert not preemption.wait(0)
    assert calls.empty()


def test_a_callback_that_fails_ends_no_watch(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    """Its error is a line in the log; the seconds are told all the same."""
    called = threading.Event()

    def fail(_: float) -> None:
        called.set()
        raise RuntimeError("no room")

    preemption = watch(callback=fail)
    os.kill(os.getpid(), signal.SIGTERM)
    assert called.wait(WAIT_SECONDS)
    assert preemption.wait(WAIT_SECONDS)
    for thread in threading.enumerate():
        if thread.name == "preemption-callback":
            thread.join(WAIT_SECONDS)
    assert "Callback of the preemption notice failed" in caplog.text
    assert preemption.seconds_left() == 30


def test_handlers_of_others_are_called(watch: Watch) -> None:
    """Whoever handled SIGTERM before still does, and gets it back; a wake-up descriptor that is taken stays theirs."""
    heard: list[int] = []

    def own(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGTERM, own)
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes)
    try:
        preemption = watch()
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.wait(WAIT_SECONDS)
        assert heard == [signal.SIGTERM]
        preemption.close()
        assert signal.getsignal(signal.SIGTERM) is own
        assert signal.set_wakeup_fd(-1) == writes
        assert os.read(reads, 10) == bytes([signal.SIGTERM])
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, before)
        os.close(reads)
        os.close(writes)


def test_whoever_takes_over_later_keeps_it(watch: Watch) -> None:
    """Closing does not take the signal away from a handler that was installed since; that one may call ours."""
    preemption = watch()
    ours = signal.getsignal(signal.SIGTERM)

    def later(number: int, frame: FrameType | None) -> None:
        ours(number, frame)

    before = signal.signal(signal.SIGTERM, later)
    os.kill(os.getpid(), signal.SIGTERM)
    assert preemption.wait(WAIT_SECONDS)
    preemption.close()
    assert signal.getsignal(signal.SIGTERM) is later
    signal.signal(signal.SIGTERM, before)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


CHILD = """
import os, signal, sys
from worker import Preemption
preemption = Preemption.watch(variables={"ATOLL_PREEMPTION_FILE": "/nonexistent"})
child = os.fork()  # its signal may come before it has run a line
if child == 0:
    os.write(1, b"child\\n")  # at once: the signal may come between a word and its line end
    signal.pause()
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
print(os.WTERMSIG(status), preemption.wait(0.5), preemption.seconds_left())
os.kill(os.getpid(), signal.SIGTERM)
print(preemption.wait(60))
"""


def test_a_forked_child_is_no_part_of_it(run: Run) -> None:
    """Loaders of data are forked and ended by SIGTERM: they end of it, and the training hears no notice."""
    done = run("-c", CHILD)
    assert done.stdout.splitlines()[-2:] == ["15 False None", "True"], done.stdout + done.stderr


BUSY = """
import hashlib, os, signal, threading
from worker import Preemption
preemption = Preemption.watch(
    callback=lambda left: print("told", left > 0, flush=True), variables={"ATOLL_PREEMPTION_FILE": "/nonexistent"}
)
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
hashlib.pbkdf2_hmac("sha256", b"a step", b"of a library", 8_000_000)
print("step over")
"""


def test_the_time_counts_from_the_signal(run: Run) -> None:
    """While the main thread is in a long call of a library, the notice is heard all the same."""
    assert run("-c", BUSY).stdout.splitlines() == ["told True", "step over"]


@pytest.mark.parametrize("grace", ["30s", "-1", "1e3", "9999999"])
def test_a_grace_period_that_is_none(grace: str) -> None:
    """A mistake in the variable is told by its name."""
    with pytest.raises(ValueError, match="ATOLL_GRACE_SECONDS="):
        Preemption.watch(variables={"ATOLL_GRACE_SECONDS": grace})


@pytest.fixture
def training(uri: str, tmp_path: Path) -> Callable[[], subprocess.Popen[str]]:
    """Start the example's training at the URI."""

    def start() -> subprocess.Popen[str]:
        variables = {
            "PYTHONPATH": str(REPOSITORY),
            "ATOLL_JOB_ID": "example",
            "ATOLL_CHECKPOINT_URI": uri,
            "ATOLL_CHECKPOINT_PREFIXES": uri,
            "ATOLL_CHECKPOINT_INTERVAL_SECONDS": "1",
            "ATOLL_PREEMPTION_FILE": str(tmp_path / "preemption-notice"),
        }
        command = [sys.executable, REPOSITORY / "examples/worker/train.py"]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, env={**os.environ, **variables}, **streams)

    return start


def test_preempted_three_times(training: Callable[[], subprocess.Popen[str]], tmp_path: Path) -> None:
    """SIGTERM twice, then the file: it saves, ends, goes on one step further each time; the result is the right one."""
    last = 0
    for by_file in (False, False, True):
        process = training()
        assert process.stdout is not None
        lines = iter(process.stdout)
        begun = next(line for line in lines if "Resumed" in line or "starting from zero" in line)
        assert f"step {last}," in begun if last else "starting from zero" in begun
        next(line for line in lines if "Checkpoint Committed" in line)
        if by_file:
            (tmp_path / "preemption-notice").write_text("20")
        else:
            process.send_signal(signal.SIGTERM)
        stopped = next(line for line in lines if line.startswith("preempted after step"))
        assert process.wait(WAIT_SECONDS) == EXIT_PREEMPTED == 143
        assert int(stopped.split()[-1]) > last
        last = int(stopped.split()[-1])
    (tmp_path / "preemption-notice").unlink()
    process = training()
    output, _ = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0
    assert f"step {last}," in output
    assert f"done: weight {sum(range(1, 101))}" in output
