"""Tokens: the API server identifies the user, invalid ones cost it little, and none is stored in clear text."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from atoll.kube.errors import Unanswered
from jobs.authentication import (
    REMEMBERED_MAX,
    REMEMBERED_SECONDS,
    REVIEWS_BURST,
    Identity,
    NotIdentified,
    TokenReviewer,
)


class TokenReviews:
    """An API server that reviews tokens: `good-NAME` is somebody's."""

    def __init__(self) -> None:
        self.asked: list[Mapping[str, Any]] = []
        self.audiences: list[str] = []
        self.is_away = False
        self.answer: bytes | None = None

    async def create(self, path: str, body: Mapping[str, Any], **_options: Any) -> bytes:
        """Answer a TokenReview."""
        self.asked.append(body["spec"])
        if self.is_away:
            raise Unanswered("POST got no answer", path=path, sent=True)
        if self.answer is not None:
            return self.answer
        token = body["spec"]["token"]
        status: dict[str, Any] = {"authenticated": token.startswith("good-")}
        if status["authenticated"]:
            status |= {"user": {"username": token[5:], "groups": ["g"]}, "audiences": self.audiences}
        return json.dumps({"status": status}).encode()


class Now:
    """Time that a test moves."""

    seconds = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.seconds


def reviewer(reviews: TokenReviews, *, audience: str = "", now: Now | None = None) -> TokenReviewer:
    """Return a reviewer over a played API server."""
    return TokenReviewer(reviews, audience=audience, now=now or Now())  # type: ignore[arg-type]


async def test_a_known_token_is_somebody_with_groups() -> None:
    """The name and groups are the API server's."""
    assert await reviewer(TokenReviews()).identify("Bearer good-ann") == Identity("ann", ("g",))


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Basic good-ann", "good-ann", "Bearer " + "x" * 20_000])
async def test_what_is_no_token_is_not_even_asked_about(header: str) -> None:
    """Nonsense costs the API server nothing."""
    reviews = TokenReviews()

    found = await reviewer(reviews).identify(header)

    assert isinstance(found, NotIdentified)
    assert (found.status, reviews.asked) == (401, [])


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (b'{"status": {"authenticated": false}}', 401),
        (b'{"status": {}}', 401),
        (b"{}", 401),
        (b'{"status": {"authenticated": true, "user": {}}}', 401),
        (b'{"status": {"authenticated": "yes"}}', 503),
        (b"<html>", 503),
        (b"", 503),
    ],
)
async def test_only_a_clear_yes_is_one(answer: bytes, status: int) -> None:
    """An answer without authenticated, without a name, or that is none lets nobody in."""
    reviews = TokenReviews()
    reviews.answer = answer

    found = await reviewer(reviews).identify("Bearer good-ann")

    assert isinstance(found, NotIdentified)
    assert found.status == status


@pytest.mark.parametrize(
    ("audiences", "is_taken"), [(["atoll"], True), (["other", "atoll"], True), (["other"], False), ([], False)]
)
async def test_a_token_for_somebody_else_is_refused(audiences: list[str], is_taken: bool) -> None:
    """Where an audience is set, the token must have been issued for it."""
    reviews = TokenReviews()
    reviews.audiences = audiences

    found = await reviewer(reviews, audience="atoll").identify("Bearer good-ann")

    assert reviews.asked == [{"token": "good-ann", "audiences": ["atoll"]}]
    assert isinstance(found, Identity) == is_taken


async def test_a_token_is_remembered_for_a_short_time_and_not_in_clear() -> None:
    """A caller costs one review in half a minute; the memory holds digests, and so many at most."""
    reviews, now = TokenReviews(), Now()
    asked = reviewer(reviews, now=now)
    for _ in range(5):
        await asked.identify("Bearer good-ann")
    within = len(reviews.asked)
    now.seconds = REMEMBERED_SECONDS
    await asked.identify("Bearer good-ann")

    assert (within, len(reviews.asked)) == (1, 2)
    assert b"good-ann" not in repr(asked.__dict__).encode()
    for number in range(REMEMBERED_MAX + 10):
        now.seconds += 1
        await asked.identify(f"Bearer good-{number}")
    assert len(asked._known) == REMEMBERED_MAX


async def test_strangers_cannot_make_the_api_server_work() -> None:
    """A flood of unknown tokens is answered 429 beyond a few; a known one is let in all the same."""
    reviews = TokenReviews()
    asked = reviewer(reviews)
    await asked.identify("Bearer good-ann")
    found = await asyncio.gather(*(asked.identify(f"Bearer bad-{number}") for number in range(500)))

    assert len(reviews.asked) == REVIEWS_BURST
    assert sum(isinstance(one, NotIdentified) and one.status == 429 for one in found) == 501 - REVIEWS_BURST
    assert await asked.identify("Bearer good-ann") == Identity("ann", ("g",))


async def test_while_the_api_server_is_away_nobody_new_is_let_in() -> None:
    """It is told that it may pass; whoever was known a moment ago goes on."""
    reviews = TokenReviews()
    asked = reviewer(reviews)
    await asked.identify("Bearer good-ann")
    reviews.is_away = True

    found = await asked.identify("Bearer good-bob")

    assert isinstance(found, NotIdentified)
    assert found.status == 503
    assert await asked.identify("Bearer good-ann") == Identity("ann", ("g",))
