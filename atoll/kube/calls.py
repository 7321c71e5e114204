"""One request for metrics: verb and resource from bounded sets, whatever the path. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

UNANSWERED: Final = "none"
"""Code of a request that got no answer."""
OTHER: Final = "other"
RESOURCES: Final = frozenset(
    {
        "configmaps",
        "csidrivers",
        "csinodes",
        "csistoragecapacities",
        "customresourcedefinitions",
        "deviceclasses",
        "events",
        "gpuclaims",
        "gpugangs",
        "gpunodestatuses",
        "jobs",
        "leases",
        "mutatingwebhookconfigurations",
        "namespaces",
        "nodes",
        "persistentvolumeclaims",
        "persistentvolumes",
        "poddisruptionbudgets",
        "podgroups",
        "pods",
        "resourceclaims",
        "resourceclaimtemplates",
        "secrets",
        "storageclasses",
        "subjectaccessreviews",
        "tokenreviews",
        "topologies",
        "validatingwebhookconfigurations",
        "workloads",
    }
)
SUBRESOURCES: Final = frozenset({"binding", "eviction", "scale", "status"})
_VERBS: Final[Mapping[str, str]] = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One request as it was sent once. code: the HTTP status, or UNANSWERED. seconds: until the answer was read; of a
    watch, until it began."""

    verb: str
    resource: str
    code: str
    seconds: float


CallObserver = Callable[[ApiCall], None]


def ignore_call(_call: ApiCall) -> None:
    """Observe nothing."""


def verb_of(method: str, path: str, *, is_watch: bool = False) -> str:
    """Return the Kubernetes verb of a request."""
    if method == "GET":
        return "watch" if is_watch else "get" if _is_named(path) else "list"
    return _VERBS.get(method, OTHER)


def resource_of(path: str) -> str:
    """Return resource/subresource of a path as in the audit log, OTHER for unknown ones."""
    words = _words(path)
    if not words or words[0] not in RESOURCES:
        return OTHER
    sub = words[2] if len(words) > 2 else ""
    return f"{words[0]}/{sub}" if sub in SUBRESOURCES else words[0]


def code_of(status: int) -> str:
    """Return the label of an HTTP status; OTHER for anything else."""
    return str(status) if 100 <= status < 600 else OTHER


def _is_named(path: str) -> bool:
    return len(_words(path)) > 1


def _words(path: str) -> list[str]:
    """Return resource, name and subresource of a path, without group, version and namespace."""
    words = path.strip("/").split("/")
    words = words[2:] if words[0] == "api" else words[3:]
    return words[2:] if words[:1] == ["namespaces"] and len(words) > 2 else words
