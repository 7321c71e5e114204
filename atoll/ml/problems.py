"""Problems of an envelope and notes about it, as values, never exceptions.

Every other module here returns these records, so that all interfaces use the same words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

VALUE_LENGTH_MAX: Final = 80


@dataclass(frozen=True, slots=True)
class AttributeProblem:
    """Why an envelope is refused.

    attribute: as written, such as ext_ml_gpu_count or queue; empty for the document. value: the given value. limit: the
    allowed values. hint: what to do. line: counted from 1, None if unknown. step: the part of a workflow, such as
    steps[2]; empty for a single job.
    """

    attribute: str
    value: str
    limit: str
    hint: str
    line: int | None = None
    step: str = ""

    def __str__(self) -> str:
        place = f"line {self.line}: " if self.line is not None else ""
        subject = ".".join(part for part in (self.step, self.attribute) if part)
        if not subject:
            value = f", and has {self.value}" if self.value else ""
            return f"{place}the document {self.limit}{value}; {self.hint}"
        value = f" is {self.value}:" if self.value else ""
        return f"{place}{subject}{value} {self.limit}; {self.hint}"


@dataclass(frozen=True, slots=True)
class ParseNote:
    """An inferred attribute, or a warning about one; it refuses nothing."""

    attribute: str
    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.attribute}: {self.value} ({self.reason})" if self.value else f"{self.attribute}: {self.reason}"


Problems = tuple[AttributeProblem, ...]
Notes = tuple[ParseNote, ...]


def shown(value: object) -> str:
    """Return a value for a message: short, on one line, printable."""
    if isinstance(value, str):
        value = str(value)  # an enumeration member shows its value
    text = repr(value) if isinstance(value, str | list | tuple | dict) else str(value)
    text = text if text.isprintable() else ascii(value)
    return text if len(text) <= VALUE_LENGTH_MAX else text[: VALUE_LENGTH_MAX - 3] + "..."


def one_of(values: Sequence[str]) -> str:
    """Return the limit text of an attribute with fixed values."""
    return "must be one of " + ", ".join(values)
