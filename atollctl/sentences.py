"""Turns an error of the API server or a file into one sentence with the next step, for the end of "cannot ...: "."""

import re
from typing import Final

from pydantic import ValidationError

from atoll.api import names
from atoll.api.forms import message_of
from atoll.kube.errors import Forbidden, NotFound, Unanswered, Unauthorized

READERS: Final = "the ClusterRole atoll-reader, and atoll-ledger-reader in atoll-system and atoll-nodes"
OPERATORS: Final = "the ClusterRole atoll-machine-operator"
_NOBODY: Final = re.compile(r"Cannot connect to host (\S+)[^\[]*\[(.+?)\]")
_OWN_COLLECTION: Final = re.compile(rf"/apis/{re.escape(names.GROUP)}/[a-z0-9]+/[a-z]+")


def sentence(error: Exception, *, roles: str = READERS) -> str:
    """Return what failed and what to do next. `roles`: the roles that allow the command, for users who lack rights."""
    if isinstance(error, Unanswered) and not error.sent:
        found = _NOBODY.search(str(error))
        what = f"no API server answers at {found[1]} ({found[2]})" if found else str(error)
        return f"{what}; is the cluster up, and the kubeconfig the right one?"
    if isinstance(error, Unauthorized):
        return "the API server does not accept the credentials of the kubeconfig; log in anew, or pass --context"
    if isinstance(error, Forbidden):
        return f"{error.message}; what allows it: {roles}"
    if isinstance(error, NotFound) and _OWN_COLLECTION.fullmatch(error.path.partition("?")[0]):
        return "the cluster does not know Atoll's kinds; is Atoll installed, and this the cluster that you mean?"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def faults(error: ValidationError) -> str:
    """Return the faults of an object's fields in one line."""
    told = [
        (".".join(map(str, fault["loc"])), message_of(fault), repr(fault["input"])[:60]) for fault in error.errors()
    ]
    return "; ".join(f"{field}: {text}, got {given}" for field, text, given in told)[:500]
