"""A mail server in this process: SMTP of RFC 5321, with STARTTLS and AUTH PLAIN, and answers that a test gives."""

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default


class MailServer:
    """Takes mails. `refusals`: answers to the next recipients, instead of taking them; `user`: who must log in, as
    name and password."""

    def __init__(self, *, tls: ssl.SSLContext | None = None, user: tuple[str, str] | None = None) -> None:
        self.mails: list[EmailMessage] = []
        self.refusals: list[str] = []
        self.port = 0
        self._tls = tls
        self._user = user

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["MailServer"]:
        """Serve until the block ends."""
        server = await asyncio.start_server(self._session, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        async with server:
            yield self

    async def _session(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_safe, is_known = False, self._user is None
        writer.write(b"220 mail.test ready\r\n")
        while line := (await reader.readline()).decode().strip():
            verb, _, rest = line.partition(" ")
            match verb.upper():
                case "EHLO":
                    offers = ["mail.test", *(["STARTTLS"] if self._tls and not is_safe else [])]
                    offers += ["AUTH PLAIN"] if self._user else []
                    told = "".join(f"250-{one}\r\n" for one in offers) + "250 8BITMIME"
                case "STARTTLS" if self._tls is not None:
                    writer.write(b"220 go ahead\r\n")
                    await writer.start_tls(self._tls)
                    is_safe = True
                    continue
                case "AUTH":
                    given = tuple(base64.b64decode(rest.partition(" ")[2]).decode().split("\0")[1:])
                    is_known = given == self._user
                    told = "235 welcome" if is_known else "535 wrong password"
                case "RCPT" if not is_known or (self._tls is not None and not is_safe):
                    told = "530 log in, and encrypt"
                case "RCPT" if self.refusals:
                    told = self.refusals.pop(0)
                case "DATA":
                    writer.write(b"354 go ahead\r\n")
                    data = await reader.readuntil(b"\r\n.\r\n")
                    found = message_from_bytes(data.removesuffix(b".\r\n"), policy=default)
                    assert isinstance(found, EmailMessage)
                    self.mails.append(found)
                    told = "250 taken"
                case "QUIT":
                    writer.write(b"221 bye\r\n")
                    break
                case _:
                    told = "250 fine"
            writer.write(f"{told}\r\n".encode())
        writer.close()
