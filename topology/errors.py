"""Faults of the placement geometry.

TopologyError
├── MachineError   a machine whose shape cannot be (not square, too many devices, ...)
├── AskError       an ask that no machine could be asked (count below one, a bandwidth that is no number, ...)
├── PositionError  positions or a free mask that point outside of the machine
├── ProfileError   no known machine of that name
└── TopologyTextError  text that holds no link matrix at all

Odd link cells are no fault: they degrade to the weaker side (see topology.links). An ask that does not fit is no fault
either: it is a Refusal (see topology.choice).
"""

from __future__ import annotations


class TopologyError(ValueError):
    """Base of every fault that this package raises."""


class MachineError(TopologyError):
    """A machine description with an impossible shape."""

    def __init__(self, problem: str, *, value: object) -> None:
        self.problem = problem
        self.value = value
        super().__init__(f"machine: {problem}, got {value!r}")


class DeviceRequestError(TopologyError):
    """An ask that makes no sense on any machine."""

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
    """A known machine was asked for by a name that is not known."""

    def __init__(self, name: str, *, known: tuple[str, ...]) -> None:
        self.name = name
        self.known = known
        super().__init__(f"no profile named {name!r}; use one of {', '.join(known)}")


class TopologyTextError(TopologyError):
    """Text that was offered as output of `nvidia-smi topo` and holds no GPU row."""

    def __init__(self, problem: str, *, excerpt: str) -> None:
        self.problem = problem
        self.excerpt = excerpt
        super().__init__(
            f"topology text: {problem}, near {excerpt!r}; save the output of `nvidia-smi topo -m` unchanged"
        )
