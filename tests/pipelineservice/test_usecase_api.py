"""Use cases are deployed, become healthy, lose a component, and are deleted with their jobs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from atoll.jobs.states import JobStep
from atoll.service.clock import SystemClock
from atoll.service.errors import SettingsError
from jobs.database import Database
from jobs.records import JobRecord
from jobs.store import take_step
from pipelines.api import PIPELINES, add_pipelines
from pipelines.records import PipelineRecord, RunRecord
from pipelines.retention import remove_runs
from pipelines.serving import registered_functions
from pipelines.usecase_api import DEPLOY, DEPLOYMENTS, TEMPLATES, add_usecases
from pipelines.usecases import DeploymentKeeper, read_templates
from tests.jobservice.service import JobService
from tests.pipelines.made import RUNNERS
from tests.pipelineservice.world import EngineWorld

RAG = {"template_id": "rag", "name": "help", "parameters": {"orchestrator": "registry.example.com/rag:1", "gpus": 2}}


@pytest.fixture
async def service(database: Database) -> AsyncIterator[JobService]:
    """Yield the API."""
    async with JobService.of(database) as found:
        add_pipelines(found.app, registered_functions(), RUNNERS)
        add_usecases(found.app, read_templates(None))
        yield found


@asynccontextmanager
async def leading(world: EngineWorld) -> AsyncIterator[None]:
    """Run the engine and the keeper until the block ends."""
    keeping = asyncio.ensure_future(DeploymentKeeper(world.database, world.clock).run())
    async with world.leading():
        yield
    keeping.cancel()


async def shown(service: JobService) -> dict[str, Any]:
    """Return the only deployment."""
    found: dict[str, Any] = (await service.call("GET", DEPLOYMENTS)).json()["items"][0]
    return found


@pytest.mark.parametrize("path", [DEPLOYMENTS, PIPELINES])
async def test_a_name_that_no_database_takes_is_refused(service: JobService, path: str) -> None:
    """PostgreSQL takes no NUL in a text."""
    assert (await service.call("GET", f"{path}?name=%00")).status_code == 422


async def test_the_life_of_a_use_case(service: JobService, database: Database, database_url: str) -> None:
    """Three components start together and the last one after them, with the addresses of the others; then a component
    fails; then all is deleted."""
    world = EngineWorld(database, database_url)
    made = (await service.call("POST", DEPLOY, json=RAG)).json()
    assert (made["status"], {one["status"] for one in made["components"]}) == ("deploying", {"pending"})
    async with leading(world):
        await world.until(lambda session: {one.state for one in session.scalars(select(RunRecord))} == {"succeeded"})
        found = await shown(service)
        assert found["status"] == "healthy"
        by_name = {one["name"]: one["endpoint"] for one in found["components"]}
        assert found["entrypoint"] == by_name["orchestrator"]
        assert by_name["vector_store"].endswith(".tenant-acme:6333")
        jobs = await database.read(
            lambda session: session.scalars(select(JobRecord).order_by(JobRecord.created_at)).all()
        )
        assert jobs[-1].document["step_id"] == "orchestrator"
        told = {one["name"]: one["value"] for one in jobs[-1].document["container"]["env"]}
        assert told["MODEL_URL"] == by_name["model_server"]
        counts = {one.document["step_id"]: (one.estimate or {}).get("gpu_count") for one in jobs}
        assert counts == {"vector_store": 0, "embedder": 1, "model_server": 2, "orchestrator": 0}

        await world.database.write(lambda session: _fail(session, jobs[0].id))
        assert (await shown(service))["status"] == "degraded"

        path = f"{DEPLOYMENTS}/{made['deployment_id']}"
        refused = await service.call("DELETE", f"{PIPELINES}/{made['pipeline_id']}")
        assert (refused.status_code, refused.json()["type"]) == (409, "urn:atoll:deployed")
        assert (await service.call("DELETE", path)).json()["status"] == "deleting"
        await world.until(lambda session: not session.scalar(select(func.count()).select_from(PipelineRecord)))

    assert (await service.call("GET", path)).status_code == 404
    states = await database.read(lambda session: session.scalars(select(JobRecord.state)).all())
    assert sorted(states) == ["cancelled", "cancelled", "cancelled", "failed"]


def _fail(session: Session, job_id: str) -> None:
    take_step(session, job_id, JobStep.FAIL, now=SystemClock().now(), message="Error (exit code 1)")


async def test_the_runs_of_deployed_use_cases_are_kept(service: JobService, database: Database) -> None:
    """However old; they say what is deployed."""
    await service.call("POST", DEPLOY, json=RAG)

    def age(session: Session) -> int:
        session.scalars(select(RunRecord)).one().ended_at = service.clock.now()
        session.flush()
        return remove_runs(session, service.clock.now().replace(year=2100))

    assert await database.write(age) == 0


@pytest.mark.parametrize(
    ("changes", "by", "status", "told"),
    [
        ({"template_id": "other"}, "ann", 422, "no such template"),
        ({"parameters": {}}, "ann", 422, "parameters.orchestrator"),
        ({"parameters": {"orchestrator": "x", "gpus": 99}}, "ann", 422, "at most 8"),
        ({"cluster_id": "moon"}, "ann", 422, "use cases run in cluster local"),
        ({"name": "Help"}, "ann", 422, "name"),
        ({"tenant_id": "other"}, "ann", 403, "may not deploy"),
        ({"tenant_id": "acme"}, "vic", 403, "may not deploy"),
        ({}, "two", 422, "whose use case"),
    ],
)
async def test_mistakes_and_strangers_are_refused(
    service: JobService, changes: dict[str, Any], by: str, status: int, told: str
) -> None:
    """With the reason, and nothing is recorded."""
    answer = await service.call("POST", DEPLOY, by=by, json=RAG | changes)

    assert (answer.status_code, told in answer.text) == (status, True), answer.text
    assert (await service.call("GET", PIPELINES)).json()["total"] == 0


async def test_a_name_is_taken_once_in_a_tenant(service: JobService) -> None:
    """And other tenants neither see nor delete the deployment."""
    made = (await service.call("POST", DEPLOY, json=RAG)).json()
    path = f"{DEPLOYMENTS}/{made['deployment_id']}"

    assert (await service.call("POST", DEPLOY, json=RAG)).status_code == 409
    assert (await service.call("POST", DEPLOY, by="eve/others", json=RAG)).status_code == 202
    assert (await service.call("GET", path, by="eve/others")).status_code == 404
    assert (await service.call("DELETE", path, by="eve/others")).status_code == 404
    assert (await service.call("GET", path, by="vic")).status_code == 200
    assert (await service.call("DELETE", path, by="vic")).status_code == 403
    assert (await service.call("GET", DEPLOYMENTS, by="eve/others")).json()["total"] == 1


async def test_templates_are_listed_with_the_schema_of_their_parameters(service: JobService) -> None:
    """As JSON Schema."""
    items = {one["id"]: one for one in (await service.call("GET", TEMPLATES)).json()["items"]}

    assert items.keys() == {"rag", "chatbot", "agent"}
    schema = items["rag"]["parameters"]
    assert schema["required"] == ["orchestrator"]
    assert schema["properties"]["gpus"]["maximum"] == 8.0


def test_a_folder_adds_templates(tmp_path: Path) -> None:
    """One of a shipped id takes its place; a broken one is told with its file."""
    text = "id: rag\ncomponents: [{name: a, port: 80, job: {container: {image: x}}}]\nentrypoint: a\n"
    (tmp_path / "mine.yaml").write_text(text)
    assert {len(one.components) for one in read_templates(tmp_path) if one.id == "rag"} == {1}
    (tmp_path / "bad.yaml").write_text("id: [")
    with pytest.raises(SettingsError, match=r"bad\.yaml"):
        read_templates(tmp_path)
