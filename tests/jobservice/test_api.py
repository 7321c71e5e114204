"""The API: submitted jobs are stored, unauthorized users see nothing, and every refusal says what to do."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import httpx
import pytest

from atoll.jobs.states import JobStep
from atoll.kube.errors import Unanswered, api_error
from jobs.database import Database, opened
from jobs.problems import MEDIA_TYPE
from jobs.settings import JobServiceSettings
from jobs.store import PAGE_SIZE_MAX, take_step
from tests.jobservice.made import after
from tests.jobservice.service import JOBS, JobService

NOBODYS = "00000000-0000-4000-8000-000000000000"
"""The id of no job; a constant, because every process must collect the same tests."""


@pytest.fixture
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[JobService]:
    """A service with an empty database."""
    database = opened(f"sqlite:///{tmp_path_factory.mktemp('records')}/jobs.db")
    async with JobService.of(database) as found:
        yield found
    database.close()


def told(answer: httpx.Response, status: int, kind: str) -> str:
    """Return the sentence of a problem of a kind."""
    problem = answer.json()
    assert (answer.status_code, answer.headers["Content-Type"]) == (status, MEDIA_TYPE), problem
    assert (problem["status"], problem["type"]) == (status, f"urn:atoll:{kind}")
    assert problem["title"]
    return str(problem["detail"])


async def lived(service: JobService, job_id: str, *steps: JobStep) -> None:
    """Take a job through steps."""
    for asked in steps:
        await service.database.write(lambda session, asked=asked: take_step(session, job_id, asked, now=after(60)))


async def test_a_submitted_job_is_recorded_shown_and_looked_after(service: JobService) -> None:
    """Whoever submits a job is told its id and place; it is shown, listed, has a history, and is taken up at once."""
    answer = await service.submit(ext_ml_gpu_count=2, policy={"max_retries": 1})
    made = answer.json()
    shown = (await service.call("GET", answer.headers["Location"])).json()
    listed = (await service.call("GET", JOBS)).json()
    events = (await service.call("GET", f"{JOBS}/{made['id']}/events")).json()

    assert answer.status_code == 201
    assert answer.headers["Location"] == f"{JOBS}/{made['id']}"
    assert (made["status"], made["namespace"], made["created_by"]) == ("pending", "tenant-acme", "ann")
    assert (made["object_kind"], made["object_name"], made["queue_name"]) == ("Job", "tune", "tenant-acme-queue")
    assert made["job"]["attributes"] == {"ext_ml_gpu_count": 2}
    assert shown == made == listed["items"][0]
    assert [one["what"] for one in events["items"]] == ["create"]
    assert service.woken == [made["id"]]


async def test_yaml_is_as_good_as_json(service: JobService) -> None:
    """A job is taken as it stands in a file."""
    body = "name: tune\njob_type: batch\ncontainer:\n  image: busybox:1\n"

    answer = await service.call("POST", JOBS, content=body, headers={"Content-Type": "application/yaml; charset=utf-8"})

    assert answer.status_code == 201, answer.text


@pytest.mark.parametrize("where", ["header", "field"])
async def test_an_idempotency_key_makes_one_job(service: JobService, where: str) -> None:
    """The same request again gives the job that is there, with 200; another request with the key is refused."""

    async def send(name: str) -> httpx.Response:
        job = {"name": name, "job_type": "batch", "container": {"image": "busybox:1"}}
        if where == "field":
            return await service.call("POST", JOBS, json=job | {"idempotency_key": "run-7"})
        return await service.call("POST", JOBS, json=job, headers={"Idempotency-Key": "run-7"})

    first, *others = await asyncio.gather(*(send("tune") for _ in range(5)))
    refused = await send("other")

    assert sorted(one.status_code for one in (first, *others)) == [200, 200, 200, 200, 201]
    assert len({one.json()["id"] for one in (first, *others)}) == 1
    assert "the idempotency key run-7 belongs to job" in told(refused, 409, "key-reused")


@pytest.mark.parametrize(
    ("fields", "field", "detail"),
    [
        pytest.param({"name": "Tune"}, "name", "name is 'Tune': must be lower-case letters", id="bad name"),
        pytest.param({"ext_ml_gpu_count": 1000}, "ext_ml_gpu_count", "may be at most 512", id="too many GPUs"),
        pytest.param({"policy": {"min_replicas": 2}}, "policy.min_replicas", "only a service has it", id="wrong type"),
        pytest.param({"gpus": 2}, "gpus", "write ext_ml_gpu_count", id="unknown field"),
        pytest.param({"id": NOBODYS}, "id", "the service sets it", id="id"),
        pytest.param({"created_by": "bob"}, "created_by", "the service sets it", id="another creator"),
        pytest.param({"cluster_id": "far"}, "cluster_id", "this path belongs to cluster local", id="another cluster"),
        pytest.param(
            {"namespace": "kube-system"}, "namespace", "jobs of tenant acme are in tenant-acme", id="namespace"
        ),
        pytest.param(
            {"ext_ml_accelerator": "fpga"}, "ext_ml_accelerator", "gives out no FPGAs", id="cannot be rendered"
        ),
        pytest.param(
            {"deployment_type": "helm", "helm": {"chart": "repo/chart"}, "container": None},
            "deployment_type",
            "the service installs no charts",
            id="helm",
        ),
        pytest.param(
            {"ext_ml_affinity": {"required": [{"key": "compute_capability", "operator": "Gte", "values": ["8.0"]}]}},
            "ext_ml_affinity.required",
            "cannot be expressed as a Kubernetes node selector",
            id="needs nodes",
        ),
    ],
)
async def test_a_job_with_a_mistake_is_refused_with_its_field(
    service: JobService, fields: dict[str, Any], field: str, detail: str
) -> None:
    """The answer names the field, what stands there, what may, and what to do; nothing is recorded."""
    answer = await service.submit(**fields)

    assert detail in told(answer, 422, "invalid-job")
    assert field in [one["field"] for one in answer.json()["errors"]]
    assert (await service.call("GET", JOBS)).json()["total"] == 0


async def test_all_mistakes_are_told_at_once(service: JobService) -> None:
    """A job with three mistakes is sent back once."""
    answer = await service.submit(ext_ml_gpu_count=1000, policy={"min_replicas": 2, "max_retries": -1}, name="Tune")

    assert len(answer.json()["errors"]) >= 2


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"- 1", b'"x"', b"null", b"a: &a [*a]"])
async def test_nonsense_is_refused(service: JobService, body: bytes) -> None:
    """Whatever the bytes are, the answer is a problem."""
    answer = await service.call("POST", JOBS, content=body, headers={"Content-Type": "application/json"})

    assert answer.status_code in (400, 422)
    assert answer.headers["Content-Type"] == MEDIA_TYPE


async def test_what_a_form_on_another_site_can_send_is_refused(service: JobService) -> None:
    """A body without the right type, or asked for by another site, is not read."""
    plain = await service.call("POST", JOBS, content=b"{}", headers={"Content-Type": "text/plain"})
    crossing = await service.call("GET", JOBS, headers={"Sec-Fetch-Site": "cross-site"})

    assert "application/json or application/yaml" in told(plain, 415, "media-type")
    assert told(crossing, 403, "other-site")


OF_THE_CLUSTER = (
    *("activate", "drain", "queues", "queues/{name}", "usage", "usage.csv", "schedule", "audit"),
    *("webhooks", "webhooks/{webhook_id}", "webhooks/{webhook_id}/deliveries"),
)
OF_ONE_JOB = [
    ("GET", ""),
    ("DELETE", ""),
    ("POST", "/retry"),
    ("GET", "/events"),
    ("GET", "/logs"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/cost"),
    ("GET", "/gpus"),
    ("GET", "/topology-offer"),
]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", JOBS),
        ("GET", JOBS),
        ("GET", f"{JOBS}/{NOBODYS}"),
        ("DELETE", f"{JOBS}/{NOBODYS}"),
        *((method, f"{JOBS}/{NOBODYS}{suffix}") for method, suffix in OF_ONE_JOB),
    ],
)
async def test_every_route_asks_who_it_is(service: JobService, method: str, path: str) -> None:
    """Without a token nothing is answered; with a token of nobody's tenant nothing is found."""
    anonymous = await service.call(method, path, by="")
    stranger = await service.call(method, path, by="eve", json={"name": "x"} if method == "POST" else None)

    assert told(anonymous, 401, "unauthenticated") == "a bearer token is needed"
    assert anonymous.headers["WWW-Authenticate"] == "Bearer"
    assert stranger.status_code in ({404, 422} if path != JOBS or method == "POST" else {200})


@pytest.mark.parametrize(("method", "suffix"), OF_ONE_JOB)
@pytest.mark.parametrize("by", ["eve", "zoe/others", "bob"], ids=["nobody", "another tenant", "another project"])
async def test_jobs_of_others_are_as_if_they_were_not_there(
    service: JobService, method: str, suffix: str, by: str
) -> None:
    """AUT-1, C-30: whoever may not see a job gets the answer, to the letter, that one gets for a job that is not
    there."""
    job_id = (await service.submit()).json()["id"]
    nowhere = str(uuid4())

    hidden = await service.call(method, f"{JOBS}/{job_id}{suffix}", by=by)
    missing = await service.call(method, f"{JOBS}/{nowhere}{suffix}", by=by)

    assert told(hidden, 404, "not-found") == f"there is no job {job_id}"
    assert hidden.json() == json.loads(missing.text.replace(nowhere, job_id))
    assert (await service.call("GET", JOBS, by=by)).json()["total"] == 0


@pytest.mark.parametrize(
    ("by", "statuses"),
    [
        pytest.param("ann", [200, 202, 409, 200, 200, 200, 409, 200, 200, 200], id="the owner"),
        pytest.param("amy", [200, 202, 409, 200, 200, 200, 409, 200, 200, 200], id="an admin"),
        pytest.param("ops", [200, 202, 409, 200, 200, 200, 409, 200, 200, 200], id="an operator"),
        pytest.param("two", [200, 403, 403, 200, 200, 403, 403, 200, 200, 200], id="another member"),
        pytest.param("vic", [200, 403, 403, 200, 403, 403, 403, 200, 200, 200], id="a viewer"),
    ],
)
async def test_roles_of_one_tenant(service: JobService, by: str, statuses: list[int]) -> None:
    """AUT-7: within a tenant the table decides, and a refusal names who, what and which job."""
    job_id = (await service.submit()).json()["id"]
    service.logs.pods["tune-x"] = [b"hello\n"]

    answers = [await service.call(method, f"{JOBS}/{job_id}{suffix}", by=by) for method, suffix in OF_ONE_JOB]

    assert [one.status_code for one in answers] == statuses
    for answer in (one for one in answers if one.status_code == 403):
        detail = told(answer, 403, "not-allowed")
        assert detail.startswith(f"{by} may not ")
        assert detail.endswith(f" job tune ({job_id})")


@pytest.mark.parametrize(
    ("by", "fields", "status", "detail"),
    [
        pytest.param("bob", {"project_id": "vision"}, 201, "", id="a member of a project, there"),
        pytest.param(
            "bob", {"project_id": "speech"}, 403, "may not create jobs in tenant acme, project speech", id="not there"
        ),
        pytest.param("vic", {"tenant_id": "acme"}, 403, "vic may not create jobs in tenant acme", id="a viewer"),
        pytest.param(
            "ann", {"tenant_id": "other"}, 403, "ann may not create jobs in tenant other", id="another tenant"
        ),
        pytest.param("ann", {"tenant_id": "none"}, 403, "ann may not create jobs in tenant none", id="no such tenant"),
        pytest.param("two", {}, 422, "tenant_id must say whose job it is; name one of acme, other", id="no choice"),
        pytest.param("two", {"tenant_id": "other"}, 201, "", id="a choice"),
        pytest.param(
            "ann", {"owner_type": "platform"}, 403, "may not create jobs of the platform", id="not the platform"
        ),
        pytest.param("ops", {"owner_type": "platform", "tenant_id": "acme"}, 201, "", id="the platform"),
    ],
)
async def test_where_somebody_may_create(
    service: JobService, by: str, fields: dict[str, Any], status: int, detail: str
) -> None:
    """A job is created in a tenant and project in which its creator may."""
    answer = await service.submit(by=by, **fields)

    assert answer.status_code == status, answer.text
    assert detail in answer.json().get("detail", "")


async def test_a_job_is_cancelled_once_and_retried_when_it_failed(service: JobService) -> None:
    """To cancel is a wish that is noted; what has ended has nothing to cancel, and only what failed is tried again."""
    job_id = (await service.submit()).json()["id"]
    first = await service.call("DELETE", f"{JOBS}/{job_id}")
    again = await service.call("DELETE", f"{JOBS}/{job_id}")
    early = await service.call("POST", f"{JOBS}/{job_id}/retry")
    await lived(service, job_id, JobStep.SUBMIT, JobStep.ADMIT, JobStep.FAIL)
    late = await service.call("DELETE", f"{JOBS}/{job_id}")
    retried = await service.call("POST", f"{JOBS}/{job_id}/retry")

    assert (first.status_code, first.json()["cancel_requested_by"]) == (202, "ann")
    assert again.json() == first.json()
    assert "only a failed job can be retried" in told(early, 409, "illegal-step")
    assert "there is nothing left to cancel" in told(late, 409, "illegal-step")
    assert (retried.status_code, retried.json()["status"], retried.json()["attempt"]) == (200, "pending", 2)
    assert retried.json()["cancel_requested_at"] is None
    assert len(service.woken) == 4


async def test_logs_are_streamed(service: JobService) -> None:
    """What a pod prints comes as it is; a job without pods says so."""
    job_id = (await service.submit()).json()["id"]
    none = await service.call("GET", f"{JOBS}/{job_id}/logs")
    service.logs.pods = {"tune-0": [b"one\n", b"two\n"], "tune-1": [b"\xff\xfe\n"], "tune-2": []}
    answers = {
        query: await service.call("GET", f"{JOBS}/{job_id}/logs{query}")
        for query in ("", "?pod=tune-1&tail=5&follow=true", "?pod=tune-2", "?pod=nobody")
    }

    for error, code, kind in (
        (
            api_error(b'{"kind":"Status","code":400,"message":"container is waiting to start"}', path="/log"),
            409,
            "no-logs",
        ),
        (Unanswered("no answer", path="/log", sent=True), 503, "unavailable"),
    ):
        service.logs.fails = error
        assert told(await service.call("GET", f"{JOBS}/{job_id}/logs"), code, kind)

    assert told(none, 409, "no-pods") == "job tune has no pods now: it is pending"
    assert answers[""].content == b"one\ntwo\n"
    assert answers[""].headers["Content-Type"] == "text/plain; charset=utf-8"
    assert answers["?pod=tune-1&tail=5&follow=true"].content == b"\xff\xfe\n"
    assert answers["?pod=tune-2"].content == b""
    assert answers["?pod=nobody"].status_code == 409
    assert service.logs.asked[1:3] == [("tune", 100, False), ("tune", 5, True)]


@pytest.mark.parametrize(
    ("path", "detail"),
    [
        ("?page=0", "page is '0': "),
        ("?page=10000000", "page is '10000000': "),
        (f"?page_size={PAGE_SIZE_MAX + 1}", "page_size is '201': "),
        ("?status=asleep", "status.0 is 'asleep': "),
        ("?name=%00", "name is '\\x00': "),
        ("?project_id=a%00b", "project_id is 'a\\x00b': "),
        ("/not-a-uuid", "job_id is 'not-a-uuid': "),
        (f"/{NOBODYS}/logs?tail=-1", "tail is '-1': "),
    ],
)
async def test_requests_beyond_bounds_are_told(service: JobService, path: str, detail: str) -> None:
    """A parameter that is out of bounds is named with its value."""
    answer = await service.call("GET", JOBS + path)

    assert told(answer, 422, "invalid-request").startswith(detail)


async def test_unknown_places_are_problems_too(service: JobService) -> None:
    """A cluster, a path or a method that is not there is answered like everything else."""
    cluster = await service.call("GET", "/api/clusters/far/jobs")
    path = await service.call("GET", "/nowhere")
    method = await service.call("PUT", JOBS)

    assert told(cluster, 404, "not-found") == "there is no cluster 'far': this service has local"
    assert told(path, 404, "not-found")
    assert told(method, 405, "method")
    assert "GET" in method.headers["Allow"] or "POST" in method.headers["Allow"]


async def test_a_database_that_is_gone_is_told(service: JobService, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the records cannot be reached, callers are told to come back."""
    from sqlalchemy.exc import OperationalError

    async def fail(_work: object) -> None:
        raise OperationalError("SELECT", {}, Exception("connection refused"))

    monkeypatch.setattr(service.database, "read", fail)
    answer = await service.call("GET", JOBS)

    assert told(answer, 503, "unavailable") == "the database does not answer; try again"
    assert answer.headers["Retry-After"] == "2"


async def test_without_tokens_the_api_answers_to_this_machine_alone(database: Database) -> None:
    """A web site that points its name at loopback is refused where nobody is asked for a token."""
    settings = JobServiceSettings(insecure_local=True)
    async with JobService.of(database, settings=settings) as service:
        near = await service.call("GET", JOBS)
        far = await service.call("GET", JOBS, headers={"Host": "evil.example.com"})

    assert near.status_code == 200
    assert told(far, 421, "wrong-name")


async def test_the_description_is_whole(service: JobService) -> None:
    """OpenAPI 3.1 tells of every route, of the submitted job and of problems; every reference leads somewhere."""
    description = (await service.client.get("/openapi.json")).json()
    text = json.dumps(description)

    assert description["openapi"].startswith("3.1")
    assert set(description["paths"]) == {
        JOBS.replace("local", "{cluster}") + suffix
        for suffix in ("", "/{job_id}", *("/{job_id}" + suffix for _, suffix in OF_ONE_JOB), "/{job_id}/exec")
    } | {
        "/api/clusters",
        "/api/clusters/{cluster}",
        "/api/endpoints",
        "/api/endpoints/{endpoint_id}",
        *(f"/api/clusters/{{cluster}}/{rest}" for rest in OF_THE_CLUSTER),
    }
    schemas = description["components"]["schemas"]
    references = {part.split('"')[0] for part in text.split('"$ref": "#/components/schemas/')[1:]}
    assert references <= set(schemas)
    assert {"Job", "JobPolicy", "JobView", "ProblemDetails", "QueueFile", "QueueView"} <= set(schemas)
    for path in description["paths"].values():
        for operation in path.values():
            assert {"401", "404", "422"} <= set(operation["responses"])
            assert operation["summary"]
