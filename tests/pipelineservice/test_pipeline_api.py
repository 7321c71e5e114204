"""The routes of pipelines: apply, run, show, cancel, permissions."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from jobs.database import opened
from pipelines.api import PIPELINES, add_pipelines
from pipelines.records import migrate_pipelines
from pipelines.serving import registered_functions
from tests.jobservice.service import JobService
from tests.pipelines.made import RUNNERS, step

DOCUMENT = {"name": "nightly", "inputs": {"epochs": 3}, "steps": [step("a"), step("b", "a")]}


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[JobService]:
    """Yield the API, without an engine."""
    url = f"sqlite:///{tmp_path}/jobs.db"
    database = opened(url)
    migrate_pipelines(url)
    async with JobService.of(database) as found:
        add_pipelines(found.app, registered_functions(), RUNNERS)
        yield found
    database.close()


async def applied(service: JobService, by: str = "ann", **changes: Any) -> str:
    """Apply the pipeline; return its path."""
    answer = await service.call("POST", PIPELINES, by=by, json=DOCUMENT | changes)
    assert answer.status_code in (200, 201), answer.text
    return f"{PIPELINES}/{answer.json()['id']}"


async def test_a_pipeline_is_applied_changed_and_listed(service: JobService) -> None:
    """The second apply of a name changes it, and earlier runs keep their document."""
    path = await applied(service)
    assert await applied(service, description="changed") == path

    found = (await service.call("GET", PIPELINES, by="vic")).json()
    assert (found["total"], found["items"][0]["pipeline"]["description"]) == (1, "changed")


@pytest.mark.parametrize(
    ("by", "total", "names"), [("ann", 3, ["mine-2"]), ("bob", 2, ["mine-3"]), ("eve/others", 1, [])]
)
async def test_a_list_has_what_the_caller_may_see_page_by_page(
    service: JobService, by: str, total: int, names: list[str]
) -> None:
    """The total is of all pages; who has one project sees its pipelines without naming it."""
    for number, project in enumerate((None, "vision", "vision"), 1):
        await applied(service, name=f"mine-{number}", **({"project_id": project} if project else {}))
    await applied(service, "eve/others", name="mine-1")

    found = (await service.call("GET", f"{PIPELINES}?page=2&page_size=1", by=by)).json()
    assert (found["total"], [one["pipeline"]["name"] for one in found["items"]]) == (total, names)


async def test_mistakes_are_problems_with_the_name_of_the_step(service: JobService) -> None:
    """One entry for each; bytes that cannot be read are status 400."""
    steps = [step("a", "zz"), step("b", config={"function_name": "rm", "extra": 1})]
    answer = await service.call("POST", PIPELINES, json=DOCUMENT | {"steps": steps})
    unread = await service.call("POST", PIPELINES, content=b"{", headers={"Content-Type": "application/json"})

    assert (answer.status_code, answer.json()["type"]) == (422, "urn:atoll:invalid-pipeline")
    assert "steps.a.depends_on is 'zz': there is no such step" in answer.json()["detail"]
    assert [one["field"] for one in answer.json()["errors"]] == ["steps.a.depends_on", "steps.b.config.extra"]
    assert unread.status_code == 400


async def test_a_run_begins_once_per_key_and_is_cancelled(service: JobService) -> None:
    """Inputs are checked; a repeated key is the same run; after the cancel its steps are skipped."""
    path = await applied(service)
    headers = {"Idempotency-Key": "k1"}
    first = await service.call("POST", f"{path}/execute", json={"inputs": {"epochs": 9}}, headers=headers)
    again = await service.call("POST", f"{path}/execute", json={"inputs": {"epochs": 9}}, headers=headers)
    wrong = await service.call("POST", f"{path}/execute", json={"inputs": {"epochs": "many"}})
    unknown = await service.call("POST", f"{path}/execute", json={"inputs": {"x": 1}})
    run = f"{path}/executions/{first.json()['execution_id']}"
    cancelled = await service.call("DELETE", run)

    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["execution_id"] == again.json()["execution_id"]
    assert "inputs.epochs is 'many': must have the type integer" in wrong.json()["detail"]
    assert "its inputs: epochs" in unknown.json()["detail"]
    assert (cancelled.status_code, cancelled.json()["status"]) == (202, "cancelled")
    assert [one["status"] for one in cancelled.json()["steps"]] == ["skipped", "skipped"]
    assert (await service.call("POST", f"{run}/rerun")).json()["number"] == 2


@pytest.mark.parametrize(
    ("by", "show", "run", "cancel", "delete"),
    [
        ("ann", 200, 201, 202, 409),
        ("vic", 200, 403, 403, 403),
        ("amy", 200, 201, 202, 409),
        ("ops", 200, 201, 202, 409),
        ("eve/others", 404, 404, 404, 404),
        ("two", 200, 201, 403, 403),
    ],
)
async def test_roles_are_those_of_jobs(
    service: JobService, by: str, show: int, run: int, cancel: int, delete: int
) -> None:
    """A viewer sees, a member runs and cancels their own, an admin everything; other tenants see nothing."""
    path = await applied(service)
    began = (await service.call("POST", f"{path}/execute")).json()["execution_id"]

    assert (await service.call("GET", path, by=by)).status_code == show
    assert (await service.call("POST", f"{path}/execute", by=by)).status_code == run
    assert (await service.call("DELETE", path, by=by)).status_code == delete
    assert (await service.call("DELETE", f"{path}/executions/{began}", by=by)).status_code == cancel


async def test_a_member_does_not_change_the_pipeline_of_somebody_else(service: JobService) -> None:
    """An admin does."""
    await applied(service)
    refused = await service.call("POST", PIPELINES, by="two", json=DOCUMENT | {"tenant_id": "acme"})

    assert (refused.status_code, refused.json()["detail"]) == (403, "two may not delete pipeline nightly")
    await applied(service, by="amy")


async def test_a_run_of_another_pipeline_is_not_found(service: JobService) -> None:
    """A run is found under its own pipeline alone."""
    path, other = await applied(service), await applied(service, name="other")
    began = (await service.call("POST", f"{path}/execute")).json()["execution_id"]

    assert (await service.call("GET", f"{other}/executions/{began}")).status_code == 404


async def test_a_pipeline_is_deleted_once_no_run_is_active(service: JobService) -> None:
    """Its runs go with it."""
    path = await applied(service)
    began = (await service.call("POST", f"{path}/execute")).json()["execution_id"]
    await service.call("DELETE", f"{path}/executions/{began}")

    assert (await service.call("DELETE", path)).status_code == 204
    assert (await service.call("GET", path)).status_code == 404


async def test_the_routes_are_described(service: JobService) -> None:
    """OpenAPI knows them."""
    told = (await service.call("GET", "/openapi.json")).json()["paths"]

    assert {PIPELINES, f"{PIPELINES}/{{pipeline_id}}/execute"} <= told.keys()


async def test_an_envelope_of_a_workflow_becomes_a_pipeline(service: JobService) -> None:
    """The golden chain, as it stands in the examples."""
    chain = (Path(__file__).parents[2] / "examples" / "jobs" / "chain.yaml").read_bytes()
    headers = {"Content-Type": "application/yaml"}
    made = await service.call("POST", PIPELINES, content=chain, headers=headers)

    assert (made.status_code, made.json()["name"]) == (201, "fine-tune")
    assert len(made.json()["pipeline"]["steps"]) == 4


async def test_notes_about_an_envelope_are_shown_with_the_run(service: JobService) -> None:
    """An attribute without its prefix says nothing, and the user may have meant it."""
    chain = (Path(__file__).parents[2] / "examples" / "jobs" / "chain.yaml").read_bytes()
    chain = chain.replace(b"    ext_ml_cpu_cores: 16\n", b"    cpu_cores: 16\n")
    made = (await service.call("POST", PIPELINES, content=chain, headers={"Content-Type": "application/yaml"})).json()
    run = (await service.call("POST", f"{PIPELINES}/{made['id']}/execute")).json()

    assert run["notes"] == ["cpu_cores: ignored without its prefix; did you mean ext_ml_cpu_cores?"]


async def test_decisions_are_audited(service: JobService) -> None:
    """Applied by one, refused to another."""
    path = await applied(service)
    await service.call("POST", f"{path}/execute", by="vic")
    found = (await service.call("GET", "/api/clusters/local/audit", by="amy")).json()["items"]

    told = {(one["user"], one["action"], one["answer"]) for one in found if one["resource_type"] == "pipeline"}
    assert {("ann", "pipeline:create", "allowed"), ("vic", "pipeline:create", "refused")} <= told
