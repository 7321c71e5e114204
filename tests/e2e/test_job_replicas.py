"""Two replicas of the job service over a real PostgreSQL and a real control plane: both answer, one leads."""

import json
import os
import signal
import socket
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from atoll.kube.election import EXIT_STATUS_OVERRUN
from devcluster import DevCluster, DevNodeSpec
from tests.e2e.running_service import NAMESPACE, WAIT_SECONDS, RunningService, wait
from tests.fakes.postgres import postgres
from tests.jobs.test_job_examples import EXAMPLES
from tests.pipelineservice.call_server import CallServer

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).parents[2]


class ServiceReplica(RunningService):
    """A replica, and whether it leads."""

    def __init__(self, cluster: DevCluster, folder: Path, *, database: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        options = ("--outgoing-hosts", '["127.0.0.1"]')
        super().__init__(cluster, folder, database=database, health_port=port, options=options)

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
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServiceReplica, ServiceReplica]]:
    """Two replicas, one database, one cluster with one real node."""
    with postgres() as database, DevCluster.start(f"jobrep-{os.getpid()}", nodes=[DevNodeSpec("worker")]) as cluster:
        cluster.kubectl("apply", "-f", str(REPOSITORY / "deploy/crds"), check=True)
        cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s", check=True)
        cluster.kubectl("apply", "-f", str(EXAMPLES / "priority-classes.yaml"), check=True)
        for namespace in (NAMESPACE, "tenant-other", "atoll-system"):
            cluster.kubectl("create", "namespace", namespace, check=True)
            account = ("get", "serviceaccount", "default", "-n", namespace)
            wait(lambda account=account: cluster.kubectl(*account).returncode == 0, "the default account")
        both = tuple(ServiceReplica(cluster, tmp_path_factory.mktemp(name), database=database) for name in ("a", "b"))
        for one in both:
            one.start()
        yield both[0], both[1]
        for one in both:
            if one.process is not None and one.process.poll() is None:
                one.kill()


def leader_first(replicas: Sequence[ServiceReplica]) -> tuple[ServiceReplica, ...]:
    """Return the replicas, the leader first; nothing unless exactly one leads."""
    found = tuple(sorted(replicas, key=lambda one: not one.leads()))
    return found if [one.leads() for one in found] == [True, False] else ()


def test_both_answer_one_leads_and_the_other_takes_over(replicas: tuple[ServiceReplica, ServiceReplica]) -> None:
    """A job that the standby was given runs; when the leader is killed, the other goes on with the same Job."""
    leader, standby = wait(lambda: leader_first(replicas), "one leader")
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


def test_a_key_makes_one_job_whichever_replica_is_asked(replicas: tuple[ServiceReplica, ServiceReplica]) -> None:
    """The same request to both replicas makes one job and one Job."""
    file = replicas[0].folder / "once.yaml"
    job = {"name": "once", "job_type": "batch", "container": {"image": "localhost/busybox:1", "command": ["true"]}}
    file.write_text(yaml.safe_dump(job | {"policy": {"priority_class": "normal"}}))
    told = {one.job("submit", "-f", str(file), "--key", "k-1").split()[1] for one in replicas}
    replicas[1].wait("once", "succeeded")

    assert told == {"created", "unchanged"}
    assert len([one for one in replicas[0].objects("once") if one.startswith("job")]) == 1


HELD = "trap 'exit 0' TERM; while [ ! -e /tmp/go ]; do sleep 0.2; done"


def held_pipeline(name: str, server: str) -> dict[str, Any]:
    """Return a pipeline that calls a server before and after two jobs, which run until they are told to go."""
    call = {"method": "POST", "url": server, "body": {}}
    job = {"job_type": "batch", "container": {"image": "localhost/busybox:1", "command": ["/bin/sh", "-c", HELD]}}
    return {
        "name": name,
        "steps": [
            {"name": "before", "step_type": "api_call", "config": call},
            *(
                {"name": one, "step_type": "job", "depends_on": ["before"], "config": {**job}}
                for one in ("left", "right")
            ),
            {"name": "after", "step_type": "api_call", "depends_on": ["left", "right"], "config": call},
            {"name": "end", "step_type": "wait", "depends_on": ["after"], "config": {"duration": "1s"}},
        ],
    }


def run_of(service: ServiceReplica, name: str) -> Any:
    """Return the newest run of a pipeline."""
    return json.loads(service.atoll("pipeline", "show", name, "-o", "json"))


def pods_of(service: ServiceReplica, name: str) -> list[str]:
    """Return the pods of the jobs of a pipeline that run."""
    listed = ("get", "pods", "-n", NAMESPACE, "--field-selector=status.phase=Running", "-o", "name")
    words = service.cluster.kubectl(*listed, check=True).stdout.split()
    return [one for one in words if one.startswith(f"pod/{name}-")]


def begin_held(service: ServiceReplica, name: str, server: str) -> None:
    """Begin a run, and wait until both its jobs run."""
    file = service.folder / f"{name}.json"
    file.write_text(json.dumps(held_pipeline(name, server)))
    service.atoll("pipeline", "apply", "-f", str(file))
    service.atoll("pipeline", "run", name)
    wait(lambda: len(pods_of(service, name)) == 2, "both jobs to run")


def let_go(service: ServiceReplica, name: str) -> dict[str, str]:
    """Let the jobs of a run end, wait for its end; return the state of each step and how often it was tried."""
    for pod in pods_of(service, name):
        service.cluster.kubectl("exec", "-n", NAMESPACE, pod, "--", "touch", "/tmp/go", check=True)
    run = wait(lambda: (found := run_of(service, name))["completed_at"] and found, "the run to end")
    assert run["status"] == "succeeded", run["message"]
    return {one["name"]: f"{one['status']}, try {one['attempt']}" for one in run["steps"]}


ONCE = dict.fromkeys(("before", "left", "right", "after", "end"), "succeeded, try 1")


BLOWS = [
    pytest.param(signal.SIGKILL, id="killed"),
    pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.long),
]


@pytest.mark.parametrize("blow", BLOWS)
def test_a_run_goes_on_when_its_leader_does_not(
    replicas: tuple[ServiceReplica, ServiceReplica], blow: signal.Signals
) -> None:
    """The standby takes the run over and ends it. A leader that was only stopped ends itself when it wakes up, and does
    nothing again: each call was made once, and each job exists once."""
    name = blow.name.lower()
    leader, standby = wait(lambda: leader_first(replicas), "one leader")
    with CallServer() as server:
        begin_held(leader, name, server.url)
        assert leader.process is not None
        leader.process.send_signal(blow)
        struck = time.monotonic()
        wait(standby.leads, "the standby to lead")
        took_over = time.monotonic() - struck
        states = let_go(standby, name)
        leader.process.send_signal(signal.SIGCONT)
        status = leader.process.wait(WAIT_SECONDS)
        leader.start()
        wait(lambda: leader.metric("atoll_jobs_leading") == 0.0, "the old leader to stand by")
        begin_held(leader, f"{name}-later", server.url)
        later = let_go(leader, f"{name}-later")
        keys = Counter(server.calls)
    print(f"{blow.name}: the standby led after {took_over:.1f} s")
    jobs = standby.cluster.kubectl("get", "jobs", "-n", NAMESPACE, "-o", "name", check=True).stdout.split()

    assert status == (EXIT_STATUS_OVERRUN if blow is signal.SIGSTOP else -blow)
    assert states == later == ONCE
    assert sorted(keys.values()) == [1, 1, 1, 1]
    assert len([one for one in jobs if one.startswith(f"job.batch/{name}-")]) == 4
    assert standby.leads()
