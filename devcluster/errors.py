"""Errors of a development cluster.

DevclusterError
├── RealNodesUnavailableError   this machine cannot run real nodes (not root, not Linux, a tool is missing)
├── BuildError                  a binary could not be built or found
├── ClusterStateError           no such cluster, or one of that name is running already
├── StartError                  a part of the cluster did not start; carries the tail of its log
├── ControlError                the supervisor refused a request or cannot be reached
└── AdminApiError               the API server of the cluster answered with an error; carries the status code

Commands turn each into one sentence with the next step.
"""

from __future__ import annotations


class DevclusterError(Exception):
    """Base of this package's errors; the message says what failed, on which object, and what to do next."""


class RealNodesUnavailableError(DevclusterError):
    """This machine cannot run real nodes."""

    def __init__(self, reason: str) -> None:
        """Keep the reason; the message adds alternatives."""
        super().__init__(
            f"real nodes cannot run here: {reason}; run this as root on Linux, or start a control plane alone "
            "(--control-plane-only), or use a cluster of your own (kind, see deploy/kind/, or any through --kubeconfig)"
        )
        self.reason = reason


class BuildError(DevclusterError):
    """A binary of the cluster could not be built or found."""


class ClusterStateError(DevclusterError):
    """No cluster has that name, or one exists already."""


_CURES = {
    "inotify_init: too many open files": (
        "this machine's inotify instances are used up, and a node takes about 10: run fewer nodes at a time, or raise "
        "the limit (sysctl fs.inotify.max_user_instances=1024)"
    ),
    "no space left on device": (
        "the disk is full: free some space; `atoll dev down` removes the leftovers of killed clusters"
    ),
}


class StartError(DevclusterError):
    """A part of the cluster did not start in time or ended at once."""

    def __init__(self, part: str, *, problem: str, log_tail: str) -> None:
        """Name the part, the problem, a fix if the log shows a known cause, and the last lines of the log."""
        cures = "".join(f"; {cure}" for sign, cure in _CURES.items() if sign in log_tail)
        super().__init__(f"{part} {problem}{cures}; end of its log:\n{log_tail or '(empty)'}")
        self.part = part
        self.log_tail = log_tail


class ControlError(DevclusterError):
    """The supervisor of a cluster refused a request or cannot be reached."""


class AdminApiError(DevclusterError):
    """The API server answered a request with an error."""

    def __init__(self, request: str, *, status: int, answer: str) -> None:
        """Keep the HTTP status code and at most 500 characters of the answer."""
        super().__init__(f"{request} was answered with {status}: {answer[:500]}")
        self.status = status
