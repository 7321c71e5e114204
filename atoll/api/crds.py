"""The CustomResourceDefinitions, generated from the pydantic models: structural schemas, CEL rules, printer columns.

`python -m atoll.api.crds` writes the files of `deploy/crds`. Only this module handles the differences between
pydantic's JSON Schema and the API server's structural schemas. It refuses what it cannot translate.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from atoll.api import names
from atoll.api.base import Model
from atoll.api.claims import GpuClaimSpec, GpuClaimStatus
from atoll.api.gangs import GpuGangSpec, GpuGangStatus
from atoll.api.node_status import GpuNodeStatusReport, GpuNodeStatusSpec
from atoll.api.reservations import GpuReservationSpec, GpuReservationStatus
from atoll.api.topologies import TopologySpec, TopologyStatus

Schema = dict[str, Any]

DEFAULT_DIRECTORY: Final = Path("deploy/crds")
_KEPT: Final = frozenset(
    {
        *("type", "format", "description", "enum", "required", "default"),
        *(
            "minimum",
            "maximum",
            "minLength",
            "maxLength",
            "pattern",
            "minItems",
            "maxItems",
            "minProperties",
            "maxProperties",
        ),
        *("x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-validations"),
    }
)
_DROPPED: Final = frozenset({"title"})
_HEADER: Final = "# Generated from the models in atoll/api by `python -m atoll.api.crds`; edit those.\n"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of `kubectl get`; `wide` ones appear only with `-o wide`."""

    name: str
    path: str
    type: str = "string"
    wide: bool = False

    def to_json(self) -> Schema:
        """Return the entry of additionalPrinterColumns."""
        return {"name": self.name, "type": self.type, "jsonPath": self.path, "priority": int(self.wide)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomResource:
    """The parts of a CustomResourceDefinition beside its schema."""

    kind: str
    plural: str
    short_names: tuple[str, ...]
    namespaced: bool
    description: str
    spec: type[Model]
    status: type[Model]
    spec_required: bool
    columns: tuple[Column, ...]

    @property
    def name(self) -> str:
        """Name of the CustomResourceDefinition."""
        return f"{self.plural}.{names.GROUP}"


AGE: Final = Column("Age", ".metadata.creationTimestamp", "date")
CUSTOM_RESOURCES: Final = (
    CustomResource(
        kind="GpuClaim",
        plural="gpuclaims",
        short_names=("gclaim", "gclaims"),
        namespaced=True,
        description="GPU request of a pod, as a template: every pod that names the claim gets its own GPUs.",
        spec=GpuClaimSpec,
        status=GpuClaimStatus,
        spec_required=True,
        columns=(
            Column("GPUs", ".spec.devices.count", "integer"),
            Column("Policy", ".spec.devices.policy"),
            Column("Phase", ".status.phase"),
            Column("Allocated", ".status.allocatedPods", "integer"),
            Column("Waiting", ".status.waitingPods", "integer"),
            Column("Models", ".spec.devices.models", wide=True),
            Column("Memory", ".spec.devices.memory", wide=True),
            Column("Interconnect", ".spec.devices.interconnect", wide=True),
            AGE,
        ),
    ),
    CustomResource(
        kind="GpuNodeStatus",
        plural="gpunodestatuses",
        short_names=("gns",),
        namespaced=False,
        description="The GPUs of a machine as its agent reads them. Named like the node.",
        spec=GpuNodeStatusSpec,
        status=GpuNodeStatusReport,
        spec_required=False,
        columns=(
            Column("GPUs", ".status.deviceCount", "integer"),
            Column("Healthy", ".status.healthyCount", "integer"),
            Column("Cordoned", ".spec.cordons[*].uuid"),
            Column("Models", ".status.models"),
            Column("Fabric", ".status.fabric.clusterUUID", wide=True),
            Column("Agent", ".status.agentVersion", wide=True),
            AGE,
        ),
    ),
    CustomResource(
        kind="GpuGang",
        plural="gpugangs",
        short_names=("ggang", "ggangs"),
        namespaced=True,
        description="Pods that start together and near each other, or wait without holding anything.",
        spec=GpuGangSpec,
        status=GpuGangStatus,
        spec_required=True,
        columns=(
            Column("Phase", ".status.phase"),
            Column("Members", ".status.members", "integer"),
            Column("Needed", ".status.needed", "integer"),
            Column("Ready", ".status.ready", "integer"),
            Column("Admitted", ".status.conditions[?(@.type=='Admitted')].status"),
            Column("Reason", ".status.conditions[?(@.type=='Admitted')].reason", wide=True),
            Column("Topology", ".status.assignment.topology", wide=True),
            Column("Evictions", ".status.requeueState.count", "integer", wide=True),
            Column("Requeue at", ".status.requeueState.requeueAt", wide=True),
            AGE,
        ),
    ),
    CustomResource(
        kind="GpuReservation",
        plural="gpureservations",
        short_names=("gres",),
        namespaced=False,
        description="Holds GPUs for certain users, from one time until another. Pods that name it run on no others.",
        spec=GpuReservationSpec,
        status=GpuReservationStatus,
        spec_required=True,
        columns=(
            Column("GPUs", ".spec.shape.count", "integer"),
            Column("Phase", ".status.phase"),
            Column("Idle", ".status.idle", "integer"),
            Column("Used", ".status.used", "integer"),
            Column("Ends", ".spec.ends"),
            Column("Models", ".spec.shape.models", wide=True),
            Column("Message", ".status.message", wide=True),
            AGE,
        ),
    ),
    CustomResource(
        kind="Topology",
        plural="topologies",
        short_names=(),
        namespaced=False,
        description="Topology of the machines: levels of node labels, including NVLink fabric cliques.",
        spec=TopologySpec,
        status=TopologyStatus,
        spec_required=True,
        columns=(
            Column("Levels", ".spec.levels[*].nodeLabel"),
            Column("Nodes", ".status.nodes", "integer"),
            Column("Outside", ".status.outside", "integer", wide=True),
            AGE,
        ),
    ),
)


class UnsupportedSchemaError(ValueError):
    """A model uses something without a structural form; `path` says where."""

    def __init__(self, path: str, problem: str) -> None:
        """Keep the path for the author of the model."""
        super().__init__(f"{path}: {problem}; change the model, or teach atoll.api.crds its structural form")
        self.path = path


def structural_schema(model: type[Model], *, defaults: bool) -> Schema:
    """Return the structural schema of `model`.

    `defaults` keeps meaningful defaults: people write spec, so the API server completes it;
    status is written whole by our own programs. Raises UnsupportedSchemaError.
    """
    schema = model.model_json_schema(by_alias=True)
    return _convert(schema, schema.get("$defs", {}), path=model.__name__, defaults=defaults)


def _convert(node: Mapping[str, Any], definitions: Mapping[str, Any], *, path: str, defaults: bool) -> Schema:
    """Translate one schema node and all its descendants."""
    node = _without_null(_inlined(node, definitions), definitions, path=path)
    unknown = set(node) - _KEPT - _DROPPED - {"properties", "items", "additionalProperties", "$defs"}
    if unknown or "type" not in node:
        raise UnsupportedSchemaError(path, f"no structural form for {sorted(unknown) or 'a value without a type'}")
    out: Schema = {key: value for key, value in node.items() if key in _KEPT}
    if not defaults or out.get("default") in (None, "", [], {}):
        out.pop("default", None)
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), Mapping):
            out[key] = _convert(node[key], definitions, path=f"{path}.{key}", defaults=defaults)
    if "properties" in node:
        out["properties"] = {
            name: _convert(child, definitions, path=f"{path}.{name}", defaults=defaults)
            for name, child in node["properties"].items()
        }
    return out


def _inlined(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    """Replace a reference by its target; keywords beside the reference win."""
    if "$ref" not in node:
        return dict(node)
    target = definitions[node["$ref"].removeprefix("#/$defs/")]
    return {**target, **{key: value for key, value in node.items() if key != "$ref"}}


def _without_null(node: Schema, definitions: Mapping[str, Any], *, path: str) -> Schema:
    """Turn "X or null" into X: the API server drops a null of a field that is not nullable."""
    if "anyOf" not in node:
        return node
    choices = [choice for choice in node["anyOf"] if choice.get("type") != "null"]
    if len(choices) != 1:
        raise UnsupportedSchemaError(path, "a union of several types")
    return {**_inlined(choices[0], definitions), **{key: value for key, value in node.items() if key != "anyOf"}}


def custom_resource_definition(resource: CustomResource) -> Schema:
    """Return the CustomResourceDefinition of `resource` for the API server."""
    schema: Schema = {
        "type": "object",
        "description": resource.description,
        **({"required": ["spec"]} if resource.spec_required else {}),
        "properties": {
            "apiVersion": {"type": "string", "description": "version of this kind's schema"},
            "kind": {"type": "string", "description": "kind of the object"},
            "metadata": {"type": "object"},
            "spec": structural_schema(resource.spec, defaults=True),
            "status": structural_schema(resource.status, defaults=False),
        },
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": resource.name},
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced" if resource.namespaced else "Cluster",
            "names": {
                "kind": resource.kind,
                "listKind": f"{resource.kind}List",
                "plural": resource.plural,
                "singular": resource.kind.lower(),
                "shortNames": list(resource.short_names),
                "categories": ["atoll"],
            },
            "versions": [
                {
                    "name": names.VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [column.to_json() for column in resource.columns],
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }


def rendered_files() -> dict[str, str]:
    """Return file name -> text of every generated manifest."""
    return {
        f"{resource.plural}.yaml": _HEADER
        + yaml.safe_dump(custom_resource_definition(resource), sort_keys=False, width=120, allow_unicode=True)
        for resource in CUSTOM_RESOURCES
    }


def stale_files(directory: Path) -> tuple[str, ...]:
    """Return the names of generated files that are missing, differ, or belong to no resource."""
    wanted = rendered_files()
    present = {path.name: path.read_text(encoding="utf-8") for path in directory.glob("*.yaml")}
    return tuple(sorted(name for name in wanted.keys() | present.keys() if wanted.get(name) != present.get(name)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files, or with --check report stale ones and return 1."""
    parser = argparse.ArgumentParser(prog="python -m atoll.api.crds", description="Generate the CRDs from the models.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is stale")
    parser.add_argument("--directory", type=Path, default=DEFAULT_DIRECTORY, help="where the files lie (%(default)s)")
    options = parser.parse_args(arguments)
    stale = stale_files(options.directory)
    if options.check:
        if stale:
            sys.stderr.write(f"stale in {options.directory}: {', '.join(stale)}; run python -m atoll.api.crds\n")
        return int(bool(stale))
    options.directory.mkdir(parents=True, exist_ok=True)
    wanted = rendered_files()
    for name in stale:
        path = options.directory / name
        if name in wanted:
            path.write_text(wanted[name], encoding="utf-8")
        else:
            path.unlink()
        sys.stdout.write(f"{'wrote' if name in wanted else 'removed'} {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
