"""End time of an evicted pod, and notices without an eviction."""

import pytest

from atoll.api import names
from atoll.api.times import seconds_of, text_of
from atoll.cluster.preemption_notices import STALE_SECONDS, is_stale, notice_of
from tests.builders import make_pod

NOW = 1_000_000.0


@pytest.mark.parametrize(
    ("spec", "seconds"),
    [({}, 30), ({"terminationGracePeriodSeconds": 300}, 300), ({"terminationGracePeriodSeconds": 0}, 0)],
)
def test_notice_tells_the_end_of_the_grace_period(spec: dict[str, int], seconds: int) -> None:
    """Kubernetes gives 30 seconds where a pod says nothing."""
    assert seconds_of(notice_of(make_pod(**spec), NOW)) == NOW + seconds


def test_absurd_grace_period_is_told_as_the_last_year() -> None:
    """It is the user's number, of up to 64 bits."""
    assert notice_of(make_pod(terminationGracePeriodSeconds=2**63 - 1), NOW).startswith("9999-")


@pytest.mark.parametrize(
    ("text", "age_seconds", "deleted", "stale"),
    [
        pytest.param(None, 0.0, False, False, id="no-notice"),
        pytest.param(text_of(NOW + 30), STALE_SECONDS - 1, False, False, id="the-eviction-may-follow"),
        pytest.param(text_of(NOW + 30), STALE_SECONDS + 1, False, True, id="nothing-followed"),
        pytest.param(text_of(NOW + 30), STALE_SECONDS + 1, True, False, id="it-ends"),
        pytest.param("soon", 0.0, False, True, id="unreadable"),
    ],
)
def test_notice_without_an_eviction_goes_stale(
    text: str | None, age_seconds: float, *, deleted: bool, stale: bool
) -> None:
    """Counted from when it was written, whatever the grace period."""
    pod = make_pod(annotations={names.PREEMPTION_NOTICE: text} if text else {}, deleted=deleted)
    assert is_stale(pod, NOW + age_seconds) == stale
