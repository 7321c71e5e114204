"""Sends deliveries to webhooks, signed, and never to an address that is not public.

The host is resolved once, checked, and the connection goes to the checked address: a name that changes its address in
between leads nowhere. Redirects are not followed.
"""

import asyncio
import hmac
import json
from collections.abc import Sequence
from datetime import datetime
from hashlib import sha256
from typing import Any, Final

import aiohttp
import structlog
from sqlalchemy.exc import SQLAlchemyError

from atoll.kube.clock import Clock
from atoll.ml.policy import MlPolicy
from atoll.ml.uris import UriProblem, host_of, refuse_addresses, refuse_model_uri
from atoll.service.metrics import Metrics
from atoll.service.resolving import GuardedResolver
from jobs.database import Database
from jobs.records import DeliveryRecord, WebhookRecord
from jobs.secrets import SecretBox
from jobs.webhook_store import due_deliveries, note_delivery

log = structlog.get_logger(__name__)

POLL_SECONDS: Final = 2.0
AT_ONCE_MAX: Final = 16
TIMEOUT_SECONDS: Final = 10.0
DELIVERY: Final = "Atoll-Delivery"
EVENT: Final = "Atoll-Event"
TIMESTAMP: Final = "Atoll-Timestamp"
SIGNATURE: Final = "Atoll-Signature"


def refuse_url(url: str, policy: MlPolicy) -> UriProblem | None:
    """Return why a webhook may not have this URL, before its host is resolved."""
    if not url.startswith("https://") and not (url.startswith("http://") and host_of(url) in policy.hosts):
        return UriProblem("must begin with https://", "take a receiver with TLS")
    return refuse_model_uri(url, None, policy)


def signature_of(secret: str, timestamp: int, body: bytes) -> str:
    """Return the value of the header Atoll-Signature: of the timestamp, a dot and the body."""
    signed = hmac.new(secret.encode(), f"{timestamp}.".encode() + body, sha256)
    return f"v1={signed.hexdigest()}"


class WebhookSender:
    """Sends what is due; `run` as one task, while this process leads."""

    def __init__(self, database: Database, secrets: SecretBox | None, clock: Clock, *, policy: MlPolicy) -> None:
        self._database = database
        self._secrets = secrets
        self._clock = clock
        self._policy = policy
        self.delivered_count = self.failures_count = 0

    def register(self, metrics: Metrics) -> None:
        """Publish what was sent."""
        metrics.counter_of("deliveries", "Events that a webhook's receiver took", lambda: self.delivered_count)
        metrics.counter_of("delivery_failures", "Attempts to deliver an event that failed", lambda: self.failures_count)

    async def run(self) -> None:
        """Send until cancelled."""
        async with self.session() as session:
            while True:
                try:
                    sent = await self.send_due(session)
                except SQLAlchemyError as error:
                    log.warning("Could not read deliveries", err=str(error).partition("\n")[0])
                    sent = 0
                if sent < AT_ONCE_MAX:
                    await self._clock.sleep(POLL_SECONDS)

    def session(self) -> aiohttp.ClientSession:
        """Return a session that reaches public addresses alone."""
        connector = aiohttp.TCPConnector(resolver=GuardedResolver(self._refusal), use_dns_cache=False, force_close=True)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        return aiohttp.ClientSession(connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar())

    def _refusal(self, host: str, addresses: Sequence[str]) -> str:
        """Return why a receiver may not be contacted."""
        refused = refuse_addresses(host, addresses, self._policy)
        return f"{refused.hint.partition(';')[0]}: the host {refused.limit}" if refused is not None else ""

    async def send_due(self, session: aiohttp.ClientSession) -> int:
        """Send what is due now, a few at a time; return how many. Raises SQLAlchemy's errors."""
        if self._secrets is None:
            return 0
        now = self._clock.now()
        due = await self._database.read(lambda reading: due_deliveries(reading, now, count_max=AT_ONCE_MAX))
        await asyncio.gather(*(self._send(session, delivery, webhook) for delivery, webhook in due))
        return len(due)

    async def _send(self, session: aiohttp.ClientSession, delivery: DeliveryRecord, webhook: WebhookRecord) -> None:
        assert self._secrets is not None
        secret = self._secrets.open(webhook.secret)
        refused = refuse_url(webhook.url, self._policy)
        if secret is None:
            status, told = None, "the secret was stored with another key: create the webhook again"
        elif refused is not None:
            status, told = None, f"the URL {refused.limit}"
        else:
            status, told = await self._post(session, delivery, webhook.url, secret)
        if status is not None and status < 300:
            self.delivered_count += 1
        else:
            self.failures_count += 1
        now = self._clock.now()
        await self._database.write(lambda writing: note_delivery(writing, delivery.id, now, status=status, told=told))
        log.info("Sent an event", delivery=delivery.id, event_name=delivery.event, status=status, reason=told)

    async def _post(
        self, session: aiohttp.ClientSession, delivery: DeliveryRecord, url: str, secret: str
    ) -> tuple[int | None, str]:
        body = json.dumps(delivery.payload, separators=(",", ":")).encode()
        headers = headers_of(delivery, secret, body, self._clock.now())
        try:
            async with session.post(url, data=body, headers=headers, allow_redirects=False) as answer:
                told = "" if answer.status < 300 else f"the receiver answered {answer.status}"
                return answer.status, told
        except TimeoutError:
            return None, f"no answer within {TIMEOUT_SECONDS:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return None, _reason(error)


def headers_of(delivery: DeliveryRecord, secret: str, body: bytes, now: datetime) -> dict[str, str]:
    """Return the headers of a delivery."""
    timestamp = int(now.timestamp())
    return {
        "Content-Type": "application/json",
        "User-Agent": "atoll-jobs",
        DELIVERY: delivery.id,
        EVENT: delivery.event,
        TIMESTAMP: str(timestamp),
        SIGNATURE: signature_of(secret, timestamp, body),
    }


def _reason(error: Exception) -> str:
    """Return why nothing was sent; of the resolver's own words the first sentence."""
    inner: Any = getattr(error, "os_error", None) or error
    return str(inner).partition("\n")[0] or type(inner).__name__
