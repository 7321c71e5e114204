"""Why a gang waits: its decision, the domains level by level, its members, and what would help.

The headline is the message that the controllers write into the gang's condition Admitted. Pure.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from atoll.api.gangs import GpuGang, GpuGangSpec
from atoll.cluster.gangs.kueue_topology import KueueTopologyRequest, words
from atoll.cluster.gangs.lifecycle import GangAction
from atoll.cluster.gangs.membership import GangMember
from atoll.cluster.gangs.readiness import quorum
from atoll.cluster.reservation_use import reservation_name
from atoll.explain.gang_decision import GangDecision, IndexedGangs, decide_gang
from atoll.explain.gang_proposals import GangProposal, find_gang_suggestions
from atoll.explain.proposals import Suggestions
from topology.gangs.domains import DomainFit, domain_fits


class GangState(StrEnum):
    """State of the gang."""

    RUNS = "runs"
    """Admitted, and nothing is missing."""
    FITS = "fits"
    """It, or its missing members, has a place; the controllers have yet to use it."""
    LACKS = "lacks"
    """It runs without some members, which find no place beside its others."""
    BUSY = "busy"
    """It waits for GPUs that others hold or that are withheld."""
    UNKNOWN = "not known yet"
    """It waits for information: machines that could hold it are closed, silent, or have not reported."""
    NEVER = "never"
    """It would not fit even on empty machines."""
    MEMBERS = "members"
    """Too few members exist, or the members contradict each other."""
    INACTIVE = "inactive"
    """It is deactivated, or its topology cannot be read."""
    ENDING = "ending"
    """Its GPUs are being released, or it waits out a pause."""


CONTENT: Final = frozenset({GangState.RUNS, GangState.FITS})
"""States that need no action."""


NO_HELP: Final[Suggestions[GangProposal]] = Suggestions()


@dataclass(frozen=True, slots=True)
class GangExplanation:
    """The answer about one gang. `stages`: number of members by stage; `waits_seconds`: since its creation.

    `asked`: topology requests, of the whole gang (empty name) and of each pod set."""

    gang: str
    state: GangState
    reason: str
    headline: str
    present: str
    stages: tuple[tuple[str, int], ...]
    waits_seconds: float
    asked: tuple[tuple[str, str], ...] = ()
    domains: tuple[DomainFit, ...] = ()
    help: Suggestions[GangProposal] = NO_HELP
    assignments: tuple[tuple[str, str, tuple[int, ...]], ...] = ()


def explain_gang(gangs: IndexedGangs, gang: GpuGang) -> GangExplanation:
    """Explain one gang. `seats` has the placed members: name, node, device ids."""
    decision = decide_gang(gangs, gang)
    state = state_of(decision)
    stages = Counter(_stage(member) for member in decision.view.members)
    is_reserved = any(reservation_name(member.pod) for member in decision.view.members)
    return GangExplanation(
        gang=f"{gang.metadata.namespace}/{gang.metadata.name}",
        state=state,
        reason=decision.reason,
        headline=decision.message,
        present=str(quorum(gang.spec, decision.view.members)),
        stages=tuple(sorted(stages.items())),
        waits_seconds=gangs.scene.snapshot.age_seconds(gang.metadata.creation_timestamp),
        asked=tuple(_asked(gang.spec)),
        domains=_domains(decision) if state in (GangState.BUSY, GangState.UNKNOWN, GangState.NEVER) else (),
        help=NO_HELP if is_reserved else find_gang_suggestions(gangs, gang, decision),
        assignments=tuple(
            (seat.member.pod.metadata.name, seat.allocation.node, seat.allocation.device_ids)
            for seat in decision.assignments
        ),
    )


def state_of(decision: GangDecision) -> GangState:
    """Return the gang's state, by what the controllers would do and the condition that they would write."""
    if decision.fits:
        return GangState.FITS
    if decision.act is GangAction.REPLACE:
        return GangState.LACKS
    if decision.reason in _STATES:
        return _STATES[decision.reason]
    return GangState.RUNS if decision.view.is_admitted or decision.reason == "Admitted" else GangState.ENDING


_STATES: Final = {
    "WaitForRoom": GangState.BUSY,
    "WaitForNodes": GangState.UNKNOWN,
    "NeverFits": GangState.NEVER,
    "WaitForQuorum": GangState.MEMBERS,
    "Inactive": GangState.INACTIVE,
    "WaitForRelease": GangState.ENDING,
    "WaitForRequeue": GangState.ENDING,
}


def _asked(spec: GpuGangSpec) -> Iterator[tuple[str, str]]:
    """Yield the topology requests of the gang and its pod sets; nothing if it has none."""
    wishes = [(one.name, KueueTopologyRequest(spec.topology_of(one), one.group or "")) for one in spec.pod_sets]
    found = [("", KueueTopologyRequest(spec.topology)), *wishes]
    if any(wish != KueueTopologyRequest() for _, wish in found):
        yield from ((name, words(wish)) for name, wish in found if name or wish != KueueTopologyRequest())


def _domains(decision: GangDecision) -> tuple[DomainFit, ...]:
    question = decision.asked.question() if decision.asked is not None else None
    return domain_fits(question.gang, question.snapshot) if question is not None else ()


def _stage(member: GangMember) -> str:
    return f"{member.pod_set or 'no pod set'}: {member.stage}"
