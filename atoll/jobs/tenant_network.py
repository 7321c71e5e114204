"""Who may talk to a tenant's pods, and to whom they may: a NetworkPolicy in each of the tenant's namespaces.

Namespaces are told by the name that the API server itself puts on them, so no label can pretend to be one. Policies
only add up: whoever may create NetworkPolicies in a namespace can open it further.
"""

from collections.abc import Sequence
from ipaddress import ip_network
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field

from atoll.jobs.base import Flag, JobPart, ShortName

POLICY: Final = "atoll-tenant"
NAMESPACE_NAME: Final = "kubernetes.io/metadata.name"
DNS_NAMESPACE: Final = "kube-system"
DNS_PORT: Final = 53


def _network(text: str) -> str:
    return str(ip_network(text))


Cidr = Annotated[str, Field(max_length=49), AfterValidator(_network)]


class TenantNetwork(JobPart):
    """A tenant's pods talk with each other; see the fields for everybody else."""

    isolated: Flag = True
    """False: no policy is made."""
    from_namespaces: Annotated[tuple[ShortName, ...], Field(max_length=32)] = ()
    """Whose pods may reach the tenant's pods too, such as those of an ingress controller or of Prometheus."""
    from_networks: Annotated[tuple[Cidr, ...], Field(max_length=32)] = ()
    """From which addresses outside the cluster they may be reached, as CIDR."""
    to_networks: Annotated[tuple[Cidr, ...], Field(max_length=32)] | None = None
    """To which addresses they may connect beside their own pods and DNS, as CIDR; anywhere if absent."""


def network_spec(network: TenantNetwork, namespaces: Sequence[str]) -> dict[str, Any]:
    """Return the specification of the NetworkPolicy of each of a tenant's namespaces."""
    own = _pods_of(namespaces)
    others = [_pods_of(network.from_namespaces)] if network.from_namespaces else []
    sources = [own, *others, *_blocks(network.from_networks)]
    spec: dict[str, Any] = {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{"from": sources}]}
    if network.to_networks is None:
        return spec | {"egress": None}
    names = [{"protocol": protocol, "port": DNS_PORT} for protocol in ("UDP", "TCP")]
    dns = {"to": [_pods_of([DNS_NAMESPACE])], "ports": names}
    return spec | {
        "policyTypes": ["Ingress", "Egress"],
        "egress": [{"to": [own, *_blocks(network.to_networks)]}, dns],
    }


def _pods_of(namespaces: Sequence[str]) -> dict[str, Any]:
    chosen = {"key": NAMESPACE_NAME, "operator": "In", "values": list(namespaces)}
    return {"namespaceSelector": {"matchExpressions": [chosen]}}


def _blocks(networks: Sequence[str]) -> list[dict[str, Any]]:
    return [{"ipBlock": {"cidr": one}} for one in networks]
