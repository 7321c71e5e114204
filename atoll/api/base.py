"""The common shape of Atoll's custom resources: camelCase on the wire, frozen in memory, bounded fields.

Unknown fields are ignored when an object is read, because the API server prunes fields that the CRD does not have, and
a newer peer may know more fields.
"""

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic.alias_generators import to_camel
from pydantic.config import JsonDict

from atoll.api.kept import kept_annotations, kept_labels, without_excess

LabelText = Annotated[str, Field(max_length=253)]
ShortText = Annotated[str, Field(max_length=1024)]


class Model(BaseModel):
    """Base of every part of a custom resource."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True, extra="ignore")

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:  # noqa: ANN401
        """Read an object as pydantic does, without managed fields, which may be too deep for it, and excess."""
        cut = without_excess(json_data, bytes_max=0) if isinstance(json_data, bytes) else json_data
        return super().model_validate_json(cut, **options)

    def to_json(self) -> dict[str, Any]:
        """Return the wire form: camelCase keys, absent values left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class ObjectMeta(Model):
    """The part of metadata that Atoll reads."""

    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None

    @field_validator("labels", mode="before")
    @classmethod
    def _keep_labels(cls, given: object) -> object:
        return kept_labels(given) if isinstance(given, dict) else given

    @field_validator("annotations", mode="before")
    @classmethod
    def _keep_annotations(cls, given: object) -> object:
        """Leave out what nobody reads, as atoll.cluster.objects does; what is no mapping of texts is refused later."""
        if not isinstance(given, dict) or not all(isinstance(one, str) for row in given.items() for one in row):
            return given
        return kept_annotations(given)[0]


class Condition(Model):
    """One entry of `status.conditions`, as Kubernetes defines it."""

    type: Annotated[str, Field(description="what the condition is about", max_length=316)]
    status: Annotated[str, Field(description="True, False or Unknown", max_length=7, pattern="^(True|False|Unknown)$")]
    reason: Annotated[str, Field(description="a word for programs, in CamelCase", max_length=1024)]
    message: Annotated[str, Field(description="a sentence for people, with the next step", max_length=4096)] = ""
    observed_generation: (
        Annotated[int, Field(description="generation of the spec that this describes", ge=0)] | None
    ) = None
    last_transition_time: Annotated[
        str, Field(description="when status last changed", max_length=64, json_schema_extra={"format": "date-time"})
    ]


def list_map(*keys: str) -> JsonDict:
    """Return the schema keywords of a list whose entries differ in `keys`: the API server refuses duplicates."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


def rules(*pairs: tuple[str, str]) -> JsonDict:
    """Return the schema keywords of CEL rules, given as (expression, message)."""
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in pairs]}


Conditions = Annotated[
    tuple[Condition, ...],
    Field(description="what is true of the object now", max_length=16, json_schema_extra=list_map("type")),
]
