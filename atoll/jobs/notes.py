"""Which wish became what, told beside the objects.

In: what the renderer decides, as it decides it. Out: frozen notes in that order. Separate, so that every part of the
renderer tells it alike, and a test can ask whether a wish was lost.
"""

from dataclasses import dataclass

from atoll.ml.problems import shown


@dataclass(frozen=True, slots=True)
class Note:
    """One wish and what became of it. `object`: kind/name where it stands, empty for what stands nowhere."""

    source: str
    value: str
    object: str
    text: str

    def __str__(self) -> str:
        return f"{self.source}: {self.value} -> {self.text}" if self.value else f"{self.source} -> {self.text}"


class NoteBook:
    """Gathers notes while one job is rendered."""

    def __init__(self) -> None:
        self._notes: list[Note] = []

    def tell(self, source: str, value: object, text: str, of: str = "") -> None:
        """Note what became of a wish; a value that is None is a default."""
        told = "" if value is None else value if isinstance(value, str) and value.isprintable() else shown(value)
        note = Note(source, str(told)[:120], of, text)
        if note not in self._notes:
            self._notes.append(note)

    @property
    def notes(self) -> tuple[Note, ...]:
        """What was noted, in order."""
        return tuple(self._notes)
