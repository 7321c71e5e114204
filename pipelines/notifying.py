"""Notification steps: tell each recipient once, and keep what was sent to whom.

What was sent is recorded after each recipient, so a retry, or a try that a crash cut off, tells only the others. A
recipient whose record a crash prevents is told twice, with the same idempotency key or Message-ID.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from atoll.jobs.retries import bounded
from atoll.pipelines.model import BY_NAME
from jobs.database import Database
from pipelines.mail import Mail, Mailer
from pipelines.outgoing import CallFailed, CallRefused, OutgoingCall, OutgoingClient
from pipelines.records import MessageRecord
from pipelines.store import Try

EMAIL: Final = "email"
WEBHOOK: Final = "webhook"


class MessageState(StrEnum):
    """How the last attempt to tell a recipient ended."""

    SENT = "sent"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Notice:
    """What a notification step tells. `key`: idempotency key of the try."""

    one: Try
    channel: str
    recipients: Sequence[str]
    subject: str
    text: str
    data: Mapping[str, Any]
    tenant: str
    key: str


class Notifier:
    """Tells recipients."""

    def __init__(self, database: Database, outgoing: OutgoingClient, mailer: Mailer) -> None:
        self._database = database
        self._outgoing = outgoing
        self._mailer = mailer

    async def tell(self, notice: Notice, now: datetime) -> None:
        """Tell every recipient that was not told before. Raises CallRefused or CallFailed if one was not reached."""
        known = await self._database.read(lambda session: messages_of(session, notice.one.run_id, notice.one.key))
        sent = {record.number for record in known if record.state == MessageState.SENT}
        failures: list[CallRefused | CallFailed] = []
        for number in range(len(notice.recipients)):
            if number in sent:
                continue
            error: CallRefused | CallFailed | None = None
            try:
                await self._send(notice, number, now)
            except (CallRefused, CallFailed) as caught:
                error = caught
                failures.append(caught)
            told = "" if error is None else str(error)
            await self._database.write(lambda session: _keep(session, notice, number, told, now))  # noqa: B023
        if failures:
            raise next((one for one in failures if isinstance(one, CallFailed)), failures[0])

    async def _send(self, notice: Notice, number: int, now: datetime) -> None:
        recipient, text = notice.recipients[number], notice.text
        if notice.channel != WEBHOOK:
            text = "\n".join([text, *(f"{name}: {value}" for name, value in notice.data.items())])
        if notice.channel == EMAIL:
            key = f"{notice.one.run_id}/{notice.one.key}/{number}"
            await self._mailer.send(Mail(recipient, notice.subject, text + "\n", key, now))
            return
        message = {**notice.data, "text": text} if notice.channel == WEBHOOK else {"text": text}
        headers, hidden = {"Idempotency-Key": f"{notice.key}-to-{number}"}, list[str]()
        if recipient.startswith(BY_NAME):
            recipient = self._outgoing.secret(notice.tenant, recipient.removeprefix(BY_NAME))
            hidden.append(recipient)
        call = OutgoingCall("POST", recipient, notice.tenant, headers, {}, message, hidden)
        found = await self._outgoing.call(call)
        if found["status_code"] >= 400:
            raise CallFailed(f"a recipient answered with status {found['status_code']}")


def messages_of(session: Session, run_id: str, key: str | None = None) -> Sequence[MessageRecord]:
    """Return what the notification steps of a run sent, or one of them, in the order of steps and recipients."""
    where = [MessageRecord.run_id == run_id]
    if key is not None:
        where.append(MessageRecord.key == key)
    found = select(MessageRecord).where(*where).order_by(MessageRecord.key, MessageRecord.number)
    return session.scalars(found).all()


def _keep(session: Session, notice: Notice, number: int, error: str, now: datetime) -> None:
    one = notice.one
    session.merge(
        MessageRecord(
            run_id=one.run_id,
            key=one.key,
            number=number,
            attempt=one.attempt,
            channel=notice.channel,
            recipient=notice.recipients[number],
            state=(MessageState.FAILED if error else MessageState.SENT).value,
            error=bounded(error),
            at=now,
        )
    )
