"""A plugin of pytest that loses one field of one kind while objects are read: `-p tests.api.dropped_field`.

ATOLL_DROPPED_FIELD names it, such as "GpuGang podSets.topology.level".
"""

import json
import os
from typing import Any

import pytest

from atoll.api.base import Model
from atoll.api.claims import GpuClaim
from atoll.api.gangs import GpuGang
from atoll.api.node_status import GpuNodeStatus
from atoll.api.reservations import GpuReservation
from atoll.api.topologies import Topology

KINDS: dict[str, type[Model]] = {
    one.__name__: one for one in (GpuClaim, GpuGang, GpuNodeStatus, GpuReservation, Topology)
}


def without(value: Any, path: list[str]) -> Any:
    """Return JSON without the field of this path, in every entry of a list."""
    if isinstance(value, list):
        return [without(one, path) for one in value]
    if not isinstance(value, dict):
        return value
    head, *rest = path
    kept = {key: one for key, one in value.items() if rest or key != head}
    return {**kept, head: without(kept[head], rest)} if rest and head in kept else kept


def lose(model: Any, path: list[str]) -> None:
    """Let every object of this kind be read without the field."""
    read = model.model_validate

    def validate(value: Any, **options: Any) -> Any:
        return read(without(value, path), **options)

    def validate_json(text: str | bytes, **options: Any) -> Any:
        return read(without(json.loads(text), path), **options)

    model.model_validate, model.model_validate_json = validate, validate_json


def pytest_configure(config: pytest.Config) -> None:
    """Lose the field before any module of tests is imported."""
    kind, _, path = os.environ["ATOLL_DROPPED_FIELD"].partition(" ")
    lose(KINDS[kind], ["spec", *path.split(".")])
