"""Expressions of pipelines: Google's Common Expression Language (CEL), and `${...}` in texts.

An expression sees only the names that it is given; it can neither loop nor call out, so its cost is bounded by its
length. Names and types are checked when the pipeline is created; what can fail only in a run, such as a missing key,
raises ExpressionFailed there.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from cel_expr_python import cel

LENGTH_MAX: Final = 1024
TEXT_LENGTH_MAX: Final = 64 * 1024
"""Characters of a text after its expressions were put in."""
DEPTH_MAX: Final = 32
OPEN: Final = "${"
ESCAPED: Final = "$${"
NUL: Final = "\x00"
NO_LOOPS: Final = cel.NewEnvConfigFromYaml("stdlib:\n  disable_macros: true\n")
"""Without macros there are no comprehensions: a kilobyte of them could build gigabytes."""


NOISE: Final = (
    *("INVALID_ARGUMENT: ", "NOT_FOUND: ", "UNKNOWN: ", "CANCELLED: ", "INTERNAL: ", "ERROR: <input>:"),
    *(" (in container '')", " found in Activation"),
)


class ValueType(Enum):
    """Type of a name or of an expression's value."""

    ANY = cel.Type.DYN
    BOOLEAN = cel.Type.BOOL
    INTEGER = cel.Type.INT
    NUMBER = cel.Type.DOUBLE
    TEXT = cel.Type.STRING
    LIST = cel.Type.LIST
    MAP = cel.Type.MAP
    NOTHING = cel.Type.NULL


Names = Mapping[str, ValueType]
"""The names that an expression may use, such as steps.train.job_id, with their types."""


class ExpressionInvalid(Exception):
    """The expression cannot be used: a syntax error, an unknown name, or types that do not fit."""


class ExpressionFailed(Exception):
    """The expression has no value in this run."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A checked expression."""

    text: str
    _compiled: Any

    def accepts(self, wanted: ValueType) -> bool:
        """Return whether the value can have a type."""
        return _name(self._compiled.return_type()) in (_name(wanted.value), "DYN")

    @property
    def type_name(self) -> str:
        """Return the type of the value, in CEL's words."""
        return _name(self._compiled.return_type()).lower()

    def value(self, values: Mapping[str, Any]) -> Any:  # noqa: ANN401 - a value of JSON's types
        """Return the value, of JSON's types. Raises ExpressionFailed."""
        if not all(map(is_json, values.values())):
            raise ExpressionFailed(f"{self.text}: it would read a value that is not of JSON's types")
        try:
            found = self._compiled.eval(data=dict(values))
            kind, plain = _name(found.type()), found.plain_value()
        except (RuntimeError, ValueError, TypeError, OverflowError) as error:
            raise ExpressionFailed(f"{self.text}: {_first_line(error)}") from error
        if kind in ("ERROR", "UNKNOWN"):
            raise ExpressionFailed(f"{self.text}: {_first_line(plain)}")
        if not is_json(plain):
            raise ExpressionFailed(f"{self.text}: a {kind.lower()} is no JSON value; convert it with string()")
        return plain


def compiled(text: str, names: Names) -> Expression:
    """Return a checked expression. Raises ExpressionInvalid."""
    if not text.strip() or len(text) > LENGTH_MAX:
        raise ExpressionInvalid(f"must have 1 to {LENGTH_MAX} characters")
    environment = cel.NewEnv(config=NO_LOOPS, variables={name: kind.value for name, kind in names.items()})
    try:
        return Expression(text, environment.compile(text))
    except (RuntimeError, ValueError, TypeError) as error:
        raise ExpressionInvalid(_first_line(error)) from error


def expressions_in(text: str) -> list[str]:
    """Return the expressions in a text. Raises ExpressionInvalid."""
    return [part for is_expression, part in _parts(text) if is_expression]


def source_of(text: str) -> str:
    """Return an expression that may stand in `${...}` or alone. Raises ExpressionInvalid."""
    inner = expressions_in(text)
    return inner[0] if len(inner) == 1 and text.strip() == f"${{{inner[0]}}}" else text


def filled(value: Any, names: Names, values: Mapping[str, Any]) -> Any:  # noqa: ANN401 - a value of JSON's types
    """Return a value with each `${...}` replaced: a text that is one expression becomes its value, other texts stay
    texts. Raises ExpressionInvalid, ExpressionFailed.
    """
    if isinstance(value, str):
        return _filled_text(value, names, values)
    if isinstance(value, list):
        return [filled(one, names, values) for one in value]
    if isinstance(value, dict):
        return {key: filled(one, names, values) for key, one in value.items()}
    return value


def texts_in(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:  # noqa: ANN401
    """Yield each text in a value with its path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from texts_in(one, (*path, number))
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from texts_in(one, (*path, str(key)))


def type_of(value: Any) -> ValueType:  # noqa: ANN401 - a value of JSON's types
    """Return the type of a value of JSON's types."""
    for kind, found in (
        (bool, ValueType.BOOLEAN),
        (int, ValueType.INTEGER),
        (float, ValueType.NUMBER),
        (str, ValueType.TEXT),
        (list, ValueType.LIST),
        (dict, ValueType.MAP),
    ):
        if isinstance(value, kind):
            return found
    return ValueType.NOTHING


def is_json(value: Any, depth: int = 0) -> bool:  # noqa: ANN401 - any value
    """Return whether a value is of JSON's types, and not too deep. NUL is refused: it would end a text in CEL."""
    if value is None or isinstance(value, bool | int):
        return True
    if isinstance(value, str):
        return NUL not in value
    if isinstance(value, float):
        return math.isfinite(value)
    if depth >= DEPTH_MAX:
        return False
    if isinstance(value, list):
        return all(is_json(one, depth + 1) for one in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and NUL not in key and is_json(one, depth + 1) for key, one in value.items())
    return False


def _filled_text(text: str, names: Names, values: Mapping[str, Any]) -> Any:  # noqa: ANN401
    parts = list(_parts(text))
    if len(parts) == 1 and parts[0][0]:
        return compiled(parts[0][1], names).value(values)
    told = "".join(_text_of(compiled(part, names).value(values)) if is_one else part for is_one, part in parts)
    if len(told) > TEXT_LENGTH_MAX:
        raise ExpressionFailed(f"the text would have {len(told)} characters, and {TEXT_LENGTH_MAX} are allowed")
    return told


def _text_of(value: Any) -> str:  # noqa: ANN401
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _parts(text: str) -> Iterator[tuple[bool, str]]:
    """Yield the parts of a text: whether it is an expression, and its characters. `$${` means `${`."""
    plain, position = "", 0
    while position < len(text):
        if text.startswith(ESCAPED, position):
            plain, position = plain + OPEN, position + len(ESCAPED)
        elif text.startswith(OPEN, position):
            if plain:
                yield False, plain
            end = _end(text, position + len(OPEN))
            yield True, text[position + len(OPEN) : end]
            plain, position = "", end + 1
        else:
            plain, position = plain + text[position], position + 1
    if plain:
        yield False, plain


def _end(text: str, start: int) -> int:
    """Return where the brace that closes an expression is; braces in quotes do not count."""
    depth, quote, position = 1, "", start
    while position < len(text):
        one = text[position]
        if quote:
            position += one == "\\"
            quote = "" if one == quote else quote
        elif one in "'\"":
            quote = one
        elif one in "{}":
            depth += 1 if one == "{" else -1
            if depth == 0:
                return position
        position += 1
    raise ExpressionInvalid(f"{OPEN} without its closing brace; write {ESCAPED} for the characters themselves")


def _name(kind: Any) -> str:  # noqa: ANN401 - a type of CEL
    return str(kind.name()).partition("<")[0]


def _first_line(error: object) -> str:
    text = str(error).partition("\n")[0]
    for noise in NOISE:
        text = text.replace(noise, "")
    return text
