"""Two replicas of the job service over a real PostgreSQL and a real control plane: both answer, one leads."""

import os
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from devcluster import DevCluster, DevNodeSpec
from tests.e2e.running_service import NAMESPACE, RunningService, wait
from tests.fakes.postgres import postgres
from tests.jobs.test_job_examples import EXAMPLES

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).parents[2]


class Replica(RunningService):
    """A replica, and whether it leads."""

    def __init__(self, cluster: DevCluster, folder: Path, *, database: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        super().__init__(cluster, folder, database=database, health_port=port)

    def metric(self, name: str) -> float:
        """Return a metric of this replica; -1 while it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.health_port}/metrics", timeout=5) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return -1.0
        return float(next(line.split()[-1] for line in lines if line.startswith(f"{name} ")))

    def leads(self) -> bool:
        """Return whether it leads now."""
        return self.metric("atoll_jobs_leading") == 1.0


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Replica, Replica]]:
    """Two replicas, one database, one cluster with one real node."""
    with postgres() as database, DevCluster.start(f"jobrep-{os.getpid()}", nodes=[DevNodeSpec("worker")]) as cluster:
        cluster.kubectl("apply", "-f", str(REPOSITORY / "deploy/crds"), check=True)
        cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s", check=True)
        cluster.kubectl("apply", "-f", str(EXAMPLES / "priority-classes.yaml"), check=True)
        for namespace in (NAMESPACE, "tenant-other", "atoll-system"):
            cluster.kubectl("create", "namespace", namespace, check=True)
            account = ("get", "serviceaccount", "default", "-n", namespace)
            wait(lambda account=account: cluster.kubectl(*account).returncode == 0, "the default account")
        both = tuple(Replica(cluster, tmp_path_factory.mktemp(name), database=database) for name in ("a", "b"))
        for one in both:
            one.start()
        yield both[0], both[1]
        for one in both:
            if one.process is not None and one.process.poll() is None:
                one.kill()


def test_both_answer_one_leads_and_the_other_takes_over(replicas: tuple[Replica, Replica]) -> None:
    """A job that the standby was given runs; when the leader is killed, the other goes on with the same Job."""
    wait(lambda: sum(one.leads() for one in replicas) == 1, "one leader")
    leader, standby = sorted(replicas, key=lambda one: not one.leads())
    standby.submit("steady", "sleep 1000")
    leader.wait("steady", "running")
    uid = ("get", "job", "steady", "-n", NAMESPACE, "-o", "jsonpath={.metadata.uid}")
    before = leader.cluster.kubectl(*uid, check=True).stdout
    leaders = sum(one.leads() for one in replicas)
    leader.kill()
    wait(standby.leads, "the standby to lead")
    standby.submit("later", "exit 0")
    standby.wait("later", "succeeded")
    after = standby.cluster.kubectl(*uid, check=True).stdout
    leader.start()
    wait(lambda: leader.metric("atoll_jobs_leading") == 0.0, "the old leader to stand by")
    told = leader.job("cancel", "steady", "--wait")

    assert leaders == 1
    assert before == after
    assert told == "job/steady cancelled\n"
    assert standby.leads()


def test_a_key_makes_one_job_whichever_replica_is_asked(replicas: tuple[Replica, Replica]) -> None:
    """The same request to both replicas makes one job and one Job."""
    file = replicas[0].folder / "once.yaml"
    job = {"name": "once", "job_type": "batch", "container": {"image": "localhost/busybox:1", "command": ["true"]}}
    file.write_text(yaml.safe_dump(job | {"policy": {"priority_class": "normal"}}))
    told = {one.job("submit", "-f", str(file), "--key", "k-1").split()[1] for one in replicas}
    replicas[1].wait("once", "succeeded")

    assert told == {"created", "unchanged"}
    assert len([one for one in replicas[0].objects("once") if one.startswith("job")]) == 1
