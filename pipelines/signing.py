"""Signatures of webhooks, as Standard Webhooks has them: HMAC-SHA256 over id, time and body."""

import base64
import binascii
import hmac
from collections.abc import Mapping
from secrets import token_bytes
from typing import Final

PREFIX: Final = "whsec_"
SECRET_BYTES: Final = 32
TOLERANCE_SECONDS: Final = 300
"""How far the sender's clock, or its delivery, may be off."""
ID_LENGTH_MAX: Final = 256
ID_HEADER, TIME_HEADER, SIGNATURE_HEADER = "webhook-id", "webhook-timestamp", "webhook-signature"


def new_secret() -> str:
    """Return a secret to sign with."""
    return PREFIX + base64.b64encode(token_bytes(SECRET_BYTES)).decode()


def signature(secret: str, delivery: str, timestamp: str, body: bytes) -> str:
    """Return the signature of a delivery."""
    key = base64.b64decode(secret.removeprefix(PREFIX))
    signed = f"{delivery}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(key, signed, "sha256")).decode()


def verified(secret: str, headers: Mapping[str, str], body: bytes, *, now_seconds: float) -> str | None:
    """Return the id of a delivery whose signature holds, else None. A repeated delivery keeps its id."""
    delivery, timestamp = headers.get(ID_HEADER, ""), headers.get(TIME_HEADER, "")
    if not 0 < len(delivery) <= ID_LENGTH_MAX or not delivery.isprintable() or not delivery.isascii():
        return None
    if not (timestamp.isascii() and timestamp.isdigit() and len(timestamp) <= 12):
        return None
    if abs(now_seconds - int(timestamp)) > TOLERANCE_SECONDS:
        return None
    try:
        wanted = signature(secret, delivery, timestamp, body).encode()
    except (binascii.Error, ValueError):
        return None
    given = headers.get(SIGNATURE_HEADER, "").encode(errors="replace").split(b" ")[:16]
    return delivery if any(hmac.compare_digest(wanted, one) for one in given) else None
