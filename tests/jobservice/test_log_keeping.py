"""SYN-3: logs of pods are in the archive before the pods are gone, whatever becomes of the job, and never stop it."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from jobs import log_keeping
from jobs.database import engine_of, migrate, opened
from jobs.log_archive import ArchiveUnavailable, LogArchive
from jobs.log_keeping import AGAIN_SECONDS, kept_logs
from jobs.records import JobRecord
from jobs.store import ask_to_cancel, ask_to_pause, change_job, get_job, retry_job
from tests.fakes.clock import ManualClock
from tests.jobservice.made import NOW
from tests.jobservice.service import JOBS, JobService
from tests.jobservice.test_reconciler import JobStage
from tests.jobservice.world import Faults, ServiceKilled, ServiceProcess


class ArchivedStage(JobStage):
    """A world, a service with an archive on disk, and the jobs that a test gives it."""

    def __init__(self, engine: Any, folder: Path) -> None:
        super().__init__(engine)
        self.folder = folder
        self.world.logs["tune"] = b"step 1\nstep 2\n"
        self.start()

    def start(self, faults: Faults | None = None, *, archive: LogArchive | None = None) -> None:
        """Start a process of the service."""
        self.archive = archive or LogArchive(
            f"file://{self.folder}/{{tenant}}/", bytes_max=1024, clock=self.world.clock
        )
        self.service = ServiceProcess(self.world, self.engine, faults, archive=self.archive)

    def files(self) -> dict[str, str]:
        """Return the archived logs by attempt and pod."""
        found = sorted(self.folder.glob("acme/*/*/*.log"))
        return {f"{one.parent.name}/{one.name}": one.read_text() for one in found}

    def broken(self) -> LogArchive:
        """Return an archive that takes nothing."""
        (self.folder / "file").write_text("no folder")
        return LogArchive(f"file://{self.folder}/file/{{tenant}}/", bytes_max=1024, clock=self.world.clock)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[ArchivedStage]:
    """An empty world, an empty database, and an empty archive."""
    url = f"sqlite:///{tmp_path}/jobs.db"
    migrate(url)
    engine = engine_of(url)
    folder = tmp_path / "archive"
    folder.mkdir()
    yield ArchivedStage(engine, folder)
    engine.dispose()


TUNED = "tune-1-0 begins\nstep 1\nstep 2\n"


async def test_the_logs_of_a_job_are_archived_when_it_ends(stage: ArchivedStage) -> None:
    """Of each pod, below the tenant's prefix, once; the record says where, and the objects stay for inspection."""
    stage.world.logs["many"] = b"done\n"
    one, many = await stage.give(), await stage.give("many", parallelism=2, completions=2)
    record, other = await stage.live(one), await stage.live(many)
    (kept,) = kept_logs(record)
    before = record.version
    await stage.service.resync()

    assert (record.state, other.state) == ("succeeded", "succeeded")
    assert stage.files() == {
        "1/many-1-0.log": "many-1-0 begins\ndone\n",
        "1/many-1-1.log": "many-1-1 begins\ndone\n",
        "1/tune-1-0.log": TUNED,
    }
    assert kept.folder == f"file://{stage.folder}/acme/{one}/1/"
    assert (kept.attempt, kept.pods, kept.message, kept.left_out) == (1, {"tune-1-0": ""}, "", 0)
    assert (await stage.record(one)).version == before
    assert "Pod" in stage.kinds()


async def test_each_attempt_is_archived_before_its_pods_make_room_for_the_next(stage: ArchivedStage) -> None:
    """A failure that the service retries, and a retry by hand."""
    stage.world.fates["tune"] = "OOMKilled"
    job_id = await stage.give(policy={"max_retries": 1, "retry_delay_seconds": 1})
    await stage.live(job_id)
    await stage.world.clock.advance(5)
    failed = await stage.live(job_id, rounds=12)
    await stage.service.database.write(lambda session: retry_job(session, job_id, now=NOW, actor="ann"))
    stage.world.fates.clear()
    ended = await stage.live(job_id, rounds=12)

    assert (failed.state, ended.state) == ("failed", "succeeded")
    assert sorted(stage.files()) == ["1/tune-1-0.log", "2/tune-2-0.log", "3/tune-3-0.log"]
    assert [one.attempt for one in kept_logs(ended)] == [1, 2, 3]


@pytest.mark.parametrize("how", ["cancel", "pause", "expire"])
async def test_what_a_running_job_printed_is_archived_before_it_is_stopped(stage: ArchivedStage, how: str) -> None:
    """Whoever stops it, its log outlives its pods."""
    stage.world.ends = False
    job_id = await stage.give(policy={"max_runtime": 600})
    running = await stage.live(job_id)
    if how == "expire":
        await stage.world.clock.advance(601)
    else:
        ask = ask_to_cancel if how == "cancel" else ask_to_pause
        await stage.service.database.write(lambda session: ask(session, job_id, now=NOW, actor="ann"))
    stopped = await stage.live(job_id, rounds=12)

    assert running.state == "running"
    assert stopped.state == {"cancel": "cancelled", "pause": "pending", "expire": "failed"}[how]
    assert stage.files() == {"1/tune-1-0.log": TUNED}
    assert not stage.world.of_kind("Pod")


async def test_pods_that_somebody_else_ends_are_archived_while_they_end(stage: ArchivedStage) -> None:
    """As a drain or a preemption does: they still print during their grace."""
    stage.world.ends = False
    job_id = await stage.give()
    await stage.live(job_id)
    ((path, pod),) = stage.world.of_kind("Pod")
    leaving = pod["metadata"] | {"deletionTimestamp": "2026-01-31T12:00:00Z"}
    stage.world.server.put(path, pod | {"metadata": leaving})
    await stage.service.look_at(job_id)

    assert stage.files() == {"1/tune-1-0.log": TUNED}


async def test_a_pod_that_never_ran_has_no_log_and_says_why(stage: ArchivedStage) -> None:
    """It is asked once."""
    stage.world.plays = True
    stage.world.rng.random = lambda: 0.0  # type: ignore[method-assign]
    job_id = await stage.give()
    stage.world.play()
    await stage.service.database.write(lambda session: ask_to_cancel(session, job_id, now=NOW, actor="ann"))
    cancelled = await stage.live(job_id)
    (kept,) = kept_logs(cancelled)

    assert cancelled.state == "cancelled"
    assert kept.pods == {"tune-1-0": "the cluster returns no log: container is waiting to start"}
    assert (kept.message, stage.files()) == ("", {})


async def test_an_archive_that_is_down_stops_no_job_and_gets_the_logs_later(stage: ArchivedStage) -> None:
    """The record says why; it is tried again each minute while the pods are there."""
    stage.start(archive=stage.broken())
    job_id = await stage.give()
    ended = await stage.live(job_id)
    (kept,) = kept_logs(ended)
    wait = stage.service.waits[job_id]
    stage.start()
    await stage.service.look_at(job_id)
    early = stage.files()
    await stage.world.clock.advance(AGAIN_SECONDS)
    await stage.service.look_at(job_id)
    (later,) = kept_logs(await stage.record(job_id))

    assert (ended.state, wait) == ("succeeded", AGAIN_SECONDS)
    assert kept.message.startswith("pod tune-1-0: cannot write file://")
    assert kept.pods == early == {}
    assert (later.message, later.pods) == ("", {"tune-1-0": ""})
    assert stage.files() == {"1/tune-1-0.log": TUNED}


@pytest.mark.parametrize("how", ["cancel", "time"])
async def test_pods_do_not_stay_for_an_archive_that_is_down(stage: ArchivedStage, how: str) -> None:
    """A cancelled job is gone at once, an ended one at its time; that the log is lost is on record."""
    stage.start(archive=stage.broken())
    stage.world.ends = how == "time"
    job_id = await stage.give()
    await stage.live(job_id)
    if how == "cancel":
        await stage.service.database.write(lambda session: ask_to_cancel(session, job_id, now=NOW, actor="ann"))
    else:
        await stage.world.clock.advance(86_401)
    gone = await stage.live(job_id, rounds=12)

    assert gone.state == ("cancelled" if how == "cancel" else "succeeded")
    assert stage.kinds() == []
    assert "cannot write" in kept_logs(gone)[0].message


@pytest.mark.parametrize("kill_after", [False, True])
async def test_a_service_killed_around_the_record_archives_again_to_the_same_place(
    stage: ArchivedStage, kill_after: bool
) -> None:
    """The log is there once, and the record knows it."""
    stage.world.ends = False
    job_id = await stage.give()
    await stage.live(job_id)
    await stage.service.database.write(lambda session: ask_to_cancel(session, job_id, now=NOW, actor="ann"))
    stage.start(Faults(kill_at=0, kill_after=kill_after))
    with pytest.raises(ServiceKilled):
        await stage.service.look_at(job_id)
    uploaded = stage.files()
    stage.start()
    cancelled = await stage.live(job_id)

    assert cancelled.state == "cancelled"
    assert uploaded == stage.files() == {"1/tune-1-0.log": TUNED}
    assert [one.pods for one in kept_logs(cancelled)] == [{"tune-1-0": ""}]


async def test_a_job_of_very_many_pods_and_attempts_has_a_bounded_archive(
    stage: ArchivedStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record counts what is left out; a log is cut at its beginning."""
    monkeypatch.setattr(log_keeping, "PODS_MAX", 2)
    monkeypatch.setattr(log_keeping, "ATTEMPTS_MAX", 2)
    stage.world.logs["tune"] = b"a line of twenty by\n" * 100
    job_id = await stage.give(parallelism=3, completions=3)
    earlier = [{"attempt": number, "folder": "s3://x/", "at": NOW.isoformat()} for number in (-1, 0)]
    await stage.service.database.write(
        lambda session: change_job(
            session, job_id, version=get_job(session, job_id).version, now=NOW, changes={"log_archive": earlier}
        )
    )
    ended = await stage.live(job_id, rounds=12)

    assert [(one.attempt, sorted(one.pods), one.left_out) for one in kept_logs(ended)] == [
        (0, [], 0),
        (1, ["tune-1-0", "tune-1-1"], 1),
    ]
    assert all(text.startswith("[the first ") and len(text) < 1100 for text in stage.files().values())


async def test_without_an_archive_nothing_is_read_or_recorded(stage: ArchivedStage) -> None:
    """It is off unless a setting says where."""
    stage.service = ServiceProcess(stage.world, stage.engine)
    ended = await stage.live(await stage.give())

    assert (ended.state, ended.log_archive, stage.files()) == ("succeeded", None, {})


# The route


@pytest.fixture
async def archived(tmp_path: Path) -> AsyncIterator[JobService]:
    """A service with an archive on disk, whose job `tune` had pods that are gone."""
    database = opened(f"sqlite:///{tmp_path}/jobs.db")
    archive = LogArchive(f"file://{tmp_path}/logs/{{tenant}}/", bytes_max=1024, clock=ManualClock())
    async with JobService.of(database, archive=archive) as service:
        yield service
    database.close()


async def archive_logs(service: JobService, pods: dict[str, str], **logs: str) -> str:
    """Submit a job and archive logs of its pods; return its path."""
    archive = service.app.state.parts.archive
    made = (await service.submit()).json()

    async def printed(text: str) -> AsyncIterator[bytes]:
        yield text.encode()

    for pod, text in logs.items():
        await archive.save(archive.place_of("acme", made["id"], "1", pod), printed(text))
    folder = archive.folder_of("acme", made["id"], "1")
    kept = {"attempt": 1, "folder": folder, "pods": pods, "at": NOW.isoformat()}

    def note(session: Any) -> None:
        session.get(JobRecord, made["id"]).log_archive = [kept]

    await service.database.write(note)
    return f"{JOBS}/{made['id']}"


async def test_logs_come_from_the_archive_once_the_pods_are_gone(archived: JobService) -> None:
    """The header says so; live logs come first; a pod may be named; its job shows where the archive is."""
    path = await archive_logs(archived, {"a": "why", "b": "", "c": ""}, b="one\ntwo\n", c="three\n")
    first = await archived.call("GET", f"{path}/logs?tail=1&follow=true")
    named = await archived.call("GET", f"{path}/logs?pod=c")
    without = await archived.call("GET", f"{path}/logs?pod=a")
    archived.logs.pods["d"] = [b"live\n"]
    live = await archived.call("GET", f"{path}/logs")
    shown = (await archived.call("GET", path)).json()["log_archive"]
    foreign = await archived.call("GET", f"{path}/logs", by="zoe/others")
    viewer = await archived.call("GET", f"{path}/logs", by="vic")

    assert (first.text, named.text, live.text) == ("two\n", "three\n", "live\n")
    assert first.headers["Atoll-Log-Archive"] == f"{shown[0]['folder']}b.log"
    assert "Atoll-Log-Archive" not in live.headers
    assert (without.status_code, without.json()["type"]) == (409, "urn:atoll:no-pods")
    assert without.json()["detail"].endswith("; not archived: why")
    assert (foreign.status_code, viewer.status_code) == (404, 403)


async def test_a_log_that_the_archive_lost_or_cannot_read_is_told(archived: JobService) -> None:
    """One that a rule of the store removed is gone; a store that does not answer may answer later."""
    path = await archive_logs(archived, {"a": ""})
    gone = await archived.call("GET", f"{path}/logs")
    archive = archived.app.state.parts.archive

    def refuse(_place: str) -> Any:
        raise ArchiveUnavailable("cannot read it")

    archive._split = refuse
    silent = await archived.call("GET", f"{path}/logs")

    assert (gone.status_code, gone.json()["type"]) == (409, "urn:atoll:no-logs")
    assert "is not there any more" in gone.json()["detail"]
    assert (silent.status_code, silent.json()["detail"]) == (503, "cannot read it")
    assert "Retry-After" in silent.headers


async def test_a_record_of_the_archive_that_cannot_be_read_is_left_out(archived: JobService) -> None:
    """As after an upgrade: the job is shown without it."""
    path = await archive_logs(archived, {"a": ""}, a="x")

    def spoil(session: Any) -> None:
        for record in session.query(JobRecord):
            record.log_archive = [{"attempt": "first"}, *record.log_archive]

    await archived.database.write(spoil)
    shown = (await archived.call("GET", path)).json()

    assert [one["attempt"] for one in shown["log_archive"]] == [1]
