"""Exceptions of the pure domain.

ClusterError
├── MalformedValue      a peer wrote something on an object that cannot be read
└── IllegalTransition   our own mistake: the ledger was asked for a step that its table does not have
"""


class ClusterError(Exception):
    """Base of this package's exceptions."""


class MalformedValue(ClusterError):
    """An annotation, name or field cannot be read; `where` names it and `value` is the text, cut to 200 characters."""

    def __init__(self, where: str, value: str, expected: str) -> None:
        self.where = where
        self.value = value[:200]
        super().__init__(f"cannot read {where} {self.value!r}: expected {expected}")


class IllegalTransition(ClusterError):
    """The ledger has no such step; nothing was changed. `history` is what happened to the device before."""

    def __init__(self, device: str, state: str, verb: str, history: tuple[str, ...]) -> None:
        self.device = device
        self.state = state
        self.verb = verb
        self.history = history
        super().__init__(
            f"cannot {verb} device {device} in state {state}; its history: {' > '.join(history) or 'none'}"
        )
