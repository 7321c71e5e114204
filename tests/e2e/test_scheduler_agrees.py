"""kube-scheduler takes every plan for a gang: random clusters, one gang each, all filters of the real control plane.

Each gang keeps to a small cluster of its own among all nodes, with zones, taints, ports, spread, affinity, volumes, cpu
and memory, and pods of others. Either Atoll says why it waits, or all its members are bound where Atoll sent them, and
kube-scheduler has refused none of them on the way. ATOLL_WORLDS=n tries more clusters, ATOLL_SEED=text others.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

import orjson
import pytest

from atoll.api import names
from atoll.kube import paths
from bench.stand import write_reports
from devcluster import DevCluster
from devcluster.api import AdminRequest
from devcluster.installation import Installation
from devcluster.waiting import wait_until
from tests.e2e.random_worlds import HOME, HOST, KIND, RACK, RACKS, TEAMS, ZONE, ZONES, RandomWorld

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(7200)]

PARTS = ("webhook", "extender", "controllers")
BATCH = 100
LONG = 5000
FAULTS_MAX = 50
WORLDS = int(os.environ.get("ATOLL_WORLDS", "200"))
PATIENCE_SECONDS = 120.0
POLL_SECONDS = 1.0
DELETED_AT_ONCE = 100
EVENTS = f"/apis/events.k8s.io/v1/namespaces/{HOME}/events"


class Worlds:
    """The real cluster in which the small ones lie."""

    def __init__(self, cluster: DevCluster) -> None:
        self.api = cluster.api
        self.cluster = cluster
        self.reasons: Counter[str] = Counter()

    def try_all(self, worlds: Sequence[RandomWorld]) -> list[str]:
        """Let the gangs of some worlds find their places; return what went wrong. Nothing is left of them."""
        self.cluster.signal("kwok", "STOP")
        self.api.request_all(AdminRequest("POST", paths.nodes(), node) for world in worlds for node in world.nodes)
        write_reports(self.cluster, ("dgx-h100",))
        objects = [one for world in worlds for one in world.objects]
        first = (paths.persistentvolumes(), paths.storageclasses(), paths.csinodes())
        storage = [one for one in objects if one.path in first]
        self.api.request_all(storage)  # a claim that is seen before its volume counts as lost
        self.api.request_all(one for one in objects if one not in storage)
        wait_until(self._are_volumes_known, what="volumes to be free or bound", timeout_seconds=PATIENCE_SECONDS)
        self.api.request_all(one for world in worlds for one in world.members)
        gangs, pods = self._wait_decided(worlds)
        refused: dict[str, str] = {}
        for event in self.api.get(f"{EVENTS}?fieldSelector=reason%3DFailedScheduling")["items"]:
            refused[event["regarding"]["name"]] = event.get("note", "")
        faults = [fault for world in worlds for fault in self._faults(world, gangs[world.name], pods, refused)]
        print("\n".join(faults))
        self.cluster.signal("kwok", "CONT")
        self._remove(worlds)
        return faults

    def _wait_decided(self, worlds: Sequence[RandomWorld]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return gangs and pods by name once each gang waits, or has no open member left, or time is up."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            pods = {one["metadata"]["name"]: one for one in self.api.get(paths.pods(HOME))["items"]}
            gangs = {one["metadata"]["name"]: one for one in self.api.get(paths.gpugangs(HOME))["items"]}
            is_decided = all(_is_decided(gangs[one.name], _bound(one, pods)) for one in worlds)
            if is_decided or time.monotonic() > deadline:
                return gangs, pods
            time.sleep(POLL_SECONDS)

    def _faults(
        self, world: RandomWorld, gang: dict[str, Any], pods: dict[str, Any], refused: dict[str, str]
    ) -> Iterator[str]:
        """Yield what is wrong with a world."""
        admitted, by_node = _admitted(gang), _bound(world, pods)
        self.reasons[admitted.get("reason", "")] += 1
        where = f"world {world.number}, gang {admitted.get('message', '')!r}"
        if admitted.get("status") != "True":
            if by_node:
                yield f"{where}: it waits, and has members on {by_node}"
        elif gang["status"].get("admissions", 1) != 1 or len(by_node) < _size(gang):
            yield f"{where}: members are not bound or had to be admitted again: {by_node}"
        for name, node in by_node.items():
            if node not in orjson.dumps(pods[name]["spec"]["affinity"]["nodeAffinity"]).decode():
                yield f"{where}: {name} is on {node}, not where Atoll sent it"
        for name in _names(world):
            if name in refused:
                yield f"{where}: {name} was refused: {refused[name]}"

    def _remove(self, worlds: Sequence[RandomWorld]) -> None:
        wait_until(self._are_running, what="bound pods to run", timeout_seconds=PATIENCE_SECONDS)
        wait_until(self._have_left, what="pods to be deleted", timeout_seconds=PATIENCE_SECONDS)
        for path in (paths.gpugangs(HOME), paths.gpuclaims(HOME), paths.core("persistentvolumeclaims", namespace=HOME)):
            self.api.request("DELETE", path)
        wait_until(self._is_empty, what="pods and Leases to be gone", timeout_seconds=PATIENCE_SECONDS)
        self.api.request("DELETE", paths.persistentvolumes())
        self.api.request("DELETE", paths.storageclasses())
        self.api.request("DELETE", paths.csinodes())
        self.api.request("DELETE", EVENTS)
        nodes = [node["metadata"]["name"] for world in worlds for node in world.nodes]
        homes = (paths.nodes, paths.gpunodestatuses, lambda name: paths.leases(names.HEARTBEAT_NAMESPACE, name))
        self.api.request_all(AdminRequest("DELETE", home(node)) for home in homes for node in nodes)

    def _are_volumes_known(self) -> bool:
        volumes = self.api.get(paths.persistentvolumes())["items"]
        claims = self.api.get(paths.core("persistentvolumeclaims", namespace=HOME))["items"]
        return all(one["status"].get("phase") in ("Available", "Bound") for one in volumes) and all(
            one["status"].get("phase") == "Bound" for one in claims if one["spec"].get("volumeName")
        )

    def _are_running(self) -> bool:
        """Only of a pod whose containers have begun does kwok tell that they have ended."""
        pods = [pod for team in TEAMS for pod in self.api.get(paths.pods(team))["items"]]
        return all(pod["status"]["phase"] == "Running" for pod in pods if pod["spec"].get("nodeName"))

    def _have_left(self) -> bool:
        """Ask for the deletion of more pods; one request for all of them takes longer than the API server allows."""
        left = [team for team in TEAMS if self.api.get(f"{paths.pods(team)}?limit=1")["items"]]
        some = f"gracePeriodSeconds=1&limit={DELETED_AT_ONCE}"
        self.api.request_all(AdminRequest("DELETE", f"{paths.pods(team)}?{some}") for team in left)
        return not left

    def _is_empty(self) -> bool:
        leases = self.api.get(paths.leases(names.SYSTEM_NAMESPACE))["items"]
        return not any(self.api.get(paths.pods(team))["items"] for team in TEAMS) and not any(
            one["metadata"]["name"].startswith("gpu-") for one in leases
        )


def _admitted(gang: dict[str, Any]) -> dict[str, Any]:
    conditions = gang.get("status", {}).get("conditions", [])
    return next((one for one in conditions if one["type"] == names.CONDITION_ADMITTED), {})


def _names(world: RandomWorld) -> list[str]:
    return [one.body["metadata"]["name"] for one in world.members]


def _bound(world: RandomWorld, pods: dict[str, Any]) -> dict[str, str]:
    """Return the nodes of the members that are bound."""
    return {name: node for name in _names(world) if (node := pods.get(name, {}).get("spec", {}).get("nodeName"))}


def _is_decided(gang: dict[str, Any], bound: dict[str, str]) -> bool:
    condition = _admitted(gang)
    if condition.get("status") == "True":
        return len(bound) >= _size(gang)
    is_incomplete = condition.get("reason") == "WaitForQuorum" and " members; " in condition["message"]
    return bool(condition.get("reason")) and not is_incomplete


def _size(gang: dict[str, Any]) -> int:
    return sum(one["count"] for one in gang["status"].get("assignment", {}).get("podSets", ()))


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    """The control plane and all of Atoll; nodes come and go."""
    with DevCluster.start(f"agrees-{uuid4().hex[:6]}", nodes=(), scheduler=False) as cluster:
        installation = Installation(cluster)
        cluster.start_kwok()
        installation.apply_manifests()
        for team, labels in TEAMS.items():
            body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": team, "labels": labels}}
            cluster.api.request("POST", paths.namespaces(), body)
        for name, level in ((RACKS, RACK), (ZONES, ZONE)):
            spec = {"levels": [{"nodeLabel": level}, {"nodeLabel": HOST}]}
            body = {**KIND, "kind": "Topology", "metadata": {"name": name}, "spec": spec}
            cluster.api.request("POST", paths.topologies(), body)
        for part in PARTS:
            installation.start(part, wait=False)
        installation.start_scheduler()
        installation.wait_ready(PARTS)
        wait_until(
            lambda: cluster.api.get(paths.core("serviceaccounts", namespace=HOME, name="default")),
            what="the account",
            timeout_seconds=60,
        )
        yield Worlds(cluster)


def _try(worlds: Worlds, count: int, seed: str) -> None:
    seed = os.environ.get("ATOLL_SEED", seed)
    print(f"seed {seed}: ATOLL_SEED={seed} tries the same {count} clusters again")
    faults: list[str] = []
    for begin in range(0, count, BATCH):
        faults += worlds.try_all([RandomWorld(seed, number) for number in range(begin, min(begin + BATCH, count))])
        assert len(faults) < FAULTS_MAX, "\n".join([f"seed {seed}", *faults])
    print(dict(worlds.reasons))
    assert not faults, "\n".join([f"seed {seed}", *faults])
    assert worlds.reasons["Admitted"] * 3 > count, f"seed {seed}: too few gangs find places: {worlds.reasons}"


def test_kube_scheduler_takes_every_plan(worlds: Worlds) -> None:
    """Random clusters: every gang waits whole, with its reason, or each member binds where Atoll sent it."""
    _try(worlds, WORLDS, "agrees")


@pytest.mark.long
def test_kube_scheduler_takes_every_plan_of_thousands(worlds: Worlds) -> None:
    """The same with many more clusters."""
    _try(worlds, LONG, uuid4().hex[:8])
