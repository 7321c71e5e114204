"""Notification steps: mail through a real server, each recipient once, and what was sent can be read."""

import json
import socket
import ssl
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from sqlalchemy.orm import Session

from atoll.jobs.states import JobStep
from atoll.service.clock import SystemClock
from jobs.database import Database, opened
from jobs.settings import JobServiceSettings
from jobs.store import create_job, take_step
from pipelines.api import PIPELINES, add_pipelines
from pipelines.firing import TriggerKeeper
from pipelines.mail import Mail, Mailer
from pipelines.notifying import messages_of
from pipelines.outgoing import CallFailed, CallRefused, OutgoingClient
from pipelines.records import migrate_pipelines
from pipelines.serving import registered_functions
from pipelines.trigger_api import add_triggers
from tests.docs_blocks import REPOSITORY, blocks
from tests.fakes.clock import until
from tests.jobservice.made import new_job
from tests.jobservice.service import JobService
from tests.pipelines.made import RUNNERS, parsed, step
from tests.pipelineservice.call_server import CallServer
from tests.pipelineservice.mail_server import MailServer
from tests.pipelineservice.world import TENANT, EngineWorld
from tests.service.certificates import Authority

PAGE = REPOSITORY / "docs" / "pipelines.md"
BASE = {"access": "/nowhere", "mail_host": "127.0.0.1", "mail_from": "atoll@mail.test", "mail_domains": ["example.com"]}
TO_ANN = Mail("ann@example.com", "done", "all good\n", "key", SystemClock().now())


def settings(server: MailServer, **fields: Any) -> JobServiceSettings:
    """Return settings that name a server."""
    return JobServiceSettings.model_validate(BASE | {"mail_port": server.port, "mail_tls": "none"} | fields)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """Yield a database with tables."""
    url = f"sqlite:///{tmp_path}/jobs.db"
    found = opened(url)
    migrate_pipelines(url)
    yield found
    found.close()


async def test_a_mail_is_encrypted_and_authenticated(tmp_path: Path) -> None:
    """With the password of a file, after STARTTLS; without a certificate that is trusted nothing is sent."""
    authority, password = Authority("test"), tmp_path / "password"
    authority.issue("mail", tmp_path / "tls.crt", tmp_path / "tls.key")
    authority.write_certificate(tmp_path / "ca.crt")
    password.write_text("sesame\n")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    async with MailServer(tls=context, user=("atoll", "sesame")).serving() as server:
        fields = {"mail_tls": "starttls", "mail_user": "atoll", "mail_password": password}
        mailer = Mailer(settings(server, mail_ca=tmp_path / "ca.crt", **fields))
        await mailer.send(TO_ANN)
        await mailer.send(TO_ANN)
        with pytest.raises(CallFailed, match="certificate"):
            await Mailer(settings(server, **fields)).send(TO_ANN)
        password.write_text("other")
        with pytest.raises(CallFailed, match="535"):
            await mailer.send(TO_ANN)

    first, second = server.mails
    assert (first["To"], first["From"], first["Subject"]) == ("ann@example.com", "atoll@mail.test", "done")
    assert first.get_content().splitlines() == ["all good"]
    assert first["Message-ID"] == second["Message-ID"]


@pytest.mark.parametrize(
    ("answer", "error"), [("451 try later", CallFailed), ("550 no such user", CallRefused)], ids=["later", "never"]
)
async def test_the_servers_answer_decides_whether_a_retry_helps(answer: str, error: type[Exception]) -> None:
    """And it is told."""
    async with MailServer().serving() as server:
        server.refusals.append(answer)
        with pytest.raises(error, match=answer):
            await Mailer(settings(server)).send(TO_ANN)


async def test_no_mail_leaves_for_other_places() -> None:
    """Not without a server, to other domains, or with headers in a subject; a dead server is worth a retry."""
    with pytest.raises(CallRefused, match="no mail server is configured"):
        await Mailer(JobServiceSettings.model_validate({"access": "/nowhere"})).send(TO_ANN)
    async with MailServer().serving() as server:
        with pytest.raises(CallRefused, match="mail_domains does not name"):
            await Mailer(settings(server, mail_domains=["other.org"])).send(TO_ANN)
        evil = Mail("ann@example.com", "a\r\nBcc: eve@example.com", "x", "k", TO_ANN.at)
        await Mailer(settings(server)).send(evil)
    assert server.mails[0]["Bcc"] is None
    assert server.mails[0]["Subject"] == "a Bcc: eve@example.com"

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        server.port = unused.getsockname()[1]
        with pytest.raises(CallFailed, match="mail server 127"):
            await Mailer(settings(server)).send(TO_ANN)


async def test_a_step_mails_each_recipient_once_and_tries_again(database: Database, tmp_path: Path) -> None:
    """The second try tells only whom the first did not reach; the API shows what was sent, to whoever sees the run."""
    async with MailServer().serving() as server:
        server.refusals += ["250 fine", "451 try later"]
        world = EngineWorld(database, f"sqlite:///{tmp_path}/jobs.db", settings=settings(server))
        config = {
            "channel": "email",
            "subject": "run ${run.pipeline}",
            "template": "It has ${steps.a.state}.",
            "recipients": ["ann@example.com", "bob@example.com", "eve@other.org"],
            "data": {"epochs": "${inputs.n}"},
        }
        retry = {"max_retries": 1, "delay": "1s"}
        async with world.leading():
            steps = step("a"), step("tell", "a", kind="notification", config=config, retry=retry)
            run_id = await world.begin(*steps, inputs={"n": 3})
            state, message = await world.until_ended(run_id)

    assert (state, message) == (
        "failed",
        "step tell failed: eve@other.org is in a domain that mail_domains does not name",
    )
    assert [mail["To"] for mail in server.mails] == ["ann@example.com", "bob@example.com"]
    assert {mail["Subject"] for mail in server.mails} == {"run nightly"}
    assert server.mails[0].get_content().splitlines() == ["It has succeeded.", "epochs: 3"]
    async with JobService.of(database) as service:
        add_pipelines(service.app, registered_functions(), RUNNERS)
        pipeline_id = (await service.call("GET", PIPELINES)).json()["items"][0]["id"]
        path = f"{PIPELINES}/{pipeline_id}/executions/{run_id}/deliveries"
        items = (await service.call("GET", path)).json()["items"]
        assert (await service.call("GET", path, by="eve/others")).status_code == 404
    told = [(one["step"], one["recipient"], one["status"], one["attempt"]) for one in items]
    assert told == [
        ("tell", "ann@example.com", "sent", 1),
        ("tell", "bob@example.com", "sent", 2),
        ("tell", "eve@other.org", "failed", 2),
    ]


async def test_posts_have_the_data_and_secret_urls_stay_secret(database: Database, tmp_path: Path) -> None:
    """Slack shows text alone, so the data are lines of it; each recipient has an idempotency key of its own. A URL that
    is a secret is in no record, also when nobody answers there."""
    (tmp_path / TENANT).mkdir()
    with CallServer() as server:
        (tmp_path / TENANT / "hook").write_text(f"{server.url}services/T0/hush-hush")
        (tmp_path / TENANT / "gone").write_text("http://127.0.0.1:1/services/T0/hush-hush")
        world = EngineWorld(database, f"sqlite:///{tmp_path}/jobs.db")
        outgoing = OutgoingClient(allowed=("127.0.0.1",), secrets=tmp_path)
        world.parts = replace(world.parts, outgoing=outgoing)
        config = {"template": "Over.", "data": {"epochs": "${inputs.n}"}}
        steps = [
            step(name, kind="notification", config=config | {"channel": channel, "recipients": recipients})
            for name, channel, recipients in (
                ("slack", "slack", ["secret:hook"]),
                ("post", "webhook", [server.url, f"{server.url}other"]),
                ("lost", "webhook", ["secret:gone"]),
            )
        ]
        async with world.leading():
            run_id = await world.begin(*steps, inputs={"n": 3})
            state, message = await world.until_ended(run_id)

    bodies = {key: json.loads(body) for key, body in zip(server.calls, server.bodies, strict=True)}
    assert sorted(json.dumps(one) for one in bodies.values()) == [
        '{"epochs": 3, "text": "Over."}',
        '{"epochs": 3, "text": "Over."}',
        '{"text": "Over.\\nepochs: 3"}',
    ]
    assert (state, message.startswith("step lost failed: POST http://127.0.0.1:1: ")) == ("failed", True)
    kept = await database.read(lambda session: messages_of(session, run_id))
    assert {(one.key, one.number, one.recipient) for one in kept} == {
        ("slack", 0, "secret:hook"),
        ("post", 0, server.url),
        ("post", 1, f"{server.url}other"),
        ("lost", 0, "secret:gone"),
    }
    assert "hush" not in message + "".join(one.error for one in kept)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"recipients": ["ann"]}, "is no address"),
        ({"channel": "slack", "recipients": ["#alerts"]}, "write https://HOST/... or secret:NAME"),
        ({"recipients": ["ann@example.com\r\nBcc: eve@example.com"]}, "is no address"),
        ({"subject": "${inputs.x}"}, "config.subject"),
        (
            {"channel": "webhook", "recipients": ["https://example.com/"], "subject": "x"},
            "subject belongs to channel email",
        ),
    ],
)
def test_mistakes_of_mail_are_told_when_the_pipeline_is_applied(changes: dict[str, Any], told: str) -> None:
    """With the step."""
    config = {"channel": "email", "template": "x", "recipients": ["ann@example.com"]} | changes
    problems = [str(one) for one in parsed(step("tell", kind="notification", config=config)).problems]

    assert any(told in one and "steps.tell" in one for one in problems), problems


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"mail_domains": []}, "mail_from and mail_domains"),
        ({"mail_user": "a"}, "belong together"),
        ({"mail_user": "a", "mail_password": "/p", "mail_tls": "none"}, "in clear"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], told: str) -> None:
    """Before anything is sent."""
    with pytest.raises(ValueError, match=told):
        JobServiceSettings.model_validate(BASE | changes)


LAST = {
    "job_id": "0b7c3f7e-0000-4000-8000-000000000000",
    "epoch": 3,
    "step": 30,
    "loss": 0.5,
    "metrics": {},
    "storage_key": "s3://bucket/runs/tune/step-30/",
    "created_at": "2026-01-31T12:00:00Z",
}


async def test_a_training_whose_time_is_over_is_told_by_mail(database: Database, tmp_path: Path) -> None:
    """EDGE-6, by the pipeline and the trigger of the page: job_name, reason, checkpoint_available and resume_info, once
    for each training that its time ended, and for no other failure."""
    found = [block.text for block in blocks(PAGE) if block.kind == "yaml"]
    document, trigger = found[found.index(next(one for one in found if "name: training-timeout" in one)) :][:2]
    async with MailServer().serving() as server:
        world = EngineWorld(database, f"sqlite:///{tmp_path}/jobs.db", settings=settings(server))
        keeper = TriggerKeeper(database, world.clock)
        async with JobService.of(database) as service:
            add_pipelines(service.app, registered_functions(), RUNNERS)
            add_triggers(service.app)
            made = (await service.call("POST", PIPELINES, json=yaml.safe_load(document))).json()
            path = f"{PIPELINES}/{made['id']}/triggers"
            answer = await service.call("POST", path, json=yaml.safe_load(trigger))
            assert answer.status_code == 201, answer.text
        now = world.clock.now() + timedelta(seconds=1)

        def end(session: Session) -> None:
            ends = {
                "saved": ("training", JobStep.EXPIRE, LAST),
                "unsaved": ("training", JobStep.EXPIRE, None),
                "broken": ("training", JobStep.FAIL, LAST),
                "other": ("batch", JobStep.EXPIRE, None),
            }
            for name, (job_type, step_, last) in ends.items():
                job_id = str(uuid4())
                create_job(session, new_job(name, job_type=job_type), now, job_id=job_id)
                for one in (JobStep.SUBMIT, JobStep.ADMIT, JobStep.RUN):
                    take_step(session, job_id, one, now=now)
                take_step(session, job_id, step_, now=now, message="was too long", changes={"last_checkpoint": last})

        await database.write(end)
        await keeper.look()
        await keeper.look()
        async with world.leading():
            await until(lambda: len(server.mails) == 2, timeout_seconds=60)

    told = {mail["Subject"]: mail.get_content().splitlines()[1:] for mail in server.mails}
    assert told == {
        f"training_timeout {name}": [
            f"job_name: {name}",
            "reason: was too long",
            f"checkpoint_available: {available}",
            f"resume_info: {info}",
        ]
        for name, available, info in (
            ("saved", True, LAST["storage_key"]),
            ("unsaved", False, "no checkpoint"),
        )
    }
