"""`atoll pipeline`: the commands of docs/pipelines.md, line by line, against a service whose jobs a test plays."""

import asyncio
import logging
import shlex
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from typer.testing import CliRunner

from atoll.service.clock import SystemClock
from atollctl.__main__ import app
from jobs.database import opened
from jobs.listener import serving
from jobs.settings import JobServiceSettings
from pipelines.serving import PipelineService
from tests.docs_blocks import blocks, commands
from tests.jobservice.service import JobService
from tests.pipelineservice.world import play_jobs

PAGE = Path(__file__).parents[2] / "docs" / "pipelines.md"
START_SECONDS = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of a service with pipelines, in a thread."""
    url = f"sqlite:///{tmp_path_factory.mktemp('records')}/jobs.db"
    ready, found = threading.Event(), []
    loop, ends = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        database, clock = opened(url), SystemClock()
        settings = JobServiceSettings.model_validate({"access": "/nowhere", "database": url})
        service = JobService(database, settings=settings)
        pipelines = PipelineService(service.app.state.parts, clock)
        pipelines.add_routes(service.app)

        async def play() -> None:
            while True:
                await database.write(play_jobs)
                await clock.sleep(0.05)

        tasks = [asyncio.ensure_future(pipelines.lead()), asyncio.ensure_future(play())]
        async with service.client, serving(service.app, "127.0.0.1", 0) as port:
            found.append(f"http://127.0.0.1:{port}")
            ready.set()
            await ends.wait()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        database.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert ready.wait(START_SECONDS)
    yield found[0]
    loop.call_soon_threadsafe(ends.set)
    thread.join(START_SECONDS)
    loop.close()


class PipelineShell:
    """A person at a command line."""

    def __init__(self, url: str, folder: Path) -> None:
        (folder / "token").write_text("ann")
        self.environment = {"ATOLL_JOBS_SERVER": url, "ATOLL_JOBS_TOKEN_FILE": str(folder / "token")}

    def run(self, line: str, status: int = 0) -> str:
        """Run a line, and return what it prints, of errors where some are expected."""
        done = CliRunner().invoke(app, shlex.split(line)[1:], env=self.environment)
        assert done.exit_code == status, (line, done.output)
        return done.stdout if status == 0 else done.stderr


@pytest.fixture
def shell(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PipelineShell:
    """Return a shell in an empty folder."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))  # it shares our streams
    monkeypatch.chdir(tmp_path)
    return PipelineShell(server, tmp_path)


def test_the_pages_commands_run(shell: PipelineShell) -> None:
    """The pipeline of the page is applied, runs, and has a trigger; its other commands say what they did."""
    document = next(block for block in blocks(PAGE) if block.kind == "yaml").text
    Path("nightly.yaml").write_text(document.replace("10m", "1s"))
    printed = [shell.run(line) for block in commands(PAGE) for line in block.text.strip().splitlines()]

    assert printed[0].startswith("pipeline/nightly created (")
    assert printed[1].splitlines() == ["run/nightly/1 pending", "run/nightly/1 succeeded"]
    assert "nightly" in printed[2]
    assert "pause" in printed[3]
    assert "not selected" in printed[3]
    assert ", next run " in printed[4]
    assert "cron" in printed[5]
    assert "chatbot" in printed[6]
    assert printed[7].splitlines()[-1].startswith("usecase/helpdesk healthy at http://uc-helpdesk-front-")
    assert "helpdesk" in printed[8]
    assert "model_server" in printed[9]
    assert printed[10] == "usecase/helpdesk deleting\n"
    trigger = printed[5].splitlines()[1].split()[0]
    assert shell.run(f"atoll pipeline trigger nightly --disable {trigger}") == f"trigger/{trigger} disabled\n"
    assert shell.run(f"atoll pipeline trigger nightly --delete {trigger}") == f"trigger/{trigger} deleted\n"
    assert "only a failed or cancelled run can be run again" in shell.run("atoll pipeline rerun nightly/1", status=1)


def test_a_run_that_does_not_succeed_is_told_and_run_again(shell: PipelineShell) -> None:
    """The wait ends with status 1 and the reason; cancel and rerun name the run."""
    Path("p.yaml").write_text(
        "name: waits\nsteps:\n- {name: a, step_type: api_call, config: {url: 'http://127.0.0.1:1/'}}\n"
        "- {name: b, step_type: wait, config: {duration: 1d}}\n"
    )
    shell.run("atoll pipeline apply -f p.yaml")
    shell.run("atoll pipeline run waits")
    assert shell.run("atoll pipeline cancel waits").startswith("run/waits/1 ")
    assert "no such input" in shell.run("atoll pipeline run waits --input x=1", status=1)
    Path("p.yaml").write_text(
        "name: waits\nsteps:\n- {name: a, step_type: api_call, config: {url: 'http://127.0.0.1:1/'}}\n"
    )
    assert "configured" in shell.run("atoll pipeline apply -f p.yaml")
    told = shell.run("atoll pipeline run waits --wait", status=1)
    assert "step a failed: 127.0.0.1 is not a public address" in told
    assert shell.run("atoll pipeline rerun waits/2") == "run/waits/3 pending\n"


def test_mistakes_are_told_with_the_step(shell: PipelineShell) -> None:
    """One line for each."""
    wait = "{name: a, step_type: wait, config: {duration: 1s}, depends_on: [zz]}"
    Path("p.yaml").write_text(f"name: p\nsteps: [{wait}]\n")

    assert "steps.a.depends_on" in shell.run("atoll pipeline apply -f p.yaml", status=1)
