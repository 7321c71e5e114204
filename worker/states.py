"""Hooks for PyTorch: state dicts become parts of a checkpoint and come back.

In: a mapping of names to state dicts. Out: parts for `Checkpoints.save`; the same mapping out of a Restored. torch is
asked only when a state dict is written or read. Where it is not installed, what JSON can carry is written as JSON, and
the part's name says which of the two it was. Nothing is ever unpickled that could run code.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, Final

from worker.checkpoints import Restored
from worker.stores import Produce

TORCH_SUFFIX: Final = ".pt"
JSON_SUFFIX: Final = ".json"


def parts_of(states: Mapping[str, object]) -> dict[str, bytes | Produce]:
    """Return the parts of state dicts: `{"model": model.state_dict(), "optimizer": ...}`.

    Raises TypeError where torch is not installed and JSON cannot carry a state.
    """
    torch = _torch()
    if torch is None:
        return {f"{name}{JSON_SUFFIX}": json.dumps(state).encode() for name, state in states.items()}
    return {f"{name}{TORCH_SUFFIX}": _saver(torch, state) for name, state in states.items()}


def states_of(restored: Restored, *, map_location: object = "cpu") -> dict[str, Any]:
    """Return the state dicts of a checkpoint by their names; map_location: where torch puts tensors.

    Raises ModuleNotFoundError where torch wrote them and is not installed here.
    """
    return {name.rpartition(".")[0]: _load(path, name, map_location) for name, path in restored.paths.items()}


def _load(path: Path, name: str, map_location: object) -> Any:  # noqa: ANN401 - whatever the state was
    if name.endswith(JSON_SUFFIX):
        return json.loads(path.read_bytes())
    if not name.endswith(TORCH_SUFFIX):
        raise ValueError(f"part {name!r} is no state dict: read restored.paths[{name!r}] yourself")
    torch = importlib.import_module("torch")
    return torch.load(path, map_location=map_location, weights_only=True)


def _saver(torch: ModuleType, state: object) -> Produce:
    def save(file: BinaryIO) -> None:
        torch.save(state, file)

    return save


def _torch() -> ModuleType | None:
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return None
