"""The page of runs on a real port: a run of acme that a test moves on, and one of another tenant."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from atoll.pipelines.deciding import TryOutcome
from jobs.database import opened
from jobs.listener import serving
from pipelines.api import PIPELINES, add_pipelines
from pipelines.page.routes import add_runs_page
from pipelines.records import StepRecord, migrate_pipelines
from pipelines.serving import registered_functions
from pipelines.store import Try, advance
from pipelines.usecase_api import add_usecases
from pipelines.usecases import read_templates
from tests.jobservice.service import JobService
from tests.pipelines.made import step

STEPS = (
    step("prepare", kind="job"),
    step("judge", "prepare", kind="condition", config={"expression": "true", "if_true": "train", "if_false": "pause"}),
    step("pause", kind="wait", config={"duration": "5m"}),
    step("train", kind="job"),
    step("each", "train", kind="loop", config={"items": ["a", "b"], "body_step": "body", "max_parallel": 1}),
    step("body"),
)


@dataclass
class RunsPage:
    """The service, where it listens, and the run that is shown."""

    service: JobService
    port: int
    pipeline: str = ""
    run: str = ""

    def url(self, path: str = "/") -> str:
        """Return a URL of the service."""
        return f"http://127.0.0.1:{self.port}{path}"

    async def begin(self, name: str, *, by: str = "ann", steps: Sequence[Any] = STEPS, **fields: Any) -> None:
        """Apply a pipeline and begin a run of it, which is the shown one from now on."""
        await self.service.clock.advance(1)
        made = await self.service.call("POST", PIPELINES, by=by, json={"name": name, "steps": list(steps)} | fields)
        assert made.status_code == 201, made.text
        self.pipeline = made.json()["id"]
        begun = await self.service.call("POST", f"{PIPELINES}/{self.pipeline}/execute", by=by)
        self.run = begun.json()["execution_id"]
        await self.service.database.write(lambda session: advance(session, self.run, now=self.service.clock.now()))

    async def end(self, key: str, error: str = "", **output: Any) -> None:
        """Let the try of a step end after ten seconds: with an output, or an error."""
        await self.service.clock.advance(10)
        ended = Try(self.run, key, 1), TryOutcome(None if error else output, error)
        await self.service.database.write(
            lambda session: advance(session, self.run, now=self.service.clock.now(), ended=ended)
        )

    async def give_job(self, key: str, log: bytes) -> str:
        """Let a step have a job with a log; return its id."""
        made = (await self.service.submit(key)).json()
        self.service.logs.pods[f"{key}-0"] = [log]

        def write(session: Session) -> None:
            record = session.get(StepRecord, (self.run, key))
            assert record is not None
            record.job_id = made["id"]

        await self.service.database.write(write)
        return str(made["id"])


@asynccontextmanager
async def runs_page(folder: Path) -> AsyncIterator[RunsPage]:
    """Yield the page with a run of another tenant, and one of acme whose first step runs."""
    url = f"sqlite:///{folder}/jobs.db"
    database = opened(url)
    migrate_pipelines(url)
    async with JobService.of(database) as service:
        add_pipelines(service.app, registered_functions(), {})
        add_usecases(service.app, read_templates(None))
        add_runs_page(service.app)
        async with serving(service.app, "127.0.0.1", 0) as port:
            page = RunsPage(service, port)
            await page.begin("secret", by="oto/others", tenant_id="other")
            await page.begin("nightly")
            yield page
    database.close()
