"""The control plane changes under running parts: its certificate authority is replaced, etcd is restored from a backup.

Real kubelets. kube-scheduler and kubelets are restarted, as Kubernetes asks; no part of Atoll is.
"""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from atoll.api import names
from atoll.kube.mirror import AUDIT_REFUSALS
from devcluster import DevCluster, DevNodeSpec
from devcluster.installation import Installation
from devcluster.maintenance import back_up_etcd, replace_certificate_authority, restore_etcd
from tests.e2e.world import RealCluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

NODES = tuple(DevNodeSpec(name, profile="dgx-h100") for name in ("hopper", "grace", "lovelace"))
PATIENT = ("--lease-duration-seconds", "300", "--renew-deadline-seconds", "240", "--retry-seconds", "0.5")
"""A leader that outlives an API server which is away: it would otherwise end itself, as it must."""
OPTIONS = {"agent": ("--poll-seconds", "2", "--heartbeat-seconds", "5"), "controllers": PATIENT}
VERSIONS_LOST_MAX = 6000
GONE_BACK = "Versions have gone back"
LATE = 20
"""Pods that are bound after the backup; with the one before it they fill all but three of the 24 GPUs."""


@pytest.fixture(scope="module")
def installed() -> Iterator[Installation]:
    """A cluster of its own, since everything else would lose what it wrote."""
    with DevCluster.start(f"plane-{uuid4().hex[:6]}", nodes=NODES, scheduler=False) as cluster:
        installation = Installation(cluster, options=OPTIONS)
        installation.install()
        yield installation


@pytest.fixture
def world(installed: Installation) -> Iterator[RealCluster]:
    """A namespace for one test; afterwards its pods are gone and the audit finds nothing."""
    with RealCluster.of_one_test(installed) as world:
        yield world


def processes(installed: Installation) -> dict[str, int]:
    """Return the running processes of Atoll's parts: name and process id."""
    running = installed.cluster.processes()
    return {name: running[name].pid for name in installed.parts if running[name].running}


def agent_of(node: DevNodeSpec) -> str:
    """Return the name of a node's agent."""
    return f"agent@{node.name}"


def count_logged(world: RealCluster, part: str, message: str) -> int:
    """Return how often a part of Atoll has logged the message."""
    return "\n".join(world.installation.log_lines(part)).count(message)


def wait_logged(world: RealCluster, message: str) -> None:
    """Wait until every part of Atoll has logged the message."""
    for part in world.installation.parts:
        world.wait(lambda part=part: count_logged(world, part, message), f"{part} to log {message!r}")


def test_another_authority_is_trusted_without_a_restart(installed: Installation, world: RealCluster) -> None:
    """Server certificate, CA and kubeconfigs are replaced on disk: every part reloads them and works on."""
    world.claim("one", 1)
    world.pod("before", "one")
    world.wait_running("before")
    started = processes(installed)
    assert started.keys() == installed.parts.keys()

    replace_certificate_authority(installed.cluster)
    installed.start_scheduler()

    wait_logged(world, "Reloaded changed credentials")
    world.pod("after", "one")
    world.wait_running("after")
    world.delete("before")
    world.wait(lambda: len(world.leases()) == 1, "the GPU of the deleted pod to be released")
    assert processes(installed) == started


def test_no_gpu_is_used_twice_after_etcd_was_restored(
    installed: Installation, world: RealCluster, tmp_path: Path
) -> None:
    """The API server has forgotten 20 pods whose containers run on, and the kubelets hang: nobody gets these GPUs until
    the kubelets have ended the containers, and the pods that wait are told why."""
    world.claim("one", 1)
    world.pod("kept", "one")
    world.wait_running("kept")
    back_up_etcd(installed.cluster, tmp_path / "backup")
    installed.start_scheduler()
    for number in range(LATE):
        world.pod(f"late-{number}", "one")
    for number in range(LATE):
        world.wait_running(f"late-{number}")
    started = processes(installed)
    for node in installed.cluster.nodes:
        installed.cluster.signal(f"kubelet@{node.name}", "STOP")

    restore_etcd(installed.cluster, tmp_path / "backup")
    installed.cluster.signal("kube-controller-manager", "STOP")  # or it would taint the nodes of kubelets that hang
    installed.start_scheduler()
    assert [pod["metadata"]["name"] for pod in world.pods()] == ["kept"]
    for number in range(LATE):
        world.pod(f"next-{number}", "one")
    wait_logged(world, GONE_BACK)
    world.wait(lambda: any(reason in world.message("next-0") for reason in AUDIT_REFUSALS), "the reason")
    assert len(world.leases()) == 1
    installed.cluster.signal("kube-controller-manager", "CONT")
    for node in installed.cluster.nodes:
        installed.cluster.restart_kubelet(node.name)

    for number in range(LATE):
        world.wait_running(f"next-{number}")
    world.check_no_contention()
    assert len({lease["metadata"]["name"] for lease in world.leases()}) == LATE + 1
    assert set(world.seen("kept").nvidia) == set(world.allocation("kept").uuids)
    assert processes(installed) == started


def test_a_restored_etcd_whose_versions_are_ahead_is_noticed_too(
    installed: Installation, world: RealCluster, tmp_path: Path
) -> None:
    """As after `etcdutl snapshot restore --bump-revision`: only objects of the past show it. The extender is started
    anew on top and remembers nothing. Containers that the API server has forgotten run on beside hanging kubelets, and
    nobody gets their GPUs."""
    world.claim("eight", 8)
    world.claim("one", 1)
    world.pod("kept", "one")
    world.wait_running("kept")
    back_up_etcd(installed.cluster, tmp_path / "backup")
    installed.start_scheduler()
    for name in ("late-0", "late-1"):
        world.pod(name, "eight")
        world.wait_running(name)
    for node in installed.cluster.nodes:
        installed.cluster.signal(f"kubelet@{node.name}", "STOP")
    noticed = {part: count_logged(world, part, GONE_BACK) for part in ("controllers", *map(agent_of, NODES))}

    restore_etcd(installed.cluster, tmp_path / "backup", raise_versions_by=VERSIONS_LOST_MAX)
    installed.cluster.signal("kube-controller-manager", "STOP")
    installed.restart("extender")
    installed.start_scheduler()
    world.pod("next-0", "eight")
    for part, count in noticed.items():
        world.wait(lambda part=part, count=count: count_logged(world, part, GONE_BACK) > count, f"{part} to notice")
    world.wait(lambda: names.REJECT_UNKNOWN_POD in world.message("next-0"), "the reason")
    installed.cluster.signal("kube-controller-manager", "CONT")
    for node in installed.cluster.nodes:
        installed.cluster.restart_kubelet(node.name)

    world.wait_running("next-0")
    world.check_no_contention()
