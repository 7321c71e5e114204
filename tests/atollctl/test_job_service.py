"""`atoll job submit|list|show|cancel|retry|logs`: output like kubectl's, and messages that say what went wrong."""

import asyncio
import json
import logging
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import structlog
from typer.testing import CliRunner, Result

from atoll.jobs.costs.spans import GpuAccount, GpuFact, TimeUse
from atoll.jobs.states import JobStep
from atollctl import service_client
from atollctl.__main__ import app
from jobs.accounts import observe_gpus
from jobs.database import opened
from jobs.listener import serving
from jobs.log_archive import LogArchive
from jobs.store import change_job, take_step
from tests.jobs.test_queue_file import EXAMPLE as QUEUES
from tests.jobservice.made import after
from tests.jobservice.service import JobService
from tests.worker.test_records import RECORD

JOB = "name: {}\njob_type: batch\ncontainer:\n  image: busybox:1\n"


class Shell:
    """A person at a command line, with a service on this machine."""

    def __init__(self, url: str, service: JobService, folder: Path) -> None:
        self.url, self.service, self.folder = url, service, folder

    def run(self, *words: str, by: str = "ann", status: int = 0, tool: Sequence[str] = ("job",)) -> str:
        """Run `atoll job ...`, or another `tool`, and return what it prints, of errors where some are expected."""
        done = self.invoke(*words, by=by, tool=tool)
        assert done.exit_code == status, done.output
        return done.stdout if status == 0 else done.stderr

    def invoke(self, *words: str, by: str = "ann", tool: Sequence[str] = ("job",)) -> Result:
        """Run a command and return all of what it prints."""
        (self.folder / "token").write_text(by)
        environment = {"ATOLL_JOBS_SERVER": self.url, "ATOLL_JOBS_TOKEN_FILE": str(self.folder / "token")}
        return CliRunner().invoke(app, [*tool, *words], env=environment)

    def submit(self, name: str, more: str = "", **options: Any) -> str:
        """Submit a job from a file."""
        file = self.folder / f"{name}.yaml"
        file.write_text(JOB.format(name) + more)
        return self.run("submit", "-f", str(file), **options)

    def take(self, name: str, *steps: JobStep) -> None:
        """Let a job live."""
        job_id = json.loads(self.run("show", name, "-o", "json"))["id"]
        for asked in steps:
            self.service.database._run(
                lambda session, asked=asked: take_step(session, job_id, asked, now=after(9)), writes=True
            )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, JobService]]:
    """A service on a port, in a thread."""
    database = opened(f"sqlite:///{tmp_path_factory.mktemp('records')}/jobs.db")
    ready, found = threading.Event(), []
    loop = asyncio.new_event_loop()
    ends = asyncio.Event()

    async def serve() -> None:
        service = JobService(database)
        async with service.client, serving(service.app, "127.0.0.1", 0) as port:
            found.append((f"http://127.0.0.1:{port}", service))
            ready.set()
            await ends.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert ready.wait(30)
    yield found[0]
    loop.call_soon_threadsafe(ends.set)
    thread.join(30)
    loop.close()
    database.close()


@pytest.fixture
def shell(served: tuple[str, JobService], tmp_path: Path) -> Iterator[Shell]:
    """A shell, and a service without jobs."""
    url, service = served
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))  # it shares our streams
    yield Shell(url, service, tmp_path)
    service.logs.pods.clear()
    with service.database._engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM jobs")


def test_jobs_are_submitted_and_listed(shell: Shell) -> None:
    """Each line tells one job, newest first, in columns."""
    first, second = shell.submit("tune"), shell.submit("serve", "policy:\n  max_retries: 1\n")
    lines = shell.run("list").splitlines()

    assert re.fullmatch(r"job/tune created \([0-9a-f-]{36}\)\n", first)
    assert second.startswith("job/serve created")
    assert lines[0].split() == ["NAME", "STATUS", "TYPE", "TENANT", "RETRIES", "AGE", "ID", "MESSAGE"]
    assert {line.split()[0] for line in lines[1:]} == {"tune", "serve"}
    assert all(line.split()[1:5] == ["pending", "batch", "acme", "0"] for line in lines[1:])


def test_pages_say_that_there_is_more(shell: Shell) -> None:
    """A list that is cut tells how to see the rest; one without jobs says so."""
    assert shell.run("list") == ""
    for number in range(3):
        shell.submit(f"job-{number}")
    (shell.folder / "token").write_text("ann")
    done = CliRunner().invoke(
        app,
        ["job", "list", "--page-size", "2"],
        env={"ATOLL_JOBS_SERVER": shell.url, "ATOLL_JOBS_TOKEN_FILE": str(shell.folder / "token")},
    )

    assert done.stderr == "2 of 3 jobs: --page 2 shows more\n"
    assert len(done.stdout.splitlines()) == 3
    assert len(json.loads(shell.run("list", "-o", "json"))["items"]) == 3
    assert shell.run("list", "--status", "running") == ""


def test_the_same_key_makes_no_second_job(shell: Shell) -> None:
    """A repeated submit is told to change nothing."""
    file = shell.folder / "tune.yaml"
    file.write_text(JOB.format("tune"))
    first = shell.run("submit", "-f", str(file), "--key", "run-1")
    again = shell.run("submit", "-f", str(file), "--key", "run-1")

    assert again == first.replace("created", "unchanged")


def test_every_mistake_is_a_line_with_its_place(shell: Shell) -> None:
    """The service's words come with file and line, as `atoll job validate` has them."""
    told = shell.submit("tune", "gpus: 2\next_ml_gpu_count: 1000\n", status=1)

    assert f"{shell.folder}/tune.yaml: line 5: gpus: is not known; write ext_ml_gpu_count" in told
    assert "line 6: ext_ml_gpu_count is 1000: may be at most 512" in told


def test_a_job_is_shown_with_its_history(shell: Shell) -> None:
    """What it is, what became of it, and each step; by name or by id."""
    shell.submit("tune")
    shell.take("tune", JobStep.SUBMIT, JobStep.ADMIT, JobStep.RUN)
    shown = shell.run("show", "tune")
    job_id = re.findall(r"^Id: +(\S+)", shown, re.MULTILINE)[0]

    assert re.search(r"^Status: +running$", shown, re.MULTILINE)
    assert re.search(r"^Object: +Job tenant-acme/tune$", shown, re.MULTILINE)
    assert [line.split()[1:3] for line in shown.split("MESSAGE\n")[1].splitlines()] == [
        ["create", "pending"],
        ["submit", "queued"],
        ["admit", "admitted"],
        ["run", "running"],
    ]
    assert shell.run("show", job_id) == shown


def test_a_job_shows_its_last_checkpoint(shell: Shell) -> None:
    """From where a resume would go on."""
    shell.submit("tune")
    job_id = json.loads(shell.run("show", "tune", "-o", "json"))["id"]
    changes = {"last_checkpoint": RECORD.told()}
    shell.service.database._run(
        lambda session: change_job(session, job_id, version=1, now=after(9), changes=changes), writes=True
    )

    assert (
        "Checkpoint:   step 30, epoch 1, loss 0.25; saved 2026-01-02T03:04:05Z to "
        "s3://bucket/run/weights/00000002-000000000000030/\n"
    ) in shell.run("show", "tune")
    assert json.loads(shell.run("show", "tune", "-o", "json"))["last_checkpoint"] == RECORD.told()


def test_jobs_are_cancelled_and_tried_again(shell: Shell) -> None:
    """The words say what happens, and a refusal why not."""
    shell.submit("tune")
    shell.submit("other")
    shell.take("other", JobStep.SUBMIT, JobStep.ADMIT, JobStep.FAIL)

    assert shell.run("cancel", "tune") == "job/tune is being cancelled\n"
    assert "pending (cancelling)" in shell.run("list")
    assert shell.run("retry", "other") == "job/other is retried (attempt 2)\n"
    assert "only a failed job can be retried" in shell.run("retry", "other", status=1)
    assert shell.run("cancel", "nobody", status=1) == "there is no job nobody\n"
    assert shell.run("show", "tune", by="zoe/others", status=1) == "there is no job tune\n"


def test_a_job_is_paused_and_resumed(shell: Shell) -> None:
    """Out of the cluster until somebody resumes it; the words say how far it is."""
    shell.submit("tune")
    shell.take("tune", JobStep.SUBMIT)

    assert shell.run("pause", "tune") == "job/tune is being paused\n"
    assert "are still in the cluster" in shell.run("resume", "tune", status=1)
    shell.take("tune", JobStep.PAUSE)
    assert shell.run("pause", "tune") == "job/tune is paused\n"
    assert shell.run("resume", "tune") == "job/tune is resumed (attempt 2)\n"


def test_usage_and_cost_are_shown(shell: Shell) -> None:
    """A table with a sum, CSV for bills, and the cost of a job beside its estimate."""
    shell.submit("tune", "ext_ml_gpu_count: 1\next_ml_gpu_type: nvidia-h100\nintent: {expected_duration_hint: 3600}\n")
    job_id = json.loads(shell.run("show", "tune", "-o", "json"))["id"]
    now = datetime.now(UTC).replace(microsecond=0)
    account = GpuAccount(namespace="tenant-acme", job_id=job_id, pod_uid="p")
    fact = GpuFact("g0", "n1", "nvidia-h100", TimeUse.USED, account, price_micros=4_000_000)
    for moment in (now - timedelta(hours=1), now):
        shell.service.database._run(
            lambda session, moment=moment: observe_gpus(
                session, "local", {"g0": fact}, moment, tenant_of=lambda _name: "", gap_seconds=10
            ),
            writes=True,
        )
    table = shell.run(tool=("usage",)).splitlines()
    text = shell.run("--by", "user", "-o", "csv", tool=("usage",)).splitlines()

    assert table[0].split() == [
        "TENANT",
        "USED",
        "GPU-H",
        "IDLE",
        "GPU-H",
        "RESERVED",
        "GPU-H",
        "TOTAL",
        "GPU-H",
        "COST",
        "USD",
    ]
    assert [line.split() for line in table[1:]] == [
        ["acme", "1.00", "0.00", "0.00", "1.00", "4.00"],
        ["TOTAL", "1.00", "0.00", "0.00", "1.00", "4.00"],
    ]
    assert text[1] == "ann,1.000000,0.000000,0.000000,,,,,1.000000,4.000000"
    shown = shell.run("show", "tune")
    assert "Estimate:     4.00 USD (3600 s: as intent.expected_duration_hint says; 1 x nvidia-h100" in shown
    assert "Cost:         4.00 USD so far, for 1.00 GPU-hours (0.00 idle)" in shown
    assert "by.0 is 'colour'" in shell.run("--by", "colour", status=1, tool=("usage",))


def test_a_command_runs_in_a_job(shell: Shell) -> None:
    """Its output and its exit status are those of the command."""
    shell.submit("tune")
    told = shell.run("exec", "tune", "--", "sh", "-c", "exit 3", status=3)

    assert told == "warning"
    assert shell.service.commands.asked[-1] == ("sh", "-c", "exit 3")


def test_logs_are_printed_as_they_are(shell: Shell) -> None:
    """Bytes of the container go through; without pods it is said why there are none."""
    shell.submit("tune")
    assert shell.run("logs", "tune", status=1) == "job tune has no pods now: it is pending\n"
    shell.service.logs.pods["tune-0"] = [b"one\n", b"two\n"]

    assert shell.run("logs", "tune", "--tail", "5") == "one\ntwo\n"
    assert shell.service.logs.asked[-1] == ("tune", 5, False)


def test_a_log_of_the_archive_is_printed_alone_and_said_to_be_one(shell: Shell, tmp_path: Path) -> None:
    """Standard output has the log and nothing else; standard error and `show` say where it is."""
    archive = LogArchive(f"file://{tmp_path}/{{tenant}}/", bytes_max=1024, clock=shell.service.clock)
    shell.submit("tune")
    job_id = re.findall(r"^Id: +(\S+)", shell.run("show", "tune"), re.MULTILINE)[0]
    place = Path(archive.place_of("acme", job_id, "1", "tune-0").removeprefix("file://"))
    place.parent.mkdir(parents=True)
    place.write_text("one\ntwo\n")
    kept = {"attempt": 1, "folder": f"file://{place.parent}/", "pods": {"tune-0": ""}, "at": "2026-01-31T12:00:00Z"}
    with shell.service.database._engine.begin() as connection:
        connection.exec_driver_sql("UPDATE jobs SET log_archive = ?", (json.dumps([kept]),))
    shell.service.app.state.parts = replace(shell.service.app.state.parts, archive=archive)
    done = shell.invoke("logs", "tune", "--tail", "1")

    assert (done.stdout, done.exit_code) == ("two\n", 0)
    assert done.stderr == f"the pod is gone: its log as archived in file://{place}\n"
    assert re.search(rf"^Logs: +file://{place.parent}/$", shell.run("show", "tune"), re.MULTILINE)


@pytest.mark.parametrize(
    ("server", "told"),
    [
        ("http://127.0.0.1:1", "cannot reach the job service at http://127.0.0.1:1: "),
        ("http://gpu.example.com", "would receive the token unencrypted: use https"),
        ("ftp://gpu.example.com", "is no URL: write https://HOST:PORT"),
        ("nonsense", "is no URL"),
    ],
)
def test_a_service_that_cannot_be_asked_is_told(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, server: str, told: str
) -> None:
    """Status 2 and one sentence; a token is never sent in clear over a network."""
    monkeypatch.setattr(service_client, "PAUSE_SECONDS", 0.0)
    shell.url = server

    assert told in shell.run("list", status=2)


def test_files_and_tokens_that_cannot_be_read_are_told(shell: Shell) -> None:
    """Whatever is missing is named."""
    assert "cannot read the job" in shell.run("submit", "-f", "/nowhere", status=2)
    assert "holds no token" in shell.run("list", by=" ", status=2)


def test_queues_are_applied_listed_and_shown(shell: Shell) -> None:
    """Each change is a line; a list sums GPUs by queue, and each quota is shown with what is used."""
    queue = ("queue",)
    dry = shell.run("apply", "-f", str(QUEUES), "--dry-run", tool=queue, by="ops")
    done = shell.run("apply", "-f", str(QUEUES), tool=queue, by="ops")
    lines = shell.run("list", tool=queue, by="ops").splitlines()
    shown = shell.run("show", "tenant-globex-queue", tool=queue, by="ops")
    bad = shell.folder / "bad.yaml"
    bad.write_text(QUEUES.read_text().replace("flavor: gpu-t4", "flavor: gpu-t5"))

    assert "ClusterQueue acme-small: is created (dry run)" in dry
    assert "ClusterQueue acme-small: is created\n" in done
    assert lines[0].split()[:4] == ["NAME", "TENANT", "COHORT", "PENDING"]
    assert [line.split()[0] for line in lines[1:4]] == ["tenant-acme-queue", "acme-small", "acme-slices"]
    assert re.search(
        r"^tenant-globex-queue +globex +production +0 +0 +0/212 +0 +unknown", "\n".join(lines), re.MULTILINE
    )
    assert re.search(r"^gpu-a100-80gb +gpu.scheduling/gpu +64 +0 +0 +32", shown, re.MULTILINE)
    assert "is no flavor of this file" in shell.run("apply", "-f", str(bad), tool=queue, by="ops", status=1)
    assert "needs the role operator" in shell.run("apply", "-f", str(QUEUES), tool=queue, by="ann", status=1)


def test_clusters_are_registered_listed_and_drained(shell: Shell) -> None:
    """A cluster's terms and health are lines; whatever the service refuses is a sentence."""
    tool = ("cluster",)
    terms = ("--file", "east", "--region", "eu-west-1", "--price", "nvidia-h100=2.5", "--latency-ms", "20")
    done = shell.run("register", "east", *terms, tool=tool, by="ops")
    listed = shell.run("list", tool=tool, by="ops")
    shown = shell.run("show", "east", tool=tool, by="ops")
    busy = shell.run("remove", "east", tool=tool, by="ops", status=1)
    drained = [shell.run("drain", "east", *more, tool=tool, by="ops") for more in ((), ("--undo",), ())]
    removed = shell.run("remove", "east", "--force", tool=tool, by="ops")

    assert (done, removed) == ("cluster/east registered\n", "cluster/east removed\n")
    assert re.search(r"^east +active +unknown +eu-west-1 ", listed, re.MULTILINE)
    assert "Prices:     nvidia-h100 2.5 USD/h\n" in shown
    assert "drain it first" in busy
    assert drained[1] == "cluster/east takes jobs again\n"
    assert "write GPUTYPE=USD" in CliRunner().invoke(app, ["cluster", "register", "x", "--price", "h100"]).output


def test_a_chosen_cluster_comes_with_its_score_sheet(shell: Shell) -> None:
    """`show` prints a row for each cluster, the chosen one with a star, and says why not the others."""
    shell.run("register", "far", "--file", "far", "--tenant", "other", tool=("cluster",), by="ops")
    shell.submit("chosen", by="ann")
    job_file = shell.folder / "auto.yaml"
    job_file.write_text(JOB.format("auto"))
    shell.run("submit", "-f", str(job_file), "--cluster", "auto")
    shown = shell.run("show", "auto", "--cluster", "auto")
    shell.run("remove", "far", "--force", tool=("cluster",), by="ops")

    assert re.search(
        r"^CLUSTER +SCORE +COST x0.4 +AVAILABILITY x0.3 +LATENCY x0.2 +LOAD x0.1 +FITS", shown, re.MULTILINE
    )
    assert re.search(r"^local\* +1.000 +1.00 +1.00 +1.00 +1.00 +now", shown, re.MULTILINE)
    assert re.search(r"^far .*does not serve tenant acme", shown, re.MULTILINE)
    assert "CLUSTER  SCORE" not in shell.run("show", "chosen")
