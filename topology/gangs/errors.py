"""Errors of gang search.

GangError   a gang, a host or a snapshot that contradicts itself (no member, two hosts of one name, ...)

It is a TopologyError (see topology.errors). A gang that does not fit is a PlacementRefusal, not an error (see
topology.gangs.model).
"""

from __future__ import annotations

from topology.errors import TopologyError


class GangError(TopologyError):
    """An invalid gang, host or snapshot."""

    def __init__(self, problem: str, *, value: object) -> None:
        self.problem = problem
        self.value = value
        super().__init__(f"gang: {problem}, got {value!r}")
