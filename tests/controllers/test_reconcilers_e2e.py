"""The controllers as a process, under their own identity and the shipped policies, against a real API server."""

import os
from collections.abc import Iterator

import pytest

from atoll.api import names
from devcluster import DevCluster
from tests.controllers.stage import CLAIMS, LEASES, PODS, REPORTS, ReconcilerHarness
from tests.deploy.requests import MERGE

pytestmark = pytest.mark.e2e

BESIDE = ("beside-first", "beside-second")


@pytest.fixture(scope="module")
def stage() -> Iterator[ReconcilerHarness]:
    """A control plane without nodes, and the controllers at work on it."""
    with DevCluster.start(f"controllers-{os.getpid()}", nodes=[], scheduler=False) as cluster:
        yield ReconcilerHarness.furnish(cluster)


@pytest.fixture
def node(stage: ReconcilerHarness, request: pytest.FixtureRequest) -> str:
    """A machine with eight GPUs of its own for each test."""
    name = request.node.name.replace("_", "-").removeprefix("test-")[:40].strip("-")
    stage.add_node(name)
    return name


def test_pod_that_kubelet_ended_frees_its_gpus(stage: ReconcilerHarness, node: str) -> None:
    """A terminal pod whose containers all terminated is proof enough: every Lease of it goes at once."""
    stage.run_pod("done", node, 0, 1)
    stage.end("done", node)
    stage.until(lambda: not stage.lease(node, 0) and not stage.lease(node, 1), "both Leases are gone")


def test_pod_deleted_before_it_was_bound_frees_its_gpus(stage: ReconcilerHarness, node: str) -> None:
    """A DELETE event without a node proves that nothing ever ran."""
    stage.reserve(stage.create_pod("hasty"), node, 3)
    stage.force_delete("hasty")
    stage.until(lambda: not stage.lease(node, 3), "the Lease is gone")


def test_force_deleted_pod_holds_its_gpus_until_the_agent_saw_its_end(stage: ReconcilerHarness, node: str) -> None:
    """No report, a live sandbox, kubelet's list: each keeps the GPU; only a later complete report frees it.

    Beside it other pods end, one per report, whose release shows that the controllers have weighed that report.
    """
    pod = stage.run_pod("forced", node, 0)
    uid = pod["metadata"]["uid"]
    first, second = (
        stage.run_pod(name, node, number)["metadata"]["uid"] for number, name in enumerate(BESIDE, start=1)
    )
    everybody = (uid, first, second)
    stage.report(node, live=everybody, listed=everybody)
    for name in ("forced", *BESIDE):
        stage.force_delete(name)
    stage.until(
        lambda: names.LEASE_IN_DOUBT in (stage.lease(node, 0) or pod)["metadata"]["annotations"], "marked in doubt"
    )
    stage.report(node, live=(uid, second))
    stage.until(lambda: not stage.lease(node, 1), "the first pod beside it is released")
    assert stage.lease(node, 0), "a live pod was released"
    stage.report(node, listed=(uid,))
    stage.until(lambda: not stage.lease(node, 2), "the second pod beside it is released")
    assert stage.lease(node, 0), "a listed pod was released"
    stage.until(lambda: stage.events(names.REASON_GPUS_IN_DOUBT, node), "the node's event tells it")
    stage.report(node)
    stage.until(lambda: not stage.lease(node, 0), "the Lease is gone after the report without the pod")


def test_pod_failed_by_hand_holds_its_gpus(stage: ReconcilerHarness, node: str) -> None:
    """Somebody sets the phase; the container runs on, so the agent's word counts and not the phase."""
    pod = stage.run_pod("victim", node, 0)
    uid = pod["metadata"]["uid"]
    stage.report(node, live=(uid,), listed=(uid,))
    stage.do("PATCH", f"{PODS}/victim/status", {"status": {"phase": "Failed"}}, kind=MERGE)
    stage.report(node, live=(uid,))
    stage.until(
        lambda: names.LEASE_IN_DOUBT in (stage.lease(node, 0) or pod)["metadata"]["annotations"], "marked in doubt"
    )
    stage.report(node)
    stage.until(lambda: not stage.lease(node, 0), "released after the agent saw it end")


def test_deletion_missed_by_everybody_is_looked_up_and_asked_for(stage: ReconcilerHarness, node: str) -> None:
    """The pod goes while the controllers are dead: they look it up, ask the agent, and need two reports past that."""
    stage.run_pod("missed", node, 0)
    stage.report(node)
    stage.kill_controllers()
    stage.force_delete("missed")
    stage.start_controllers()

    def wanted() -> str:
        found = stage.get(f"{REPORTS}/{node}") or {}
        return str(found["metadata"].get("annotations", {}).get(names.EVIDENCE_WANTED, ""))

    stage.until(wanted, "the agent is asked")
    stage.report(node)
    assert stage.lease(node, 0), "one report is not enough for a pod that was never seen"
    stage.report(node)
    stage.until(lambda: not stage.lease(node, 0), "two reports are")


def test_expired_reservation_is_taken_back_behind_a_fence(stage: ReconcilerHarness, node: str) -> None:
    """The Lease goes only after the pod's version moved, so a Binding that was prepared before cannot land."""
    pod = stage.create_pod("slow")
    stage.reserve(pod, node, 5, deadline_seconds=-60)
    stage.until(lambda: not stage.lease(node, 5), "the Lease is taken back")
    answer = stage.bind(pod, node, 5)
    assert answer.status == 409, f"the late Binding landed on a GPU that was free again: {answer}"


def test_reservation_of_a_pod_that_got_bound_in_time_is_kept(stage: ReconcilerHarness, node: str) -> None:
    """A deadline that passed means nothing for a pod that is bound to the device."""
    pod = stage.create_pod("just")
    assert stage.bind(pod, node, 5).is_accepted
    stage.reserve(pod, node, 5, deadline_seconds=-60)
    stage.reserve(pod, node, 6, deadline_seconds=-60)
    stage.until(lambda: not stage.lease(node, 6), "the Lease beside the allocation is gone")
    assert stage.lease(node, 5)


def test_lost_lease_of_a_bound_pod_is_written_again(stage: ReconcilerHarness, node: str) -> None:
    """The pod's annotation outranks the Lease: whoever deleted it, it is back, under the same holder."""
    pod = stage.run_pod("robbed", node, 2)
    stage.do("DELETE", f"{LEASES}/gpu-{node}-2", identity="controllers")
    stage.until(lambda: stage.lease(node, 2), "the Lease is back")
    found = stage.lease(node, 2)
    assert found is not None
    assert found["spec"]["holderIdentity"] == f"team/robbed/{pod['metadata']['uid']}"


def test_lease_edited_by_hand_is_read_by_its_name(stage: ReconcilerHarness, node: str) -> None:
    """Annotations that contradict the Lease's name are written anew from the name and the bound pod."""
    stage.run_pod("edited", node, 2)
    body = {"metadata": {"annotations": {names.LEASE_DEVICE_ID: "7"}}, "spec": {"holderIdentity": "nonsense"}}
    stage.do("PATCH", f"{LEASES}/gpu-{node}-2", body, identity="controllers", kind=MERGE)

    def is_repaired() -> bool:
        found = stage.lease(node, 2) or {"metadata": {"annotations": {}}, "spec": {"holderIdentity": ""}}
        is_device = found["metadata"]["annotations"].get(names.LEASE_DEVICE_ID) == "2"
        return is_device and found["spec"]["holderIdentity"].startswith("team/edited/")

    stage.until(is_repaired, "the Lease says again what it should")


def test_release_wakes_exactly_the_pod_that_fits(stage: ReconcilerHarness, node: str) -> None:
    """The woken pod carries the version of the very Lease deletion that made room for it; the others sleep on."""
    where = {"nodeSelector": {"kubernetes.io/hostname": node}}
    stage.do("PATCH", f"/api/v1/nodes/{node}", {"metadata": {"labels": where["nodeSelector"]}}, kind=MERGE)
    for device_id in range(8):
        stage.run_pod(f"full-{device_id}", node, device_id)
    stage.create_pod("waits-for-one", 1, **where)
    stage.create_pod("waits-for-eight", 8, **where)
    for name in ("waits-for-one", "waits-for-eight"):
        stage.reject(name)
    before = int(stage.do("GET", f"{LEASES}?limit=1")["metadata"]["resourceVersion"])
    stage.end("full-4", node)
    stage.until(lambda: names.WOKEN in stage.pod("waits-for-one")["metadata"].get("annotations", {}), "it is woken")
    generation = int(stage.pod("waits-for-one")["metadata"]["annotations"][names.WOKEN])
    after = int(stage.do("GET", f"{LEASES}?limit=1")["metadata"]["resourceVersion"])
    assert before < generation <= after
    stage.until(lambda: stage.events(names.REASON_POD_WOKEN, "waits-for-one"), "the event tells why")
    assert names.WOKEN not in stage.pod("waits-for-eight")["metadata"].get("annotations", {})
    stage.until(lambda: stage.events(names.REASON_WAITING, "waits-for-eight"), "the other is told what is missing")


def test_claim_tells_who_has_what(stage: ReconcilerHarness, node: str) -> None:
    """The status counts the pods of this very claim and names their GPUs."""
    body = {"apiVersion": names.API_VERSION, "kind": "GpuClaim", "metadata": {"name": "two"}}
    claim = stage.do("POST", CLAIMS, {**body, "spec": {"devices": {"count": 1}}})
    annotations = {names.CLAIM: "two", names.CLAIM_UID: claim["metadata"]["uid"]}
    pod = stage.create_pod("claimed", annotations=annotations)

    def status() -> dict[str, object]:
        return (stage.get(f"{CLAIMS}/two") or {}).get("status", {})

    stage.until(lambda: status().get("phase") == "Waiting", "the claim waits")
    stage.reserve(pod, node, 1)
    assert stage.bind(pod, node, 1).is_accepted
    stage.until(lambda: status().get("phase") == "Allocated", "the claim is allocated")
    assert status()["allocations"] == [
        {"pod": "claimed", "uid": pod["metadata"]["uid"], "node": node, "ids": [1], "uuids": [f"GPU-{node}-0001"]}
    ]


def test_pod_with_numbers_of_an_earlier_boot_is_evicted(stage: ReconcilerHarness, node: str) -> None:
    """A reboot renumbers the machine: the pod that was told a number is evicted, one that was told a uuid is not."""
    for name, device_id, cuda in (("numbered", 0, "0"), ("named", 1, "")):
        pod = stage.create_pod(name)
        stage.reserve(pod, node, device_id)
        assert stage.bind(pod, node, device_id, cuda=cuda).is_accepted
    stage.report(node, indices=(7, 6, 5, 4, 3, 2, 1, 0))
    stage.until(lambda: "deletionTimestamp" in stage.pod("numbered")["metadata"], "it is evicted")
    stage.until(lambda: stage.events(names.REASON_GPUS_RENUMBERED, "numbered"), "the event tells why")
    assert "deletionTimestamp" not in stage.pod("named")["metadata"]


def test_one_round_by_hand(stage: ReconcilerHarness, node: str) -> None:
    """`--once` leads when nobody else does, looks at everything once, and ends in order."""
    stage.kill_controllers()
    stage.run_pod("lonely", node, 0)
    stage.end("lonely", node)
    try:
        stage.start_controllers("--once", name="once")
        assert stage.cluster.wait_exit("once") == 0
        assert not stage.lease(node, 0)
    finally:
        stage.start_controllers()


def test_loser_of_leadership_stops_and_may_lead_again(stage: ReconcilerHarness, node: str) -> None:
    """Somebody else takes the leader's Lease and dies: the process gave up its term, and begins another one later."""
    terms = stage.terms()
    path = f"{LEASES}/{names.CONTROLLERS_LEADER_LEASE}"
    usurped = {"spec": {"holderIdentity": "usurper", "leaseTransitions": 99}}
    stage.do("PATCH", path, usurped, identity="controllers", kind=MERGE)
    stage.until(lambda: stage.terms() > terms, "the controllers lead again")
    leader = stage.get(path)
    assert leader is not None
    assert leader["spec"]["leaseTransitions"] >= 100  # a machine that stalls costs another term
    stage.run_pod("after", node, 0)
    stage.end("after", node)
    stage.until(lambda: not stage.lease(node, 0), "the new term does its work")
