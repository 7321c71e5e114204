"""Reads an envelope: a job with its attributes, or a workflow of jobs, from JSON or YAML.

In: bytes. Out: a Parsed, which holds the envelope or the problems that refuse it. Nothing that the bytes hold raises an
exception.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from atoll.ml.attributes import MlAttributes
from atoll.ml.problems import Notes, Problems

Path = tuple[str | int, ...]


class WorkflowType(StrEnum):
    """chain: one step after the other. group: all at once. batch: all at once, then callbacks."""

    CHAIN = "chain"
    GROUP = "group"
    BATCH = "batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnvelope:
    """One job. `attributes` is what the envelope gives, nothing inferred; `others` are keys that are not named here."""

    type: str
    id: str = ""
    queue: str = ""
    args: tuple[Any, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)
    priority: int | None = None
    timeout_seconds: int | None = None
    attributes: MlAttributes = field(default_factory=MlAttributes)
    others: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowEnvelope:
    """Jobs that belong together. Each has its own attributes and inherits none; `meta` is handed to all.

    callbacks: on_complete, on_success, on_failure of a batch.
    """

    workflow_type: WorkflowType
    id: str = ""
    name: str = ""
    steps: tuple[JobEnvelope, ...] = ()
    callbacks: Mapping[str, JobEnvelope] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """What came of the bytes: an envelope, or None and why. `lines`: of each value, by its path in the document."""

    envelope: JobEnvelope | WorkflowEnvelope | None
    problems: Problems = ()
    notes: Notes = ()
    lines: Mapping[Path, int] = field(default_factory=dict)


def parse(data: bytes) -> Parsed:
    """Read an envelope from JSON or YAML."""
    raise NotImplementedError
