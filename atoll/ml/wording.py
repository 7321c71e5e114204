"""Turns errors of the models into problems in words: attribute, value, allowed values, what to do.

Users never see pydantic's words, and files, queues and the service use the same ones.
"""

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, Final, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from atoll.api.forms import UNKNOWN, form_of
from atoll.ml import tables
from atoll.ml.attributes import PREFIX, MlAttributes
from atoll.ml.problems import AttributeProblem, Problems, one_of, shown
from atoll.ml.rules import Complaint

NAME_LENGTH_MAX: Final = 64

_FORMS: Final = {
    "gpu_type": "must be vendor-model in lower case, such as nvidia-h100",
    "gpu_compute_capability": "must be major.minor in quotes, such as 9.0",
    "tpu_topology": "must be sides joined by x, such as 4x4 or 2x2x4",
    "model_id": "must be a name without blanks",
    "model_version": "must be letters, digits and ._:+-",
    "model_checksum": "must be algorithm:hexadecimal in lower case, such as sha256:9f86d0...",
    "model_registry_uri": "must be a URI without blanks, such as hf://org/name@revision",
    "checkpoint_storage_uri": "must be a URI without blanks, such as s3://bucket/path/",
    "reservation_id": "must be a name in lower case, such as nightly-h100",
    "key": "must be the key of a label, such as topology.kubernetes.io/zone",
    "values": "must be values of labels: at most 63 letters, digits and -_.",
    "node_selector": "must be labels: keys such as zone, values of at most 63 letters, digits and -_.",
}
_LIMITS: Final = {
    "int_type": ("must be a whole number", "write it without quotes, point or unit"),
    "int_from_float": ("must be a whole number", "write it without point"),
    "float_type": ("must be a number", "write it without quotes or unit"),
    "finite_number": ("must be a finite number", "write a number"),
    "bool_type": ("must be true or false", "write true or false without quotes"),
    "string_type": ("must be text", "put it in quotes"),
    "greater_than": ("must be above {gt}", "ask for more, or leave it out"),
    "greater_than_equal": ("must be at least {ge}", "ask for more, or leave it out"),
    "less_than_equal": ("may be at most {le}", "ask for less"),
    "string_too_long": ("may have {max_length} characters", "shorten it"),
    "string_too_short": ("must not be empty", "write a value, or leave it out"),
    "too_long": ("may have {max_length} entries", "remove some"),
    "missing": ("must be given", "add it"),
    "extra_forbidden": ("is not known", "remove it"),
    "dict_type": ("must be a mapping of labels to values", "write label: value"),
    "model_type": ("must be a mapping", "write required: and preferred: lists of rules"),
    "tuple_type": ("must be a list", "write [value]"),
    "enum": ("must be one of {expected}", "choose one"),
    "literal_error": ("must be one of {expected}", "choose one"),
    "decimal_parsing": ("must be a number", "write it without unit"),
    "decimal_type": ("must be a number", "write it without unit"),
    "decimal_max_digits": ("may have {max_digits} digits", "shorten it"),
    "decimal_max_places": ("may have {decimal_places} digits behind the point", "shorten it"),
    "decimal_whole_digits": ("may have {whole_digits} digits before the point", "shorten it"),
}


Path = tuple[str | int, ...]
LineOf = Callable[[Path], int | None]
"""Line of an attribute by its path, without its prefix."""


def nowhere(_path: Path) -> int | None:
    """Return no line, for values that were not read from a file."""
    return None


def problems_of_errors(
    error: ValidationError,
    model: type[BaseModel],
    *,
    more: Sequence[str] = (),
    prefix: str = PREFIX,
    step: str = "",
    line_of: LineOf = nowhere,
) -> Problems:
    """Return one problem for each error of a model; `more`: what people may mean beside its fields."""
    return tuple(
        _problem(detail, model, more, prefix=prefix, step=step, line_of=line_of)
        for detail in error.errors(include_url=False, include_context=True)
    )


def _problem(
    detail: ErrorDetails, model: type[BaseModel], more: Sequence[str], *, prefix: str, step: str, line_of: LineOf
) -> AttributeProblem:
    path = tuple(part for part in detail["loc"] if part != "[key]")
    if detail["type"] == "extra_forbidden" and len(path) == 1:
        known = (*model.model_fields, *more)
        return unknown_attribute(str(path[0]), known, prefix=prefix, step=step, line=line_of(path))
    limit, hint = _limit(detail, path)
    if detail["type"] == "extra_forbidden":
        hint = _close(str(path[-1]), _fields_at(model, path[:-1])) or hint
    value = "" if detail["type"] == "missing" or detail["input"] is None else shown(detail["input"])
    return AttributeProblem(prefix + dotted(path), value, limit, hint, line_of(path), step)


def _fields_at(model: type[BaseModel], path: Path) -> Sequence[str]:
    """Return the fields of the part of a model that a path leads to; none where it is no model."""
    part: type[BaseModel] | None = model
    for name in path:
        if part is not None and isinstance(name, str):
            field = part.model_fields.get(name)
            part = _model_in(field.annotation) if field is not None else None
    return tuple(part.model_fields) if part is not None else ()


def _model_in(annotation: object) -> type[BaseModel] | None:
    """Return the model in an annotation, such as that of X | None or tuple[X, ...]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for one in get_args(annotation) if (found := _model_in(one)) is not None), None)


def _limit(detail: ErrorDetails, path: Sequence[Any]) -> tuple[str, str]:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "string_pattern_mismatch":
        names = [part for part in reversed(path) if isinstance(part, str)]
        limit = next((_FORMS[part] for part in names if part in _FORMS), form_of(str(context.get("pattern"))))
        alias = tables.gpu_id(str(detail["input"])) if path and path[0] == "gpu_type" else ""
        return limit, f"write {alias}" if alias in tables.GPU_TYPES else "correct it"
    if detail["input"] is None and kind != "missing":
        return "must have a value", "write one, or remove the line"
    limit, hint = _LIMITS.get(kind, (UNKNOWN, "see the reference of attributes"))
    if kind in {"enum", "literal_error"}:
        expected = _words(str(context.get("expected", "")))
        return one_of(expected), _close(str(detail["input"]), expected) or hint
    return limit.format(**context), hint


def _words(expected: str) -> list[str]:
    """Return the values that pydantic lists as 'a', 'b' or 'c'."""
    return expected.split("'")[1::2]


def _close(text: str, known: Sequence[str]) -> str:
    """Return a hint with the probable intent; empty if nothing is similar."""
    lower = text[:NAME_LENGTH_MAX].lower().replace(" ", "_")
    found = get_close_matches(lower, known, 1) or get_close_matches(lower.replace("_", "-"), known, 1)
    return f"did you mean {found[0]}?" if found else ""


def unknown_attribute(
    name: str, known: Sequence[str], *, prefix: str = PREFIX, step: str = "", line: int | None = None
) -> AttributeProblem:
    """Return the problem of an unknown attribute, with the probable intent."""
    close = _close(name, known)
    hint = close.replace("mean ", f"mean {prefix}") if close else "remove it, or see the reference of attributes"
    return AttributeProblem(prefix + dotted((name,)), "", "is not known", hint, line, step)


def problem_of_complaint(
    complaint: Complaint, attributes: MlAttributes, *, step: str = "", line_of: LineOf = nowhere
) -> AttributeProblem:
    """Return a broken rule as a problem, with the value of the attribute."""
    path = (complaint.name, *complaint.path)
    value = complaint.value or shown(getattr(attributes, complaint.name))
    return AttributeProblem(PREFIX + dotted(path), value, complaint.limit, complaint.hint, line_of(path), step)


def dotted(path: Iterable[str | int]) -> str:
    """Return a path as text: required[2].key."""
    out = ""
    for part in path:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else str(part)
    out = out if out.isprintable() else ascii(out)
    return out if len(out) <= 2 * NAME_LENGTH_MAX else out[: 2 * NAME_LENGTH_MAX - 3] + "..."
