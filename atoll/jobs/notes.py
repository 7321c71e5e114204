"""Notes that map a job's fields to the objects.

Every part of the renderer writes them, in the order of its decisions, so that a test can find lost fields.
"""

from dataclasses import dataclass
from typing import Final

from atoll.ml.problems import VALUE_LENGTH_MAX, shown

HINT: Final = "note that "
NO_EFFECT: Final = "without effect: "
ONLY_SERVICE: Final = "only the job service "
"""Prefixes of notes that `atoll job validate` also shows: the user may have meant something else."""


@dataclass(frozen=True, slots=True)
class Note:
    """One field and its result. `object`: kind/name of the object with it, empty for none."""

    source: str
    value: str
    object: str
    text: str

    @property
    def is_hint(self) -> bool:
        """Return whether the user may have meant something else."""
        return self.text.startswith((HINT, NO_EFFECT, ONLY_SERVICE))

    def __str__(self) -> str:
        return f"{self.source}: {self.value} -> {self.text}" if self.value else f"{self.source} -> {self.text}"


class NoteBook:
    """Gathers notes while one job is rendered."""

    def __init__(self) -> None:
        self._notes: list[Note] = []

    def tell(self, source: str, value: object, text: str, of: str = "") -> None:
        """Note the result of a field; a value of None is a default."""
        note = Note(source, _shown(value), of, text)
        if note not in self._notes:
            self._notes.append(note)

    def replace(self, source: str, value: object, text: str) -> None:
        """Note the result of a field instead of what was noted of it and of its parts."""
        self._notes = [note for note in self._notes if not f"{note.source}.".startswith(f"{source}.")]
        self.tell(source, value, text)

    @property
    def notes(self) -> tuple[Note, ...]:
        """The notes, in order."""
        return tuple(self._notes)


def _shown(value: object) -> str:
    """Return a value for a note: as written, short and on one line."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    text = value if isinstance(value, str) and value.isprintable() else shown(value)
    return text if len(text) <= VALUE_LENGTH_MAX else text[: VALUE_LENGTH_MAX - 3] + "..."
