"""The controllers as a process, under their own identity and the shipped policies, against a real API server."""

import os
from collections.abc import Iterator

import pytest

from atoll.api import names
from devcluster import DevCluster
from tests.controllers.reconciler_harness import CLAIMS, LEASES, PODS, REPORTS, ReconcilerHarness
from tests.deploy.requests import MERGE

pytestmark = pytest.mark.e2e

BESIDE = ("beside-first", "beside-second")


@pytest.fixture(scope="module")
def running() -> Iterator[ReconcilerHarness]:
    """A control plane without nodes, and the controllers at work on it."""
    with DevCluster.start(f"controllers-{os.getpid()}", nodes=[], scheduler=False) as cluster:
        yield ReconcilerHarness.setup(cluster)


@pytest.fixture
def node(running: ReconcilerHarness, request: pytest.FixtureRequest) -> str:
    """A machine with eight GPUs of its own for each test."""
    name = request.node.name.replace("_", "-").removeprefix("test-")[:40].strip("-")
    running.add_node(name)
    return name


def test_pod_that_kubelet_ended_frees_its_gpus(running: ReconcilerHarness, node: str) -> None:
    """A terminal pod whose containers all terminated is proof enough: every Lease of it goes at once."""
    running.run_pod("done", node, 0, 1)
    running.end("done", node)
    running.until(lambda: not running.lease(node, 0) and not running.lease(node, 1), "both Leases are gone")


def test_pod_deleted_before_it_was_bound_frees_its_gpus(running: ReconcilerHarness, node: str) -> None:
    """A DELETE event without a node proves that nothing ever ran."""
    running.reserve(running.create_pod("hasty"), node, 3)
    running.force_delete("hasty")
    running.until(lambda: not running.lease(node, 3), "the Lease is gone")


def test_force_deleted_pod_holds_its_gpus_until_the_agent_saw_its_end(running: ReconcilerHarness, node: str) -> None:
    """No report, a live sandbox, kubelet's list: each keeps the GPU; only a later complete report frees it.

    Beside it other pods end, one per report, whose release shows that the controllers have weighed that report.
    """
    pod = running.run_pod("forced", node, 0)
    uid = pod["metadata"]["uid"]
    first, second = (
        running.run_pod(name, node, number)["metadata"]["uid"] for number, name in enumerate(BESIDE, start=1)
    )
    everybody = (uid, first, second)
    running.report(node, live=everybody, listed=everybody)
    for name in ("forced", *BESIDE):
        running.force_delete(name)
    running.until(
        lambda: names.LEASE_IN_DOUBT in (running.lease(node, 0) or pod)["metadata"]["annotations"], "marked in doubt"
    )
    running.report(node, live=(uid, second))
    running.until(lambda: not running.lease(node, 1), "the first pod beside it is released")
    assert running.lease(node, 0), "a live pod was released"
    running.report(node, listed=(uid,))
    running.until(lambda: not running.lease(node, 2), "the second pod beside it is released")
    assert running.lease(node, 0), "a listed pod was released"
    running.until(lambda: running.events(names.REASON_GPUS_IN_DOUBT, node), "the node's event tells it")
    running.report(node)
    running.until(lambda: not running.lease(node, 0), "the Lease is gone after the report without the pod")


def test_pod_failed_by_hand_holds_its_gpus(running: ReconcilerHarness, node: str) -> None:
    """Somebody sets the phase; the container runs on, so the agent's word counts and not the phase."""
    pod = running.run_pod("victim", node, 0)
    uid = pod["metadata"]["uid"]
    running.report(node, live=(uid,), listed=(uid,))
    running.do("PATCH", f"{PODS}/victim/status", {"status": {"phase": "Failed"}}, kind=MERGE)
    running.report(node, live=(uid,))
    running.until(
        lambda: names.LEASE_IN_DOUBT in (running.lease(node, 0) or pod)["metadata"]["annotations"], "marked in doubt"
    )
    running.report(node)
    running.until(lambda: not running.lease(node, 0), "released after the agent saw it end")


def test_deletion_missed_by_everybody_is_looked_up_and_asked_for(running: ReconcilerHarness, node: str) -> None:
    """The pod goes while the controllers are dead: they look it up, ask the agent, and need two reports past that."""
    running.run_pod("missed", node, 0)
    running.report(node)
    running.kill_controllers()
    running.force_delete("missed")
    running.start_controllers()

    def wanted() -> str:
        found = running.get(f"{REPORTS}/{node}") or {}
        return str(found["metadata"].get("annotations", {}).get(names.EVIDENCE_WANTED, ""))

    running.until(wanted, "the agent is asked")
    running.report(node)
    assert running.lease(node, 0), "one report is not enough for a pod that was never seen"
    running.report(node)
    running.until(lambda: not running.lease(node, 0), "two reports are")


def test_expired_reservation_is_taken_back_behind_a_fence(running: ReconcilerHarness, node: str) -> None:
    """The Lease goes only after the pod's version moved, so a Binding that was prepared before cannot land."""
    pod = running.create_pod("slow")
    running.reserve(pod, node, 5, deadline_seconds=-60)
    running.until(lambda: not running.lease(node, 5), "the Lease is taken back")
    answer = running.bind(pod, node, 5)
    assert answer.status == 409, f"the late Binding landed on a GPU that was free again: {answer}"


def test_reservation_of_a_pod_that_got_bound_in_time_is_kept(running: ReconcilerHarness, node: str) -> None:
    """A deadline that passed means nothing for a pod that is bound to the device."""
    pod = running.create_pod("just")
    assert running.bind(pod, node, 5).is_accepted
    running.reserve(pod, node, 5, deadline_seconds=-60)
    running.reserve(pod, node, 6, deadline_seconds=-60)
    running.until(lambda: not running.lease(node, 6), "the Lease beside the allocation is gone")
    assert running.lease(node, 5)


def test_lost_lease_of_a_bound_pod_is_written_again(running: ReconcilerHarness, node: str) -> None:
    """The pod's annotation outranks the Lease: whoever deleted it, it is back, under the same holder."""
    pod = running.run_pod("robbed", node, 2)
    running.do("DELETE", f"{LEASES}/gpu-{node}-2", identity="controllers")
    running.until(lambda: running.lease(node, 2), "the Lease is back")
    found = running.lease(node, 2)
    assert found is not None
    assert found["spec"]["holderIdentity"] == f"team/robbed/{pod['metadata']['uid']}"


def test_lease_edited_by_hand_is_read_by_its_name(running: ReconcilerHarness, node: str) -> None:
    """Annotations that contradict the Lease's name are written anew from the name and the bound pod."""
    running.run_pod("edited", node, 2)
    body = {"metadata": {"annotations": {names.LEASE_DEVICE_ID: "7"}}, "spec": {"holderIdentity": "nonsense"}}
    running.do("PATCH", f"{LEASES}/gpu-{node}-2", body, identity="controllers", kind=MERGE)

    def is_repaired() -> bool:
        found = running.lease(node, 2) or {"metadata": {"annotations": {}}, "spec": {"holderIdentity": ""}}
        is_device = found["metadata"]["annotations"].get(names.LEASE_DEVICE_ID) == "2"
        return is_device and found["spec"]["holderIdentity"].startswith("team/edited/")

    running.until(is_repaired, "the Lease says again what it should")


def test_release_wakes_exactly_the_pod_that_fits(running: ReconcilerHarness, node: str) -> None:
    """The woken pod carries the version of the very Lease deletion that made room for it; the others sleep on."""
    where = {"nodeSelector": {"kubernetes.io/hostname": node}}
    running.do("PATCH", f"/api/v1/nodes/{node}", {"metadata": {"labels": where["nodeSelector"]}}, kind=MERGE)
    for device_id in range(8):
        running.run_pod(f"full-{device_id}", node, device_id)
    running.create_pod("waits-for-one", 1, **where)
    running.create_pod("waits-for-eight", 8, **where)
    for name in ("waits-for-one", "waits-for-eight"):
        running.reject(name)
    before = int(running.do("GET", f"{LEASES}?limit=1")["metadata"]["resourceVersion"])
    running.end("full-4", node)
    running.until(lambda: names.WOKEN in running.pod("waits-for-one")["metadata"].get("annotations", {}), "it is woken")
    generation = int(running.pod("waits-for-one")["metadata"]["annotations"][names.WOKEN])
    after = int(running.do("GET", f"{LEASES}?limit=1")["metadata"]["resourceVersion"])
    assert before < generation <= after
    running.until(lambda: running.events(names.REASON_POD_WOKEN, "waits-for-one"), "the event tells why")
    assert names.WOKEN not in running.pod("waits-for-eight")["metadata"].get("annotations", {})
    running.until(lambda: running.events(names.REASON_WAITING, "waits-for-eight"), "the other is told what is missing")


def test_claim_tells_who_has_what(running: ReconcilerHarness, node: str) -> None:
    """The status counts the pods of this very claim and names their GPUs."""
    body = {"apiVersion": names.API_VERSION, "kind": "GpuClaim", "metadata": {"name": "two"}}
    claim = running.do("POST", CLAIMS, {**body, "spec": {"devices": {"count": 1}}})
    annotations = {names.CLAIM: "two", names.CLAIM_UID: claim["metadata"]["uid"]}
    pod = running.create_pod("claimed", annotations=annotations)

    def status() -> dict[str, object]:
        return (running.get(f"{CLAIMS}/two") or {}).get("status", {})

    running.until(lambda: status().get("phase") == "Waiting", "the claim waits")
    running.reserve(pod, node, 1)
    assert running.bind(pod, node, 1).is_accepted
    running.until(lambda: status().get("phase") == "Allocated", "the claim is allocated")
    assert status()["allocations"] == [
        {"pod": "claimed", "uid": pod["metadata"]["uid"], "node": node, "ids": [1], "uuids": [f"GPU-{node}-0001"]}
    ]


def test_pod_with_numbers_of_an_earlier_boot_is_evicted(running: ReconcilerHarness, node: str) -> None:
    """A reboot renumbers the machine: the pod that was told a number is evicted, one that was told a uuid is not."""
    for name, device_id, cuda in (("numbered", 0, "0"), ("named", 1, "")):
        pod = running.create_pod(name)
        running.reserve(pod, node, device_id)
        assert running.bind(pod, node, device_id, cuda=cuda).is_accepted
    running.report(node, indices=(7, 6, 5, 4, 3, 2, 1, 0))
    running.until(lambda: "deletionTimestamp" in running.pod("numbered")["metadata"], "it is evicted")
    running.until(lambda: running.events(names.REASON_GPUS_RENUMBERED, "numbered"), "the event tells why")
    assert "deletionTimestamp" not in running.pod("named")["metadata"]


def test_one_round_by_hand(running: ReconcilerHarness, node: str) -> None:
    """`--once` leads when nobody else does, looks at everything once, and ends in order."""
    running.kill_controllers()
    running.run_pod("lonely", node, 0)
    running.end("lonely", node)
    try:
        running.start_controllers("--once", name="once")
        assert running.cluster.wait_exit("once") == 0
        assert not running.lease(node, 0)
    finally:
        running.start_controllers()


def test_loser_of_leadership_stops_and_may_lead_again(running: ReconcilerHarness, node: str) -> None:
    """Somebody else takes the leader's Lease and dies: the process gave up its term, and begins another one later."""
    terms = running.terms()
    path = f"{LEASES}/{names.CONTROLLERS_LEADER_LEASE}"
    usurped = {"spec": {"holderIdentity": "usurper", "leaseTransitions": 99}}
    running.do("PATCH", path, usurped, identity="controllers", kind=MERGE)
    running.until(lambda: running.terms() > terms, "the controllers lead again")
    leader = running.get(path)
    assert leader is not None
    assert leader["spec"]["leaseTransitions"] >= 100  # a machine that stalls costs another term
    running.run_pod("after", node, 0)
    running.end("after", node)
    running.until(lambda: not running.lease(node, 0), "the new term does its work")
