"""Places for a whole gang, or why there are none: one pure decision.

In: a gang with its quorum, the members to place, the cluster. Out: `FoundPlacement`, or `NoPlacement` with the reason that the
gang's condition gives. All members that are there are tried first; where they do not fit and fewer would be enough, as
many as fit are taken, never fewer than the quorum.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atoll.cluster.gangs.lifecycle import GangView, Obstacle
from atoll.cluster.gangs.membership import GangMember, MemberStage
from atoll.cluster.gangs.node_domains import NodeDomains
from atoll.cluster.gangs.search_input import GangSearchInput, PlacementSnapshot, search_input
from atoll.cluster.requests import Request
from topology.errors import TopologyError
from topology.gangs.model import Placement
from topology.gangs.search import place


@dataclass(frozen=True, slots=True)
class FoundPlacement:
    """A placement, and the question that it answers."""

    question: GangSearchInput
    placement: Placement


@dataclass(frozen=True, slots=True)
class NoPlacement:
    """A reason of the condition Admitted, and a message."""

    reason: str
    message: str


def find_places(
    view: GangView,
    chosen: Sequence[GangMember],
    requests: Mapping[str, Request],
    site: NodeDomains,
    landscape: PlacementSnapshot,
) -> FoundPlacement | NoPlacement:
    """Decide where the members go."""
    answer = search(view, chosen, requests, site, landscape)
    if isinstance(answer, FoundPlacement) or answer.reason != "WaitForRoom":
        return answer
    never = isinstance(search(view, chosen, requests, site, landscape.emptied()), NoPlacement)
    return NoPlacement("NeverFits", answer.message) if never else answer


def search(
    view: GangView,
    chosen: Sequence[GangMember],
    requests: Mapping[str, Request],
    site: NodeDomains,
    landscape: PlacementSnapshot,
) -> FoundPlacement | NoPlacement:
    """Try all members, then as few as are enough, on this landscape alone."""
    done = Counter(member.pod_set for member in view.members if member.stage is MemberStage.SUCCEEDED)
    needed = view.gang.spec.quorum - done.total()
    first: NoPlacement | None = None
    for is_elastic in (False, True) if len(chosen) > needed else (False,):
        question = search_input(view.gang.spec, chosen, requests, site, landscape, done=done if is_elastic else None)
        if isinstance(question, Obstacle):
            return NoPlacement("WaitForQuorum", question.message)
        try:
            answer = place(question.gang, question.snapshot)
        except TopologyError as error:
            return NoPlacement("NeverFits", str(error))
        if isinstance(answer, Placement):
            if sum(assignment.count for assignment in answer.assignments) >= needed:
                return FoundPlacement(question, answer)
            continue
        first = first or NoPlacement("WaitForRoom", answer.text)
    return first or NoPlacement("WaitForRoom", f"fewer than {needed} members find a place")
