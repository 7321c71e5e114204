"""When a pod that is evicted ends, as its containers may read it, and which notices mean nothing any more.

In: a pod and the time. Out: the text of the annotation, and verdicts. Pure. The eviction follows its notice at once; a
notice without one is what a controller left behind that died in between, or whose eviction was refused.
"""

from typing import Final

from atoll.api import names
from atoll.api.times import seconds_of, text_of
from atoll.cluster.objects import Pod

STALE_SECONDS: Final = 60.0
"""An owner that is suspended for a gang has deleted its pods by then."""
TIME_MAX: Final = 253_370_764_800.0
"""The last year that a time of Kubernetes can tell."""


def grace_seconds(pod: Pod) -> int:
    """Return how long the pod's containers have from SIGTERM to their end; Kubernetes' own where it says nothing."""
    return 30 if pod.spec.termination_grace_period_seconds is None else pod.spec.termination_grace_period_seconds


def notice_of(pod: Pod, now_seconds: float) -> str:
    """Return when a pod that is evicted now has ended at the latest, in RFC 3339."""
    return text_of(min(now_seconds + grace_seconds(pod), TIME_MAX))


def is_stale(pod: Pod, now_seconds: float) -> bool:
    """Tell whether the pod bears a notice and goes on: written `STALE_SECONDS` ago, or unreadable."""
    text = pod.metadata.annotations.get(names.PREEMPTION_NOTICE)
    if not text or pod.metadata.deletion_timestamp is not None:
        return False
    end = seconds_of(text)
    return end is None or end - grace_seconds(pod) + STALE_SECONDS <= now_seconds
