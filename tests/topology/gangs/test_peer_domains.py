"""Scenarios of another scheduler's tests: our places are valid and use no more domains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.peer_domains import answers
from topology.gangs.model import Order

ROOT = Path(__file__).resolve().parents[3]
LEVELS = ["block", "rack", "host"]


def host(block: str, rack: str, name: str, **more: Any) -> dict[str, Any]:
    """A node of so many thousandths of a CPU."""
    alloc = {"cpu": more.pop("cpu", 1000), "pods": more.pop("pods", 10)}
    return {"name": name, "labels": {"block": block, "rack": rack, "host": name}, "alloc": alloc, **more}


SIX = [
    host("b1", "r1", "a1"),
    host("b1", "r1", "a2"),
    host("b1", "r2", "a3", cpu=3000),
    host("b2", "r1", "a4", cpu=4000),
]


def case(name: str, want: Any, nodes: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
    """One pod set of members of one CPU."""
    top = {key: more.pop(key) for key in list(more) if key in TOP}
    row = {"name": "p", "count": 1, "req": {"cpu": 1000}, **more}
    row["want_fail" if want is None else "want"] = {"kind": "no-fit"} if want is None else want
    return {"id": name, "levels": LEVELS, "nodes": nodes or SIX, "podsets": [row], **top}


TOP = {
    "gates",
    "other_pods",
    "usage_own_flavor",
    "usage_sibling_flavor",
    "existing",
    "unhealthy_nodes",
    "owners",
    "flavor_labels",
    "simulate_empty",
}
ELASTIC = {"ElasticJobsViaWorkloadSlicesWithTAS": True}
TAINT = [{"key": "k", "value": "v", "effect": "NoSchedule"}]
CASES = [
    case("required rack, best fit", [[["a1"], 1], [["a2"], 1]], count=2, required="rack"),
    case("required rack, too many", None, count=5, required="rack"),
    case("preferred rack goes up", [[["a1"], 1], [["a2"], 1], [["a3"], 3]], count=5, preferred="rack"),
    case("preferred block, several", [[["a1"], 1], [["a3"], 3], [["a4"], 4]], count=8, preferred="block"),
    case("unconstrained", [[["a1"], 1]], unconstrained=True),
    case("implied", [[["a1"], 1]], mode="implied"),
    case("slices of a host", [[["a3"], 2], [["a4"], 2]], count=4, preferred="host", slices=[["host", 2]]),
    case("slices without a size", None, count=4, required="block", slices=[["host", None]]),
    case("slices above the level", None, count=4, required="rack", slices=[["block", 2]]),
    case("unknown level", None, required="zone"),
    case("no request", None),
    case("nobody", [], count=0, required="rack"),
    case("not ready", None, [host("b1", "r1", "a1", ready=False)], required="host"),
    case("unschedulable", None, [host("b1", "r1", "a1", unschedulable=True)], required="host"),
    case("tainted", None, [host("b1", "r1", "a1", taints=TAINT)], required="host"),
    case("tolerated", [[["a1"], 1]], [host("b1", "r1", "a1", taints=["k=v:NoSchedule"])], required="host",
         tolerations=[{"key": "k", "operator": "Exists"}]),
    case("tolerated in words", [[["a1"], 1]], [host("b1", "r1", "a1", taints=[["k", "v", "NoSchedule"]])],
         required="host", tolerations=[["k", "Equal", "v", "NoSchedule"]]),
    case("a soft taint", [[["a1"], 1]], [host("b1", "r1", "a1", taints=["k=v:PreferNoSchedule"])], required="host"),
    case("usage as if it were not there", [[["a1"], 1]], SIX[:1], required="host", simulate_empty=True,
         usage_own_flavor=[{"values": ["b1", "r1", "a1"], "req": {"cpu": 1000}, "count": 1}]),
    case("selector", None, required="host", node_selector={"x": "y"}),
    case("selector by full name", [[["a3"], 1]], required="host", node_selector={"kubernetes.io/hostname": "a3"}),
    case("affinity", [[["a4"], 1]], required="host",
         affinity_required=[{"key": "block", "op": "In", "values": ["b2"]}]),
    case("other pods", None, [host("b1", "r1", "a1")], required="host",
         other_pods=[{"name": "x", "node": "a1", "req": {"cpu": 600}, "phase": "Running"}]),
    case("ended pods", [[["a1"], 1]], [host("b1", "r1", "a1")], required="host",
         other_pods=[{"name": "x", "node": "a1", "req": {"cpu": 600}, "phase": "Failed"}]),
    case("usage", [[["a2"], 1]], SIX[:2], required="host",
         usage_own_flavor=[{"values": ["a1"], "req": {"cpu": 1000}, "count": 1}]),
    case("sibling usage that does not count", [[["a1"], 1], [["a2"], 1]], SIX[:2], count=2, required="rack",
         usage_sibling_flavor=[{"values": ["a1"], "req": {"cpu": 1000}, "count": 1}],
         gates={"TASHandleOverlappingFlavors": False}),
    case("another flavor", None, required="host", flavor_labels={"zone": "z"}),
    case("identical nodes", [[["n-0"], 1], [["n-1"], 1]], [host("b1", "r1", "n", repeat=2)], count=2, required="rack"),
    case("replaced in its rack", [[["a1"], 1], [["a2"], 1]], [*SIX, host("b1", "r1", "x", ready=False)], count=2,
         required="rack", existing={"p": [[["a1"], 1], [["x"], 1]]}, unhealthy_nodes=["x"]),
    case("nothing left in its rack", None, [SIX[0], SIX[2], host("b1", "r1", "x", ready=False)], count=2,
         required="rack", existing={"p": [[["a1"], 1], [["x"], 1]]}, unhealthy_nodes=["x"],
         usage_own_flavor=[{"values": ["a1"], "req": {"cpu": 1000}, "count": 1}]),
    case("a pod of its own stays", [[["x"], 1]], [*SIX, host("b1", "r1", "x", ready=False)], required="host",
         existing={"p": [[["x"], 1]]}, unhealthy_nodes=["x"], owners=["Pod"]),
]  # fmt: skip


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("asked", CASES, ids=[one["id"] for one in CASES])
def test_found_alike_and_in_no_more_domains(asked: dict[str, Any], order: Order) -> None:
    """Same places, others in as many domains, or fewer; refused exactly when the peer refuses."""
    (answer,) = answers([json.dumps(asked)], order)

    assert answer["found"] == answer["peerFound"], answer
    assert answer["valid"]
    assert answer["verdict"] in ("same", "equal", "better"), answer


def test_leader_and_workers_of_a_group() -> None:
    """The workers' request holds for both; the leader goes where it costs least."""
    nodes = [host("b1", "r1", "h1", cpu=8000), host("b1", "r1", "h2", cpu=3000)]
    leader = {"name": "l", "count": 1, "req": {"cpu": 1000}, "preferred": "host", "group": "g", "want": [[["h2"], 1]]}
    workers = {**leader, "name": "w", "count": 5, "req": {"cpu": 2000}, "want": [[["h1"], 4], [["h2"], 1]]}
    (answer,) = answers([json.dumps({"id": "g", "levels": LEVELS, "nodes": nodes, "podsets": [leader, workers]})])

    assert (answer["verdict"], answer["domains"], answer["peerDomains"]) == ("same", 3, 3)


def test_what_is_about_the_peers_own_objects_is_unsupported() -> None:
    """Several flavors; nothing else is declined."""
    (answer,) = answers([json.dumps({**case("flavors", [[["a3"], 2]], count=2, unconstrained=True), "flavors": []})])

    assert (answer["verdict"], answer["peerFound"]) == ("unsupported", True)


@pytest.mark.parametrize(
    ("count", "previous", "want"),
    [
        pytest.param(4, [[["a1"], 1], [["a2"], 1]], [[["a1"], 1], [["a2"], 1], [["a3"], 2]], id="grows"),
        pytest.param(2, [[["a3"], 2], [["a4"], 2]], [[["a3"], 2]], id="shrinks"),
        pytest.param(3, [[["a3"], 1], [["a4"], 2]], [[["a3"], 1], [["a4"], 2]], id="stays"),
        pytest.param(2, [[["gone"], 1]], [[["a3"], 2]], id="its place is gone"),
    ],
)
def test_members_of_an_elastic_job_stay_where_they_are(count: int, previous: Any, want: Any) -> None:
    """Workload slices: those that come are placed beside them; of fewer the first stay."""
    elastic = case("elastic", want, count=count, unconstrained=True, previous=previous, gates=ELASTIC)
    (answer,) = answers([json.dumps(elastic)])

    assert (answer["verdict"], answer["domains"]) == ("same", len(want)), answer


def test_an_unreadable_scenario_is_told_and_does_not_stop_the_rest() -> None:
    """A line that is no scenario counts as worse, with the reason; the next one is answered."""
    told = list(answers(["{", json.dumps({"id": "x"}), json.dumps(CASES[1])]))

    assert [row["verdict"] for row in told] == ["worse", "worse", "same"]
    assert all(set(row) == set(told[2]) for row in told)


def test_unknown_fields_are_named() -> None:
    """A field that nobody knows is not passed over in silence."""
    (answer,) = answers([json.dumps({**CASES[0], "moon": "full"})])

    assert "unknown fields: moon" in answer["why"]


def test_the_command_prints_a_line_per_scenario_and_a_summary(tmp_path: Path) -> None:
    """As it is run: keys as promised, counts at the end, exit code 0 while nothing is worse."""
    file = tmp_path / "cases.jsonl"
    meta = {"meta": "explains", "gate_defaults": {"TASBalancedPlacement": False}}
    file.write_text("\n".join(json.dumps(row) for row in (meta, *CASES[:2])))
    done = subprocess.run(
        [sys.executable, "-m", "bench.peer_cases", "domain", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]

    assert done.returncode == 0, done.stderr
    assert set(lines[0]) == {"id", "found", "peerFound", "valid", "domains", "peerDomains", "verdict", "why"}
    assert lines[-1] == {"scenarios": 2, "same": 1, "better": 0, "equal": 1, "worse": 0, "unsupported": 0}


def broken(**changes: Any) -> str:
    """A scenario of one host and one pod set, with changes that make it none."""
    node = {"name": "x", "labels": {"host": "x"}, "alloc": {"pods": 5}, **changes.pop("node", {})}
    row = {"name": "p", "count": 1, "required": "host", "want": [[["x"], 1]], **changes.pop("row", {})}
    return json.dumps({"id": "odd", "levels": ["host"], "nodes": [node], "podsets": [row], **changes})


@pytest.mark.parametrize(
    "line",
    [
        broken(id=None),
        broken(gates=None, owners=None, other_pods=None, existing=None, unhealthy_nodes=None),
        broken(flavor_labels=None, flavor_tolerations=None, usage_own_flavor=None, usage_sibling_flavor=None),
        broken(node={"name": None, "repeat": None, "taints": None, "ready": None}),
        broken(node={"alloc": {"pods": 5, "cpu": None}}),
        broken(row={"name": None, "req": None, "slices": None, "node_selector": None, "tolerations": None}),
        broken(other_pods=[{"node": "x", "req": None, "phase": None}]),
        broken(usage_own_flavor=[{"values": ["x"], "req": None, "count": None}]),
    ],
)
def test_a_field_that_is_null_is_as_one_that_is_absent(line: str) -> None:
    """What may be left out may be null; names and numbers are found for what has none."""
    (answer,) = answers([line])

    assert (answer["verdict"], answer["domains"]) == ("same", 1)
    assert answer["id"]


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("{", id="no JSON"),
        pytest.param("[" * 50_000, id="nested without end"),
        pytest.param("7", id="a number"),
        pytest.param('{"id": "odd"}', id="nothing but a name"),
        pytest.param(broken(levels=[]), id="no levels"),
        pytest.param(broken(levels=["host", "host"]), id="a level twice"),
        pytest.param(broken(row={"count": -1}), id="fewer than no members"),
        pytest.param(broken(row={"count": 1e400}), id="members without number"),
        pytest.param(broken(row={"want": [[[], 1]]}), id="a wanted place without values"),
        pytest.param(broken(row={"slices": [[]]}), id="an empty slice"),
        pytest.param(broken(node={"alloc": {"pods": "many"}}), id="an amount in words"),
        pytest.param(broken(node={"taints": [["key", "value"]]}), id="a taint without effect"),
        pytest.param(broken(node={"repeat": 10**12}), id="a node too often"),
        pytest.param(broken(usage_own_flavor=[{"values": [], "count": 1}]), id="usage nowhere"),
    ],
)
def test_a_line_that_is_no_scenario_is_told_and_the_next_is_answered(line: str) -> None:
    """One row for it, never an end of the run."""
    first, second = answers([line, broken()])

    assert first["verdict"] == "worse"
    assert "cannot be read" in first["why"]
    assert second["verdict"] == "same"
