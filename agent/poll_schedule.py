"""When the agent looks again, and when it must publish although nothing changed.

In: what happened (a pod of this node deleted, a reading taken). Out: the next wait in seconds, and whether the reading
counts as owed. Pure: no clock, no task. Separate because controllers rely on this rule to release GPUs:

* after a start and after each deletion of a pod that had GPUs, two further complete readings are published;
* while such a pod is gone from the API but still live or listed, evidence is read again about every second;
* a reading that could not be completed pays nothing, and repeats ever more slowly, up to the poll interval.

Beside it stands where in the time over which a cluster's agents start one of them does.
"""

from dataclasses import dataclass, replace
from hashlib import sha256

READINGS_OWED = 2
"""Complete readings that prove an absence: one might have begun before the kubelet learned of the deletion."""


def start_wait_seconds(node: str, *, spread_seconds: float) -> float:
    """How long a node's agent waits before it asks the API server for anything: by the node's name, so that the agents
    of a cluster are spread evenly whatever starts them together, and one of them always waits the same."""
    return spread_seconds * int.from_bytes(sha256(node.encode()).digest()[:6]) / 2.0**48


@dataclass(frozen=True, slots=True)
class PollSchedule:
    """Waits in seconds, and what is owed at the moment."""

    poll_seconds: float
    urgent_seconds: float
    pending_reports: int = READINGS_OWED
    failures: int = 0

    def after_deletion(self) -> "PollSchedule":
        """A pod that had GPUs was deleted, or controllers asked: two more readings are owed, from now on and soon."""
        return replace(self, pending_reports=READINGS_OWED, failures=0)

    def after_reading(self, *, is_complete: bool) -> "PollSchedule":
        """A reading was taken (and published, where it was owed and complete)."""
        if is_complete:
            return replace(self, pending_reports=max(0, self.pending_reports - 1), failures=0)
        return replace(self, failures=self.failures + 1)

    def must_publish(self, *, is_complete: bool) -> bool:
        """Tell whether a reading is published even if it says nothing new."""
        return is_complete and self.pending_reports > 0

    def wait_seconds(self, *, has_terminating: bool) -> float:
        """Return the wait before the next reading. has_terminating: a pod is gone from the API and still seen."""
        if self.pending_reports == 0 and not has_terminating:
            return self.poll_seconds
        return min(self.poll_seconds, self.urgent_seconds * 2.0 ** min(self.failures, 16))
