"""Requests made from the OpenAPI description, sent to a running service: every answer is one that is described."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.authentication import Identity, NotIdentified
from jobs.database import opened
from jobs.listener import serving
from jobs.settings import JobServiceSettings
from tests.jobservice.service import JobService

LIMITS = JobServiceSettings.model_validate(
    {"access": "/nowhere", "requests_per_second": 10_000, "requests_burst": 100_000}
)
EXAMPLES = 4
SEED = 1
QUIET = ("--no-color", "--suppress-health-check", "all")
NOT_MEANT = "use_after_free"
"""DELETE cancels a job, and its record stays: it is still there afterwards, on purpose."""
CONFIGURATION = """\
[parameters]
"path.cluster" = "local"
"path.job_id" = "{job_id}"

[checks.negative_data_rejection]
expected-statuses = ["400", "401", "403", "404", "405", "406", "409", "413", "415", "422", "428", "429", "5xx"]

[checks.positive_data_acceptance]
expected-statuses = ["2xx", "400", "401", "403", "404", "409", "415", "422", "5xx"]
"""
"""A list with too many entries may also be a body that is too large. Rules over several fields, such as a deadline
after the start, are no part of a JSON Schema: 422 is their answer."""


class OneToken:
    """Takes the token of an operator alone."""

    async def identify(self, authorization: str) -> Identity | NotIdentified:
        """Return the operator, or nobody."""
        return Identity("ops") if authorization == "Bearer ops" else NotIdentified(401, "an unknown token")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The address of a service on a port, in a thread, and the id of a job."""
    database = opened(f"sqlite:///{tmp_path}/jobs.db")
    ready, found, loop = threading.Event(), list[tuple[str, str]](), asyncio.new_event_loop()
    ends = asyncio.Event()

    async def serve() -> None:
        service = JobService(database, settings=LIMITS, authenticator=OneToken())
        async with service.client, serving(service.app, "127.0.0.1", 0) as port:
            made = (await service.submit(by="ops", tenant_id="acme")).json()
            found.append((f"http://127.0.0.1:{port}", made["id"]))
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


@pytest.mark.timeout(1500)
def test_the_service_answers_as_it_is_described(served: tuple[str, str], tmp_path: Path) -> None:
    """All checks of schemathesis: whatever is allowed is taken, whatever is not is refused, each answer is described,
    no route answers without a token, and nothing leads to an error of the server."""
    url, job_id = served
    (tmp_path / "schemathesis.toml").write_text(CONFIGURATION.replace("{job_id}", job_id))
    program = str(Path(sys.executable).with_name("schemathesis"))
    options = [
        "--checks",
        "all",
        "--exclude-checks",
        NOT_MEANT,
        "--phases",
        "coverage,fuzzing,stateful",
        "--max-examples",
        str(EXAMPLES),
        "--seed",
        str(SEED),
    ]
    command = [program, "run", f"{url}/openapi.json", "-H", "Authorization: Bearer ops", *options, *QUIET]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1400)

    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
