"""What was recorded may become invalid, by an upgrade or another setting: it is told, and never stops the others."""

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session

from atoll.api import job_names
from atoll.jobs.choosing import ScoreSheet
from atoll.jobs.errors import JobMistake
from atoll.jobs.model import Job
from atoll.jobs.queue_file import as_stored
from atoll.jobs.settings import RenderSettings
from atoll.kube.errors import Forbidden
from jobs.cluster_store import MOVING
from jobs.database import Database
from jobs.queue_cluster import QueueCluster
from jobs.queue_keeper import QueueKeeper
from jobs.queue_store import queue_file_of, store_queue_file
from jobs.records import JobRecord
from jobs.store import ask_to_cancel, get_job
from tests.explain.situations import situation
from tests.jobs.test_queue_file import EXAMPLE, parsed
from tests.jobservice.made import NOW
from tests.jobservice.service import JOBS, JobService
from tests.jobservice.test_clusters import GivenMover, TwoClusters
from tests.jobservice.world import SERVICE_ID, Faults, WorldApi

BROKEN = {"policy": {"max_retries": -1}, "intent": {"budget_cap": -1}}
TOLD = "job tune can no longer be read: policy.max_retries: Input should be greater than or equal to 0"


@pytest.fixture
def two(tmp_path: Path) -> TwoClusters:
    """Two clusters, of which local may be drained."""
    return TwoClusters(tmp_path)


async def spoil(database: Database, job_id: str) -> None:
    """Make the document of a job invalid."""

    def work(session: Session) -> None:
        record = get_job(session, job_id)
        record.document = record.document | BROKEN

    await database.write(work)


class StrictMover(GivenMover):
    """Finds that one job can no longer be rendered."""

    async def choose(self, record: JobRecord, job: Job) -> ScoreSheet:
        """Return the sheet, or refuse the job."""
        if job.name == "tune":
            raise JobMistake("container.image", "busybox:1", "is not allowed any more", "use another registry")
        return await super().choose(record, job)


MISTAKE = "the job can no longer be rendered: container.image is 'busybox:1': is not allowed any more"


async def test_a_running_job_that_can_no_longer_be_rendered_stays_and_says_so(two: TwoClusters) -> None:
    """It goes on in the drained cluster; the other one moves in the same time."""
    ids = [await two.submit(name=name, job_type="training") for name in ("tune", "other")]
    two.home.ends = two.east.ends = False
    for job_id in ids:
        await two.look(job_id)
    two.mover = StrictMover("east")
    two.start()
    stays, moved = [await two.look(job_id) for job_id in ids]

    assert (stays.cluster_id, stays.state) == ("local", "running")
    assert stays.message.startswith(f"local is draining, and {MISTAKE}")
    assert (moved.cluster_id, moved.state) == ("east", "running")
    assert two.there.waits[stays.id] is not None


async def test_so_does_one_that_was_on_its_way_out(two: TwoClusters) -> None:
    """Its objects are gone, so the draining must not be undone: the message still says that it is on its way."""
    job_id = await two.submit(job_type="training")
    two.home.ends = False
    await two.look(job_id)
    two.mover.drains = True
    await two.there.look_at(job_id, rounds=1)
    two.mover = StrictMover("east")
    two.start()
    waits = await two.look(job_id)

    assert waits.message.startswith(f"local is draining{MOVING}another one, and {MISTAKE}")


async def test_a_waiting_job_that_can_no_longer_be_rendered_fails(two: TwoClusters) -> None:
    """Nothing of it runs, and no cluster could take it."""
    two.mover = StrictMover("east")
    two.start()
    ended = await two.look(await two.submit())

    assert ended.state == "failed"
    assert ended.message.startswith(MISTAKE)


async def test_a_job_that_can_no_longer_be_read_waits_and_says_so(two: TwoClusters) -> None:
    """It is looked at again, another one is not held up, and it can be cancelled."""
    job_id, other_id = await two.submit(), await two.submit(name="other")
    await spoil(two.database, job_id)
    waits, other = await two.look(job_id), await two.look(other_id)
    await two.database.write(lambda session: ask_to_cancel(session, job_id, now=NOW, actor="ann"))
    cancelled = await two.look(job_id)

    assert (waits.state, waits.message) == ("pending", TOLD)
    assert other.state == "succeeded"
    assert cancelled.state == "cancelled"


async def test_lists_show_the_others_too(service: JobService) -> None:
    """Of endpoints and jobs; what needs the job itself is refused in words."""
    ports: dict[str, Any] = {
        "job_type": "service",
        "container": {"image": "busybox:1", "ports": [{"name": "http", "port": 80}]},
    }
    bad, good = [(await service.submit(name, **ports)).json() for name in ("tune", "other")]

    def work(session: Session) -> None:
        record = get_job(session, bad["id"])
        record.document = record.document | BROKEN
        record.last_checkpoint = {"step": "none"}

    await service.database.write(work)
    endpoints = (await service.call("GET", "/api/endpoints")).json()["items"]
    jobs = (await service.call("GET", JOBS)).json()["items"]
    offer = await service.call("GET", f"{JOBS}/{bad['id']}/topology-offer")

    assert {one["id"] for one in endpoints} == {one["id"] for one in jobs} == {bad["id"], good["id"]}
    assert (offer.status_code, offer.json()["detail"]) == (409, TOLD)


async def test_objects_that_cannot_be_removed_do_not_stop_the_sweep(two: TwoClusters) -> None:
    """A webhook refuses to let one job's object go: that of the next goes, and the sweep ends as usual."""
    for name in ("a", "b"):
        labels = {job_names.SERVICE_ID: SERVICE_ID, job_names.JOB_ID: name, job_names.ATTEMPT: "1"}
        two.home.server.put(
            f"/api/v1/namespaces/team/services/{name}", {"kind": "Service", "metadata": {"labels": labels}}
        )
    inner = two.home.answer

    def answer(method: str, path: str, body: Any = None) -> bytes:
        if method == "DELETE" and path.endswith("/a"):
            raise Forbidden("a webhook says no", path=path, status=403, reason="Forbidden")
        return inner(method, path, body)

    two.home.answer = answer  # type: ignore[method-assign]
    await two.there.reconciler.sweep()

    assert [path.rsplit("/", 1)[1] for path in two.home.server.objects] == ["a"]


async def test_a_file_of_queues_that_can_no_longer_be_read_is_told(service: JobService) -> None:
    """Its keeper writes nothing and says what to do; a job is sent to another cluster, or refused in words."""
    file = as_stored(parsed(EXAMPLE.read_text())) | {"tenants": "none"}
    await service.database.write(lambda session: store_queue_file(session, "local", file, now=NOW, actor="ops"))
    faults = Faults()
    keeper = QueueKeeper(
        service.database,
        QueueCluster(WorldApi(service.world, faults)),
        RenderSettings(),
        service.clock,
        cluster="local",
        service_id=SERVICE_ID,
    )
    record = await service.database.read(lambda session: queue_file_of(session, "local"))
    assert record is not None
    await keeper.look(record)
    noted = await service.database.read(lambda session: queue_file_of(session, "local"))
    answer = await service.call("PUT", "/api/clusters/east", by="ops", json={"kubeconfig": "file:east"})
    service.links.worlds["east"] = service.world
    service.links.snapshots = {"local": situation({"n1": {}}).snapshot, "east": situation({"n1": {}}).snapshot}
    fields = {"job_type": "batch", "container": {"image": "busybox:1"}, "ext_ml_gpu_count": 8}
    chosen = (await service.call("POST", "/api/clusters/auto/jobs", json={"name": "tune"} | fields)).json()
    refused = await service.submit("here")

    assert answer.status_code == 200
    assert noted is not None
    assert noted.problems[0].startswith("the file of queues of cluster local can no longer be read: tenants: ")
    assert faults.writes == 0
    assert chosen["cluster_id"] == "east"
    assert "can no longer be read" in chosen["choice"]["rows"][1]["excluded"]
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:atoll:unreadable")
