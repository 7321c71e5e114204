"""GPUs go to another pod only on proof, whatever happens to pod, kubelet, agent or Node.

Every test fills the four GPUs of one machine, ends the holder in a different way, and creates a successor that waits
for these GPUs. The successor must get them in the end, and never while the former container still holds its locks.
"""

from collections.abc import Iterator

import pytest

from atoll.api import names
from tests.e2e.world import RealCluster

pytestmark = pytest.mark.e2e

NODE = "grace"
WHOLE_MACHINE = {"count": 4, "models": ["nvidia-gb200"]}


@pytest.fixture
def holder(world: RealCluster) -> str:
    """Uid of the pod `holder`, which runs on the whole machine; `successor` waits for the same GPUs."""
    world.claim("whole", **WHOLE_MACHINE)
    world.pod("holder", "whole")
    uid: str = world.wait_running("holder")["metadata"]["uid"]
    world.seen("holder")
    world.pod("successor", "whole")
    world.wait_rejected("successor")
    return uid


@pytest.fixture
def paused(world: RealCluster) -> Iterator[list[str]]:
    """Processes that the test has stopped with SIGSTOP; they go on when it ends."""
    processes: list[str] = []
    yield processes
    for process in processes:
        world.cluster.signal(process, "CONT")


def is_in_doubt(world: RealCluster, uid: str) -> bool:
    """Tell whether the controllers marked every Lease of the pod as in doubt."""
    leases = world.leases(uid)
    return len(leases) == 4 and all(names.LEASE_IN_DOUBT in lease["metadata"]["annotations"] for lease in leases)


def assert_nobody_got_them(world: RealCluster, uid: str) -> None:
    """All four Leases are the former pod's, and the successor has no node."""
    assert len(world.leases(uid)) == 4
    assert "nodeName" not in world.get("successor")["spec"]


def assert_successor_takes_over(world: RealCluster, uid: str) -> None:
    """The successor runs on the same GPUs, and no Lease of the former pod is left."""
    world.wait_running("successor")
    world.seen("successor")
    world.check_no_contention()

    assert world.leases(uid) == []


def test_a_pod_that_completes_gives_its_gpus_back_while_it_still_exists(world: RealCluster) -> None:
    """A Succeeded pod holds nothing, though nobody has deleted it."""
    world.claim("whole", **WHOLE_MACHINE)
    world.pod("short", "whole", script="echo done", restartPolicy="Never")
    uid = world.wait_phase("short", "Succeeded")["metadata"]["uid"]
    world.pod("successor", "whole")

    assert_successor_takes_over(world, uid)
    assert world.get("short")["status"]["phase"] == "Succeeded"


def test_a_pod_whose_init_container_failed_gives_its_gpus_back_while_it_still_exists(world: RealCluster) -> None:
    """Its own container never ran and waits for ever by its status; a Job keeps such a pod for days."""
    world.claim("whole", **WHOLE_MACHINE)
    setup = world.container("setup", script="exit 1")
    uid = world.pod("broken", "whole", restartPolicy="Never", initContainers=[setup])["metadata"]["uid"]
    world.wait_phase("broken", "Failed")
    world.pod("successor", "whole")

    assert_successor_takes_over(world, uid)
    assert "waiting" in world.get("broken")["status"]["containerStatuses"][0]["state"]


def test_a_pod_that_kubelet_refuses_gives_its_gpus_back_while_it_still_exists(
    world: RealCluster, paused: list[str]
) -> None:
    """Bound and then refused, because the node changed meanwhile: it never starts, whatever becomes of its object."""
    world.claim("whole", **WHOLE_MACHINE)
    world.cluster.kubectl("label", "node", NODE, "test/room=yes", check=True)
    paused.append(f"kubelet@{NODE}")
    world.cluster.signal(f"kubelet@{NODE}", "STOP")
    uid = world.pod("refused", "whole", nodeSelector={"test/room": "yes"})["metadata"]["uid"]
    world.wait(lambda: "nodeName" in world.get("refused")["spec"], "the pod to be bound")
    world.cluster.kubectl("label", "node", NODE, "test/room-", check=True)
    world.cluster.signal(f"kubelet@{NODE}", "KILL")  # a paused one that went on for a moment might start the pod
    world.cluster.restart_kubelet(NODE)
    world.wait_phase("refused", "Failed")
    world.pod("successor", "whole")

    assert_successor_takes_over(world, uid)
    assert world.get("refused")["status"]["reason"] == "NodeAffinity"


def test_a_graceful_deletion_hands_over_without_overlap(world: RealCluster, holder: str) -> None:
    """The successor starts after the former container has ended."""
    world.delete("holder")

    assert_successor_takes_over(world, holder)


def test_a_forced_deletion_on_a_healthy_node_hands_over_without_overlap(world: RealCluster, holder: str) -> None:
    """The pod is gone from the API at once, its container lives on for a moment, and the successor waits for that."""
    world.delete("holder", force=True)

    assert_successor_takes_over(world, holder)


def test_a_paused_kubelet_keeps_the_gpus_in_doubt(world: RealCluster, holder: str, paused: list[str]) -> None:
    """With nobody to stop the container, its GPUs go to nobody until kubelet is back and has stopped it."""
    paused.append(f"kubelet@{NODE}")
    world.cluster.signal(f"kubelet@{NODE}", "STOP")
    world.delete("holder", force=True)
    world.wait(lambda: is_in_doubt(world, holder), "the GPUs to be in doubt")

    assert_nobody_got_them(world, holder)
    world.cluster.signal(f"kubelet@{NODE}", "CONT")
    assert_successor_takes_over(world, holder)


def test_a_silent_agent_keeps_the_gpus_in_doubt(world: RealCluster, holder: str, paused: list[str]) -> None:
    """Without evidence nothing is freed; when the agent speaks again the successor gets the GPUs."""
    paused.append(f"agent@{NODE}")
    world.cluster.signal(f"agent@{NODE}", "STOP")
    world.delete("holder", force=True)
    world.wait(lambda: is_in_doubt(world, holder), "the GPUs to be in doubt")

    assert_nobody_got_them(world, holder)
    world.cluster.signal(f"agent@{NODE}", "CONT")
    assert_successor_takes_over(world, holder)


def test_a_node_deleted_under_a_running_pod_frees_nothing(world: RealCluster, holder: str) -> None:
    """The Node comes back with the same container running, and its Leases were never gone."""
    before = {lease["metadata"]["uid"] for lease in world.leases(holder)}
    started = world.get("holder")["status"]["containerStatuses"][0]["state"]["running"]["startedAt"]
    world.cluster.kubectl("delete", "node", NODE, check=True)
    world.cluster.restart_kubelet(NODE)
    world.cluster.wait_node_ready(NODE)
    world.installation.restart(f"agent@{NODE}")

    assert {lease["metadata"]["uid"] for lease in world.leases(holder)} == before
    assert "nodeName" not in world.get("successor")["spec"]
    status = world.get("holder")["status"]
    assert status["containerStatuses"][0]["state"]["running"]["startedAt"] == started
    world.delete("holder")
    assert_successor_takes_over(world, holder)


def test_a_pod_set_failed_by_hand_keeps_its_gpus_while_its_container_runs(
    world: RealCluster, holder: str, paused: list[str]
) -> None:
    """A phase that anybody may have written is no proof. Kubelet, once it is back, corrects it or ends the pod."""
    paused.append(f"kubelet@{NODE}")
    world.cluster.signal(f"kubelet@{NODE}", "STOP")
    path = f"/api/v1/namespaces/{world.namespace}/pods/holder/status"
    failed = {"status": {"phase": "Failed"}}
    world.cluster.api.request("PATCH", path, failed, content_type="application/merge-patch+json")
    world.wait(lambda: is_in_doubt(world, holder), "the GPUs to be in doubt")

    assert_nobody_got_them(world, holder)
    world.cluster.signal(f"kubelet@{NODE}", "CONT")
    world.wait(lambda: is_corrected(world) or is_handed_over(world), "kubelet to correct the phase or to end the pod")
    world.delete("holder")
    assert_successor_takes_over(world, holder)


def is_corrected(world: RealCluster) -> bool:
    """Tell whether the holder is no longer said to have failed."""
    return bool(world.get("holder")["status"]["phase"] != "Failed")


def is_handed_over(world: RealCluster) -> bool:
    """Tell whether the successor has a node."""
    return "nodeName" in world.get("successor")["spec"]
