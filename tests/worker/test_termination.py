"""The last checkpoint in kubelet's termination message."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.worker.test_records import RECORD
from worker import Checkpoints
from worker.termination import BYTES_MAX, message_of, tell_last


def test_the_last_record_is_the_message(tmp_path: Path) -> None:
    """One whole document replaces the other in the file that is mounted, also where it is shorter."""
    path = tmp_path / "log"
    path.touch()
    inode = path.stat().st_ino
    tell_last(replace(RECORD, metrics={"a" * 100: 1.0}), path)
    tell_last(RECORD, path)
    assert json.loads(path.read_bytes()) == {"last_checkpoint": RECORD.told()}
    assert path.stat().st_ino == inode


def test_metrics_give_way_to_the_limit() -> None:
    """Kubelet cuts messages off; what a resume needs is in it whole."""
    large = replace(RECORD, metrics={f"{number}" * 50: 1.0 for number in range(100)})
    message = message_of(large)
    assert len(message) <= BYTES_MAX
    assert json.loads(message)["last_checkpoint"]["step"] == 30


def test_saving_tells_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every commit tells; where there is no such file, as outside of containers, nothing is made."""
    monkeypatch.setenv("ATOLL_TERMINATION_LOG", str(tmp_path / "log"))
    uri = f"file://{tmp_path}/run/"
    checkpoints = Checkpoints.open(uri, job_id="job", allowed=[uri])
    checkpoints.save(1, {"model": b"w"})
    assert not (tmp_path / "log").exists()
    (tmp_path / "log").touch()
    record = checkpoints.save(2, {"model": b"w"})
    assert json.loads((tmp_path / "log").read_bytes())["last_checkpoint"] == record.told()


def test_a_full_disk_stops_no_training(caplog: pytest.LogCaptureFixture) -> None:
    """The checkpoint is committed; a message that cannot be written is a line in the log."""
    assert os.path.exists("/dev/full")  # noqa: PTH110 - a device
    tell_last(RECORD, Path("/dev/full"))
    assert "Failed to write the termination message" in caplog.text
