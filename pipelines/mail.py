"""Mail of notification steps, through the one server that the settings name; addresses of steps choose no server.

smtplib blocks, so each mail is sent in a thread. A mail that a crash makes the service send again has the same
Message-ID, by which mail programs drop the second one.
"""

import asyncio
import smtplib
import ssl
from dataclasses import dataclass
from datetime import datetime
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import format_datetime
from hashlib import sha256
from pathlib import Path
from typing import Final

from jobs.settings import JobServiceSettings, MailTls
from pipelines.outgoing import CallFailed, CallRefused

TIMEOUT_SECONDS: Final = 20.0
"""Of each answer of the server."""
SUBJECT_LENGTH_MAX: Final = 200
ANY_DOMAIN: Final = "*"


@dataclass(frozen=True, slots=True)
class Mail:
    """One mail to one address. `key`: the same whenever it is sent again."""

    recipient: str
    subject: str
    text: str
    key: str
    at: datetime


class Mailer:
    """Sends mails."""

    def __init__(self, settings: JobServiceSettings) -> None:
        self._settings = settings

    async def send(self, mail: Mail) -> None:
        """Hand a mail to the server. Raises CallRefused if no retry would help, else CallFailed."""
        if not self._settings.mail_host:
            raise CallRefused("no mail server is configured: set --mail-host, or use channel webhook or slack")
        domain = mail.recipient.rpartition("@")[2].lower()
        if not {domain, ANY_DOMAIN}.intersection(self._settings.mail_domains):
            raise CallRefused(f"{mail.recipient} is in a domain that mail_domains does not name")
        try:
            await asyncio.to_thread(self._send, message_of(mail, self._settings.mail_from))
        except smtplib.SMTPRecipientsRefused as error:
            code, told = next(iter(error.recipients.values()))
            raise _failure(f"the mail server refuses {mail.recipient}", code, told) from error
        except smtplib.SMTPResponseException as error:
            raise _failure("the mail server answered", error.smtp_code, error.smtp_error) from error
        except (smtplib.SMTPException, OSError) as error:
            raise CallFailed(f"mail server {self._settings.mail_host}: {error}") from error

    def _send(self, message: EmailMessage) -> None:
        asked = self._settings
        host, port = asked.mail_host, asked.mail_port
        context = ssl.create_default_context(cafile=asked.mail_ca)
        with (
            smtplib.SMTP_SSL(host, port, timeout=TIMEOUT_SECONDS, context=context)
            if asked.mail_tls is MailTls.TLS
            else smtplib.SMTP(host, port, timeout=TIMEOUT_SECONDS)
        ) as server:
            if asked.mail_tls is MailTls.STARTTLS:
                server.starttls(context=context)
            if asked.mail_password is not None:
                server.login(asked.mail_user, _password(asked.mail_password))
            server.send_message(message)


def message_of(mail: Mail, sender: str) -> EmailMessage:
    """Return a mail as it is sent; line breaks in its subject could make headers, and become spaces."""
    message = EmailMessage(policy=SMTP)
    message["From"], message["To"] = sender, mail.recipient
    message["Subject"] = " ".join(mail.subject.split())[:SUBJECT_LENGTH_MAX]
    message["Date"] = format_datetime(mail.at)
    message["Message-ID"] = f"<{sha256(mail.key.encode()).hexdigest()[:32]}@{sender.rpartition('@')[2].rstrip('>')}>"
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(mail.text)
    return message


def _failure(what: str, code: int, told: bytes | str) -> CallRefused | CallFailed:
    """Return the error of an answer: with a code from 500 on the server will never take the mail."""
    text = told.decode(errors="replace") if isinstance(told, bytes) else told
    error = f"{what}: {code} {text}".strip()
    return CallRefused(error) if code >= 500 and code not in (530, 534, 535) else CallFailed(error)


def _password(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CallFailed(f"cannot read the password of the mail server: {type(error).__name__}") from error
