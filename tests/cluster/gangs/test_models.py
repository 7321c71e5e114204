"""One GPU model per gang, and healthy machines before damaged ones, unless its claims say otherwise."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import pytest

from atoll.api import names
from atoll.api.topologies import Topology
from atoll.cluster import host_fit
from atoll.cluster.gangs.lifecycle import GangView
from atoll.cluster.gangs.membership import MemberStage, members_of
from atoll.cluster.gangs.node_domains import NodeDomains, node_domains_of
from atoll.cluster.gangs.placing import FoundPlacement, NoPlacement, find_places
from atoll.cluster.gangs.readiness_policy import ReadinessPolicy
from atoll.cluster.gangs.replacements import place_missing
from atoll.cluster.gangs.search_input import PlacementSnapshot
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import Node, Pod, decode_node
from atoll.cluster.requests import Request, request_of
from tests.builders import make_allocation, make_claim, make_pod, make_report
from tests.cluster.gangs.builders import GATES, make_gang
from tests.cluster.test_weakness import halved
from topology.gangs import descent

RACK = "example.com/rack"
MODELS = {"a": "dgx-a100", "h": "dgx-h100", "v": "dgx1-v100"}
"""A node is named MODEL NUMBER - RACK, such as a1-x."""


def node(name: str) -> Node:
    """Return a Node in the rack that its name tells."""
    body = {
        "metadata": {"name": name, "uid": name, "labels": {RACK: name.partition("-")[2]}},
        "status": {"allocatable": {"cpu": "640", "pods": "110", names.GPU_RESOURCE: "8"}},
    }
    return decode_node(orjson.dumps(body))


class MixedMachines:
    """A cluster of these nodes; a gang of which some members run, and others want a place."""

    def __init__(
        self,
        nodes: Sequence[str],
        sets: Mapping[str, tuple[int, Mapping[str, Any]]],
        *,
        damaged: Sequence[str] = (),
        running: Mapping[str, str] | None = None,
    ) -> None:
        self.nodes = {name: node(name) for name in nodes}
        self.ledger = Ledger()
        for name in nodes:
            status = halved(0) if name in damaged else None
            self.ledger.put_report(make_report(name, MODELS[name[0]], status=status))
            self.ledger.put_heartbeat(name, 0.0, 1e9)
        pod_sets = [{"name": name, "count": count} for name, (count, _) in sets.items()]
        self.gang = make_gang(1, podSets=pod_sets)
        claims = {name: make_claim(name, **devices) for name, (_, devices) in sets.items()}
        self.pods: list[Pod] = []
        self.requests: dict[str, Request] = {}
        for name, (count, devices) in sets.items():
            for number in range(count):
                where = (running or {}).get(f"{name}{number}")
                bound = {"node": where, "allocation": make_allocation(where, *range(devices["count"]))} if where else {}
                pod = make_pod(
                    f"{name}{number}",
                    gpus=devices["count"],
                    claim=claims[name],
                    annotations={names.GANG: "g", names.POD_SET: name},
                    schedulingGates=[] if where else GATES,
                    **bound,
                )
                self.pods.append(pod)
                request = request_of(pod, claims[name], is_admitted=True)
                assert isinstance(request, Request)
                self.requests[pod.metadata.uid] = request
                if where:
                    self.ledger.put_pod(pod)

    def _asked(self) -> Any:
        found = members_of(self.pods, self.gang.spec, {})
        chosen = [one for one in found if one.stage is MemberStage.GATED]
        on: dict[str, list[Pod]] = {}
        for pod in self.pods:
            if pod.spec.node_name:
                on.setdefault(pod.spec.node_name, []).append(pod)
        free = {name: host_fit.free(one, on.get(name, ())) for name, one in self.nodes.items()}
        cells = dict(self.ledger.cells(now_seconds=0.0))
        land = PlacementSnapshot(self.nodes, dict(self.ledger.nodes), cells, on, free)
        topology = Topology.model_validate({"metadata": {"name": "t"}, "spec": {"levels": [{"nodeLabel": RACK}]}})
        site = node_domains_of(topology, self.nodes.values(), {}, strict=True)
        assert isinstance(site, NodeDomains)
        return GangView(self.gang, tuple(found), ReadinessPolicy()), chosen, self.requests, site, land

    def find(self) -> FoundPlacement | NoPlacement:
        """Return the answer for all members."""
        return find_places(*self._asked())

    def hosts(self) -> set[str]:
        """Return the nodes that the members get; none where they find no place."""
        answer = self.find()
        placed = answer.placement.assignments if isinstance(answer, FoundPlacement) else ()
        return {member.host for part in placed for member in part.members}

    def replaced(self) -> list[str]:
        """Return the nodes of the members that a running gang lacks."""
        return sorted(seat.allocation.node for seat in place_missing(*self._asked()).assignments)


WORKERS = {"count": 8}


@pytest.mark.parametrize(
    ("nodes", "sets", "hosts"),
    [
        pytest.param("a1-x h1-x a2-y", {"w": (2, WORKERS)}, {"a1-x", "a2-y"}, id="one model, however far"),
        pytest.param("a1-x h1-x", {"w": (2, WORKERS)}, set(), id="no model alone is enough"),
        pytest.param("a1-x h1-x", {"w": (2, {"count": 8, "mixedModels": True})}, {"a1-x", "h1-x"}, id="mixing allowed"),
        pytest.param("a1-x a2-y h1-x h2-x", {"w": (2, WORKERS)}, {"h1-x", "h2-x"}, id="the model that lies nearer"),
        pytest.param(
            "a1-x a2-y h1-x h2-x",
            {"w": (2, {"count": 8, "models": ["nvidia-a100", "nvidia-h100"]})},
            {"a1-x", "a2-y"},
            id="the model that is named first, near or far",
        ),
        pytest.param(
            "a1-x h1-x h2-x",
            {"w": (2, {"count": 8, "models": ["nvidia-a100", "nvidia-h100"]})},
            {"h1-x", "h2-x"},
            id="the second model where the first is too few",
        ),
        pytest.param(
            "a1-x h1-x h2-x",
            {"leader": (1, {"count": 1}), "w": (2, WORKERS)},
            set(),
            id="a leader that accepts the workers' model takes it, or waits with them",
        ),
        pytest.param(
            "v1-x h1-x h2-x",
            {"leader": (1, {"count": 1, "models": ["nvidia-v100"]}), "w": (2, {"count": 8, "models": ["nvidia-h100"]})},
            {"v1-x", "h1-x", "h2-x"},
            id="pod sets that name different models keep them",
        ),
        pytest.param(
            "v1-x a1-x h1-x h2-y",
            {"leader": (1, {"count": 1, "models": ["nvidia-v100"]}), "w": (2, WORKERS)},
            {"v1-x", "h1-x", "h2-y"},
            id="the workers are of one model beside a leader of another",
        ),
    ],
)  # fmt: skip
def test_a_gang_gets_one_model(nodes: str, sets: Any, hosts: set[str]) -> None:
    """A collective runs at the pace of its slowest member."""
    assert MixedMachines(nodes.split(), sets).hosts() == hosts


def test_a_gang_that_waits_for_one_model_says_so() -> None:
    """Two machines are free, and each is of another model."""
    answer = MixedMachines(["a1-x", "h1-x"], {"w": (2, WORKERS)}).find()

    assert isinstance(answer, NoPlacement)
    assert answer.reason == "NeverFits"
    assert answer.message.startswith("no model alone holds all members: ")


def test_models_that_nobody_has_time_for_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """All choices of models share one limit of work; the claim's first model is tried whatever it is."""
    monkeypatch.setattr(descent, "COUNTED_MAX", 0)
    models = {"w": (2, {"count": 8, "models": ["nvidia-a100", "nvidia-h100"]})}

    assert MixedMachines(["a1-x", "a2-x", "h1-x", "h2-x"], models).hosts() == {"a1-x", "a2-x"}
    assert MixedMachines(["a1-x", "h1-x", "h2-x"], models).hosts() == set()


@pytest.mark.parametrize(
    ("nodes", "place"),
    [
        pytest.param("a1-x h1-x a2-y", ["a2-y"], id="the model that the others have, although another is nearer"),
        pytest.param("h1-x a1-x h2-y", ["h2-y"], id="whichever model that is"),
        pytest.param("a1-x h1-x", [], id="none of that model: it waits"),
    ],
)
def test_a_replacement_is_of_its_gangs_model(nodes: str, place: list[str]) -> None:
    """w0 runs on the first machine; w1 was lost."""
    machines = nodes.split()
    assert MixedMachines(machines, {"w": (2, WORKERS)}, running={"w0": machines[0]}).replaced() == place


@pytest.mark.parametrize(
    ("nodes", "damaged", "hosts"),
    [
        pytest.param("h1-x h2-x h3-x", ["h1-x"], {"h2-x", "h3-x"}, id="two of three in a rack are sound"),
        pytest.param("h1-x h2-x h3-y h4-y", ["h2-x"], {"h3-y", "h4-y"}, id="the rack with sound machines"),
        pytest.param("h1-x h2-x h3-y", ["h2-x"], {"h1-x", "h2-x"}, id="near and damaged before far and sound"),
    ],
)  # fmt: skip
def test_a_gang_takes_sound_machines_where_they_lie_as_near(nodes: str, damaged: list[str], hosts: set[str]) -> None:
    """What is required of nearness comes first; among equals the damaged machine is the last choice."""
    sets = {"w": (2, WORKERS)}
    place = MixedMachines(nodes.split(), sets, damaged=damaged)
    place.gang = place.gang.model_copy(
        update={
            "spec": make_gang(
                1, podSets=[{"name": "w", "count": 2}], topology={"mode": "preferred", "level": RACK}
            ).spec
        }
    )

    assert place.hosts() == hosts
