"""Random small clusters with one gang each, all of one real cluster: what a member may run on is its own world.

Returns objects for the API server. The same seed and number give the same world.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from atoll.api import names
from atoll.kube import paths
from devcluster.api import AdminRequest
from devcluster.fake_nodes import node_object

DRIVER = "disks.example.com"
HOST, ZONE, RACK, WORLD = (
    "kubernetes.io/hostname",
    "topology.kubernetes.io/zone",
    "example.com/rack",
    "example.com/world",
)
TEAMS = {"red": {"team": "red", "tier": "gold"}, "blue": {"team": "blue"}}
"""Namespaces with their labels; gangs are in the first."""
HOME = "red"
RACKS, ZONES = "racks", "zones"
KIND = {"apiVersion": names.API_VERSION}
Body = dict[str, Any]


@dataclass(slots=True)
class RandomWorld:
    """One world. `objects`: everything but the gang, in the order of creation; `members`: the gang's pods."""

    seed: str
    number: int
    dice: random.Random = field(init=False)
    name: str = field(init=False)
    sets: list[str] = field(init=False)
    nodes: list[Body] = field(default_factory=list)
    objects: list[AdminRequest] = field(default_factory=list)
    members: list[AdminRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Throw the dice."""
        self.dice = random.Random(f"{self.seed}/{self.number}")
        self.name = f"w{self.number}"
        self.sets = ["a", "b"][: self.dice.choice((1, 1, 2))]
        self._make_nodes()
        self._make_others()
        self._make_gang()

    def may(self, chance: float) -> bool:
        """Throw once."""
        return self.dice.random() < chance

    def _make_nodes(self) -> None:
        for number in range(self.dice.randint(2, 6)):
            name = f"{self.name}-n{number}"
            labels = {WORLD: self.name, "size": str(self.dice.randint(1, 3))}
            if self.may(0.92):
                labels[ZONE] = f"{self.name}-z{self.dice.randint(0, 2)}"
            if self.may(0.92):
                labels[RACK] = f"{self.name}-r{self.dice.randint(0, 2)}"
            cpu, memory = self.dice.choice((4, 16, 64)), self.dice.choice((16, 64, 256))
            room = {"cpu": str(cpu), "memory": f"{memory}Gi", "pods": str(self.dice.choice((3, 6, 30)))}
            node = node_object(name, labels=labels, allocatable={**room, names.GPU_RESOURCE: "8"})
            taints = []
            if self.may(0.2):
                effect = self.dice.choice(("NoSchedule", "PreferNoSchedule"))
                taints.append({"key": "kept-for", "value": self.dice.choice("xy"), "effect": effect})
            node["spec"] = {"taints": taints, "unschedulable": self.may(0.05)}
            self.nodes.append(node)

    def _make_others(self) -> None:
        for number in range(self.dice.randint(0, 4)):
            node = self.dice.choice(self.nodes)["metadata"]["name"]
            pod = self._pod(f"{self.name}-o{number}", self.dice.choice("abc"), namespace=self.dice.choice(list(TEAMS)))
            pod["spec"]["nodeName"] = node
            if self.may(0.3):
                pod["spec"]["affinity"] = {
                    "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [self._term()]}
                }
            self.objects.append(AdminRequest("POST", paths.pods(pod["metadata"]["namespace"]), pod))

    def _make_gang(self) -> None:
        pod_sets: list[Body] = []
        for name in self.sets:
            pod_set: Body = {"name": name, "count": self.dice.randint(1, 4)}
            if self.may(0.2):
                pod_set["minCount"] = self.dice.randint(1, pod_set["count"])
            pod_sets.append(pod_set)
        spec: Body = {"podSets": pod_sets}
        if self.may(0.3):
            level, spec["topologyName"] = self.dice.choice(((RACK, RACKS), (ZONE, ZONES), (HOST, RACKS)))
            spec["topology"] = {"mode": self.dice.choice(("required", "preferred")), "level": level}
        gang = {**KIND, "kind": "GpuGang", "metadata": {"name": self.name}, "spec": spec}
        self.objects.append(AdminRequest("POST", paths.gpugangs(HOME), gang))
        for pod_set in pod_sets:
            self._make_pod_set(pod_set["name"], pod_set["count"])

    def _make_pod_set(self, pod_set: str, count: int) -> None:
        gpus = self.dice.choice((0, 1, 2, 4, 8))
        claim = f"{self.name}-{pod_set}"
        if gpus:
            devices = {"gangRef": self.name, "devices": {"count": gpus}}
            body = {**KIND, "kind": "GpuClaim", "metadata": {"name": claim}, "spec": devices}
            self.objects.append(AdminRequest("POST", paths.gpuclaims(HOME), body))
        template = self._pod("", pod_set, namespace=HOME)
        notes = {names.GANG: self.name, names.POD_SET: pod_set, **({names.CLAIM: claim} if gpus else {})}
        template["metadata"]["annotations"] = notes
        template["spec"] |= self._placement(pod_set)
        if self.may(0.25):
            self._add_volumes(template, pod_set)
        is_attached = self.may(0.15)
        if is_attached:
            self._limit_volumes()
        is_local = self.may(0.15)
        if is_local:
            self._add_local_disks()
        for rank in range(count):
            body = {**template, "metadata": {**template["metadata"], "name": f"{self.name}-{pod_set}{rank}"}}
            if is_local:
                claim = f"{self.name}-{pod_set}{rank}-scratch"
                self.objects.append(local_claim(claim, f"local-{self.name}"))
                volume = {"name": "scratch", "persistentVolumeClaim": {"claimName": claim}}
                body["spec"] = {**template["spec"], "volumes": [*template["spec"].get("volumes", []), volume]}
            if is_attached:
                claim = f"{self.name}-{pod_set}{rank}-disk"
                source = {"csi": {"driver": DRIVER, "volumeHandle": claim}, "hostPath": None, "nodeAffinity": None}
                self.objects += bound_volume(claim, HOST, "", mode="ReadWriteOnce", **source)
                volume = {"name": "disk", "persistentVolumeClaim": {"claimName": claim}}
                body["spec"] = {**body["spec"], "volumes": [*body["spec"].get("volumes", []), volume]}
            self.members.append(AdminRequest("POST", paths.pods(HOME), body))

    def _pod(self, name: str, app: str, *, namespace: str) -> Body:
        requests = {"cpu": f"{self.dice.choice((100, 900, 2500))}m", "memory": f"{self.dice.choice((1, 5))}Gi"}
        container: Body = {"name": "main", "image": "none", "resources": {"requests": requests}}
        if self.may(0.15):
            port = self.dice.choice((7001, 7002))
            container["ports"] = [{"containerPort": port, "hostPort": port}]
        labels = {"app": f"{self.name}-{app}", "version": self.dice.choice("12")}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": namespace, "labels": labels},
            "spec": {"containers": [container]},
        }

    def _placement(self, pod_set: str) -> Body:
        spec: Body = {"nodeSelector": {WORLD: self.name}}
        if self.may(0.4):
            spec["tolerations"] = [self.dice.choice(list(_tolerations()))]
        affinity: Body = {}
        if self.may(0.2):
            row = self.dice.choice(list(self._node_conditions()))
            affinity["nodeAffinity"] = {
                "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [row]}]}
            }
        if self.may(0.3):
            affinity["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [self._term()]}
        if self.may(0.2):
            affinity["podAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [self._term()]}
        if affinity:
            spec["affinity"] = affinity
        if self.may(0.4):
            keys = self.dice.sample((ZONE, RACK, HOST), self.dice.choice((1, 1, 2)))
            spec["topologySpreadConstraints"] = [self._spread(pod_set, key) for key in keys]
        return spec

    def _node_conditions(self) -> Iterator[Body]:
        yield {"key": "size", "operator": "Gt", "values": ["1"]}
        yield {"key": "size", "operator": "Lt", "values": ["3"]}
        yield {"key": ZONE, "operator": "NotIn", "values": [f"{self.name}-z0"]}
        yield {"key": RACK, "operator": "Exists"}

    def _term(self) -> Body:
        term: Body = {
            "topologyKey": self.dice.choice((HOST, HOST, ZONE, RACK)),
            "labelSelector": {"matchLabels": {"app": f"{self.name}-{self.dice.choice('aab')}"}},
        }
        where = self.dice.choice(("own", "own", "names", "labels", "all"))
        if where == "names":
            term["namespaces"] = list(TEAMS)
        elif where == "labels":
            term["namespaceSelector"] = {"matchLabels": {"team": self.dice.choice(list(TEAMS))}}
        elif where == "all":
            term["namespaceSelector"] = {}
        if self.may(0.2):
            term[self.dice.choice(("matchLabelKeys", "mismatchLabelKeys"))] = ["version"]
        return term

    def _spread(self, pod_set: str, key: str) -> Body:
        constraint: Body = {
            "maxSkew": self.dice.choice((1, 1, 2)),
            "topologyKey": key,
            "whenUnsatisfiable": self.dice.choice(("DoNotSchedule", "DoNotSchedule", "ScheduleAnyway")),
            "labelSelector": {"matchLabels": {"app": f"{self.name}-{pod_set if self.may(0.8) else 'b'}"}},
        }
        if constraint["whenUnsatisfiable"] == "DoNotSchedule" and self.may(0.3):
            constraint["minDomains"] = self.dice.randint(1, 3)
        if self.may(0.3):
            constraint["nodeAffinityPolicy"] = self.dice.choice(("Honor", "Ignore"))
        if self.may(0.3):
            constraint["nodeTaintsPolicy"] = self.dice.choice(("Honor", "Ignore"))
        if self.may(0.2):
            constraint["matchLabelKeys"] = ["version"]
        return constraint

    def _add_volumes(self, template: Body, pod_set: str) -> None:
        """Add a bound volume that some nodes reach, by zone or by name."""
        node = self.dice.choice(self.nodes)["metadata"]
        zone = node["labels"].get(ZONE)
        key, value = (ZONE, zone) if zone and self.may(0.6) else (HOST, node["name"])
        claim = f"{self.name}-{pod_set}-data"
        self.objects += bound_volume(claim, key, value, mode="ReadWriteOncePod" if self.may(0.2) else "ReadWriteMany")
        template["spec"]["volumes"] = [{"name": "data", "persistentVolumeClaim": {"claimName": claim}}]

    def _limit_volumes(self) -> None:
        """Let most nodes take few volumes of a driver."""
        if any(one.path == paths.csinodes() for one in self.objects):
            return
        for node in self.nodes:
            if self.may(0.8):
                driver = {"name": DRIVER, "nodeID": "x", "allocatable": {"count": self.dice.randint(1, 3)}}
                body = {
                    "apiVersion": "storage.k8s.io/v1",
                    "kind": "CSINode",
                    "metadata": {"name": node["metadata"]["name"]},
                    "spec": {"drivers": [driver]},
                }
                self.objects.append(AdminRequest("POST", paths.csinodes(), body))

    def _add_local_disks(self) -> None:
        """Add disks of nodes, or of zones, that are bound when a pod that uses one is placed."""
        kind = f"local-{self.name}"
        if any(one.path == paths.storageclasses() for one in self.objects):
            return
        body = {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": kind},
            "provisioner": "kubernetes.io/no-provisioner",
            "volumeBindingMode": "WaitForFirstConsumer",
        }
        self.objects.append(AdminRequest("POST", paths.storageclasses(), body))
        for number, node in enumerate(self.nodes * 2):
            if self.may(0.7):
                name = f"{self.name}-disk{number}"
                zone = node["metadata"]["labels"].get(ZONE)
                key, value = (ZONE, zone) if zone and self.may(0.3) else (HOST, node["metadata"]["name"])
                disk = volume_body(name, key, value, storageClassName=kind)
                self.objects.append(AdminRequest("POST", paths.persistentvolumes(), disk))


def _tolerations() -> Iterator[Body]:
    yield {"operator": "Exists"}
    yield {"key": "kept-for", "operator": "Exists"}
    yield {"key": "kept-for", "operator": "Equal", "value": "x", "effect": "NoSchedule"}
    yield {"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}


def volume_body(name: str, key: str, value: str, **spec: Any) -> Body:
    """Return a volume that nodes with a label reach."""
    row = {"key": key, "operator": "In", "values": [value]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteMany"],
            "hostPath": {"path": "/tmp"},
            "persistentVolumeReclaimPolicy": "Retain",
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [row]}]}},
            **spec,
        },
    }


def local_claim(name: str, kind: str, **spec: Any) -> AdminRequest:
    """Return a claim of a storage class."""
    body = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "1Gi"}},
            "storageClassName": kind,
            **spec,
        },
    }
    return AdminRequest("POST", paths.core("persistentvolumeclaims", namespace=HOME), body)


def bound_volume(name: str, key: str, value: str, *, mode: str, **spec: Any) -> list[AdminRequest]:
    """Return a claim and its volume, bound to each other, which nodes with a label reach."""
    owner = {"namespace": HOME, "name": name}
    volume = volume_body(name, key, value, storageClassName="", claimRef=owner, accessModes=[mode], **spec)
    claim = local_claim(name, "", volumeName=name, accessModes=[mode])
    return [AdminRequest("POST", paths.persistentvolumes(), volume), claim]
