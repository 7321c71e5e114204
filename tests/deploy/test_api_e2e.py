"""The custom resources on a real API server: accepted, defaulted, and guarded by their own rules."""

import json
from typing import Any

import pytest

from atoll.api.claims import DEVICE_RULES, SPEC_RULES, GpuClaim
from atoll.api.node_status import GpuNodeStatus
from tests.deploy.api_server import Api

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


@pytest.mark.parametrize("plural", ["gpuclaims", "gpunodestatuses"])
def test_definition_is_structural_to_the_api_server(api: Api, plural: str) -> None:
    """The API server established the definition and found nothing that is not structural."""
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{plural}.gpu.scheduling"
    status = json.loads(api.send("GET", path).message)["status"]
    conditions = {condition["type"]: condition["status"] for condition in status["conditions"]}
    assert conditions["Established"] == "True"
    assert conditions["NamesAccepted"] == "True"
    assert "NonStructuralSchema" not in conditions


def test_defaults_are_those_of_the_model(api: Api) -> None:
    """What the API server fills into a short claim is what the model would have filled in."""
    answer = api.send("POST", CLAIMS, claim(), dry_run=True)
    assert answer.status == 201, answer
    stored = json.loads(answer.message)
    assert stored["spec"]["devices"]["policy"] == "contiguous"
    assert GpuClaim.model_validate(stored).spec == GpuClaim.model_validate(claim()).spec


def test_null_means_absent(api: Api) -> None:
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
def test_bad_claims_are_refused_with_the_reason(api: Api, devices: dict[str, Any], message: str) -> None:
    """The API server refuses by itself, with the webhook down too, and says what is wrong."""
    answer = api.send("POST", CLAIMS, claim(**devices), dry_run=True)
    assert answer.status == 422
    assert message in answer.message


def test_spec_of_a_claim_is_immutable_and_its_status_is_not(api: Api) -> None:
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
def test_one_gpu_cannot_stand_in_a_list_twice(api: Api, part: str, entries: dict[str, Any]) -> None:
    """Lists of GPUs are maps by uuid to the API server: a second entry of one uuid is refused."""
    body = {"apiVersion": "gpu.scheduling/v1", "kind": "GpuNodeStatus", "metadata": {"name": "twice"}}
    api.send("POST", REPORTS, body)
    path = f"{REPORTS}/twice" if part == "spec" else f"{REPORTS}/twice/status"
    answer = api.send("PATCH", path, {part: entries}, content_type=MERGE)
    assert answer.status == 422
    assert "Duplicate value" in answer.message
    assert api.send("DELETE", f"{REPORTS}/twice").is_accepted


def test_a_full_report_of_a_large_machine_is_accepted(api: Api) -> None:
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
