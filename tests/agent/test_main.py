"""The command line: clear messages for invalid settings, and --once prints the report of this machine."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from agent.__main__ import STATUS_SETTINGS, main
from atoll.api.node_status import GpuNodeStatusReport

SIMULATED = ["--node", "n1", "--backend", "simulated", "--profile", "dgx1-v100"]


@pytest.fixture(autouse=True)
def own_logs() -> Iterator[None]:
    """The command line sets up the process's logs; the next test gets them as they were."""
    handlers, level = logging.root.handlers, logging.root.level
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    logging.root.handlers, logging.root.level = handlers, level


def test_once_tells_the_pods_of_the_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Whoever has a cgroup here, since nobody says which of them have to do with GPUs."""
    uid = "11111111-2222-3333-4444-555555555555"
    for folder, processes in (("cpu", "1"), ("cpu/kubepods", ""), (f"cpu/kubepods/pod{uid}", "4711")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "cgroup.procs").write_text(processes)
    assert main([*SIMULATED, "--once", "--cgroup-mount", str(tmp_path)]) == 0

    report = GpuNodeStatusReport.model_validate(json.loads(capsys.readouterr().out))
    assert [(pod.uid, pod.live) for pod in report.pods] == [(uid, True)]
    assert (report.evidence.live_read, report.evidence.kubelet_read) == (True, False)


def test_once_prints_a_valid_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """No cluster is needed, and nothing but the report goes to standard output."""
    assert main([*SIMULATED, "--once", "--cgroup-mount", str(tmp_path)]) == 0

    report = GpuNodeStatusReport.model_validate(json.loads(capsys.readouterr().out))
    assert (report.device_count, report.healthy_count) == (8, 8)
    assert not report.evidence.live_read


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        pytest.param(["--node", "n1", "--backend", "simulated"], "needs a profile", id="simulated without a profile"),
        pytest.param(["--node", "n1", "--profile", "dgx1-v100"], "needs a profile", id="profile without simulated"),
        pytest.param([*SIMULATED[:-1], "dgx-9"], "no profile named 'dgx-9'", id="unknown profile"),
        pytest.param([*SIMULATED, "--simulated-order", "0,0"], "every position", id="impossible order"),
        pytest.param([*SIMULATED, "--poll-seconds", "0"], "poll_seconds", id="no interval"),
        pytest.param([*SIMULATED, "--kubelet-url", "10.0.0.1"], "kubelet_url", id="an address is no url"),
        pytest.param([*SIMULATED, "--log-level", "loud"], "loud", id="unknown log level"),
        pytest.param(["--node", ""], "node", id="no node"),
    ],
)
def test_impossible_settings_end_the_start(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The process ends with its own status and one sentence that names the setting."""
    assert main(argv) == STATUS_SETTINGS

    assert says in capsys.readouterr().err
