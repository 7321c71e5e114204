"""Webhooks: who may have them, what they are told, signed, until it is delivered, and never inside the cluster."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from sqlalchemy import select

from atoll.jobs.settings import RenderSettings
from atoll.jobs.states import JobStep
from atoll.ml.policy import MlPolicy
from jobs import webhook_sender
from jobs.database import Database
from jobs.offers import TopologyOffers
from jobs.records import WebhookRecord
from jobs.secrets import SecretBox
from jobs.store import take_step
from jobs.webhook_sender import WebhookSender, refuse_url, signature_of
from jobs.webhook_store import ATTEMPTS_MAX, retry_seconds
from tests.explain.situations import holder, situation
from tests.jobservice.made import NOW
from tests.jobservice.service import SECRET_KEY, JobService

WEBHOOKS = "/api/clusters/local/webhooks"
SECRET = "a secret of sixteen letters"
URL = "https://hooks.example.com/atoll"


class Receiver:
    """A receiver on this machine that answers as a test wants, and the service that calls it."""

    def __init__(self, service: JobService, url: str) -> None:
        self.service, self.url = service, url
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.answers: list[int] = []
        policy = MlPolicy(hosts=("127.0.0.1",))
        box = SecretBox(SECRET_KEY)
        self.sender = WebhookSender(service.database, box, service.clock, policy=policy)

    async def answer(self, request: web.Request) -> web.Response:
        """Take a delivery."""
        self.got.append((dict(request.headers), await request.read()))
        return web.Response(status=self.answers.pop(0) if self.answers else 204, headers={"Location": "http://other/"})

    async def send(self) -> int:
        """Send what is due."""
        async with self.sender.session() as session:
            return await self.sender.send_due(session)

    async def create(self, **fields: Any) -> dict[str, Any]:
        """Create a webhook of acme that leads here."""
        made = await self.service.call("POST", WEBHOOKS, json={"url": URL, "secret": SECRET} | fields)
        assert made.status_code == 201, made.text
        found: dict[str, Any] = made.json()

        def lead_here(session: Any) -> None:
            for record in session.scalars(select(WebhookRecord).where(WebhookRecord.id == found["id"])):
                record.url = self.url

        await self.service.database.write(lead_here)
        return found

    async def job(self, *steps: JobStep, name: str = "tune", **fields: Any) -> str:
        """Submit a job and let it live."""
        made = (await self.service.submit(name, **fields)).json()
        for asked in steps:
            await self.service.database.write(
                lambda session, asked=asked: take_step(session, made["id"], asked, now=NOW, message="as it is")
            )
        return str(made["id"])

    async def deliveries(self, webhook: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the log of a webhook."""
        found: dict[str, Any] = (await self.service.call("GET", f"{WEBHOOKS}/{webhook['id']}/deliveries")).json()
        assert found["total"] == len(found["items"])
        return list(found["items"])


@pytest.fixture
async def receiver(database: Database) -> AsyncIterator[Receiver]:
    """A receiver, and a service without jobs."""
    async with JobService.of(database) as service:
        app = web.Application()
        runner = web.AppRunner(app)
        found = Receiver(service, "")
        app.router.add_post("/atoll", found.answer)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        found.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/atoll"  # type: ignore[attr-defined]
        yield found
        await runner.cleanup()


async def test_events_are_delivered_signed_and_logged(receiver: Receiver) -> None:
    """Each event once, with a signature over timestamp and body that the receiver can check."""
    webhook = await receiver.create()
    job_id = await receiver.job(JobStep.SUBMIT, JobStep.ADMIT, JobStep.RUN, JobStep.SUCCEED, labels={"team": "vision"})
    sent, again = await receiver.send(), await receiver.send()
    events = {json.loads(body)["event"]: (headers, body) for headers, body in receiver.got}
    headers, body = events["job.running"]
    log = await receiver.deliveries(webhook)

    assert (sent, again) == (3, 0)
    assert sorted(events) == ["job.queued", "job.running", "job.succeeded"]
    assert headers["Atoll-Event"] == "job.running"
    assert headers["Atoll-Signature"] == signature_of(SECRET, int(headers["Atoll-Timestamp"]), body)
    assert json.loads(body)["job"] | {"message": ""} == {
        "id": job_id,
        "name": "tune",
        "cluster_id": "local",
        "tenant_id": "acme",
        "project_id": None,
        "job_type": "batch",
        "status": "running",
        "message": "",
        "attempt": 1,
        "labels": {"team": "vision"},
    }
    assert {one["status"] for one in log} == {204}
    assert {headers["Atoll-Delivery"] for headers, _ in receiver.got} == {one["id"] for one in log}
    assert all(one["next_at"] is None and one["delivered_at"] for one in log)


async def test_a_delivery_is_tried_again_with_pauses_and_given_up_in_the_end(receiver: Receiver) -> None:
    """The pauses double up to an hour; a redirect is a refusal, and is not followed."""
    webhook = await receiver.create(events=["job.queued"])
    await receiver.job(JobStep.SUBMIT)
    receiver.answers = [500, 302]
    pauses = []
    for _ in range(2):
        await receiver.send()
        (one,) = await receiver.deliveries(webhook)
        pauses.append((one["status"], one["told"]))
        assert await receiver.send() == 0
        await receiver.service.clock.advance(retry_seconds(one["attempts"]))
    await receiver.send()
    (one,) = await receiver.deliveries(webhook)

    assert pauses == [(500, "the receiver answered 500"), (302, "the receiver answered 302")]
    assert (one["attempts"], one["status"], one["told"]) == (3, 204, "")
    assert len({headers["Atoll-Delivery"] for headers, _ in receiver.got}) == 1
    assert [retry_seconds(attempts) for attempts in (1, 2, 3, 9, 10)] == [10, 20, 40, 2560, 3600]

    await receiver.job(JobStep.SUBMIT, name="other")
    receiver.answers = [500] * ATTEMPTS_MAX
    for attempts in range(1, ATTEMPTS_MAX + 1):
        await receiver.send()
        await receiver.service.clock.advance(retry_seconds(attempts))
    (given_up,) = [one for one in await receiver.deliveries(webhook) if one["status"] == 500]
    assert (given_up["attempts"], given_up["next_at"]) == (ATTEMPTS_MAX, None)


async def test_an_offer_of_a_weaker_topology_is_sent_like_the_other_events(receiver: Receiver) -> None:
    """EDGE-7: the job, what it asked for and is offered, what that costs and the wait that it saves; signed, and in the
    log; a webhook that lists other events is not told."""
    webhook = await receiver.create(events=["job.topology_relaxation_offer"])
    other = await receiver.create(events=["job.queued"])
    service = receiver.service
    held = [holder("a", "n1", 0), holder("b", "n1", 2)]  # one of each pair that NVLink joins
    service.links.snapshots["local"] = situation({"n1": {"profile": "azure-nc96ads-a100-v4"}}, held).snapshot
    waits = {"ext_ml_gpu_count": 2, "policy": {"topology": "nvlink"}}
    job_id = await receiver.job(JobStep.SUBMIT, JobStep.ADMIT, **waits)
    chooser, wake = service.app.state.parts.chooser, service.woken.append
    offers = TopologyOffers(service.database, chooser, RenderSettings(), service.clock, seconds_max=0, wake=wake)
    await offers.look()
    await receiver.send()
    await offers.look()
    ((headers, body),) = [(head, raw) for head, raw in receiver.got if b"offer" in raw]
    told = json.loads(body)
    (delivery,) = await receiver.deliveries(webhook)

    assert headers["Atoll-Event"] == told["event"] == delivery["event"] == "job.topology_relaxation_offer"
    assert headers["Atoll-Signature"] == signature_of(SECRET, int(headers["Atoll-Timestamp"]), body)
    assert (told["job"]["id"], told["job"]["status"]) == (job_id, "admitted")
    assert told["offer"] | {"reason": "", "slower": ""} == {
        "asked": "nvlink",
        "suggested": "same_node",
        "reason": "",
        "slower": "",
        "saved_seconds": None,
    }
    assert "waits for GPUs that others hold" in told["offer"]["reason"]
    assert "PCIe" in told["offer"]["slower"]
    assert (delivery["status"], delivery["job_id"]) == (204, job_id)
    assert [one["event"] for one in await receiver.deliveries(other)] == ["job.queued"]


@pytest.mark.parametrize(
    ("filters", "is_told"),
    [
        ({}, True),
        ({"job_type": ["batch"]}, True),
        ({"job_type": ["service"]}, False),
        ({"labels": {"team": "vision"}}, True),
        ({"labels": {"team": "vision", "more": "x"}}, False),
    ],
)
async def test_filters_choose_the_jobs(receiver: Receiver, filters: dict[str, Any], is_told: bool) -> None:
    """By type and by labels; all must fit."""
    webhook = await receiver.create(filters=filters)
    await receiver.job(JobStep.SUBMIT, labels={"team": "vision"})

    assert bool(await receiver.deliveries(webhook)) == is_told


async def test_another_tenant_hears_and_sees_nothing(receiver: Receiver) -> None:
    """Webhooks of acme are told of jobs of acme; for others they do not exist; a viewer or half a member has none."""
    webhook = await receiver.create()
    call = receiver.service.call
    await receiver.service.submit("theirs", by="zoe/others")
    foreign = await call("DELETE", f"{WEBHOOKS}/{webhook['id']}", by="zoe/others")
    listed = (await call("GET", WEBHOOKS, by="zoe/others")).json()
    refused = [
        (await call("POST", WEBHOOKS, by=by, json={"url": URL, "secret": SECRET, "tenant_id": "acme"})).status_code
        for by in ("vic", "bob", "zoe/others")
    ]
    own = (await call("GET", WEBHOOKS)).json()
    gone = await call("DELETE", f"{WEBHOOKS}/{webhook['id']}")

    assert foreign.status_code == 404
    assert listed["total"] == 0
    assert refused == [403, 403, 403]
    assert own["total"] == 1
    assert "secret" not in json.dumps(own)
    assert gone.status_code == 204
    assert (await call("GET", WEBHOOKS)).json()["total"] == 0


async def test_a_secret_is_never_stored_or_answered_in_clear(
    receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not in the record, not in a refusal, not in the log; another key cannot read it, and the deliveries say so."""
    webhook = await receiver.create()
    record = await receiver.service.database.read(lambda session: session.get(WebhookRecord, webhook["id"]))
    short = await receiver.service.call("POST", WEBHOOKS, json={"url": URL, "secret": "hunter2"})
    body = await receiver.service.call("POST", WEBHOOKS, json=[{"secret": SECRET}])
    await receiver.job(JobStep.SUBMIT)
    receiver.sender._secrets = SecretBox(b"eHl6MzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=")
    await receiver.send()
    (one,) = await receiver.deliveries(webhook)

    assert record is not None
    assert SECRET not in record.secret
    assert short.status_code == 422
    assert "hunter2" not in short.text
    assert SECRET not in body.text
    assert "stored with another key" in one["told"]
    assert SECRET not in capsys.readouterr().out


@pytest.mark.parametrize(
    "url",
    [
        "http://hooks.example.com/",
        "https://127.0.0.1/",
        "https://169.254.169.254/latest",
        "https://[::ffff:10.0.0.1]/",
        "https://2130706433/",
        "https://kubernetes.default.svc/",
        "https://localhost/",
        "https://user:word@hooks.example.com/",
        "file:///etc/passwd",
        "https://hooks.example.com/%2e%2e/admin",
    ],
)
async def test_a_url_that_may_lead_inside_is_refused(receiver: Receiver, url: str) -> None:
    """Loopback, private and link-local addresses in any disguise, names of clusters, other schemes, passwords."""
    answer = await receiver.service.call("POST", WEBHOOKS, json={"url": url, "secret": SECRET})

    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "url")


async def test_a_public_name_that_leads_inside_is_not_called(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address is checked when it is used, whatever the name led to when the webhook was created."""
    webhook = await receiver.create(events=["job.queued"])
    await receiver.job(JobStep.SUBMIT)
    port = int(receiver.url.split(":")[2].partition("/")[0])
    receiver.sender._policy = MlPolicy()
    monkeypatch.setattr(webhook_sender, "refuse_url", lambda _url, _policy: None)

    async def rebound(*_arguments: Any, **_options: Any) -> list[Any]:
        return [(2, 1, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", rebound)

    def lead_to_name(session: Any) -> None:
        session.get(WebhookRecord, webhook["id"]).url = f"http://hooks.example.com:{port}/atoll"

    await receiver.service.database.write(lead_to_name)
    await receiver.send()
    (one,) = await receiver.deliveries(webhook)

    assert receiver.got == []
    assert "public address" in one["told"]


def test_an_administrator_may_allow_a_host() -> None:
    """By name, also without TLS: inside a cluster that is the operator's choice."""
    assert refuse_url("http://ci.team.svc/hook", MlPolicy()) is not None
    assert refuse_url("http://ci.team.svc/hook", MlPolicy(hosts=("ci.team.svc",))) is None
