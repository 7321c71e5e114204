"""Choice between the two sources of a claim."""

import asyncio
import json
from typing import Any

import pytest

from atoll.api.claims import GpuClaim
from atoll.kube.errors import Forbidden, KubeError, NotFound, Unanswered
from atoll.service.metrics import Metrics
from webhook.claims import COPY_SECONDS_MAX, ClaimFinder
from webhook.metrics import webhook_metrics
from webhook.requests import ClaimLookup, ClaimMissing, ClaimUnavailable, ClaimUnreadable
from webhook.serving import ServingCertificate

PATH = "/apis/gpu.scheduling/v1/namespaces/team/gpuclaims/two"


def raw_claim(count: int = 2) -> dict[str, Any]:
    return {"metadata": {"name": "two", "namespace": "team", "uid": "u"}, "spec": {"devices": {"count": count}}}


WATCHED = GpuClaim.model_validate(raw_claim(2))
LIVE = GpuClaim.model_validate(raw_claim(3))


class FakeCopy:
    """A watched copy in a chosen state."""

    def __init__(self, *claims: GpuClaim, age: float = 1.0, synced: bool = True, untrusted: bool = False) -> None:
        self.synced = asyncio.Event()
        if synced:
            self.synced.set()
        self.store = {("team", claim.metadata.name): claim for claim in claims}
        self.untrusted = {("team", "two"): "odd"} if untrusted else {}
        self._age = age

    def seconds_since_heard(self) -> float:
        return self._age


class FakeApi:
    """Answers one GET, or fails it."""

    def __init__(self, answer: bytes | KubeError) -> None:
        self._answer = answer
        self.asked: list[str] = []

    async def get(self, path: str, *, timeout_seconds: float = 10.0) -> bytes:
        self.asked.append(path)
        if isinstance(self._answer, KubeError):
            raise self._answer
        return self._answer


NOT_FOUND = NotFound("no", status=404, reason="NotFound", path=PATH)
FORBIDDEN = Forbidden("no", status=403, reason="Forbidden", path=PATH)
CUT = Unanswered("cut", path=PATH, sent=True)
FOUND = json.dumps(raw_claim(3)).encode()
INVALID = json.dumps(raw_claim(0)).encode()


@pytest.mark.parametrize(
    ("copy", "answer", "want", "asked"),
    [
        pytest.param(FakeCopy(WATCHED), CUT, WATCHED, 0, id="watched-no-request"),
        pytest.param(FakeCopy(), FOUND, LIVE, 1, id="not-watched-yet-but-there"),
        pytest.param(FakeCopy(), NOT_FOUND, ClaimMissing(), 1, id="really-missing"),
        pytest.param(FakeCopy(), CUT, ClaimUnavailable(), 1, id="miss-and-api-down"),
        pytest.param(FakeCopy(), FORBIDDEN, ClaimUnavailable(), 1, id="not-allowed-to-look"),
        pytest.param(FakeCopy(WATCHED, synced=False), FOUND, LIVE, 1, id="copy-not-complete"),
        pytest.param(FakeCopy(WATCHED, age=COPY_SECONDS_MAX + 1), FOUND, LIVE, 1, id="copy-silent-too-long"),
        pytest.param(
            FakeCopy(WATCHED, age=COPY_SECONDS_MAX + 1), CUT, ClaimUnavailable(), 1, id="old-copy-is-no-fallback"
        ),
        pytest.param(FakeCopy(WATCHED, untrusted=True), INVALID, None, 1, id="stored-claim-breaks-its-schema"),
    ],
)
async def test_lookup(copy: FakeCopy, answer: bytes | KubeError, want: ClaimLookup | None, asked: int) -> None:
    """A miss is asked live before anything is denied; an unreachable API server is told apart from a missing claim."""
    api = FakeApi(answer)

    lookup = await ClaimFinder(api, copy, webhook_metrics(Metrics("webhook"), ServingCertificate())).find("team", "two")

    if want is None:
        assert isinstance(lookup, ClaimUnreadable)
        assert "spec.devices.count" in lookup.detail
    else:
        assert lookup == want
    assert api.asked == [PATH] * asked
