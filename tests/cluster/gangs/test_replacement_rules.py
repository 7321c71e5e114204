"""A replacement of a running gang's member honours every rule by which a new gang is placed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from atoll.cluster import host_fit
from atoll.cluster.csi import CsiDriver
from atoll.cluster.daemons import coming_daemons
from atoll.cluster.gangs.lifecycle import GangView, Obstacle
from atoll.cluster.gangs.member_requests import member_requests
from atoll.cluster.gangs.membership import members_of
from atoll.cluster.gangs.node_domains import NodeDomains, node_domains_of
from atoll.cluster.gangs.placing import FoundPlacement, NoPlacement, find_places
from atoll.cluster.gangs.readiness_policy import ReadinessPolicy
from atoll.cluster.gangs.replacements import place_missing
from atoll.cluster.gangs.search_input import PlacementSnapshot
from atoll.cluster.objects import Node, Pod
from atoll.cluster.storage import StorageClass
from atoll.cluster.volume_fit import Volumes
from tests.builders import make_pod
from tests.cluster.gangs.builders import GATES, make_gang
from tests.cluster.test_daemons import LATELY, LONG_AGO, NOW, born, daemon
from tests.cluster.test_host_fit import HOSTNAME, ZONE, anti, near
from tests.cluster.test_static_volumes import cluster
from tests.cluster.test_volume_limits import CLASS, DRIVER, attached, own, room, taking

APP = {"app": "x"}
SIDECAR = {"name": "s", "restartPolicy": "Always", "ports": [{"containerPort": 1, "hostPort": 1}]}
PORT = {"initContainers": [SIDECAR]}
SPREAD = {"maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": APP}}
WAITS = ""


@dataclass
class Lacking:
    """Nodes n1 to n3 in zones a to c. `alike`: spec of each member; those of pod set `w` are of app x. `running`:
    where members run, by name; `missing`: members by name, each with a claim of its name if `claims`."""

    alike: Mapping[str, Any] = field(default_factory=dict)
    others: Sequence[Pod] = ()
    running: Mapping[str, str] = field(default_factory=lambda: {"w0": "n1"})
    missing: Sequence[str] = ("w1",)
    claims: bool = False
    volumes: Volumes = field(default_factory=Volumes)
    taints: Mapping[str, Any] = field(default_factory=dict)
    born: Mapping[str, str] = field(default_factory=dict)
    full: Sequence[str] = ("n1",)

    def nodes(self) -> dict[str, Node]:
        """Return the nodes; a full one has room for nobody who is missing."""
        return {
            name: born(
                name,
                self.born.get(name, LONG_AGO),
                labels={ZONE: zone},
                taints=self.taints.get(name, []),
                allocatable={"pods": str(list(self.running.values()).count(name)) if name in self.full else "9"},
            )
            for name, zone in (("n1", "a"), ("n2", "b"), ("n3", "c"))
        }

    def pod(self, name: str, at: str = "") -> Pod:
        """Return a member, which waits behind its gate if it is on no node."""
        claim = [{"name": "v", "persistentVolumeClaim": {"claimName": name}}] if self.claims else []
        spec = {**self.alike, "volumes": claim, **({} if at else {"schedulingGates": GATES})}
        notes = {"gpu.scheduling/pod-set": name[0]}
        return make_pod(name, gpus=None, labels=APP, annotations=notes, node=at or None, **spec)

    def place(self, *, anew: bool = False) -> tuple[dict[str, str], str]:
        """Return the nodes of the missing members, and why others wait; `anew`: as members of a new gang that is on its
        own, with those that run as pods of somebody."""
        nodes = self.nodes()
        on: dict[str, list[Pod]] = {}
        running = [self.pod(name, at) for name, at in self.running.items()]
        for pod in (*running, *self.others):
            on.setdefault(pod.spec.node_name, []).append(pod)
        for name, coming in coming_daemons(nodes, on, now_seconds=NOW).items():
            on.setdefault(name, []).extend(coming)
        free = {name: host_fit.free(one, on.get(name, ())) for name, one in nodes.items()}
        snapshot = PlacementSnapshot(nodes, {}, {}, on, free, volumes=self.volumes)
        found = [self.pod(name) for name in self.missing]
        counted = found if anew else [*running, *found]
        sets = sorted({pod.metadata.name[0] for pod in counted})
        rows = [{"name": one, "count": sum(pod.metadata.name[0] == one for pod in counted)} for one in sets]
        gang = make_gang(podSets=rows)
        members = members_of(counted, gang.spec, {})
        chosen = [one for one in members if one.is_gated]
        requests = member_requests(chosen, lambda _: None, lambda _: None)
        if isinstance(requests, Obstacle):
            return {}, requests.message
        site = node_domains_of(None, nodes.values(), {}, strict=False)
        assert isinstance(site, NodeDomains)
        view = GangView(gang, members, ReadinessPolicy())
        if anew:
            answer = find_places(view, chosen, requests, site, snapshot)
            return _read(answer)
        replaced = place_missing(view, chosen, requests, site, snapshot)
        told = replaced.waiting.message if replaced.waiting is not None else ""
        return {one.member.pod.metadata.name: one.allocation.node for one in replaced.assignments}, told


def _read(answer: FoundPlacement | NoPlacement) -> tuple[dict[str, str], str]:
    if isinstance(answer, NoPlacement):
        return {}, answer.message
    parts = answer.placement.assignments
    asked = answer.question.asked
    return {asked[part.pod_set][one.rank].pod.metadata.name: one.host for part in parts for one in part.members}, ""


def somebody(at: str, labels: dict[str, str] | None = None, **spec: Any) -> Pod:
    """Return another pod that runs."""
    return make_pod("o", gpus=None, node=at, labels=labels or {}, **spec)


def using(claim: str) -> dict[str, Any]:
    """Return the part of a pod's spec by which it uses a claim."""
    return {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": claim}}]}


def bound(names: Sequence[str], takes: Mapping[str, int], **labels: str) -> Volumes:
    """Return claims of these names, each bound to a volume of its own; the nodes take so many of the driver's."""
    claims = {("team", name): own(name, f"v-{name}")[1] for name in names}
    disks = {f"v-{name}": attached(f"v-{name}") for name in names}
    for disk in list(disks.values()) if labels else ():
        metadata = msgspec.structs.replace(disk.metadata, labels=labels)
        disks[disk.metadata.name] = msgspec.structs.replace(disk, metadata=metadata)
    kinds = {"c": msgspec.convert(CLASS, StorageClass)}
    ready = {key: _ready(claim) for key, claim in claims.items()}
    return Volumes(ready, disks, kinds, {name: taking(count) for name, count in takes.items()})


def _ready(claim: Any) -> Any:
    return msgspec.structs.replace(claim, status=msgspec.structs.replace(claim.status, phase="Bound"))


def _roomy() -> Volumes:
    kinds = {"c": msgspec.convert(CLASS, StorageClass)}
    tracked = {"metadata": {"name": DRIVER}, "spec": {"storageCapacity": True}}
    drivers = {DRIVER: msgspec.convert(tracked, CsiDriver)}
    claims = {("team", "w1"): own("w1")[1]}
    return Volumes(claims, {}, kinds, csi_drivers=drivers, capacities={("s", "s"): room("100Gi", {ZONE: "c"})})


def _static(*reached: list[str], claims: Sequence[str] = ("w1",)) -> Volumes:
    return cluster(dict.fromkeys(claims, 10), [(nodes, 20) for nodes in reached], namespace="team")


CASES: dict[str, tuple[Lacking, dict[str, str], str]] = {
    "nothing in the way": (Lacking(), {"w1": "n2"}, ""),
    "a taint": (Lacking(taints={"n2": [{"key": "k", "effect": "NoSchedule"}]}), {"w1": "n3"}, ""),
    "a host port of another": (Lacking(PORT, [somebody("n2", **PORT)]), {"w1": "n3"}, ""),
    "a host port of its own gang": (Lacking(PORT, running={"w0": "n2"}, full=["n1"]), {"w1": "n3"}, ""),
    "a host port of a daemon that is coming": (
        Lacking(PORT, [daemon("d", at="n3", **PORT)], born={"n2": LATELY}, full=["n1"]), {}, WAITS),
    "anti-affinity to another": (
        Lacking({"affinity": anti({"app": "y"})}, [somebody("n2", {"app": "y"})]), {"w1": "n3"}, ""),
    "anti-affinity of another": (Lacking(others=[somebody("n2", affinity=anti(APP))]), {"w1": "n3"}, ""),
    "anti-affinity to its own gang": (Lacking({"affinity": anti(APP)}, running={"w0": "n2"}), {"w1": "n3"}, ""),
    "affinity to another": (
        Lacking({"affinity": near({"app": "y"}, ZONE)}, [somebody("n3", {"app": "y"})]), {"w1": "n3"}, ""),
    "a strict spread": (
        Lacking({"topologySpreadConstraints": [{**SPREAD, "topologyKey": ZONE}]}, running={"w0": "n1", "w2": "n2"}),
        {"w1": "n3"}, ""),
    "a spread judged by the host": (
        Lacking({"topologySpreadConstraints": [{**SPREAD, "maxSkew": 2, "topologyKey": HOSTNAME, "minDomains": 2}]},
             running={"w0": "n2"}, full=["n1", "n3"]), {"w1": "n2"}, ""),
    "a static volume elsewhere": (Lacking(claims=True, volumes=_static(["n3"])), {"w1": "n3"}, ""),
    "one static volume for two": (
        Lacking(missing=["w1", "w2"], claims=True, volumes=_static(["n2", "n3"], claims=("w1", "w2"))), {"w1": "n2"},
        "create more volumes"),
    "a volume of a zone": (Lacking(claims=True, volumes=bound(["w1"], {}, **{ZONE: "c"})), {"w1": "n3"}, ""),
    "room of storage": (Lacking(claims=True, volumes=_roomy()), {"w1": "n3"}, ""),
    "as many volumes as the node takes": (
        Lacking(others=[somebody("n2", **using("o"))], claims=True, volumes=bound(["w0", "w1", "o"], {"n2": 1})),
        {"w1": "n3"}, ""),
    "the volume of its own gang counts once": (
        Lacking(running={"w0": "n2"}, full=["n1", "n3"], claims=True, volumes=bound(["w0", "w1"], {"n2": 2})),
        {"w1": "n2"}, ""),
    "volumes of two pod sets on one node": (
        Lacking(missing=["v0", "w1"], claims=True, full=["n1", "n3"], volumes=bound(["w0", "v0", "w1"], {"n2": 1})),
        {"v0": "n2"}, "node n2 takes 1 volumes"),
    "a claim that does not exist": (
        Lacking(claims=True, volumes=_static(["n2"], claims=())), {}, "PersistentVolumeClaim w1 does not exist"),
    "a resource claim": (
        Lacking({"resourceClaims": [{"name": "nic", "resourceClaimName": "n"}]}), {}, "remove spec.resourceClaims"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_replacement_honours_what_a_new_gang_honours(name: str) -> None:
    """And a member that waits is told why."""
    case, places, told = CASES[name]

    found, said = case.place()
    assert found == places, said
    assert told in said
    assert bool(said) == (len(found) < len(case.missing))


@pytest.mark.parametrize("name", CASES)
def test_a_new_gang_takes_no_place_that_a_replacement_does_not(name: str) -> None:
    """As pods of a gang of their own the same members go where replacements may go, or wait for the same."""
    case, places, told = CASES[name]

    found, said = case.place(anew=True)
    assert bool(found) == (len(places) == len(case.missing)), said
    assert told in said
    if len(case.missing) == 1:
        assert found == places
