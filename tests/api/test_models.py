"""Models and schemas agree: each accepts the other's output and refuses the same objects."""

from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from atoll.api import claims, crds, node_status
from atoll.api.base import Model

SCHEMAS = {
    model: crds.structural_schema(model, defaults=True)
    for model in (
        claims.GpuClaimSpec,
        claims.GpuClaimStatus,
        node_status.GpuNodeStatusSpec,
        node_status.GpuNodeStatusReport,
    )
}


def enum_or(default: st.SearchStrategy[Any], schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for the listed values, or the default one."""
    return st.sampled_from(schema["enum"]) if "enum" in schema else default


def strings(schema: dict[str, Any]) -> st.SearchStrategy[str]:
    """Return strings that the schema allows."""
    if "pattern" in schema:
        longest = schema["maxLength"]
        return st.from_regex(schema["pattern"].replace("$", r"\Z"), fullmatch=True).filter(lambda s: len(s) <= longest)
    return st.text("aZ9-.", min_size=schema.get("minLength", 0), max_size=min(schema.get("maxLength", 8), 8))


def values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return JSON values that obey a structural schema of ours."""
    match schema["type"]:
        case "object":
            required = {key: values(schema["properties"][key]) for key in schema.get("required", ())}
            optional = {key: values(child) for key, child in schema["properties"].items() if key not in required}
            return st.fixed_dictionaries(required, optional=optional)
        case "array":
            keys = schema.get("x-kubernetes-list-map-keys")
            unique = (lambda entry: tuple(entry[key] for key in keys)) if keys else None
            return st.lists(values(schema["items"]), max_size=2, unique_by=unique)
        case "string":
            return enum_or(strings(schema), schema)
        case "integer":
            return st.integers(schema.get("minimum", -1000), schema.get("maximum", 2**53))
        case "number":
            return st.integers(int(schema.get("minimum", 0)), 100_000).map(lambda tenths: tenths / 10)
        case _:
            return st.booleans()


STRATEGIES = {model: values(schema) for model, schema in SCHEMAS.items()}


@pytest.mark.parametrize("model", SCHEMAS, ids=lambda model: model.__name__)
@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_what_the_schema_allows_survives_the_model(model: type[Model], data: st.DataObject) -> None:
    """Read, write and read again gives the same value, and what is written obeys the schema."""
    document = data.draw(STRATEGIES[model])
    try:
        value = model.model_validate(document)
    except ValidationError as error:
        problems = {problem["type"] for problem in error.errors()}
    else:
        problems = set()
    # Only rules over several fields, which the API server knows as CEL, may refuse what the schema allows.
    assert problems <= {"value_error"}
    assume(not problems)
    written = value.to_json()
    jsonschema.validate(written, SCHEMAS[model])
    assert model.model_validate(written) == value


def with_devices(**fields: Any) -> dict[str, Any]:
    """Return the spec of a claim."""
    return {"devices": fields}


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({}, id="no devices at all"),
        pytest.param(with_devices(), id="no count"),
        pytest.param(with_devices(count=0), id="zero count"),
        pytest.param(with_devices(count=-1), id="negative count"),
        pytest.param(with_devices(count=65), id="more than any machine has"),
        pytest.param(with_devices(count="two"), id="a word as count"),
        pytest.param(with_devices(count=1, policy="nearby"), id="unknown policy"),
        pytest.param(with_devices(count=1, interconnect="infiniband"), id="unknown interconnect"),
        pytest.param(with_devices(count=1, vendor="intel"), id="unknown vendor"),
        pytest.param(with_devices(count=1, models=["NVIDIA H100"]), id="a product name instead of a slug"),
        pytest.param(with_devices(count=1, models=[f"m{n}" for n in range(17)]), id="too many models"),
        pytest.param(with_devices(count=1, memory="40 gigabytes"), id="memory in words"),
        pytest.param(with_devices(count=1, memory="-1Gi"), id="negative memory"),
        pytest.param(with_devices(count=1, computeCapability="nine"), id="compute capability in words"),
        pytest.param(with_devices(count=1, minBandwidthGBps=-1), id="negative bandwidth"),
        pytest.param(with_devices(count=1, migProfile="half"), id="unknown form of MIG profile"),
        pytest.param({**with_devices(count=1), "visibleDevices": "minor"}, id="unknown mode of visible devices"),
        pytest.param({**with_devices(count=1), "gangRef": "Not A Name"}, id="gang that cannot be a name"),
    ],
)
def test_model_and_schema_refuse_the_same_claims(spec: dict[str, Any]) -> None:
    """A claim that the API server refuses for one of its fields is refused by the model too."""
    with pytest.raises(ValidationError):
        claims.GpuClaimSpec.model_validate(spec)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(spec, SCHEMAS[claims.GpuClaimSpec])


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        pytest.param(
            {"count": 2, "policy": "spread", "interconnect": "nvlink"},
            claims.DEVICE_RULES[0][1],
            id="spread and joined",
        ),
        pytest.param(
            {"count": 2, "migProfile": "1g.10gb", "interconnect": "nvlink"}, "MIG instances", id="MIG over NVLink"
        ),
        pytest.param({"count": 1, "models": ["a100", "a100"]}, claims.DEVICE_RULES[2][1], id="one model twice"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(devices: dict[str, Any], message: str) -> None:
    """The model knows the CEL rules too: it refuses what came in before the rules did."""
    with pytest.raises(ValidationError, match=message):
        claims.DeviceClaim.model_validate(devices)


def test_bandwidth_fields_keep_their_published_spelling() -> None:
    """GB/s is written GBps on the wire, in every place."""
    links = node_status.Links.model_validate({"linkGBps": 25, "interSocketGBps": 20.8})
    assert links.to_json() == {
        "nvlink": [],
        "pcie": [],
        "nvswitch": False,
        "linkGBps": 25.0,
        "interSocketGBps": 20.8,
        "nics": [],
    }
