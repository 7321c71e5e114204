"""The generated CustomResourceDefinitions: structural, bounded, up to date, and consistent with the models."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import jsonschema
import pytest
import yaml
from pydantic import Field

from atoll.api import crds, names
from atoll.api.base import Model
from tests.kubernetes_schemas import validate

REPOSITORY = Path(__file__).parents[2]
DEFINITIONS = {resource.kind: crds.custom_resource_definition(resource) for resource in crds.CUSTOM_RESOURCES}
KINDS = sorted(DEFINITIONS)
METADATA = ".metadata."
FORBIDDEN_KEYWORDS = {"$ref", "$defs", "anyOf", "oneOf", "allOf", "not", "title", "const", "discriminator", "nullable"}


def root_schema(kind: str) -> dict[str, Any]:
    """Return the schema of the only version of `kind`."""
    return DEFINITIONS[kind]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every schema node below spec and status with its path."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from nodes(schema[key], f"{path}[]")


def field_nodes(kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the nodes that we describe: apiVersion, kind and metadata belong to the API server."""
    for part in ("spec", "status"):
        yield from nodes(root_schema(kind)["properties"][part], f".{part}")


@pytest.mark.parametrize("kind", KINDS)
def test_every_node_is_structural(kind: str) -> None:
    """Each value has one type and none of the keywords that a structural schema may not have."""
    for path, node in field_nodes(kind):
        assert isinstance(node.get("type"), str), path
        assert not FORBIDDEN_KEYWORDS & node.keys(), path
        assert not ({"properties", "additionalProperties"} <= node.keys()), path
        assert node["type"] != "array" or "items" in node, path
        assert set(node.get("required", ())) <= node.get("properties", {}).keys(), path


@pytest.mark.parametrize("kind", KINDS)
def test_every_size_is_bounded(kind: str) -> None:
    """Strings and lists have limits, so that no object can be made huge and CEL costs can be estimated."""
    for path, node in field_nodes(kind):
        assert node["type"] != "string" or "enum" in node or "maxLength" in node, path
        assert node["type"] != "array" or "maxItems" in node, path
        assert "additionalProperties" not in node or "maxProperties" in node, path


@pytest.mark.parametrize("kind", KINDS)
def test_map_lists_name_required_keys(kind: str) -> None:
    """The API server takes a list of type map only where its keys are required; conditions are such a list."""
    lists = {path: node for path, node in field_nodes(kind) if node.get("x-kubernetes-list-type") == "map"}
    if (
        "conditions"
        in DEFINITIONS[kind]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    ):
        assert lists[".status.conditions"]["x-kubernetes-list-map-keys"] == ["type"]
    for path, node in lists.items():
        assert set(node["x-kubernetes-list-map-keys"]) <= set(node["items"]["required"]), path


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_obey_the_schema_and_stand_in_spec_alone(kind: str) -> None:
    """What the API server fills in is valid, and it fills in nothing in what our own programs write."""
    for path, node in field_nodes(kind):
        if "default" in node:
            jsonschema.validate(node["default"], {key: value for key, value in node.items() if key != "default"})
            assert path.startswith(".spec"), path


@pytest.mark.parametrize("kind", KINDS)
def test_patterns_mean_the_same_to_the_api_server(kind: str) -> None:
    """Patterns keep to what Go's engine knows: anchored, without look-around or back references."""
    for path, node in field_nodes(kind):
        pattern = node.get("pattern", "^$")
        re.compile(pattern)
        assert pattern.startswith("^"), path
        assert pattern.endswith("$"), path
        assert "(?" not in pattern, path
        assert not re.search(r"\\[1-9]", pattern), path


@pytest.mark.parametrize("kind", KINDS)
def test_columns_show_fields_that_exist(kind: str) -> None:
    """Every printer column leads to a field of the schema, or to metadata."""
    paths = {path for path, _ in field_nodes(kind)}
    for column in DEFINITIONS[kind]["spec"]["versions"][0]["additionalPrinterColumns"]:
        path = re.sub(r"\[[^]]*\]", "[]", column["jsonPath"])
        assert path.startswith(METADATA) or path in paths, column


@pytest.mark.parametrize("kind", KINDS)
def test_definition_obeys_the_published_schema(kind: str) -> None:
    """kubernetes-validate accepts the definition, and its names belong together."""
    definition = DEFINITIONS[kind]
    validate(definition, "1.37", strict=True)
    assert definition["metadata"]["name"] == f"{definition['spec']['names']['plural']}.{names.GROUP}"
    assert definition["spec"]["versions"][0]["subresources"] == {"status": {}}


def test_files_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    """The committed files are what the models give; the message tells how to renew them."""
    assert crds.main(["--check", "--directory", str(REPOSITORY / "deploy/crds")]) == 0, capsys.readouterr().err


def test_check_reports_missing_changed_and_left_over_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--check fails for each kind of staleness and writes nothing; writing repairs all of them."""
    directory = ["--directory", str(tmp_path)]
    (tmp_path / "gpuclaims.yaml").write_text("stale")
    (tmp_path / "old.yaml").write_text("left over")
    assert crds.main(["--check", *directory]) == 1
    assert (
        "gpuclaims.yaml, gpugangs.yaml, gpunodestatuses.yaml, gpureservations.yaml, old.yaml, topologies.yaml"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "gpunodestatuses.yaml").exists()
    assert crds.main(directory) == 0
    assert crds.main(["--check", *directory]) == 0
    assert {path.name: yaml.safe_load(path.read_text()) for path in tmp_path.iterdir()} == {
        f"{definition['spec']['names']['plural']}.yaml": definition for definition in DEFINITIONS.values()
    }


class Union(Model):
    """A model with a field of two types."""

    either: int | str = 0


class Untyped(Model):
    """A model with a field that may be anything."""

    anything: Any = None


class Excluded(Model):
    """A model with a bound that has no structural form."""

    above: Annotated[int, Field(gt=0)] = 1


@pytest.mark.parametrize("model", [Union, Untyped, Excluded])
def test_what_has_no_structural_form_is_refused(model: type[Model]) -> None:
    """The generator names the place instead of guessing."""
    with pytest.raises(crds.UnsupportedSchemaError, match=model.__name__):
        crds.structural_schema(model, defaults=True)


def test_every_field_says_what_it_means() -> None:
    """`kubectl explain` has words for each field of each kind, at every depth. The API server describes metadata, and
    refuses a definition that does."""

    def silent(schema: dict[str, Any], path: str) -> list[str]:
        found = []
        for name, child in schema.get("properties", {}).items():
            found += [] if child.get("description") else [path + name]
            found += silent(child, f"{path}{name}.") + silent(child.get("items", {}), f"{path}{name}[].")
        return found

    for kind, definition in DEFINITIONS.items():
        (version,) = definition["spec"]["versions"]
        assert silent(version["schema"]["openAPIV3Schema"], f"{kind}.") == [f"{kind}.metadata"]
