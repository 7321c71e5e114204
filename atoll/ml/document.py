"""Parses JSON or YAML into plain values, with the line of each.

Gives a Document, or the problem with the bytes. Size, depth and number of values are bounded; aliases, tags, values of
other types, repeated keys and numbers that are not finite are refused. YAML's plain words have their JSON meaning: yes
and no are text, and so is a date.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from atoll.ml.problems import AttributeProblem, shown

BYTES_MAX: Final = 256 * 1024
DEPTH_MAX: Final = 32
VALUES_MAX: Final = 20_000
DIGITS_MAX: Final = 40

Path = tuple[str | int, ...]
Value = Any

_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_WORDS: Final[Mapping[str, Value]] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGER: Final = re.compile(r"[-+]?[0-9]+")
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE: Final = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


@dataclass(frozen=True, slots=True)
class Document:
    """A value of JSON's types, and the line on which each part of it begins, counted from 1."""

    value: Value
    lines: Mapping[Path, int] = field(default_factory=dict)

    def line_of(self, path: Path) -> int | None:
        """Return the line of a value, or of the nearest one around it whose line is known."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path)


class _Refusal(Exception):
    """Ends the parsing with a problem; never leaves this module."""

    def __init__(self, limit: str, hint: str, *, value: str = "", line: int | None = None) -> None:
        super().__init__(limit)
        self.problem = AttributeProblem("", value, limit, hint, line)


def read(data: bytes) -> Document | AttributeProblem:
    """Parse the bytes as JSON if possible, else as YAML."""
    try:
        return _read(data)
    except _Refusal as refusal:
        return refusal.problem


def _read(data: bytes) -> Document:
    if len(data) > BYTES_MAX:
        raise _Refusal(
            f"may have {BYTES_MAX} bytes at most", "leave data out and name its URI", value=f"{len(data)} bytes"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _Refusal("must be UTF-8", "save the file as UTF-8", line=line) from None
    if not text.strip():
        raise _Refusal("must hold a job", "write type and attributes, such as ext_ml_gpu_count: 1", value="nothing")
    if text.lstrip()[0] not in "{[":
        return _checked(_yaml(text))
    # JSON has no tabs inside text, so replacing them by blanks changes no value and lets YAML find the lines.
    reader = _YamlReader()
    refusal = None
    try:
        reader.read(text.replace("\t", " "))
    except _Refusal as found:
        refusal = found
    return _checked(_json(text, reader.lines, refusal))


def _yaml(text: str) -> Document:
    reader = _YamlReader()
    reader.read(text)
    return Document(reader.value, reader.lines)


def _json(text: str, lines: Mapping[Path, int], refusal: _Refusal | None) -> Document:
    """Parse text that looks like JSON, as YAML's flow style does too. `refusal`: YAML's problem with it."""
    try:
        value = json.loads(
            text, object_pairs_hook=_mapping, parse_constant=_constant, parse_int=_integer, parse_float=_float
        )
        return Document(value, lines)
    except json.JSONDecodeError as error:
        if refusal is None:
            return _yaml(text)
        if refusal.problem.line is not None and not isinstance(refusal.__cause__, yaml.YAMLError):
            raise refusal from None
        if error.msg == "Extra data":
            raise _second(error.lineno) from None
        raise _Refusal("must be JSON or YAML", f"JSON: {error.msg}", line=error.lineno) from None
    except RecursionError:
        raise _deep(None) from None
    except _Refusal as found:
        raise (refusal if refusal is not None and refusal.problem.line is not None else found) from None


def _mapping(pairs: list[tuple[str, Value]]) -> dict[str, Value]:
    out: dict[str, Value] = {}
    for key, value in pairs:
        if key in out:
            raise _repeated(key, None)
        out[key] = value
    return out


def _constant(word: str) -> Value:
    raise _Refusal("must hold finite numbers", "write a number", value=word)


def _integer(text: str, line: int | None = None) -> int:
    if len(text) > DIGITS_MAX:
        raise _Refusal(
            f"may hold numbers of at most {DIGITS_MAX} digits", "write it as text", value=shown(text), line=line
        )
    return int(text)


def _float(text: str, line: int | None = None) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _Refusal("must hold finite numbers", "write a number", value=shown(text), line=line)
    return number


def _repeated(key: str, line: int | None) -> _Refusal:
    return _Refusal("may hold each key once", "remove one of the two", value=f"{shown(key)} twice", line=line)


def _second(line: int) -> _Refusal:
    return _Refusal("may hold one job or one workflow", "write the second into a file of its own", line=line)


def _deep(line: int | None) -> _Refusal:
    return _Refusal(f"may be nested at most {DEPTH_MAX} deep", "flatten it", line=line)


class _YamlReader:
    """Builds plain values from YAML events with its own stack, without recursion."""

    def __init__(self) -> None:
        self.value: Value = None
        self.lines: dict[Path, int] = {}
        self._stack: list[tuple[Value, Path]] = []
        self._keys: list[str | None] = []
        self._documents = 0
        self._values = 0

    def read(self, text: str) -> None:
        """Read one document. Raises _Refusal; `lines` keeps the lines read so far."""
        try:
            for event in yaml.parse(text, Loader=_LOADER):
                self._take(event, event.start_mark.line + 1 if event.start_mark is not None else 0)
        except yaml.reader.ReaderError as error:
            above = text.encode()[: error.position].count(b"\n")
            hint = f"remove the character U+{error.character:04X}, which YAML does not allow"
            raise _Refusal("must be JSON or YAML", hint, line=above + 1) from error
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            problem = str(getattr(error, "problem", None) or "it cannot be read")
            line = mark.line + 1 if mark is not None else None
            raise _Refusal("must be JSON or YAML", f"YAML: {problem}", line=line) from error

    def _take(self, event: yaml.Event, line: int) -> None:
        match event:
            case yaml.DocumentStartEvent():
                self._documents += 1
                if self._documents > 1:
                    raise _second(line)
            case yaml.AliasEvent():
                raise _Refusal("may hold no aliases", "write the value out", value=f"*{event.anchor}", line=line)
            case yaml.ScalarEvent() | yaml.MappingStartEvent() | yaml.SequenceStartEvent() if event.tag is not None:
                raise _Refusal("may hold no tags", "remove the tag", value=shown(event.tag), line=line)
            case yaml.ScalarEvent():
                self._scalar(event, line)
            case yaml.MappingStartEvent():
                self._open({}, line)
            case yaml.SequenceStartEvent():
                self._open([], line)
            case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                self._stack.pop()
                self._keys.pop()

    def _scalar(self, event: yaml.ScalarEvent, line: int) -> None:
        value = _plain(event.value, line) if event.implicit[0] else event.value
        if self._stack and isinstance(self._stack[-1][0], dict) and self._keys[-1] is None:
            self._key(value, line)
        else:
            self._put(value, line)

    def _key(self, value: Value, line: int) -> None:
        if not isinstance(value, str):
            raise _Refusal("must have text for keys", "put it in quotes", value=shown(value), line=line)
        if value in self._stack[-1][0]:
            raise _repeated(value, line)
        self._keys[-1] = value

    def _open(self, container: Value, line: int) -> None:
        if self._stack and isinstance(self._stack[-1][0], dict) and self._keys[-1] is None:
            raise _Refusal("must have text for keys", "write one word before the colon", line=line)
        if len(self._stack) >= DEPTH_MAX:
            raise _deep(line)
        path = self._put(container, line)
        self._stack.append((container, path))
        self._keys.append(None)

    def _put(self, value: Value, line: int) -> Path:
        """Add a value to the open container, and return its path."""
        self._values += 1
        if self._values > VALUES_MAX:
            raise _Refusal(f"may hold at most {VALUES_MAX} values", "leave data out and name its URI", line=line)
        path: Path = ()
        if not self._stack:
            self.value = value
        else:
            container, outer = self._stack[-1]
            if isinstance(container, list):
                path = (*outer, len(container))
                container.append(value)
            else:
                key = self._keys[-1] or ""
                path = (*outer, key)
                container[key] = value
                self._keys[-1] = None
        self.lines[path] = line
        return path


def _plain(text: str, line: int) -> Value:
    """Return the value of a word without quotes."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return _integer(text, line)
    if _NOT_FINITE.fullmatch(text):
        raise _Refusal("must hold finite numbers", "write a number, or text in quotes", value=text, line=line)
    return _float(text, line) if _FLOAT.fullmatch(text) else text


def _checked(document: Document) -> Document:
    """Return the document. Raises _Refusal if it is too deep or large, or contains a lone surrogate or a NUL."""
    waiting: list[tuple[Value, Path]] = [(document.value, ())]
    count = 0
    while waiting:
        value, path = waiting.pop()
        count += 1
        line = document.line_of(path)
        if count > VALUES_MAX:
            raise _Refusal(f"may hold at most {VALUES_MAX} values", "leave data out and name its URI", line=line)
        if isinstance(value, dict | list) and len(path) >= DEPTH_MAX:
            raise _deep(line)
        if isinstance(value, str):
            _check_text(value, line)
        elif isinstance(value, dict):
            for key, child in value.items():
                _check_text(key, line)
                waiting.append((child, (*path, key)))
        elif isinstance(value, list):
            waiting.extend((child, (*path, index)) for index, child in enumerate(value))
    return document


def _check_text(text: str, line: int | None) -> None:
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise _Refusal("must hold whole characters", "remove NUL and lone surrogates", value=shown(text), line=line)
