"""The custom resources on a real API server: accepted, defaulted, and guarded by their own rules."""

import json
from typing import Any

import pytest

from atoll.api import gangs
from atoll.api.claims import DEVICE_RULES, SPEC_RULES, GpuClaim
from atoll.api.gangs import GpuGang
from atoll.api.node_status import GpuNodeStatus
from tests.deploy.api_server import RealApi

pytestmark = pytest.mark.e2e

CLAIMS = "/apis/gpu.scheduling/v1/namespaces/default/gpuclaims"
REPORTS = "/apis/gpu.scheduling/v1/gpunodestatuses"
MERGE = "application/merge-patch+json"


def claim(name: str = "new", **devices: Any) -> dict[str, Any]:
    """Return a GpuClaim."""
    return {
        "apiVersion": "gpu.scheduling/v1",
        "kind": "GpuClaim",
        "metadata": {"name": name},
        "spec": {"devices": {"count": 1, **devices}},
    }


@pytest.mark.parametrize("plural", ["gpuclaims", "gpugangs", "gpunodestatuses", "gpureservations", "topologies"])
def test_definition_is_structural_to_the_api_server(api: RealApi, plural: str) -> None:
    """The API server established the definition and found nothing that is not structural."""
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{plural}.gpu.scheduling"
    status = json.loads(api.send("GET", path).message)["status"]
    conditions = {condition["type"]: condition["status"] for condition in status["conditions"]}
    assert conditions["Established"] == "True"
    assert conditions["NamesAccepted"] == "True"
    assert "NonStructuralSchema" not in conditions


def test_defaults_are_those_of_the_model(api: RealApi) -> None:
    """What the API server fills into a short claim is what the model would have filled in."""
    answer = api.send("POST", CLAIMS, claim(), dry_run=True)
    assert answer.status == 201, answer
    stored = json.loads(answer.message)
    assert stored["spec"]["devices"]["policy"] == "contiguous"
    assert GpuClaim.model_validate(stored).spec == GpuClaim.model_validate(claim()).spec


def test_null_means_absent(api: RealApi) -> None:
    """A template that leaves a field empty gives the default, not an error."""
    answer = api.send("POST", CLAIMS, claim(memory=None, policy=None), dry_run=True)
    assert answer.status == 201, answer
    assert "memory" not in json.loads(answer.message)["spec"]["devices"]


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        pytest.param({"policy": "spread", "interconnect": "nvlink"}, DEVICE_RULES[0][1], id="spread and joined"),
        pytest.param({"migProfile": "1g.10gb", "interconnect": "nvlink"}, DEVICE_RULES[1][1], id="MIG over NVLink"),
        pytest.param({"models": ["a100", "a100"]}, DEVICE_RULES[2][1], id="one model twice"),
        pytest.param({"count": 0}, "should be greater than or equal to 1", id="zero count"),
        pytest.param({"count": -2}, "should be greater than or equal to 1", id="negative count"),
        pytest.param({"count": 65}, "should be less than or equal to 64", id="more than any machine has"),
        pytest.param({"policy": "nearby"}, 'supported values: "contiguous", "island", "packed", "spread"', id="policy"),
        pytest.param({"memory": "40 gigabytes"}, "spec.devices.memory", id="memory in words"),
    ],
)
def test_bad_claims_are_refused_with_the_reason(api: RealApi, devices: dict[str, Any], message: str) -> None:
    """The API server refuses by itself, with the webhook down too, and says what is wrong."""
    answer = api.send("POST", CLAIMS, claim(**devices), dry_run=True)
    assert answer.status == 422
    assert message in answer.message


def test_spec_of_a_claim_is_immutable_and_its_status_is_not(api: RealApi) -> None:
    """A claim cannot be changed under the pods that name it; labels and status can."""
    api.send("DELETE", f"{CLAIMS}/fixed")
    assert api.send("POST", CLAIMS, claim("fixed")).status == 201
    path = f"{CLAIMS}/fixed"
    changed = api.send("PATCH", path, {"spec": {"devices": {"count": 2}}}, content_type=MERGE)
    assert changed.status == 422
    assert SPEC_RULES[0][1] in changed.message
    labelled = api.send("PATCH", path, {"metadata": {"labels": {"a": "b"}}}, content_type=MERGE)
    assert labelled.is_accepted, labelled
    status = {"status": {"phase": "Waiting", "waitingPods": 1}}
    told = api.send("PATCH", f"{path}/status", status, content_type=MERGE)
    assert told.is_accepted, told
    assert GpuClaim.model_validate_json(told.message).status is not None


@pytest.mark.parametrize(
    ("part", "entries"),
    [
        pytest.param("spec", {"cordons": [{"uuid": "GPU-a"}, {"uuid": "GPU-a"}]}, id="cordons"),
        pytest.param(
            "status",
            {"devices": [{"id": n, "uuid": "GPU-a", "model": "m", "index": n} for n in range(2)]},
            id="devices",
        ),
    ],
)
def test_one_gpu_cannot_stand_in_a_list_twice(api: RealApi, part: str, entries: dict[str, Any]) -> None:
    """Lists of GPUs are maps by uuid to the API server: a second entry of one uuid is refused."""
    body = {"apiVersion": "gpu.scheduling/v1", "kind": "GpuNodeStatus", "metadata": {"name": "twice"}}
    api.send("POST", REPORTS, body)
    path = f"{REPORTS}/twice" if part == "spec" else f"{REPORTS}/twice/status"
    answer = api.send("PATCH", path, {part: entries}, content_type=MERGE)
    assert answer.status == 422
    assert "Duplicate value" in answer.message
    assert api.send("DELETE", f"{REPORTS}/twice").is_accepted


def test_a_full_report_of_a_large_machine_is_accepted(api: RealApi) -> None:
    """Eight GPUs with seven MIG instances each, all links and 250 pods pass the limits of the schema."""
    devices = [
        {"id": n, "uuid": f"GPU-{n:08d}-0000-0000-0000-000000000000", "model": "nvidia-h100", "index": n}
        for n in range(64)
    ]
    rows = [["NV18"] * 64] * 64
    pods = [{"uid": f"{n:08d}-0000-0000-0000-000000000000", "live": True} for n in range(250)]
    status = {"devices": devices, "links": {"nvlink": rows, "pcie": rows}, "pods": pods, "deviceCount": 64}
    body = {"apiVersion": "gpu.scheduling/v1", "kind": "GpuNodeStatus", "metadata": {"name": "large"}}
    api.send("POST", REPORTS, body)
    answer = api.send("PATCH", f"{REPORTS}/large/status", {"status": status}, content_type=MERGE)
    assert answer.is_accepted, answer
    report = GpuNodeStatus.model_validate_json(answer.message).status
    assert report is not None
    assert len(report.devices) == 64
    assert api.send("DELETE", f"{REPORTS}/large").is_accepted


GANGS = "/apis/gpu.scheduling/v1/namespaces/default/gpugangs"
TOPOLOGIES = "/apis/gpu.scheduling/v1/topologies"
RACK = {"mode": "required", "level": "example.com/rack"}


def gang(**spec: Any) -> dict[str, Any]:
    """Return a GpuGang of four workers."""
    sets = [{"name": "workers", "count": 4}]
    body = {"apiVersion": "gpu.scheduling/v1", "kind": "GpuGang", "metadata": {"name": "new"}}
    return {**body, "spec": {"podSets": sets, **spec}}


def workers(**pod_set: Any) -> list[dict[str, Any]]:
    """Return one pod set."""
    return [{"name": "workers", "count": 4, **pod_set}]


def slices(*sizes: int) -> dict[str, Any]:
    """Return a topology request with slices of these sizes."""
    return {**RACK, "slices": [{"size": size, "level": "example.com/rack"} for size in sizes]}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        pytest.param({"topology": {"mode": "required"}}, gangs.LEVEL_RULES[0][1], id="required without a level"),
        pytest.param({"topology": {"level": "rack"}}, gangs.LEVEL_RULES[0][1], id="a level without a mode for it"),
        pytest.param({"topology": slices(8, 3)}, gangs.LEVEL_RULES[1][1], id="slices that do not nest"),
        pytest.param({"topology": slices(8, 4, 3)}, gangs.LEVEL_RULES[1][1], id="inner slices that do not nest"),
        pytest.param({"topology": {**RACK, "subGroupCount": 2}}, gangs.LEVEL_RULES[2][1], id="half a sub-group"),
        pytest.param({"topology": {"mode": "required", "level": "no such label"}}, "spec.topology.level", id="level"),
        pytest.param(
            {"topology": {**RACK, "balanced": True}}, gangs.LEVEL_RULES[3][1], id="balance of a required level"
        ),
        pytest.param(
            {"podSets": [*workers(group="g"), {"name": "others", "count": 4, "group": "g"}]},
            gangs.GANG_RULES[5][1],
            id="a group without a leader",
        ),
        pytest.param(
            {"podSets": [*workers(group="g"), {"name": "leader", "count": 1, "group": "g", "topology": RACK}]},
            gangs.GANG_RULES[6][1],
            id="a leader that asks for itself",
        ),
        pytest.param({"minMember": 5}, gangs.GANG_RULES[0][1], id="more members than there are"),
        pytest.param({"podSets": workers(minCount=5)}, gangs.POD_SET_RULES[0][1], id="a minimum beyond the count"),
        pytest.param({"podSets": workers() * 2}, "Duplicate value", id="one pod set twice"),
        pytest.param({"topology": {"podIndexLabel": "r"}}, gangs.GANG_RULES[2][1], id="a rank label of all members"),
        pytest.param(
            {"topology": {"slices": [{"size": 2, "level": "r"}]}, "podSets": [*workers(), *workers(name="b")]},
            gangs.GANG_RULES[3][1],
            id="slices over several pod sets",
        ),
        pytest.param({"podSets": []}, "should have at least 1 items", id="no pod set"),
        pytest.param({"waitForPodsReady": {"timeout": "0s"}}, gangs.DURATION_RULES[0][1], id="no time"),
        pytest.param({"waitForPodsReady": {"timeout": "-5s"}}, "spec.waitForPodsReady.timeout", id="negative time"),
        pytest.param({"waitForPodsReady": {"timeout": "10"}}, "spec.waitForPodsReady.timeout", id="time without unit"),
    ],
)
def test_bad_gangs_are_refused_with_the_reason(api: RealApi, spec: dict[str, Any], message: str) -> None:
    """Contradictions never reach the controllers: the API server names them."""
    answer = api.send("POST", GANGS, gang(**spec), dry_run=True)
    assert answer.status == 422, answer
    assert message in answer.message


def test_a_gang_with_everything_is_accepted_and_read_back(api: RealApi) -> None:
    """The largest sensible gang passes the rules within their cost, and the model reads what is stored."""
    sets = [{"name": f"set-{number}", "count": 6000, "topology": slices(8, 4, 2)} for number in range(16)]
    spec = {
        "podSets": sets,
        "minMember": 96_000,
        "topology": {"mode": "preferred", "level": "example.com/block"},
        "waitForPodsReady": {"timeout": "1h30m", "requeuingStrategy": {"timestamp": "Creation"}},
    }
    answer = api.send("POST", GANGS, gang(**spec), dry_run=True)
    assert answer.status == 201, answer
    assert GpuGang.model_validate_json(answer.message).spec.size == 96_000


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        pytest.param([], "should have at least 1 items", id="no level"),
        pytest.param([f"example.com/l{number}" for number in range(9)], "must have at most 8 items", id="nine levels"),
        pytest.param(["example.com/rack"] * 2, "Duplicate value", id="one level twice"),
        pytest.param(["not a label"], "spec.levels[0].nodeLabel", id="no label key"),
    ],
)
def test_bad_topologies_are_refused_with_the_reason(api: RealApi, labels: list[str], message: str) -> None:
    """One to eight levels, each a label key, none twice."""
    levels = [{"nodeLabel": label} for label in labels]
    body = {
        "apiVersion": "gpu.scheduling/v1",
        "kind": "Topology",
        "metadata": {"name": "t"},
        "spec": {"levels": levels},
    }
    answer = api.send("POST", TOPOLOGIES, body, dry_run=True)
    assert answer.status == 422, answer
    assert message in answer.message
