"""Checks URIs of models and checkpoints, and the hosts that may be contacted.

Pure; gives the fault or None. A fetcher resolves the host, calls `refuse_addresses`, and connects to one of these
addresses, never to the name again. A URI cannot leave its place (`..`, also encoded) and cannot lead to an address that
is not public.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Final
from urllib.parse import unquote

from atoll.ml.attributes import ModelRegistry
from atoll.ml.policy import MlPolicy

LENGTH_MAX: Final = 1024
SCHEMES: Final = {
    "hf": ModelRegistry.HUGGINGFACE,
    "mlflow": ModelRegistry.MLFLOW,
    "wandb": ModelRegistry.WANDB,
    "s3": ModelRegistry.S3,
    "gs": ModelRegistry.GCS,
}
"""Scheme of a model's URI to the kind of its registry; other schemes are custom."""
CHECKPOINT_SCHEMES: Final = ("s3", "gs", "az", "file")
LOCAL_SCHEMES: Final = frozenset(
    {"file", "ftp", "tftp", "gopher", "dict", "ldap", "ldaps", "smb", "nfs", "ssh", "sftp", "telnet", "unix", "jar"}
    | {"netdoc", "data", "javascript", "about", "blob", "php", "expect", "local"}
)
"""Schemes that read the worker's own files, or contact services that are not registries."""

_NAME: Final = "[A-Za-z0-9][A-Za-z0-9._-]*"
_FORMS: Final = {
    "hf": (rf"({_NAME}/)?{_NAME}(@{_NAME}(/{_NAME})*)?", "hf://org/name@revision"),
    "mlflow": (rf"[^/]+/[^/@:]+/{_NAME}", "mlflow://server/name/version"),
    "wandb": (rf"{_NAME}/{_NAME}/{_NAME}(:{_NAME})?", "wandb://entity/project/model:alias"),
    "s3": (r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]/.*", "s3://bucket/path/"),
    "gs": (r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]/.*", "gs://bucket/path/"),
    "az": (r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9](@[a-z0-9.-]{3,253})?/.*", "az://container/path/"),
    "file": (r"/.*", "file:///path/"),
}
BUCKET_NAMES: Final = {
    "s3": "lower-case letters, digits, dots and hyphens",
    "gs": "lower-case letters, digits, dots, hyphens and underscores",
}
_URI: Final = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]{0,31})://(?P<rest>.+)")
_HOST: Final = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^:/\[\]]+)(:(?P<port>[0-9]{1,5}))?")
_HOST_NAME: Final = re.compile(
    r"(?=.{1,253}$)([A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)+[A-Za-z][A-Za-z0-9-]{0,61}[A-Za-z0-9]"
)
_INNER_SUFFIXES: Final = (
    ".local",
    ".internal",
    ".localhost",
    ".localdomain",
    ".svc",
    ".lan",
    ".intranet",
    ".home.arpa",
)
_SPECIAL: Final = tuple(
    map(
        ip_network,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
            *("192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.168.0.0/16"),
            *("192.175.48.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/3"),
            "168.63.129.16/32",  # Azure's own services on every machine
            *("::/3", "4000::/2", "8000::/1"),  # all but global unicast: NAT64, site-local and the like among them
            *("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20"),
        ),
    )
)
"""IANA's registries of special-purpose addresses, and what clouds use beside them. Networks whose IPv6 addresses carry
an IPv4 address for a gateway (6to4, Teredo, NAT64) are among them."""


@dataclass(frozen=True, slots=True)
class UriProblem:
    """What a URI must be, and what to do."""

    limit: str
    hint: str


def refuse_model_uri(uri: str, registry: ModelRegistry | None, policy: MlPolicy) -> UriProblem | None:
    """Return the fault of a model's URI; registry: the job's own choice."""
    found = _split(uri)
    if isinstance(found, UriProblem):
        return found
    scheme, rest = found
    if scheme in LOCAL_SCHEMES:
        return UriProblem("must name a registry", f"{scheme}:// reads what is not a registry; take hf, mlflow, s3, gs")
    kind = SCHEMES.get(scheme, ModelRegistry.CUSTOM)
    if registry is not None and kind is not registry:
        return UriProblem(
            f"must be of registry {registry}", f"{scheme}:// is of {kind}; change ext_ml_model_registry or the URI"
        )
    if problem := _form_problem(scheme, rest):
        return problem
    return _refuse_host(rest.partition("/")[0], policy) if scheme not in {"hf", "wandb", "s3", "gs"} else None


def refuse_checkpoint_uri(uri: str, policy: MlPolicy) -> UriProblem | None:
    """Return the fault of a checkpoints' URI."""
    found = _split(uri)
    if isinstance(found, UriProblem):
        return found
    scheme, rest = found
    if scheme not in CHECKPOINT_SCHEMES:
        return UriProblem("must begin with " + ", ".join(f"{s}://" for s in CHECKPOINT_SCHEMES), "choose one of these")
    if not uri.endswith("/"):
        return UriProblem("must end in a slash", f"write {uri}/")
    if problem := _form_problem(scheme, rest):
        return problem
    if scheme == "az" and "@" in rest.partition("/")[0]:
        account = rest.partition("/")[0].partition("@")[2]
        if not account.endswith((".dfs.core.windows.net", ".blob.core.windows.net")):
            return UriProblem("must name an account of Azure", "write az://container/path/")
    if not is_trusted_checkpoint(uri, policy):
        return UriProblem(
            "must begin with " + ", ".join(policy.checkpoint_prefixes), "choose a place that the administrators allow"
        )
    return None


def is_trusted_checkpoint(uri: str, policy: MlPolicy) -> bool:
    """True if a checkpoint may be restored from there: it is below an allowed prefix and does not leave it."""
    if isinstance(_split(uri), UriProblem):
        return False
    return not policy.checkpoint_prefixes or uri.startswith(policy.checkpoint_prefixes)


def host_of(uri: str) -> str:
    """Return the host of the URI that a fetch must resolve; empty without one."""
    found = _split(uri)
    if isinstance(found, UriProblem) or found[0] in {*CHECKPOINT_SCHEMES, "hf", "wandb"}:
        return ""
    host = _HOST.fullmatch(found[1].partition("/")[0])
    return host["host"].strip("[]") if host is not None else ""


def refuse_addresses(host: str, addresses: Iterable[str], policy: MlPolicy) -> UriProblem | None:
    """Return why a host must not be contacted, given its addresses; one address that is not public refuses all.

    A host or an address that the policy lists is allowed.
    """
    found = tuple(addresses)
    if not found:
        return UriProblem("must have an address", f"{host} does not resolve; check the name")
    if host.lower().rstrip(".") in policy.hosts:
        return None
    for text in found:
        if text not in policy.hosts and not is_public(text):
            return UriProblem(
                "must lead to a public address",
                f"{host} leads to {text}; an administrator can allow the host for models inside the cluster",
            )
    return None


def is_public(address: str) -> bool:
    """True for an address of the public internet; an IPv4 address mapped into IPv6 is judged as itself."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return not any(found.version == network.version and found in network for network in _SPECIAL)


def _split(uri: str) -> tuple[str, str] | UriProblem:
    """Return scheme and rest of a URI without dot segments, hidden characters or empty segments."""
    match = _URI.fullmatch(uri)
    if match is None or len(uri) > LENGTH_MAX:
        return UriProblem(
            f"must be scheme://place of at most {LENGTH_MAX} characters", "see the forms in the reference"
        )
    if not uri.isascii() or not uri.isprintable() or any(character in uri for character in " \\?#;\"'<>`{}|^$*"):
        return UriProblem(
            "must be made of letters, digits and -._~/:@+=,%", "remove other characters, ? and # included"
        )
    rest, decoded = match["rest"], unquote(match["rest"])
    if (
        "%" in decoded
        or unquote(decoded) != decoded
        or decoded.count("/") != rest.count("/")
        or not decoded.isprintable()
    ):
        return UriProblem("must not hide characters", "write it without %25, %2f and the like")
    segments = decoded.split("/")
    if any(segment.strip() in {".", ".."} or "\\" in segment for segment in segments):
        return UriProblem("must not climb out of its place", "remove the segments . and ..")
    if "" in segments[1:-1]:
        return UriProblem("must not have empty segments", "remove the second of two slashes")
    return match["scheme"], rest


def _form_problem(scheme: str, rest: str) -> UriProblem | None:
    form = _FORMS.get(scheme)
    if form is None or re.fullmatch(form[0], rest):
        return None
    bucket = rest.partition("/")[0]
    if scheme in BUCKET_NAMES and "/" in rest and not re.fullmatch(form[0].removesuffix("/.*"), bucket):
        limit = f"must name a bucket of 3 to 63 {BUCKET_NAMES[scheme]}, with a letter or digit at both ends"
        return UriProblem(limit, f"correct {bucket!r}")
    return UriProblem(f"must look like {form[1]}", "compare the parts")


def _refuse_host(authority: str, policy: MlPolicy) -> UriProblem | None:
    """Return why the host in a URI may not be contacted, before resolution."""
    if "@" in authority:
        return UriProblem("must not hold a user or password", "remove everything up to @; take a Secret for passwords")
    match = _HOST.fullmatch(authority)
    if match is None or int(match["port"] or 1) not in range(1, 65_536):
        return UriProblem("must name a host", "write scheme://host/path")
    host = match["host"].strip("[]").lower().rstrip(".")
    if host in policy.hosts or authority.lower() in policy.hosts:
        return None
    inner = UriProblem("must name a public host", "an administrator can allow the host for models inside the cluster")
    if ":" in host or host[-1:].isdigit():  # an address; ip_address takes no decimal, octal or hexadecimal disguise
        return None if is_public(host) else inner
    if host.endswith(_INNER_SUFFIXES) or ".svc." in host or not _HOST_NAME.fullmatch(host):
        return inner
    return None
