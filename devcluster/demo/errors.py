"""What ends the demo early: something that should have come true and did not."""

from __future__ import annotations

from devcluster.errors import DevclusterError


class ExpectationFailed(DevclusterError):
    """A promise was seen broken, or something promised did not come in time."""

    def __init__(self, what: str, *, process: str) -> None:
        """Say what was expected or found, and keep the process whose log tells more."""
        super().__init__(what)
        self.process = process
