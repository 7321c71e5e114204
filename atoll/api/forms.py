"""The forms of texts in words: a message for people says what a field takes, and shows no regular expression."""

import re
from collections.abc import Mapping
from typing import Any, Final

UNKNOWN: Final = "must be in another form"
_LOWER: Final = "must be lower-case letters, digits and hyphens, with a letter or digit at both ends"
_LABEL: Final = "must be the key of a label, such as example.com/team"
_VALUE: Final = "must be the value of a label: at most 63 letters, digits and -_., with a letter or digit at both ends"
_NAME: Final = "must be letters, digits and -_., with a letter or digit at both ends"
_SIZE: Final = "must be a size such as 64Gi or 64G"
_CHOICE: Final = re.compile(r"\^\((?P<words>[A-Za-z._\[\]|]+)\)\$")
_FORMS: Final[Mapping[str, str]] = {
    r"^(([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*/)?"
    r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$": _LABEL,
    r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$": _LABEL,
    r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$": _VALUE,
    r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$": _VALUE,
    r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$": _NAME,
    r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$": _LOWER,
    r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$": (
        "must be lower-case letters, digits, hyphens and dots, with a letter or digit at both ends"
    ),
    r"^([a-z0-9][a-z0-9.-]*)?$": "must be lower-case letters, digits, dots and hyphens, a letter or digit first",
    r"^[a-z]([-a-z0-9]*[a-z0-9])?$": "must be lower-case letters, digits and hyphens, and begin with a letter",
    r"^[a-z][a-z0-9_]*$": "must be lower-case letters, digits and underscores, and begin with a letter",
    r"^([a-z0-9]+-)*[a-z0-9]*[a-z][a-z0-9]*(-[a-z0-9]+)*$": (
        "must be lower-case letters, digits and single hyphens, with at least one letter, such as http"
    ),
    r"^([a-z0-9][-a-z0-9.]*/)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$": (
        "must be the name of a resource, such as gpu, cpu or example.com/card"
    ),
    r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?/[a-z0-9]([-a-z0-9.]*[a-z0-9])?$": (
        "must be NAMESPACE/NAME of a service account, in lower case"
    ),
    r"^[a-z0-9]+(-[a-z0-9.]*[a-z0-9])+$": "must be vendor-model in lower case, such as nvidia-h100",
    r"^([1-9]g\.[0-9]{1,4}gb(\+[a-z]+)?)?$": "must be a MIG profile such as 3g.40gb",
    r"^([0-9]{1,5}h)?([0-9]{1,6}m)?([0-9]{1,8}s)?$": "must be a time such as 1h30m or 300s",
    r"^([01][0-9]|2[0-3]):[0-5][0-9]$": "must be a time of day such as 22:00",
    r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d{6})?Z$": "must be a time in UTC such as 2030-01-31T22:00:00Z",
    r"^[0-9]+(Ki|Mi|Gi|Ti|k|M|G|T)?$": "must be bytes such as 40G or 40Gi",
    r"^[0-9]{1,12}(m|k|Ki|M|Mi|G|Gi|T|Ti)?$": "must be a quantity such as 8, 500m or 64Gi",
    r"^[1-9][0-9]{0,7}(Ki|Mi|Gi|Ti|k|M|G|T)$": _SIZE,
    r"^[1-9][0-9]{0,7}(Mi|Gi|Ti|M|G|T)$": _SIZE,
    r"^[1-9][0-9]{0,4}GB$": "must be a size such as 40GB",
    r"^([1-9][0-9]{0,4}(\.[0-9]{1,3})?|0\.[0-9]{0,2}[1-9]|[1-9][0-9]{0,6}m)$": 'must be cores such as 4, "0.5" or 500m',
    r"^[0-9]{1,3}(\.[0-9]{1,3})?$": "must be a compute capability such as 9.0",
    r"^[0-9]{1,3}\.[0-9]{1,3}$": "must be major.minor in quotes, such as 9.0",
    r"^[1-9][0-9]{0,3}(x[1-9][0-9]{0,3}){1,2}$": "must be sides joined by x, such as 4x4 or 2x2x4",
    r"^(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+$": "must be a whole path such as /data, without dots that lead elsewhere",
    r"^/[^\s\x00]*$": "must be a path that begins with a slash and has no blanks",
    r"^[^\s\x00]+/$": "must be a URI that ends in a slash",
    r"^[a-z0-9]+://[^\s\x00]*/$": "must be a URI that ends in a slash, such as s3://bucket/",
    r"^(s3|gs|az|file)://[!-~]+$": "must be a URI that begins with s3://, gs://, az:// or file://",
    r"^[!-~]+$": "must be visible ASCII characters without blanks",
    r"^[^\x00]*$": "must not have the character NUL in it",
    r"^[^\x00-\x1f\x7f]*$": "must not have control characters in it, such as line breaks",
    r"^[^\x00-\x20\x7f]+$": "must be a name without blanks",
    r"^[a-z0-9_]{2,16}:[0-9a-f]+$": "must be algorithm:hexadecimal in lower case, such as sha256:9f86d0...",
    r"^([^\s@]+@[^\s@]+)?$": "must be an address such as atoll@example.com",
    r"^[A-Za-z0-9-]*$": "must be letters, digits and hyphens",
    r"^[A-Za-z0-9-]+$": "must be letters, digits and hyphens",
    r"^[A-Za-z0-9._:-]*$": "must be letters, digits and ._:-",
    r"^([A-Za-z0-9][A-Za-z0-9._/-]*)?$": "must be letters, digits and ._/-, with a letter or digit first",
    r"^[A-Za-z0-9][A-Za-z0-9.+_-]*$": "must be letters, digits and .+_-, with a letter or digit first",
    r"^[A-Za-z0-9][A-Za-z0-9._:+-]*$": "must be letters, digits and ._:+-, with a letter or digit first",
    r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$": "must be letters, digits and ._:/-, with a letter or digit first",
    r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$": "must be the name of a container image",
    r"^[A-Za-z0-9][A-Za-z0-9_.-]*$": "must be letters, digits and _.-, with a letter or digit first",
    r"^[A-Za-z0-9_-][-A-Za-z0-9._]*$": "must be letters, digits and -_., and not begin with a dot",
    r"^[A-Za-z_][A-Za-z0-9_.-]*$": "must be letters, digits and _.-, and begin with a letter",
    r"^[A-Za-z_][A-Za-z0-9_]*$": "must be letters, digits and underscores, and not begin with a digit",
}


def form_of(pattern: str) -> str:
    """Return in words what a pattern of a model takes."""
    choice = _CHOICE.fullmatch(pattern)
    if choice is not None:
        return f"must be one of {choice['words'].replace('[.]', '.').replace('|', ', ')}"
    return _FORMS.get(pattern, UNKNOWN)


def message_of(detail: Mapping[str, Any]) -> str:
    """Return the message of one error of pydantic, with a form in words instead of a pattern."""
    is_form = detail["type"] == "string_pattern_mismatch"
    return form_of(str(detail["ctx"]["pattern"])) if is_form else str(detail["msg"])
