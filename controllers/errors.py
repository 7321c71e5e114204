"""Exceptions of the controllers.

ControllersError
└── NotLeading    a write was about to be sent by a process that may no longer lead
"""


class ControllersError(Exception):
    """Base of this package's exceptions."""


class NotLeading(ControllersError):
    """Nothing was sent; `path` is what would have been written."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(f"not written, because another process may lead now: {path}")
