"""The error that ends the demo early."""

from __future__ import annotations

from devcluster.errors import DevclusterError


class ExpectationFailed(DevclusterError):
    """A promise is broken, or an expected state did not come in time."""

    def __init__(self, what: str, *, process: str) -> None:
        """Keep what was expected or found, and the process whose log has details."""
        super().__init__(what)
        self.process = process
