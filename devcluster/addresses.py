"""Addresses of a development cluster's network, by IP family.

Every cluster has its own network namespaces, so all use the same addresses. With two families the first, IPv4, is the
one of Services, of the API server and of each Node's first address.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

_NODE_OFFSET = 11


class IpFamily(StrEnum):
    """IP families of a cluster."""

    IPV4 = "ipv4"
    IPV6 = "ipv6"
    DUAL = "dual"


@dataclass(frozen=True, slots=True)
class _Block:
    """Addresses of one family: format strings of the bridge's and the pods' networks, and prefix lengths."""

    bridge: str
    bridge_length: int
    service_network: str
    service: str
    pods: str
    everything: str


_IPV4 = _Block("10.255.0.{}", 24, "10.96.0.0/16", "10.96.0.1", "10.244.{}.0/24", "0.0.0.0/0")
_IPV6 = _Block("fd00:255::{}", 64, "fd00:96::/112", "fd00:96::1", "fd00:244:{}::/64", "::/0")
_BLOCKS = {IpFamily.IPV4: (_IPV4,), IpFamily.IPV6: (_IPV6,), IpFamily.DUAL: (_IPV4, _IPV6)}


@dataclass(frozen=True, slots=True)
class ClusterNetwork:
    """Addresses of a cluster's parts."""

    family: IpFamily = IpFamily.IPV4

    @property
    def bridges(self) -> Sequence[str]:
        """Addresses of the bridge that joins the nodes, where the control plane listens."""
        return [block.bridge.format(1) for block in self._blocks]

    @property
    def bridge(self) -> str:
        """First address of the bridge."""
        return self.bridges[0]

    @property
    def service(self) -> str:
        """Address of the Service `kubernetes`, which pods use to reach the API server."""
        return self._blocks[0].service

    @property
    def service_networks(self) -> str:
        """CIDRs of Services, separated by commas."""
        return ",".join(block.service_network for block in self._blocks)

    @property
    def slice_type(self) -> str:
        """Address type of EndpointSlices with the bridge's first address."""
        return "IPv6" if self.family is IpFamily.IPV6 else "IPv4"

    def node(self, number: int) -> Sequence[str]:
        """Addresses of a node."""
        return [block.bridge.format(_NODE_OFFSET + number) for block in self._blocks]

    def pods(self, number: int) -> Sequence[str]:
        """CIDRs of a node's pods."""
        return [block.pods.format(number) for block in self._blocks]

    def routes_of_pods(self) -> Sequence[str]:
        """Destinations that pods reach through their node: everything."""
        return [block.everything for block in self._blocks]

    def bridge_commands(self, bridge: str) -> list[str]:
        """Shell commands that give the bridge its addresses and let it forward."""
        commands = []
        for block in self._blocks:
            flags = _no_detection(block.service)
            kind = "ipv6/conf/all/forwarding" if block is _IPV6 else "ipv4/ip_forward"
            commands += [
                f"ip address add {block.bridge.format(1)}/{block.bridge_length} dev {bridge}{flags}",
                f"echo 1 > /proc/sys/net/{kind}",
            ]
        own = 128 if self._blocks[0] is _IPV6 else 32
        return [*commands, f"ip address add {self.service}/{own} dev {bridge}{_no_detection(self.service)}"]

    def node_commands(self, number: int, *, inside: Sequence[str]) -> list[list[str]]:
        """Commands that give a node its addresses and routes; `inside` is the prefix of those that run in the node."""
        commands = []
        for block in self._blocks:
            own = block.bridge.format(_NODE_OFFSET + number)
            kind = "-6" if block is _IPV6 else "-4"
            ip, flags = [*inside, "ip", kind], _no_detection(own).split()
            commands += [
                [*ip, "address", "add", f"{own}/{block.bridge_length}", "dev", "eth0", *flags],
                [*ip, "route", "add", "default", "via", block.bridge.format(1)],
                ["ip", kind, "route", "replace", block.pods.format(number), "via", own],
            ]
        return commands

    @property
    def _blocks(self) -> Sequence[_Block]:
        return _BLOCKS[self.family]


def in_url(host: str) -> str:
    """Return the host as URLs have it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def _no_detection(address: str) -> str:
    """Flag that makes an IPv6 address usable at once: nobody else can have it here."""
    return " nodad" if ":" in address else ""
