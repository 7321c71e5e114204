"""State dicts: saved with torch if installed, otherwise as JSON, and never in a format that could run code."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from worker import Checkpoints, parts_of, states_of

STATES = {"model": {"layer.weight": [[1.0, 2.0]], "layer.bias": [0.5]}, "optimizer": {"step": 7}}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    """Checkpoints in a folder."""
    uri = f"file://{tmp_path}/"
    return Checkpoints.open(uri, job_id="job", allowed=[uri])


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """A module of torch's name that keeps state dicts as text; what it was asked."""
    calls: list[tuple[str, object]] = []
    module = ModuleType("torch")

    def save(state: object, file: object) -> None:
        calls.append(("save", None))
        file.write(repr(state).encode())
        file.flush()

    def load(path: Path, **options: object) -> object:
        calls.append(("load", options))
        return eval(path.read_text())

    module.save, module.load = save, load
    monkeypatch.setitem(sys.modules, "torch", module)
    return calls


def test_through_torch(checkpoints: Checkpoints, torch: list[tuple[str, object]]) -> None:
    """torch writes and reads them; it is told to load weights alone, and onto the CPU."""
    checkpoints.save(1, parts_of(STATES))
    with checkpoints.restore() as restored:
        assert restored is not None
        assert set(restored.paths) == {"model.pt", "optimizer.pt"}
        assert states_of(restored) == STATES
    assert torch == [("save", None)] * 2 + [("load", {"map_location": "cpu", "weights_only": True})] * 2


def test_without_torch(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain states are kept as JSON; what JSON cannot carry is refused before anything is saved."""
    monkeypatch.setitem(sys.modules, "torch", None)
    checkpoints.save(1, parts_of(STATES))
    with checkpoints.restore() as restored:
        assert restored is not None
        assert states_of(restored) == STATES
    with pytest.raises(TypeError):
        parts_of({"model": {"weight": object()}})


def test_torch_is_missing_where_it_is_needed(
    checkpoints: Checkpoints, torch: list[tuple[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch wrote is not guessed at without it."""
    checkpoints.save(1, parts_of(STATES))
    monkeypatch.setitem(sys.modules, "torch", None)
    with checkpoints.restore() as restored, pytest.raises(ModuleNotFoundError):
        states_of(restored)


def test_parts_of_ones_own_are_left_to_oneself(checkpoints: Checkpoints) -> None:
    """A part that no hook wrote is named."""
    checkpoints.save(1, {"tokens.bin": b"\1"})
    with checkpoints.restore() as restored, pytest.raises(ValueError, match=r"'tokens.bin' is no state dict"):
        states_of(restored)
