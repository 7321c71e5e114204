"""Preemption notices: the end of an evicted pod as an annotation for its containers, and stale notices. Pure.

The eviction follows its notice at once. A notice without an eviction is left over from a controller that died in
between, or whose eviction was refused.
"""

from typing import Final

from atoll.api import names
from atoll.api.times import seconds_of, text_of
from atoll.cluster.objects import Pod

STALE_SECONDS: Final = 60.0
"""By then a suspended owner of a gang has deleted its pods."""
TIME_MAX: Final = 253_370_764_800.0
"""The last year that a Kubernetes timestamp can express."""


def grace_seconds(pod: Pod) -> int:
    """Return the pod's grace period from SIGTERM to its end, seconds; Kubernetes' default if unset."""
    return 30 if pod.spec.termination_grace_period_seconds is None else pod.spec.termination_grace_period_seconds


def notice_of(pod: Pod, now_seconds: float) -> str:
    """Return the latest end of a pod that is evicted now, in RFC 3339."""
    return text_of(min(now_seconds + grace_seconds(pod), TIME_MAX))


def is_stale(pod: Pod, now_seconds: float) -> bool:
    """Return whether the pod still runs with a notice that is older than `STALE_SECONDS`, or unreadable."""
    text = pod.metadata.annotations.get(names.PREEMPTION_NOTICE)
    if not text or pod.metadata.deletion_timestamp is not None:
        return False
    end = seconds_of(text)
    return end is None or end - grace_seconds(pod) + STALE_SECONDS <= now_seconds
