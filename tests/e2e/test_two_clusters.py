"""The job service with two real clusters: choice, health, one that fails, draining, and both kinds of removal.

Neither cluster has nodes: jobs are admitted, and their pods wait.
"""

import base64
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster import DevCluster
from tests.e2e.running_service import RunningService, wait
from tests.jobs.test_job_examples import EXAMPLES

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1200)]

REPOSITORY = Path(__file__).parents[2]
OPERATOR = "atoll-system"
TENANT = "tenant-acme"
RULES = {"rules": [{"group": f"system:serviceaccounts:{OPERATOR}", "role": "operator"}]}
SECRET = f"{OPERATOR}/east/kubeconfig"


def prepared(cluster: DevCluster) -> DevCluster:
    """Return a cluster with Atoll's kinds, the priorities, and a tenant's namespace."""
    cluster.kubectl("apply", "-f", str(REPOSITORY / "deploy/crds"), check=True)
    cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s", check=True)
    cluster.kubectl("apply", "-f", str(EXAMPLES / "priority-classes.yaml"), check=True)
    for namespace in (TENANT, OPERATOR):
        cluster.kubectl("create", "namespace", namespace, check=True)
        account = ("get", "serviceaccount", "default", "-n", namespace)
        wait(lambda account=account: cluster.kubectl(*account).returncode == 0, "the default account")
    return cluster


@pytest.fixture(scope="module")
def home() -> Iterator[DevCluster]:
    """The service's own cluster."""
    with DevCluster.start(f"home-{os.getpid()}", scheduler=False) as cluster:
        yield prepared(cluster)


@pytest.fixture
def east(home: DevCluster) -> Iterator[DevCluster]:
    """A second cluster, whose kubeconfig is in a Secret of the first."""
    with DevCluster.start(f"east-{os.getpid()}", scheduler=False) as cluster:
        content = base64.b64encode(cluster.kubeconfig.read_bytes()).decode()
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "east"}, "data": {"kubeconfig": content}}
        home.kubectl("apply", "-n", OPERATOR, "-f", "-", input=json.dumps(secret), check=True)
        yield prepared(cluster)


@pytest.fixture
def service(home: DevCluster, tmp_path: Path) -> Iterator[RunningService]:
    """A service with an empty database and a folder for kubeconfigs."""
    folder = tmp_path / "kubeconfigs"
    folder.mkdir()
    options = ("--kubeconfig-folder", folder)
    service = RunningService(home, tmp_path, rules=RULES, namespaces=(OPERATOR,), options=options)
    service.start()
    yield service
    service.kill()
    home.kubectl("delete", "jobs", "--all", "-n", TENANT, "--wait=false")


def atoll(service: RunningService, *words: str, status: int = 0) -> str:
    """Run `atoll ...` as the operator."""
    return service.atoll(*words, by=OPERATOR, status=status)


def submit(service: RunningService, name: str, cluster: str = "auto", **fields: Any) -> dict[str, Any]:
    """Submit a job without GPUs and return it."""
    job = {"name": name, "job_type": "training", "tenant_id": "acme", "container": {"image": "busybox:1"}} | fields
    file = service.folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(job))
    atoll(service, "job", "submit", "-f", str(file), "--cluster", cluster)
    return shown(service, name)


def shown(service: RunningService, name: str) -> dict[str, Any]:
    """Return a job, wherever it is."""
    found: dict[str, Any] = json.loads(atoll(service, "job", "show", name, "--cluster", "auto", "-o", "json"))
    return found


def health(service: RunningService, name: str) -> dict[str, Any]:
    """Return a cluster."""
    found: dict[str, Any] = json.loads(atoll(service, "cluster", "show", name, "-o", "json"))
    return found


def jobs_in(cluster: DevCluster) -> set[str]:
    """Return the names of the tenant's Jobs in a cluster."""
    return set(cluster.kubectl("get", "jobs", "-n", TENANT, "-o", "name").stdout.replace("job.batch/", "").split())


def test_jobs_go_to_the_better_cluster_and_move_when_it_is_drained(
    service: RunningService, home: DevCluster, east: DevCluster
) -> None:
    """EDGE-1, MC-2, MC-5: the cheaper cluster gets the job and the score sheet says why; drained, it takes no more, its
    job moves and nothing of it stays; then the cluster is removed, and its own Jobs are left alone."""
    atoll(service, "cluster", "register", "local", "--price", "cpu=3", "--region", "eu-west-1")
    atoll(service, "cluster", "register", "east", "--secret", SECRET, "--price", "cpu=1", "--region", "us-east-1")
    wait(lambda: health(service, "east")["is_healthy"], "east to be healthy")
    stored = (service.folder / "jobs.db").read_bytes() + (service.folder / "jobs.db-wal").read_bytes()
    cheap = submit(service, "cheap")
    wait(lambda: shown(service, "cheap")["status"] == "admitted", "the job in east")
    near = submit(service, "near", labels={"compliance": "eu-only"})
    page = atoll(service, "job", "show", "cheap", "--cluster", "auto")
    there = jobs_in(east)
    atoll(service, "cluster", "drain", "east")
    refused = service.folder / "refused.yaml"
    refused.write_text((service.folder / "cheap.yaml").read_text().replace("cheap", "refused"))
    told = atoll(service, "job", "submit", "-f", str(refused), "--cluster", "east", status=1)
    wait(lambda: shown(service, "cheap")["cluster_id"] == "local", "the job to move")
    wait(lambda: shown(service, "cheap")["status"] == "admitted", "the job at home")
    wait(lambda: health(service, "east")["jobs"] == {}, "east to be empty")

    assert (cheap["cluster_id"], near["cluster_id"]) == ("east", "local")
    assert there == {"cheap"}
    assert "COST x0.4" in page
    assert "east*" in page
    assert "is draining" in told
    assert jobs_in(east) == set()
    assert jobs_in(home) == {"cheap", "near"}
    assert "moved from east, which is draining, to local" in atoll(service, "job", "show", "cheap", "--cluster", "auto")
    assert atoll(service, "cluster", "remove", "east") == "cluster/east removed\n"
    assert "east" not in atoll(service, "cluster", "list")
    assert b"client-key-data" not in stored


def test_a_cluster_that_fails_stops_nobody_else(service: RunningService, home: DevCluster, east: DevCluster) -> None:
    """REC-1, EDGE-2: with east gone, jobs at home go on, new ones are chosen to go there, and east is said to be
    unreachable; removed by force its jobs fail, with its name."""
    shutil.copy(east.kubeconfig, service.folder / "kubeconfigs" / "east")
    atoll(service, "cluster", "register", "east", "--file", "east", "--price", "cpu=1")
    atoll(service, "cluster", "register", "local", "--price", "cpu=3")
    wait(lambda: health(service, "east")["is_healthy"], "east to be healthy")
    assert submit(service, "lost")["cluster_id"] == "east"
    wait(lambda: shown(service, "lost")["status"] == "admitted", "the job in east")
    east.stop()
    wait(lambda: not health(service, "east")["is_healthy"], "east to be unreachable")
    second = submit(service, "second")  # before that, what was read of east a moment ago still counts
    wait(lambda: shown(service, "second")["status"] == "admitted", "a job at home")
    service.kill()
    service.start()
    third = submit(service, "third", "local")
    wait(lambda: shown(service, "third")["status"] == "admitted", "another job at home, after a restart")
    rows = {row["cluster"]: row for row in second["choice"]["rows"]}

    assert second["cluster_id"] == third["cluster_id"] == "local"
    assert rows["east"]["excluded"].startswith("does not answer: ")
    assert shown(service, "lost")["status"] == "admitted"
    assert "unreachable" in atoll(service, "cluster", "list")
    assert atoll(service, "cluster", "remove", "east", "--force") == "cluster/east removed; 1 jobs failed\n"
    lost = shown(service, "lost")
    assert (lost["status"], lost["cluster_id"]) == ("failed", "east")
    assert "cluster east was removed by force" in lost["message"]
