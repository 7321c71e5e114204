"""The job service on a real control plane with a real kubelet: jobs run, end, and survive the service.

All requests use the command line, with tokens that the API server verifies.
"""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster import DevCluster, DevNodeSpec
from tests.e2e.running_service import NAMESPACE, RunningService, wait
from tests.jobs.test_job_examples import EXAMPLES
from tests.worker.s3_server import BUCKET, SECRET_KEY, s3_server

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    """A control plane with Atoll's kinds and one real node."""
    with DevCluster.start(f"jobsvc-{os.getpid()}", nodes=[DevNodeSpec("worker")]) as cluster:
        cluster.kubectl("apply", "-f", str(REPOSITORY / "deploy/crds"), check=True)
        cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s", check=True)
        cluster.kubectl("apply", "-f", str(EXAMPLES / "priority-classes.yaml"), check=True)
        for namespace in (NAMESPACE, "tenant-other", "atoll-system"):
            cluster.kubectl("create", "namespace", namespace, check=True)
            account = ("get", "serviceaccount", "default", "-n", namespace)
            wait(lambda account=account: cluster.kubectl(*account).returncode == 0, "the default account")
        yield cluster


@pytest.fixture(scope="module")
def service(cluster: DevCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A service with an empty database, which archives logs in a real bucket and keeps tenants apart in another."""
    folder = tmp_path_factory.mktemp("service")
    (folder / "render.yaml").write_text("tenant_prefixes: ['s3://runs/{tenant}/']\n")
    options = ("--render", folder / "render.yaml", "--log-archive", f"s3://{BUCKET}/logs/{{tenant}}/")
    with s3_server(tmp_path_factory.mktemp("s3")) as variables:
        service = RunningService(cluster, folder, options=options, variables=variables)
        service.start()
        yield service
        service.kill()


def test_a_job_runs_and_its_output_is_shown(service: RunningService) -> None:
    """A batch is submitted, runs on a real node, succeeds; its log is printed, and its history told."""
    said = service.submit("greet", "echo hello from $ATOLL_JOB_NAME")
    service.wait("greet", "succeeded")
    shown, listed = service.job("show", "greet"), service.job("list")

    assert re.fullmatch(r"job/greet created \([0-9a-f-]{36}\)\n", said)
    assert service.job("logs", "greet") == "hello from greet\n"
    assert [what for what in ("create", "submit", "admit", "run", "succeed") if what in shown][-1] == "succeed"
    assert "system:serviceaccount:tenant-acme:default" in shown
    assert re.search(r"^greet +succeeded +batch +acme +0 ", listed, re.MULTILINE)


def test_the_page_does_what_it_says(service: RunningService) -> None:
    """The job and the commands of docs/job-service.md, line by line."""
    section = (REPOSITORY / "docs/job-service.md").read_text().split("## Submit jobs")[1].split("\n## ")[0]
    job, commands = (re.findall(rf"```{kind}\n(.*?)```", section, re.DOTALL)[0] for kind in ("yaml", "sh"))
    (service.folder / "hello.yaml").write_text(job.replace("busybox:1", "localhost/busybox:1"))
    lines = [line.removeprefix("atoll job ").split() for line in commands.splitlines() if line.startswith("atoll job ")]
    told = []
    for words in lines:
        if words[0] in ("logs", "cancel"):
            service.wait("hello", "running")
        told.append(service.job(*(str(service.folder / word) if word == "hello.yaml" else word for word in words)))

    assert [words[0] for words in lines] == ["submit", "list", "show", "logs", "cancel"]
    assert told[3] == "hello\n"
    assert told[4] == "job/hello cancelled\n"


def test_commands_run_in_a_container_with_and_without_a_terminal(service: RunningService) -> None:
    """The output and the exit status are the command's; a terminal has this one's size and gets what is typed."""
    service.submit("open", "sleep 1000")
    service.wait("open", "running")
    printed = service.job("exec", "open", "--", "sh", "-c", "echo $ATOLL_JOB_NAME")
    service.job("exec", "open", "--", "sh", "-c", "exit 3", status=3)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    command = [sys.executable, "-m", "atollctl", "job", "exec", "-it", "open", "--", "sh", "-c"]
    script = "echo ready; read word; stty size; echo got $word; exit 4"
    environment = os.environ | service.environment(NAMESPACE)
    with subprocess.Popen([*command, script], stdin=slave, stdout=slave, stderr=slave, env=environment) as process:
        os.close(slave)
        shown = b""
        while b"ready" not in shown:
            shown += os.read(master, 4096)
        os.write(master, b"hello\r")
        while b"got hello" not in shown:
            shown += os.read(master, 4096)
        status = process.wait(60)
    os.close(master)

    assert printed == "open\n"
    assert b"40 120" in shown
    assert status == 4
    service.job("cancel", "open", "--wait")


def test_other_tenants_see_nothing(service: RunningService) -> None:
    """Another tenant's account neither sees the job nor learns that it is there; a stranger's token is nobody's."""
    service.submit("secret", "sleep 1000")
    service.wait("secret", "running")
    (service.folder / "stranger").write_text("nonsense")

    assert service.job("show", "secret", by="tenant-other", status=1) == "there is no job secret\n"
    assert service.job("cancel", "secret", by="tenant-other", status=1) == "there is no job secret\n"
    assert "does not know the token" in service.job("list", by="stranger", status=1)
    service.job("cancel", "secret", "--wait")


def test_logs_outlive_their_pods(service: RunningService) -> None:
    """SYN-3: what a real kubelet had of a job that was cancelled is in a real bucket, and is printed from there; to
    nobody of another tenant. Neither log nor record of the service has a credential of the bucket."""
    service.submit("chatty", "echo one; echo two; sleep 1000")
    service.wait("chatty", "running")
    wait(lambda: "two" in service.job("logs", "chatty"), "its lines")
    service.job("cancel", "chatty", "--wait")
    shown = service.job("show", "chatty")
    job_id = re.findall(r"^Id: +(\S+)", shown, re.MULTILINE)[0]

    assert service.objects("chatty") == []
    assert service.job("logs", "chatty") == "one\ntwo\n"
    assert service.job("logs", "chatty", "--tail", "1") == "two\n"
    assert f"s3://{BUCKET}/logs/acme/{job_id}/1/" in shown
    assert service.job("logs", "chatty", by="tenant-other", status=1) == "there is no job chatty\n"
    assert SECRET_KEY not in service.log.read_text() + service.job("show", "chatty", "-o", "json")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"ext_ml_model_registry_uri": "s3://runs/other/model/"}, "belongs to tenant other"),
        (
            {"ext_ml_checkpoint_enabled": True, "ext_ml_checkpoint_storage_uri": "s3://runs/other/tune/"},
            "belongs to tenant other, and this job is of tenant acme; name a place below s3://runs/acme/",
        ),
        ({"namespace": "tenant-other"}, "jobs of tenant acme are in tenant-acme"),
        ({"tenant_id": "other"}, "may not create jobs in tenant other"),
    ],
)
def test_a_job_that_names_what_is_another_tenants_is_refused(
    service: RunningService, fields: dict[str, Any], told: str
) -> None:
    """TEN-1: prefix, namespace and tenant, by the service that runs; nothing is recorded or created."""
    file = service.folder / "thief.yaml"
    job = {"name": "thief", "job_type": "training", "container": {"image": "localhost/busybox:1"}} | fields
    file.write_text(yaml.safe_dump(job))

    assert told in service.job("submit", "-f", str(file), status=1)
    assert service.job("show", "thief", status=1) == "there is no job thief\n"


def test_a_secret_of_another_tenant_is_none_of_a_jobs(service: RunningService) -> None:
    """TEN-1: a name leads into the job's own namespace only, where there is no such Secret; the job of the tenant whose
    it is gets it. Each job may save below the prefix of its own tenant only."""
    create = ("create", "secret", "generic", "wandb", "-n", "tenant-other", "--from-literal=token=hush")
    service.cluster.kubectl(*create, check=True)
    entry = {"name": "TOKEN", "secret": {"name": "wandb", "key": "token"}}
    script = "echo $TOKEN; echo $ATOLL_CHECKPOINT_PREFIXES"
    image = {"image": "localhost/busybox:1", "command": ["/bin/sh", "-c", script], "env": [entry]}
    saves = {"ext_ml_checkpoint_enabled": True}
    service.submit("thief", "", container=image)
    wait(lambda: "not found" in service.job("show", "thief"), "the missing Secret")
    shown = service.job("show", "thief")
    service.job("cancel", "thief", "--wait")
    file = service.folder / "owner.yaml"
    own = {"name": "owner", "job_type": "training", "container": image, **saves}
    file.write_text(yaml.safe_dump(own | {"ext_ml_checkpoint_storage_uri": "s3://runs/other/owner/"}))
    service.job("submit", "-f", str(file), by="tenant-other")
    wait(lambda: "Status:       succeeded" in service.job("show", "owner", by="tenant-other"), "its end")

    assert re.search(r'CreateContainerConfigError secret "wandb" not found', shown)
    assert service.job("logs", "owner", by="tenant-other") == "hush\ns3://runs/other/\n"


def test_a_job_whose_pods_cannot_be_created_says_why(service: RunningService, cluster: DevCluster) -> None:
    """Only an event of its Job tells what the API server answered; once it takes pods, the job runs."""
    cluster.kubectl("create", "quota", "none", "--hard=pods=0", "-n", NAMESPACE, check=True)
    service.submit("crowded", "true")
    why = r"its pods cannot be created: .* exceeded quota: none"
    wait(lambda: re.search(why, service.job("show", "crowded")), "the reason")
    cluster.kubectl("delete", "quota", "none", "-n", NAMESPACE, check=True)
    service.wait("crowded", "succeeded")


def test_a_cancelled_job_leaves_nothing(service: RunningService) -> None:
    """When a job is said to be cancelled, its Job and its pods are gone from the cluster."""
    service.submit("endless", "trap 'exit 0' TERM; while :; do sleep 1 & wait $!; done")
    service.wait("endless", "running")
    running = service.objects("endless")
    told = service.job("cancel", "endless", "--wait")

    assert len(running) == 2
    assert told == "job/endless cancelled\n"
    assert service.objects("endless") == []
    assert "there is nothing left to cancel" not in service.job("cancel", "endless")


def test_jobs_outlive_the_service(service: RunningService) -> None:
    """The service is killed while jobs run and one is being cancelled; started again, it knows what became of them."""
    service.submit("steady", "sleep 1000")
    service.submit("short", "while [ ! -e /tmp/never ]; do sleep 1; n=$((n+1)); [ $n -gt 8 ] && exit 0; done")
    service.submit("doomed", "trap '' TERM; sleep 1000")
    for name in ("steady", "short", "doomed"):
        service.wait(name, "running")
    uid = ("get", "job", "steady", "-n", NAMESPACE, "-o", "jsonpath={.metadata.uid}")
    before = service.cluster.kubectl(*uid, check=True).stdout
    service.job("cancel", "doomed")
    service.kill()
    done = ("wait", "job/short", "-n", NAMESPACE, "--for=condition=Complete", "--timeout=120s")
    service.cluster.kubectl(*done, check=True)
    service.start()
    service.wait("short", "succeeded")
    service.wait("doomed", "cancelled")

    assert service.status("steady") == "running"
    assert service.cluster.kubectl(*uid, check=True).stdout == before
    assert service.objects("doomed") == []
    service.job("cancel", "steady", "--wait")


def test_a_failed_job_is_tried_again_by_hand(service: RunningService) -> None:
    """A program's own failure ends the job with its exit code; a retry is a new try with a new Job."""
    service.submit("broken", "exit 3")
    service.wait("broken", "failed")
    shown = service.job("show", "broken")
    told = service.job("retry", "broken")
    wait(lambda: "Try:          2;" in service.job("show", "broken"), "the second try")
    service.wait("broken", "failed")

    assert "Error (exit code 3)" in shown
    assert told == "job/broken is retried (attempt 2)\n"


def test_an_object_deleted_by_hand_is_missed(service: RunningService) -> None:
    """Whoever deletes the Job with kubectl ends the job, and it says so."""
    service.submit("lost", "sleep 1000")
    service.wait("lost", "running")
    service.cluster.kubectl("delete", "job", "lost", "-n", NAMESPACE, "--grace-period=1", check=True)
    service.wait("lost", "failed")

    assert "the service did not delete" in service.job("show", "lost")
