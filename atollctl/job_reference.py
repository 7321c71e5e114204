"""Generates the page of a job's fields from its models.

Turns the JSON Schemas of Job and of the administrator's settings into Markdown; atollctl.reference writes the page.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic import BaseModel

from atoll.api.markdown import table
from atoll.jobs.contracts import CONTRACTS
from atoll.jobs.model import Job
from atoll.jobs.settings import RenderSettings
from atoll.jobs.words import PRIORITY_MEANINGS, PRIORITY_VALUES

HEAD: Final = """\
# Fields of a job

`atoll job` reads these fields as YAML or JSON; see [From a model to pods](jobs.md). An asterisk marks a required field,
`[]` a list. The `ext_ml_*` attributes have [a page of their own](attributes.md).
"""
ELSEWHERE: Final = ("attributes", "liveness", "startup")
"""Fields whose parts are on another page, or are those of `readiness`."""
RESTARTS: Final = {"OnFailure": "Never; OnFailure if kept from preemption"}
"""What is rendered: Kubernetes tells preemption from failure only in pods that it does not restart in place."""


def page() -> Iterator[str]:
    """Yield the page."""
    yield HEAD
    yield "\n## Job\n\n" + table(("Field", "Type", "Default", "Means"), list(_fields(Job)))
    yield "\n## Types\n\n"
    heads = ("", *(of.value for of in CONTRACTS))
    rows = (
        ("object", [row.kind for row in CONTRACTS.values()]),
        ("runs", [row.life for row in CONTRACTS.values()]),
        ("restarts", [RESTARTS.get(row.restart_policy, row.restart_policy) for row in CONTRACTS.values()]),
        ("scales by", [row.scaling for row in CONTRACTS.values()]),
        ("priority", [row.priority.value for row in CONTRACTS.values()]),
        ("is preempted", [row.preemptible for row in CONTRACTS.values()]),
        ("when preempted", [row.on_preemption for row in CONTRACTS.values()]),
        ("is billed", [row.billing for row in CONTRACTS.values()]),
        ("service level", [f"{row.service_level:.1%}" for row in CONTRACTS.values()]),
    )
    yield table(heads, [(name, *values) for name, values in rows])
    yield "\n## Priorities\n\n"
    told = [(f"`{one}`", str(value), PRIORITY_MEANINGS[one]) for one, value in PRIORITY_VALUES.items()]
    yield table(("Priority", "Value", "Means"), told)
    yield "\n## Settings of the administrator\n\nThe file that `atoll job --settings` names.\n\n"
    yield table(("Field", "Type", "Default", "Means"), list(_fields(RenderSettings)))


def _fields(model: type[BaseModel]) -> Iterator[tuple[str, str, str, str]]:
    schema = model.model_json_schema()
    yield from _below(schema, schema.get("$defs", {}), "")


def _below(schema: Mapping[str, Any], parts: Mapping[str, Any], path: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield path, type, default and meaning of every field, depth first; attributes are on another page."""
    required = set(schema.get("required", ()))
    for name, field in schema.get("properties", {}).items():
        shape = _shape(field, parts)
        inner = _shape(shape.get("items", shape), parts)
        here = f"{path}{name}" + ("[]" if "items" in shape else "")
        about = field.get("description") or inner.get("description", "")
        yield f"`{here}`" + ("*" if name in required else ""), _type(inner), _default(field), _line(about)
        if name not in ELSEWHERE:
            yield from _below(inner, parts, here + ".")


def _shape(field: Mapping[str, Any], parts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema with its reference resolved, without the null of optional fields."""
    for one in field.get("anyOf", ()):
        if one.get("type") != "null":
            return _shape(one, parts)
    reference = field.get("$ref") or next((one["$ref"] for one in field.get("allOf", ())), "")
    return parts[reference.rpartition("/")[2]] if reference else field


def _type(shape: Mapping[str, Any]) -> str:
    if "enum" in shape:
        return "one of " + ", ".join(f"`{value}`" for value in shape["enum"])
    words = [str(shape.get("format", shape.get("type", "any")))]
    for key, text in (("minimum", "at least {}"), ("maximum", "at most {}"), ("maxLength", "at most {} characters")):
        if key in shape:
            words.append(text.format(shape[key]))
    return ", ".join(words)


def _default(field: Mapping[str, Any]) -> str:
    value = field.get("default")
    if isinstance(value, bool):
        return "`true`" if value else "`false`"
    return f"`{value}`" if isinstance(value, str | int | float) and value != "" else ""


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
