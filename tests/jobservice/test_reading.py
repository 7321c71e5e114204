"""The reader: fields of real objects become facts, and unexpected values do no harm."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.api import names
from atoll.jobs.facts import PodFacts, QuotaFacts, WorkloadFacts
from jobs.reading import DETAIL_LENGTH_MAX, decode_pod, decode_quota, decode_workload
from tests.worker.test_records import RECORD


def raw(value: Any) -> bytes:
    """Return an object as the API server sends it."""
    return json.dumps(value).encode()


def condition(kind: str, status: str = "True", **more: str) -> dict[str, str]:
    """Return a condition."""
    return {"type": kind, "status": status, **more}


@pytest.mark.parametrize(
    ("spec", "status", "expected"),
    [
        pytest.param({}, {}, {}, id="bare"),
        pytest.param({"suspend": True}, {}, {"is_suspended": True}, id="suspended"),
        pytest.param({"parallelism": 4, "completions": 8}, {"succeeded": 6}, {"wanted": 2}, id="what is left"),
        pytest.param({"parallelism": 4, "completions": 8}, {}, {"wanted": 4}, id="at a time"),
        pytest.param({"backoffLimit": 3}, {}, {"backoff_limit": 3}, id="retries of the cluster"),
        pytest.param({}, {"conditions": [condition("Complete")]}, {"is_complete": True}, id="complete"),
        pytest.param({}, {"conditions": [condition("Complete", "False")]}, {}, id="not complete"),
        pytest.param(
            {},
            {"conditions": [condition("Failed", reason="DeadlineExceeded", message="too\nlong")]},
            {"failed": "DeadlineExceeded", "failed_detail": "too long"},
            id="failed",
        ),
        pytest.param({}, {"conditions": [condition("Failed")]}, {"failed": "Failed"}, id="failed without a reason"),
        pytest.param(
            {"template": {"metadata": {"annotations": {names.GANG: "tune"}}}}, {}, {"runs_whole": True}, id="a gang"
        ),
        pytest.param(
            {"managedBy": "kueue.x-k8s.io/multikueue"}, {"ready": 2}, {"ready": 2}, id="its pods are in another cluster"
        ),
        pytest.param({}, {"ready": 2}, {}, id="its pods are here"),
    ],
)
def test_a_job_becomes_facts(spec: dict[str, Any], status: dict[str, Any], expected: dict[str, Any]) -> None:
    """Conditions decide how it ended, counts how much of it is to run."""
    found = decode_workload("Job", raw({"metadata": {"uid": "u1"}, "spec": spec, "status": status}))

    assert found == WorkloadFacts("Job", "u1", **expected)


def test_a_deployment_tells_why_it_gets_no_further_pod() -> None:
    """Its condition has what the API server answered, of a ReplicaSet that nobody else asks for."""
    refused = condition("ReplicaFailure", reason="FailedCreate", message="exceeded\nquota")
    found = decode_workload(
        "Deployment", raw({"metadata": {"uid": "u1"}, "spec": {}, "status": {"conditions": [refused]}})
    )

    assert found.refused == "exceeded quota"


@pytest.mark.parametrize(
    ("status", "reason", "detail"),
    [
        pytest.param({}, "", "", id="nothing yet"),
        pytest.param(
            {"containerStatuses": [{"state": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}]},
            "OOMKilled",
            "(exit code 137)",
            id="killed for memory",
        ),
        pytest.param(
            {"containerStatuses": [{"state": {"terminated": {"exitCode": 2, "message": "boom"}}}]},
            "Error",
            "(exit code 2) boom",
            id="exit code",
        ),
        pytest.param(
            {"containerStatuses": [{"state": {"terminated": {"reason": "Completed", "exitCode": 0}}}]},
            "",
            "",
            id="exit 0",
        ),
        pytest.param(
            {"containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}]},
            "ImagePullBackOff",
            "no such image",
            id="image",
        ),
        pytest.param(
            {"initContainerStatuses": [{"state": {"waiting": {"reason": "PodInitializing"}}}]},
            "PodInitializing",
            "",
            id="init",
        ),
        pytest.param({"reason": "Evicted", "message": "disk"}, "Evicted", "disk", id="the kubelet's"),
        pytest.param(
            {"conditions": [condition("PodScheduled", "False", reason="Unschedulable", message="0/1 nodes")]},
            "Unschedulable",
            "0/1 nodes",
            id="no place",
        ),
        pytest.param(
            {
                "conditions": [condition("DisruptionTarget", reason="PreemptionByScheduler")],
                "containerStatuses": [{"state": {"terminated": {"exitCode": 143}}}],
            },
            "Preempted",
            "",
            id="preempted, whatever its container says",
        ),
        pytest.param(
            {"conditions": [condition("DisruptionTarget", reason="DeletionByTaintManager")]},
            "NodeNotReady",
            "",
            id="node",
        ),
        pytest.param(
            {"conditions": [condition("DisruptionTarget", reason="EvictionByEvictionAPI")]},
            "EvictionByEvictionAPI",
            "",
            id="drained",
        ),
    ],
)
def test_why_a_pod_ended_or_waits(status: dict[str, Any], reason: str, detail: str) -> None:
    """The first cause is told: a disruption before what the container made of it."""
    found = decode_pod(raw({"metadata": {"name": "p"}, "spec": {}, "status": status}))

    assert (found.reason, found.detail) == (reason, detail)


def ended(step: int, at: str) -> dict[str, Any]:
    """Return a state of a container that ended after it saved a checkpoint."""
    told = RECORD.told() | {"step": step, "created_at": at}
    return {"terminated": {"exitCode": 143, "message": json.dumps({"last_checkpoint": told})}}


@pytest.mark.parametrize(
    ("containers", "step"),
    [
        pytest.param([{"state": ended(30, "2026-01-02T03:04:05Z")}], 30, id="ended"),
        pytest.param([{"state": {}, "lastState": ended(30, "2026-01-02T03:04:05Z")}], 30, id="runs again in its pod"),
        pytest.param(
            [{"state": ended(7, "2026-01-02T03:00:00Z"), "lastState": ended(9, "2026-01-02T02:59:59Z")}],
            7,
            id="the later of two, though it began anew",
        ),
        pytest.param([{"state": {"running": {}}}], None, id="has not ended"),
    ],
)
def test_the_checkpoint_that_a_pod_tells(containers: list[Any], step: int | None) -> None:
    """It is in the termination message of a container, of now or before its restart."""
    found = decode_pod(raw({"metadata": {"name": "p"}, "status": {"containerStatuses": containers}})).checkpoint

    assert (found and found.step) == step


def test_only_kueues_gates_mean_quota() -> None:
    """A pod that Atoll holds for its gang has its quota."""
    gates = {
        gate: raw({"metadata": {"name": "p"}, "spec": {"schedulingGates": [{"name": gate}]}})
        for gate in ("kueue.x-k8s.io/admission", "gpu.scheduling/gang")
    }

    assert [decode_pod(one).is_gated for one in gates.values()] == [True, False]


@pytest.mark.parametrize(
    ("status", "told"),
    [
        ({"conditions": [condition("Evicted", reason="Preempted")]}, QuotaFacts(evicted="Preempted")),
        ({"conditions": [condition("Evicted", "False", reason="Preempted")]}, QuotaFacts()),
        (
            {"conditions": [condition("QuotaReserved", "False", reason="Pending", message="5 more needed")]},
            QuotaFacts(detail="5 more needed"),
        ),
        (
            {"admission": {"podSetAssignments": [{"flavors": {"cpu": "h100", "gpu.scheduling/gpu": "h100"}}]}},
            QuotaFacts(flavors=("h100",)),
        ),
        (
            {"admission": {"podSetAssignments": [{"flavors": {"cpu": "h100"}}]}, "clusterName": "east"},
            QuotaFacts(flavors=("h100",), cluster="east"),
        ),
        ({}, QuotaFacts()),
    ],
)
def test_what_kueue_says_about_quota(status: dict[str, Any], told: QuotaFacts) -> None:
    """An eviction counts while its condition holds; a waiting job says what is missing; an admitted one its flavors."""
    assert decode_quota(raw({"status": status})) == told


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["status", "conditions", "type", "reason", "message", "state", "phase", "containerStatuses"]
            ),
            inner,
        )
    ),
    max_leaves=12,
)


@given(status=JSON)
def test_odd_objects_are_read_or_refused(status: Any) -> None:
    """Whatever stands in a status, there are facts of bounded size, or one kind of error."""
    try:
        found = decode_pod(raw({"metadata": {"name": "p"}, "spec": {}, "status": status}))
    except msgspec.MsgspecError:
        return
    assert isinstance(found, PodFacts)
    assert len(found.detail) <= DETAIL_LENGTH_MAX + 20
