"""Schedule of the agent's looks, and of reports that are due although nothing changed.

Pure: no clock, no task. The controllers rely on these rules to release GPUs:

* after a start and after each deletion of a pod that had GPUs, two further complete readings are published;
* while such a pod is gone from the API but still live or listed, evidence is read about every second;
* an incomplete reading does not count, and repeats ever more slowly, up to the poll interval; the first two that lack
  only kubelet's list are published, because two prove that a sandbox which was seen is gone.

`start_wait_seconds` spreads the starts of a cluster's agents.
"""

from dataclasses import dataclass, replace
from hashlib import sha256

READINGS_OWED = 2
"""Complete readings that prove an absence: the first may have begun before the kubelet learned of the deletion."""


def start_wait_seconds(node: str, *, spread_seconds: float) -> float:
    """Wait before the agent's first request to the API server, derived from the node's name: it spreads a cluster's
    agents evenly, and is the same at each start."""
    return spread_seconds * int.from_bytes(sha256(node.encode()).digest()[:6]) / 2.0**48


@dataclass(frozen=True, slots=True)
class PollSchedule:
    """Waits in seconds, and the readings owed now."""

    poll_seconds: float
    urgent_seconds: float
    pending_reports: int = READINGS_OWED
    pending_without_kubelet: int = READINGS_OWED
    failures: int = 0

    def after_deletion(self) -> "PollSchedule":
        """The schedule after a GPU pod was deleted or a controller asked: two more readings are due soon."""
        return replace(self, pending_reports=READINGS_OWED, pending_without_kubelet=READINGS_OWED, failures=0)

    def after_reading(self, *, is_complete: bool, live_read: bool) -> "PollSchedule":
        """The schedule after a reading (published, if it was owed)."""
        if is_complete:
            return replace(self, pending_reports=max(0, self.pending_reports - 1), failures=0)
        without_kubelet = max(0, self.pending_without_kubelet - live_read)
        return replace(self, pending_without_kubelet=without_kubelet, failures=self.failures + 1)

    def must_publish(self, *, is_complete: bool, live_read: bool) -> bool:
        """True if a reading is published even without news."""
        if is_complete:
            return self.pending_reports > 0
        return live_read and self.pending_reports > 0 and self.pending_without_kubelet > 0

    def wait_seconds(self, *, has_terminating: bool) -> float:
        """Seconds before the next reading. has_terminating: a pod is gone from the API and still seen."""
        if self.pending_reports == 0 and not has_terminating:
            return self.poll_seconds
        return min(self.poll_seconds, self.urgent_seconds * 2.0 ** min(self.failures, 16))
