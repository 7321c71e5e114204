"""What is wrong with an envelope, and what was worked out from it: values, never exceptions.

In: nothing. Out: the records that every other module here returns. Separate, so that the command line, the service and
the admission review tell the same words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

VALUE_LENGTH_MAX: Final = 80


@dataclass(frozen=True, slots=True)
class AttributeProblem:
    """Why an envelope is refused.

    attribute: as it is written, such as ext_ml_gpu_count or queue; empty for the document. value: what stands there.
    limit: what may stand there. hint: what to do. line: counted from 1, None where it is not known. step: the part of a
    workflow, such as steps[2]; empty for a single job.
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
class Note:
    """What was worked out for an attribute, or what a user should know about it; it refuses nothing."""

    attribute: str
    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.attribute}: {self.value} ({self.reason})" if self.value else f"{self.attribute}: {self.reason}"


Problems = tuple[AttributeProblem, ...]
Notes = tuple[Note, ...]


def shown(value: object) -> str:
    """Return a value of an envelope as a message shows it: short, on one line, printable."""
    text = repr(value) if isinstance(value, str | list | tuple | dict) else str(value)
    text = text if text.isprintable() else ascii(value)
    return text if len(text) <= VALUE_LENGTH_MAX else text[: VALUE_LENGTH_MAX - 3] + "..."


def one_of(values: Sequence[str]) -> str:
    """Return the limit of an attribute that takes one of some values."""
    return "must be one of " + ", ".join(values)
