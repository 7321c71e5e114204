"""The routes of endpoints: services that are deployed directly."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy.orm import Session

from atoll.jobs.states import JobStep
from jobs.database import opened
from jobs.endpoint_routes import ENDPOINTS
from jobs.store import get_job, take_step
from tests.jobservice.service import JOBS, JobService

MODEL = {
    "name": "llama",
    "deployment_type": "model",
    "ext_ml_model_id": "meta-llama/Llama-3.1-8B-Instruct",
    "ext_ml_runtime": "vllm",
    "ext_ml_gpu_count": 1,
    "cluster_id": "local",
}
DOCKER = {
    "name": "front",
    "container": {"image": "front:1", "ports": [{"name": "http", "port": 8080}]},
    "cluster_id": "local",
}


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[JobService]:
    """Yield the API."""
    database = opened(f"sqlite:///{tmp_path}/jobs.db")
    async with JobService.of(database) as found:
        yield found
    database.close()


async def deployed(service: JobService, document: Any = None, **changes: Any) -> httpx.Response:
    """Deploy an endpoint."""
    return await service.call("POST", ENDPOINTS, json=(document or DOCKER) | changes)


@pytest.mark.parametrize(
    ("document", "url"),
    [
        (MODEL, "http://llama.tenant-acme:8000"),
        (DOCKER, "http://front.tenant-acme:8080"),
        ({**DOCKER, "container": {"image": "front:1"}}, None),
    ],
    ids=["the server of a model", "a container with a port", "a container without one"],
)
async def test_an_endpoint_is_a_service_of_nobody_elses_pipeline(
    service: JobService, document: Any, url: str | None
) -> None:
    """It is recorded as a job of its id, waits to be submitted, and says where it will answer."""
    answer = await deployed(service, document)
    made = answer.json()
    job = (await service.call("GET", f"{JOBS}/{made['id']}")).json()
    shown = await service.call("GET", answer.headers["Location"])

    assert (answer.status_code, made["url"], made["status"], made["is_ready"]) == (201, url, "pending", False)
    assert (job["job_type"], job["source_type"], job["cluster_id"]) == ("service", "direct", "local")
    assert shown.json() == made
    assert service.woken == [made["id"]]


async def test_without_a_cluster_the_service_chooses(service: JobService) -> None:
    """As a job of cluster auto."""
    document = {key: value for key, value in DOCKER.items() if key != "cluster_id"}
    made = await service.call("POST", ENDPOINTS, json=document)

    assert (made.status_code, made.json()["cluster_id"]) == (201, "local")


async def test_a_repeated_key_deploys_once(service: JobService) -> None:
    """The second answer is the endpoint of the first."""
    headers = {"Idempotency-Key": "k1"}
    first, again = [await service.call("POST", ENDPOINTS, json=DOCKER, headers=headers) for _ in range(2)]

    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["id"] == again.json()["id"]


async def test_a_deleted_endpoint_is_cancelled_and_no_longer_listed(service: JobService) -> None:
    """The request is recorded at once; once its job has ended it is not listed, and can still be shown."""
    kept, gone = [(await deployed(service, name=name)).json() for name in ("kept", "gone")]
    answer = await service.call("DELETE", f"{ENDPOINTS}/{gone['id']}")
    requested = (await service.call("GET", f"{JOBS}/{gone['id']}")).json()["cancel_requested_by"]
    now = service.clock.now()
    await service.database.write(lambda session: take_step(session, gone["id"], JobStep.CANCEL, now=now))
    listed = (await service.call("GET", ENDPOINTS)).json()
    shown = await service.call("GET", f"{ENDPOINTS}/{gone['id']}")

    assert (answer.status_code, requested) == (202, "ann")
    assert ([one["id"] for one in listed["items"]], listed["total"]) == ([kept["id"]], 1)
    assert shown.json()["status"] == "cancelled"


async def test_a_job_recorded_before_a_rule_was_tightened_stays_readable(service: JobService) -> None:
    """What no document may say any more fails neither the list nor a question about the job; a change is refused."""
    made = (await deployed(service)).json()["id"]
    volume = {"name": "v", "mount_path": "/sys/fs/bpf", "empty_size": "1Gi"}

    def write_older(session: Session) -> None:
        record = get_job(session, made)
        container = record.document["container"] | {"volumes": [volume]}
        record.document = record.document | {"container": container, "ext_ml_reservation_id": "a..b"}

    await service.database.write(write_older)
    listed = await service.call("GET", ENDPOINTS)
    offer = await service.call("GET", f"{JOBS}/{made}/topology-offer")
    changed = await service.call("PATCH", f"{JOBS}/{made}", json={"labels": {"a": "b"}})

    assert (listed.status_code, offer.status_code, changed.status_code) == (200, 200, 422)
    assert {one["field"] for one in changed.json()["errors"]} == {
        "ext_ml_reservation_id",
        "container.volumes[0].mount_path",
    }


async def test_other_jobs_are_no_endpoints(service: JobService) -> None:
    """A batch is neither listed, shown nor deleted here."""
    batch = (await service.submit("tune")).json()["id"]
    answers = [await service.call(method, f"{ENDPOINTS}/{batch}") for method in ("GET", "DELETE")]

    assert [one.status_code for one in answers] == [404, 404]
    assert (await service.call("GET", ENDPOINTS)).json()["total"] == 0
    assert (await service.call("GET", f"{JOBS}/{batch}")).json()["cancel_requested_at"] is None


@pytest.mark.parametrize(
    ("changes", "status", "told"),
    [
        ({"job_type": "batch"}, 422, "job_type is 'batch': of an endpoint it is service"),
        ({"source_type": "pipeline"}, 422, "source_type is 'pipeline': of an endpoint it is direct"),
        ({"cluster_id": 7}, 422, "cluster_id is 7: must be the name of a cluster"),
        ({"cluster_id": "moon"}, 404, "there is no cluster"),
        ({"container": {"imag": "x"}}, 422, "imag"),
    ],
)
async def test_mistakes_are_told(service: JobService, changes: Any, status: int, told: str) -> None:
    """With the field, and what to write instead."""
    answer = await deployed(service, **changes)

    assert answer.status_code == status
    assert told in answer.json()["detail"]


@pytest.mark.parametrize(
    ("by", "deploy", "show", "delete"), [("vic", 403, 200, 403), ("bob", 403, 404, 404), ("oto/others", 403, 404, 404)]
)
async def test_roles_are_those_of_jobs(service: JobService, by: str, deploy: int, show: int, delete: int) -> None:
    """Viewers only see it; of another tenant or project nobody learns that it is there."""
    path = f"{ENDPOINTS}/{(await deployed(service)).json()['id']}"
    made = await service.call("POST", ENDPOINTS, by=by, json=DOCKER | {"name": "mine", "tenant_id": "acme"})
    answers = [await service.call(method, path, by=by) for method in ("GET", "DELETE")]

    assert made.status_code == deploy
    assert [one.status_code for one in answers] == [show, delete]


async def test_a_name_that_no_database_takes_is_refused(service: JobService) -> None:
    """PostgreSQL takes no NUL in a text."""
    assert (await service.call("GET", f"{ENDPOINTS}?name=%00")).status_code == 422


async def test_a_mistake_is_told_with_its_line_of_the_body(service: JobService) -> None:
    """As of a job."""
    body = "name: front\ncluster_id: local\ncontainer:\n  image: front:1\n  imag: x\next_ml_gpu_count: many\n"
    headers = {"Content-Type": "application/yaml"}
    answer = await service.call("POST", ENDPOINTS, content=body, headers=headers)

    assert {one["field"]: one["line"] for one in answer.json()["errors"]} == {
        "container.imag": 5,
        "ext_ml_gpu_count": 6,
    }


async def test_a_body_that_cannot_be_read_is_told(service: JobService) -> None:
    """As of a job."""
    headers = {"Content-Type": "application/json"}
    broken = await service.call("POST", ENDPOINTS, content=b"{", headers=headers)
    other = await service.call("POST", ENDPOINTS, content=b"{}", headers={"Content-Type": "text/plain"})

    assert (broken.status_code, other.status_code) == (400, 415)
