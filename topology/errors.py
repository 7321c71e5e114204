"""Errors of the placement geometry.

TopologyError
├── MachineError        a machine of impossible shape (not square, too many devices, ...)
├── DeviceRequestError  an invalid request (count below one, a bandwidth that is not a number, ...)
├── PositionError       positions or a free mask outside the machine
├── ProfileError        no known machine of that name
└── TopologyTextError   text without a link matrix

Odd link cells are not an error: they degrade to the weaker side (see topology.links). A request that does not fit is a
ChoiceRefusal, not an error (see topology.choice).
"""

from __future__ import annotations


class TopologyError(ValueError):
    """Base of this package's errors."""


class MachineError(TopologyError):
    """A machine description with an impossible shape."""

    def __init__(self, problem: str, *, value: object) -> None:
        self.problem = problem
        self.value = value
        super().__init__(f"machine: {problem}, got {value!r}")


class DeviceRequestError(TopologyError):
    """A request that makes no sense on any machine."""

    def __init__(self, problem: str, *, value: object) -> None:
        self.problem = problem
        self.value = value
        super().__init__(f"ask: {problem}, got {value!r}")


class PositionError(TopologyError):
    """Positions, counts or a free mask that do not belong to the machine."""

    def __init__(self, problem: str, *, value: object) -> None:
        self.problem = problem
        self.value = value
        super().__init__(f"positions: {problem}, got {value!r}")


class ProfileError(TopologyError):
    """No machine profile has this name."""

    def __init__(self, name: str, *, known: tuple[str, ...]) -> None:
        self.name = name
        self.known = known
        super().__init__(f"no profile named {name!r}; use one of {', '.join(known)}")


class TopologyTextError(TopologyError):
    """Text given as output of `nvidia-smi topo` that has no GPU row."""

    def __init__(self, problem: str, *, excerpt: str) -> None:
        self.problem = problem
        self.excerpt = excerpt
        super().__init__(
            f"topology text: {problem}, near {excerpt!r}; save the output of `nvidia-smi topo -m` unchanged"
        )
