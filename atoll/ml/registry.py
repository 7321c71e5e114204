"""Source of a model: loaded on the worker, in its cache, in a registry, or none.

Gives a Source, or the reason why there is none; such a job is retried later. The worker itself fetches and verifies.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from atoll.ml.attributes import MlAttributes, ModelRegistry
from atoll.ml.policy import MlPolicy
from atoll.ml.uris import refuse_model_uri

CHECKSUM_DIGITS: Final[Mapping[str, int]] = {
    "md5": 32,
    "sha1": 40,
    "sha256": 64,
    "sha384": 96,
    "sha512": 128,
    "sha3_256": 64,
    "sha3_512": 128,
    "blake2b": 128,
    "blake2s": 64,
}
"""Hexadecimal digits of the algorithms that every worker's Python can verify."""
_SAFE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on a worker. version: empty if unknown."""

    model_id: str
    model_version: str = ""
    model_format: str = ""

    def matches(self, attributes: MlAttributes) -> bool:
        """True if this is the job's model; a job without a version or format accepts any."""
        return (
            self.model_id == attributes.model_id
            and attributes.model_version in {None, self.model_version}
            and (attributes.model_format is None or self.model_format in {"", attributes.model_format})
        )


class ModelPlace(StrEnum):
    """Places of a model, the nearest first."""

    LOADED = "loaded"
    CACHED = "cached"
    REGISTRY = "registry"


@dataclass(frozen=True, slots=True)
class Source:
    """Source of the model for a worker; `uri` is empty if the worker has it and the job names none."""

    place: ModelPlace
    uri: str = ""


@dataclass(frozen=True, slots=True)
class Unresolved:
    """Why a worker cannot get the model, in words; the job is retryable."""

    message: str


def resolve(
    attributes: MlAttributes,
    *,
    loaded: Iterable[LoadedModel] = (),
    cached: Iterable[LoadedModel] = (),
    registries: Mapping[ModelRegistry, str] | None = None,
    policy: MlPolicy | None = None,
) -> Source | Unresolved | None:
    """Return a worker's source of the model; None for a job without a model.

    Order: loaded on the worker, its cache, the job's URI, the job's registry or, if it names none, every configured one
    in the order of `registries` (kind to base URI).
    """
    uri = attributes.model_registry_uri or ""
    if attributes.model_id is not None:
        for place, models in ((ModelPlace.LOADED, loaded), (ModelPlace.CACHED, cached)):
            if any(model.matches(attributes) for model in models):
                return Source(place, uri)
    if uri:
        return Source(ModelPlace.REGISTRY, uri)
    if attributes.model_id is None:
        return None
    known = registries or {}
    asked = [attributes.model_registry] if attributes.model_registry is not None else list(known)
    for kind in asked:
        found = registry_uri(attributes, kind, known.get(kind, ""))
        if found and refuse_model_uri(found, None, policy or MlPolicy()) is None:
            return Source(ModelPlace.REGISTRY, found)
    return _unresolved(attributes, asked)


def registry_uri(attributes: MlAttributes, kind: ModelRegistry, base: str) -> str:
    """Return the URI of the job's model in a registry; empty if a necessary base URI is missing, or the model's name
    could lead elsewhere."""
    model_id, version = attributes.model_id or "", attributes.model_version or ""
    if not _SAFE.fullmatch(model_id) or ".." in model_id or "//" in model_id:
        return ""
    root = base.rstrip("/")
    if kind is ModelRegistry.HUGGINGFACE:
        return f"hf://{model_id}@{version}" if version else f"hf://{model_id}"
    if not root:
        return ""
    if kind is ModelRegistry.WANDB:
        return f"{root}/{model_id}:{version}" if version else f"{root}/{model_id}"
    tail = f"{model_id}/{version}" if version else model_id
    return f"{root}/{tail}" if kind in {ModelRegistry.MLFLOW, ModelRegistry.CUSTOM} else f"{root}/{tail}/"


def _unresolved(attributes: MlAttributes, asked: list[ModelRegistry]) -> Unresolved:
    model = " ".join(filter(None, (attributes.model_id, attributes.model_version)))
    where = f"registry {', '.join(asked)} has no place for it" if asked else "no registry is configured"
    return Unresolved(
        f"model {model} is neither loaded nor cached on the worker, and {where}; "
        "set ext_ml_model_registry_uri, or ask an administrator to configure the registry"
    )
