"""Small clusters with a waiting gang, as data.

Takes nodes in racks, pods that hold GPUs, and the number of members and their GPUs; returns a ClusterSnapshot.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from atoll.api import names
from atoll.api.gangs import GpuGang
from atoll.api.topologies import Topology
from atoll.cluster.objects import Lease, Pod
from atoll.explain.snapshot import ClusterSnapshot
from tests.builders import make_claim, make_pod
from tests.cluster.gangs.builders import GATES
from tests.explain.situations import CREATED, situation, waiting, with_cpu

RACK = "example.com/rack"
FABRIC = Topology.model_validate(
    {
        "metadata": {"name": "fabric", "uid": "uid-of-fabric"},
        "spec": {"levels": [{"nodeLabel": RACK}, {"nodeLabel": "kubernetes.io/hostname"}]},
    }
)


@dataclass(frozen=True)
class GangSituation:
    """A cluster and the gang that is asked about."""

    snapshot: ClusterSnapshot
    gang: GpuGang


def rack(name: str, **options: Any) -> dict[str, Any]:
    """Return a node of four cards without NVLink that stands in a rack; options as for `situation`."""
    node = dict(options.pop("node", {}))
    labels = {RACK: name, **node.pop("labels", {})}
    return {"profile": "l40s-4", "node": {**node, "labels": labels}, **options}


def gang_situation(
    nodes: Mapping[str, Mapping[str, Any]],
    holders: Sequence[tuple[Pod, list[Lease]]] = (),
    *,
    count: int = 2,
    gpus: int = 4,
    there: int | None = None,
    topology: Mapping[str, Any] | None = None,
    claim: Mapping[str, Any] | None = None,
    member: Mapping[str, Any] | None = None,
    status: Mapping[str, Any] | None = None,
    cpu: str = "",
    **spec: Any,
) -> GangSituation:
    """Return a gang `g` of one pod set; `there`: members that exist, all by default; `topology`: its request; `cpu`:
    what each member asks for."""
    gang = GpuGang.model_validate(
        {
            "metadata": {
                "name": "g", "namespace": "team", "uid": "uid-of-g", "generation": 1, "creationTimestamp": CREATED
            },
            "spec": {
                "podSets": [{"name": "workers", "count": count, **({"topology": topology} if topology else {})}], **spec
            },
            "status": status,
        }
    )  # fmt: skip
    asked = make_claim("c", count=gpus, **claim) if claim is not None else None
    members = [
        make_pod(f"g-{number}", **{"gpus": gpus, "claim": asked, "annotations": {names.GANG: "g"},
                                   "schedulingGates": GATES, **(member or {})})
        for number in range(count if there is None else there)
    ]  # fmt: skip
    members = [with_cpu(one, cpu) for one in members] if cpu else members
    base = situation(nodes, holders, waiting(1)).snapshot
    pods = (*(pod for pod in base.pods if pod.metadata.name != "p"), *members)
    claims = (asked,) if asked is not None else ()
    return GangSituation(replace(base, pods=pods, claims=claims, gangs=(gang,), topologies=(FABRIC,)), gang)
