"""Base of a job's parts: snake_case keys, frozen, bounded, unknown keys refused.

Unlike custom resources, a job refuses unknown keys, because a misspelt field would be lost silently.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
)

SECONDS_MAX: Final = 10 * 365 * 24 * 3600
"""Ten years: longer than any machine."""
MAP_ENTRIES_MAX: Final = 64
NEW: Final[Mapping[str, bool]] = {"is_new": True}
"""Context of a validation of a new document. Rules that came later hold for new documents alone: a recorded job that
broke them before must stay readable."""
_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.ASCII)


def is_new(info: ValidationInfo) -> bool:
    """True if the validation checks a new document, and not a record."""
    return info.context is NEW


def is_short_name(value: str) -> bool:
    """Tell whether a text may be the name of a namespace or a port, as a document's is checked."""
    try:
        _SHORT_NAME.validate_python(value)
    except ValidationError:
        return False
    return True


def _subdomain(value: str, info: ValidationInfo) -> str:
    """Refuse a name, or the domain of a label, that the API server refuses. Raises ValueError."""
    domain = value.rpartition("/")[0] if "/" in value else value
    if is_new(info) and not _SUBDOMAIN.fullmatch(domain):
        raise ValueError(
            "must have letters or digits at both ends of each part between dots; remove the dot or hyphen too many"
        )
    return value


def _label_domain(value: str, info: ValidationInfo) -> str:
    """Refuse the key of a label if its domain is none. Raises ValueError."""
    return _subdomain(value, info) if "/" in value else value


Seconds = Annotated[int, Field(strict=True, ge=1, le=SECONDS_MAX)]
Flag = Annotated[bool, Field(strict=True)]
Identifier = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$")]
"""A valid label value, such as a uuid."""
ObjectName = Annotated[
    str,
    Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"),
    AfterValidator(_subdomain),
]
"""The name of a Kubernetes object."""
ShortName = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
"""A name without dots, as of a namespace or a port."""
_SHORT_NAME: Final = TypeAdapter(ShortName)
NO_NUL: Final = r"^[^\x00]*$"
"""Pattern of texts for a database or the arguments of a program: neither takes a NUL."""
Text = Annotated[str, Field(max_length=1024, pattern=NO_NUL)]
LabelKey = Annotated[
    str,
    Field(
        max_length=317,
        pattern=r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$",
    ),
    AfterValidator(_label_domain),
]
LabelValue = Annotated[str, Field(max_length=63, pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")]


def _cores(value: object) -> object:
    """Accept numbers of cores without quotes."""
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else value


CpuQuantity = Annotated[
    str,
    BeforeValidator(_cores),
    Field(max_length=12, pattern=r"^([1-9][0-9]{0,4}(\.[0-9]{1,3})?|0\.[0-9]{0,2}[1-9]|[1-9][0-9]{0,6}m)$"),
]
ByteQuantity = Annotated[str, Field(max_length=12, pattern=r"^[1-9][0-9]{0,7}(Ki|Mi|Gi|Ti|k|M|G|T)$")]


class JobPart(BaseModel):
    """Base of a job and its parts."""

    model_config = ConfigDict(frozen=True, extra="forbid")
