"""Small clusters as data: nodes of known machines, pods that hold GPUs, one waiting pod.

Takes a few words per node and pod; returns a ClusterSnapshot as from the API server.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from atoll.api import names
from atoll.api.claims import GpuClaim
from atoll.cluster.leases import Holder
from atoll.cluster.objects import ContainerPort, Lease, Node, Pod, decode_lease, decode_node
from atoll.explain.snapshot import ClusterSnapshot
from tests.builders import make_allocation, make_claim, make_lease, make_pod, make_report

TAKEN_AT = "2026-01-31T12:00:00Z"
CREATED = "2026-01-31T11:30:00Z"
LONG_AGO = "2026-01-31T10:00:00Z"
NODE_CPUS = 64
NO_FABRIC = {"incidents": [{"kind": "fabric", "firstTime": LONG_AGO, "lastTime": LONG_AGO}]}


def make_node(name: str, *, gpus: int = 8, cpu: int = NODE_CPUS, **options: Any) -> Node:
    """Return a Node that is ready. `labels` and whatever belongs into its spec may be given."""
    labels = {"kubernetes.io/hostname": name, **options.pop("labels", {})}
    allocatable = {"cpu": str(cpu), "memory": "512Gi", "pods": "110", names.GPU_RESOURCE: str(gpus)}
    ready, boot = options.pop("ready", "True"), options.pop("boot", "")
    body = {
        "metadata": {"name": name, "uid": f"uid-of-{name}", "labels": labels},
        "spec": options,
        "status": {
            "allocatable": allocatable,
            "conditions": [{"type": "Ready", "status": ready}],
            "nodeInfo": {"bootID": boot},
        },
    }
    return decode_node(orjson.dumps(body))


def make_heartbeat(node: str, time: str = TAKEN_AT) -> Lease:
    """Return an agent's heartbeat."""
    body = {"metadata": {"name": node}, "spec": {"holderIdentity": node, "renewTime": time}}
    return decode_lease(orjson.dumps(body))


@dataclass(frozen=True)
class Situation:
    """A cluster and the pod that is asked about."""

    snapshot: ClusterSnapshot
    pod: Pod

    @property
    def claim(self) -> GpuClaim | None:
        """The claim that the pod names."""
        return self.snapshot.claim_of(self.pod)


def holder(
    name: str, node: str, *ids: int, priority: int = 0, cpu: str = "", **options: Any
) -> tuple[Pod, list[Lease]]:
    """Return a running pod with these GPUs, and its Leases."""
    pod = make_pod(
        name,
        gpus=len(ids) or None,
        node=node,
        allocation=make_allocation(node, *ids) if ids else None,
        phase=options.pop("phase", "Running"),
        priority=priority,
        **options,
    )
    if cpu:
        pod = with_cpu(pod, cpu)
    leases = [make_lease(node, number, holder=Holder("team", name, f"uid-of-{name}")) for number in ids]
    return pod, leases


def with_cpu(pod: Pod, cpu: str) -> Pod:
    """Return the pod whose first container asks for so much cpu."""
    first, *others = pod.spec.containers
    resources = msgspec.structs.replace(first.resources, requests={**first.resources.requests, "cpu": cpu})
    containers = (msgspec.structs.replace(first, resources=resources), *others)
    return msgspec.structs.replace(pod, spec=msgspec.structs.replace(pod.spec, containers=containers))


def with_host_port(pod: Pod, port: int = 8080) -> Pod:
    """Return the pod whose first container opens a port of its host."""
    first, *others = pod.spec.containers
    containers = (msgspec.structs.replace(first, ports=(ContainerPort(host_port=port),)), *others)
    return msgspec.structs.replace(pod, spec=msgspec.structs.replace(pod.spec, containers=containers))


def unsociable(name: str, node: str, where: str = "kubernetes.io/hostname", **options: Any) -> Pod:
    """Return a running pod that shares its host, or another domain, with no pod of the app x."""
    term = {"labelSelector": {"matchLabels": {"app": "x"}}, "topologyKey": where}
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    return make_pod(name, gpus=None, node=node, phase="Running", affinity=affinity, **options)


def waiting(
    count: int = 1, *, claim: Mapping[str, Any] | None = None, cpu: str = "", **options: Any
) -> tuple[Pod, GpuClaim | None]:
    """Return a pod that waits, and its claim where `claim` says what it asks for beside the count."""
    asked = make_claim("c", count=count, **claim) if claim is not None else None
    pod = make_pod("p", gpus=options.pop("gpus", count), claim=asked, **options)
    return (with_cpu(pod, cpu) if cpu else pod), asked


def situation(
    nodes: Mapping[str, Mapping[str, Any]],
    holders: Sequence[tuple[Pod, list[Lease]]] = (),
    asking: tuple[Pod, GpuClaim | None] | None = None,
    *,
    others: Sequence[Pod] = (),
    refused: Mapping[str, str] | None = None,
) -> Situation:
    """Return a situation. refused: why reports do not count, by node.

    Per node: `profile`, `heard` (None: never), `node` options, `status` for fields of the report's status by their
    names on the wire, and what `make_report` takes.
    """
    built, reports, heartbeats = [], [], []
    for name, told in nodes.items():
        given = dict(told)
        profile, heard = given.pop("profile", "dgx1-v100"), given.pop("heard", TAKEN_AT)
        options, has_report = dict(given.pop("node", {})), given.pop("report", True)
        report = make_report(name, profile, status=given.pop("status", {}), **given)
        assert report.status is not None
        built.append(make_node(name, **{"gpus": len(report.status.devices), **options}))
        if has_report:
            reports.append(report)
        if heard is not None:
            heartbeats.append(make_heartbeat(name, heard))
    pod, claim = asking or waiting()
    snapshot = ClusterSnapshot(
        taken_at=TAKEN_AT,
        nodes=tuple(built),
        pods=(*(one for one, _ in holders), *others, pod),
        claims=(claim,) if claim is not None else (),
        reports=tuple(reports),
        leases=tuple(lease for _, leases in holders for lease in leases),
        heartbeats=tuple(heartbeats),
        refused=refused or {},
    )
    return Situation(snapshot, pod)
