"""The JSON Schema of an envelope, generated from the models, for editors and for clients in other languages.

Writes `docs/schemas/job-envelope.schema.json`, which the documentation site serves, and the page of atoll.ml.reference;
with --check it only reports stale ones. The schema has no rules over several attributes (atoll.ml.rules): a valid
document may still be refused, an invalid one always is.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from atoll.ml.attributes import NAMES, PREFIX, MlAttributes
from atoll.ml.envelope import CALLBACKS, STEPS_MAX, JobHead, WorkflowHead, WorkflowType, steps_key
from atoll.ml.infer import DEFAULTS
from atoll.ml.policy import BOUNDS
from atoll.ml.reference import page

Schema = dict[str, Any]

DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


def envelope_schema() -> Schema:
    """Return the schema of a job or a workflow."""
    found = MlAttributes.model_json_schema()
    attributes = {PREFIX + name: _bounded(name, found["properties"][name]) for name in NAMES}
    job = {
        "type": "object",
        "description": "One job. Attributes are here or under `attributes`, each once.",
        "properties": {
            **_fields(JobHead),
            "attributes": {"$ref": "#/$defs/Attributes"},
        },
        "allOf": [{"$ref": "#/$defs/Attributes"}],
    }
    return {
        "$schema": DIALECT,
        "title": "Envelope of a machine-learning job or workflow",
        "if": {"required": ["workflow_type"]},
        "then": {"$ref": "#/$defs/Workflow"},
        "else": {"$ref": "#/$defs/Job"},
        "$defs": {
            **_without_titles(found["$defs"]),
            "Attributes": {"type": "object", "properties": attributes, "propertyNames": _names()},
            "Job": job,
            "Workflow": _workflow(),
        },
    }


def _workflow() -> Schema:
    jobs = {"type": "array", "minItems": 1, "maxItems": STEPS_MAX, "items": {"$ref": "#/$defs/Job"}}
    return {
        "type": "object",
        "description": "Jobs that belong together; each has its own attributes and inherits none.",
        "properties": {
            **_fields(WorkflowHead),
            "workflow_type": {"enum": [kind.value for kind in WorkflowType]},
            "steps": jobs,
            "jobs": jobs,
            "callbacks": {
                "type": "object",
                "properties": {key: {"$ref": "#/$defs/Job"} for key in CALLBACKS},
                "additionalProperties": False,
            },
        },
        "propertyNames": {"not": {"anyOf": [{"pattern": f"^{PREFIX}"}, {"const": "attributes"}]}},
        "required": ["workflow_type"],
        "oneOf": [
            {"properties": {"workflow_type": {"const": kind.value}}, "required": [steps_key(kind)]}
            for kind in WorkflowType
        ],
    }


def _names() -> Schema:
    """Return the condition that names with the prefix are known."""
    return {"anyOf": [{"not": {"pattern": f"^{PREFIX}"}}, {"enum": [PREFIX + name for name in NAMES]}]}


def _fields(model: type[JobHead] | type[WorkflowHead]) -> Schema:
    properties = model.model_json_schema()["properties"]
    return {name: _bounded("", field) for name, field in properties.items()}


def _bounded(name: str, field: Schema) -> Schema:
    """Return the schema of one field: without null and titles, with bound and default of its attribute."""
    choices = [choice for choice in field.get("anyOf", ()) if choice.get("type") != "null"]
    own = {key: value for key, value in field.items() if key not in {"anyOf", "title", "default"}}
    out = {**_without_titles(choices[0] if choices else {}), **own}
    bound = {"maximum": BOUNDS[name]} if name in BOUNDS else {}
    return {**out, **bound, **({"default": DEFAULTS[name]} if name in DEFAULTS else {})}


def _without_titles(node: Schema) -> Schema:
    """Return a schema without pydantic's titles; keys that match no pattern are refused."""
    closed = {"additionalProperties": False} if "patternProperties" in node else {}
    return closed | {
        key: _without_titles(child) if isinstance(child, dict) else child
        for key, child in node.items()
        if not (key == "title" and isinstance(child, str))
    }


def rendered() -> dict[str, str]:
    """Return the files, by their paths in docs/."""
    return {
        "schemas/job-envelope.schema.json": json.dumps(envelope_schema(), indent=2) + "\n",
        "attributes.md": page(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files, or with --check report stale ones and return 1."""
    parser = argparse.ArgumentParser(prog="python -m atoll.ml.schema", description="Generate schema and reference.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is stale")
    parser.add_argument("--directory", type=Path, default=DOCS, help="where the files lie (%(default)s)")
    options = parser.parse_args(arguments)
    wanted = {options.directory / path: text for path, text in rendered().items()}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if options.check:
        if stale:
            sys.stderr.write(f"stale: {', '.join(map(str, stale))}; run python -m atoll.ml.schema\n")
        return int(bool(stale))
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
