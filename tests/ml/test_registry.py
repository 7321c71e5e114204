"""Source of a model: the order of places, and the message if no place has it."""

from typing import Any

import pytest

from atoll.ml.attributes import MlAttributes, ModelRegistry
from atoll.ml.policy import MlPolicy
from atoll.ml.registry import LoadedModel, ModelPlace, Source, Unresolved, registry_uri, resolve

LLAMA = LoadedModel("llama", "2.1", "safetensors")
HUB = {ModelRegistry.HUGGINGFACE: ""}
BUCKETS = {ModelRegistry.S3: "s3://models/", ModelRegistry.HUGGINGFACE: ""}

FOUND: dict[str, tuple[dict[str, Any], dict[str, Any], Source | None]] = {
    "loaded before cached": ({}, {"loaded": [LLAMA], "cached": [LLAMA]}, Source(ModelPlace.LOADED)),
    "cached before a registry": ({}, {"cached": [LLAMA], "registries": HUB}, Source(ModelPlace.CACHED)),
    "a registry last": ({}, {"registries": HUB}, Source(ModelPlace.REGISTRY, "hf://llama@2.1")),
    "registries in their order": ({}, {"registries": BUCKETS}, Source(ModelPlace.REGISTRY, "s3://models/llama/2.1/")),
    "the registry that the job names": (
        {"model_registry": "huggingface"}, {"registries": BUCKETS}, Source(ModelPlace.REGISTRY, "hf://llama@2.1"),
    ),
    "the hub needs no configuration": (
        {"model_registry": "huggingface"}, {}, Source(ModelPlace.REGISTRY, "hf://llama@2.1"),
    ),
    "the URI that the job names": (
        {"model_registry_uri": "s3://mine/x/"}, {"registries": HUB}, Source(ModelPlace.REGISTRY, "s3://mine/x/"),
    ),
    "another version loaded is not it": (
        {},
        {"loaded": [LoadedModel("llama", "2.0")], "registries": HUB},
        Source(ModelPlace.REGISTRY, "hf://llama@2.1"),
    ),
    "another format loaded is not it": (
        {"model_format": "gguf"}, {"loaded": [LLAMA], "registries": HUB}, Source(ModelPlace.REGISTRY, "hf://llama@2.1"),
    ),
    "any version for a job that names none": ({"model_version": None}, {"loaded": [LLAMA]}, Source(ModelPlace.LOADED)),
    "no model, no source": ({"model_id": None, "model_version": None}, {"registries": HUB}, None),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "known", "source"), FOUND.values(), ids=FOUND)
def test_model_comes_from_the_nearest_place(
    fields: dict[str, Any], known: dict[str, Any], source: Source | None
) -> None:
    """Loaded, cached, the URI, the registry that is named, those that are configured."""
    job = MlAttributes.model_validate({"model_id": "llama", "model_version": "2.1", **fields})

    assert resolve(job, **known) == source


LOST: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no registry at all": ({}, {}, "no registry is configured"),
    "a registry without its place": ({"model_registry": "mlflow"}, {"registries": HUB}, "registry mlflow has no place"),
    "a name that would lead elsewhere": ({"model_id": "a/../b"}, {"registries": BUCKETS}, "has no place for it"),
    "a registry inside that is not listed": (
        {}, {"registries": {ModelRegistry.MLFLOW: "mlflow://10.0.0.5"}}, "registry mlflow has no place",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "known", "text"), LOST.values(), ids=LOST)
def test_model_that_is_nowhere_is_told_of(fields: dict[str, Any], known: dict[str, Any], text: str) -> None:
    """The job is tried again, and its words say what to configure."""
    job = MlAttributes.model_validate({"model_id": "llama", "model_version": "2.1", **fields})
    answer = resolve(job, **known)

    assert isinstance(answer, Unresolved)
    assert text in answer.message
    assert "ext_ml_model_registry_uri" in answer.message


def test_listed_registry_inside_is_used() -> None:
    """What administrators allow is reached."""
    job = MlAttributes(model_id="llama", model_version="3")
    known = {ModelRegistry.MLFLOW: "mlflow://10.0.0.5"}

    assert resolve(job, registries=known, policy=MlPolicy(hosts=("10.0.0.5",))) == Source(
        ModelPlace.REGISTRY, "mlflow://10.0.0.5/llama/3"
    )


@pytest.mark.parametrize(
    ("kind", "base", "uri"),
    [
        (ModelRegistry.HUGGINGFACE, "", "hf://m@1"),
        (ModelRegistry.MLFLOW, "mlflow://mlflow.example.com/", "mlflow://mlflow.example.com/m/1"),
        (ModelRegistry.WANDB, "wandb://entity/project", "wandb://entity/project/m:1"),
        (ModelRegistry.S3, "s3://models/", "s3://models/m/1/"),
        (ModelRegistry.GCS, "gs://models", "gs://models/m/1/"),
        (ModelRegistry.CUSTOM, "https://models.example.com/x", "https://models.example.com/x/m/1"),
        (ModelRegistry.MLFLOW, "", ""),
    ],
)
def test_each_registry_has_its_form(kind: ModelRegistry, base: str, uri: str) -> None:
    """Kind and base URI make the place of a model."""
    assert registry_uri(MlAttributes(model_id="m", model_version="1"), kind, base) == uri
