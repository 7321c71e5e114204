"""The demo as a user runs it: complete, with a broken promise, and interrupted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from devcluster import state

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="real nodes need root on Linux"),
]

ROOT = Path(__file__).parents[2]

BREAK_A_PROMISE = """
import sys
from devcluster.demo.__main__ import perform
from devcluster.demo.scenes import check, run_examples

def take_a_lease_away(play):
    play.installation.kill("controllers")  # they would write it again
    uid = play.observer.pod("pair").metadata.uid
    lease = play.observer.snapshot().held_by(uid)[0].lease_name
    user = "system:serviceaccount:atoll-system:atoll-controllers"  # not even an administrator may
    play.observer.cluster.kubectl("delete", "lease", "-n", "atoll-system", lease, f"--as={user}", check=True)

sys.exit(perform(sys.argv[1], scenes=(run_examples, take_a_lease_away, check)))
"""

INTERRUPT = """
import signal, sys
from devcluster.cluster import DevCluster
from devcluster.demo.__main__ import main
from devcluster.demo.stage import Terminal

name, moment = sys.argv[1:]
wait, show = DevCluster._wait, Terminal._print

def wait_or_interrupt(cluster, question, *, what, **options):
    if (what, moment) == ("the API server", "while the API server comes up"):
        signal.raise_signal(signal.SIGINT)
    wait(cluster, question, what=what, **options)

def show_and_interrupt(stage, markup):
    show(stage, markup)
    if "control plane and four nodes" in markup:
        signal.raise_signal(signal.SIGINT)

DevCluster._wait, Terminal._print = wait_or_interrupt, show_and_interrupt
sys.exit(main(["--name", name]))
"""


@pytest.fixture
def name() -> str:
    """A cluster name that no other run uses."""
    return f"demo-{uuid4().hex[:6]}"


def test_the_demo_shows_that_every_promise_holds(name: str) -> None:
    """It ends with status 0 and one line that says so, and leaves nothing behind."""
    done = subprocess.run(
        [sys.executable, "-m", "devcluster.demo", "--name", name], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(
        r"  \S+ every promise held: \d+ pods, \d+ of 28 GPUs, \d+ s", done.stdout.rstrip().splitlines()[-1]
    )
    for part in (
        "volta",
        "numa-0 {0 1 2 3}",
        "per-container/trainer",
        "Atoll woke it",
        "third",
        "none of their Leases is left",
    ):
        assert part in done.stdout
    assert not state.cluster_folder(name).exists()


def test_a_broken_promise_fails_the_demo(name: str, tmp_path: Path) -> None:
    """A GPU in use whose Lease is gone is found, told with the log to read, and the status is not 0."""
    done = subprocess.run(
        [sys.executable, "-c", BREAK_A_PROMISE, name],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    said = " ".join(done.stdout.split())
    assert done.returncode == 1, done.stdout + done.stderr
    assert "a bound pod's GPU has no Lease: pod demo/pair" in said
    assert "every promise held" not in said
    log = re.search(r"read (\S+\.log)", said)
    assert log is not None
    assert Path(log.group(1)).is_relative_to(tmp_path)
    assert Path(log.group(1)).exists()
    assert not state.cluster_folder(name).exists()


@pytest.mark.parametrize("moment", ["while the API server comes up", "when the cluster has just come up"])
def test_interrupting_the_demo_leaves_nothing_behind(name: str, moment: str) -> None:
    """Ctrl-C ends the cluster and says so, also between its start and the first scene."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPT, name, moment], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 130, done.stdout + done.stderr
    assert "interrupted; nothing is left running" in done.stdout
    assert not state.cluster_folder(name).exists()


@pytest.mark.long
def test_the_play_of_jobs_shows_that_every_promise_holds(name: str) -> None:
    """Borrowed quota, a preemption with checkpoint, a second cluster, a spent budget, the bill: the play checks each
    itself, says so, and leaves nothing behind."""
    done = subprocess.run(
        [sys.executable, "-m", "devcluster.demo", "--play", "jobs", "--name", name],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = " ".join(done.stdout.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"every promise held: 4 jobs of 2 tenants on 2 clusters, \d+ s$", said)
    for part in (
        "4 of them borrowed from acme",
        "Preempted to accommodate a workload",
        "sweep went on after step",
        "they add up to 180300",
        "the service chose east for evaluate",
        "reached the budget of 0.02 USD: the job is paused",
        "acme sees its own part of the bill alone",
    ):
        assert part in said
    assert not [place for place in ("local", "east") if state.cluster_folder(f"{name}-{place}").exists()]
