"""The decision about one gang, recomputed: what the controllers would do about it now, and where its members would go.

In: a snapshot made ready, and a GpuGang. Out: a GangDecision. What is to be done is said by
`atoll.cluster.gangs.lifecycle.decide`, places by `atoll.cluster.gangs.placing.find_places` and, for what a running gang
lacks, by `place_missing`: the very functions of the controllers. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from atoll.api import names
from atoll.api.gangs import GpuGang
from atoll.api.times import seconds_of
from atoll.cluster.gangs import conditions
from atoll.cluster.gangs.lifecycle import GangAction, GangView, LifecycleDecision, Obstacle, decide
from atoll.cluster.gangs.member_assignments import MemberAssignment, member_assignments
from atoll.cluster.gangs.membership import GangMember
from atoll.cluster.gangs.node_domains import NodeDomains
from atoll.cluster.gangs.placing import FoundPlacement, NoPlacement, find_places
from atoll.cluster.gangs.preemption import with_kept
from atoll.cluster.gangs.replacements import place_missing
from atoll.cluster.gangs.search_input import GangSearchInput, PlacementSnapshot, search_input
from atoll.cluster.requests import Request
from atoll.explain.gang_index import IndexedGangs
from atoll.explain.snapshot import NOW_SECONDS


@dataclass(frozen=True, slots=True)
class FindPlacesInput:
    """What the search is asked: everything that `find_places` takes."""

    view: GangView
    chosen: tuple[GangMember, ...]
    requests: Mapping[str, Request]
    site: NodeDomains
    landscape: PlacementSnapshot

    def question(self) -> GangSearchInput | None:
        """Return the question of the search; None where it contradicts itself."""
        found = search_input(self.view.gang.spec, self.chosen, self.requests, self.site, self.landscape)
        return None if isinstance(found, Obstacle) else found


@dataclass(frozen=True, slots=True)
class GangDecision:
    """What would become of a gang now. `reason`, `message`: as the condition Admitted gives them. `seats`: where those
    members would go that have no GPUs yet; `asked`: None where nobody is to be placed."""

    view: GangView
    act: GangAction
    reason: str
    message: str
    assignments: tuple[MemberAssignment, ...] = ()
    asked: FindPlacesInput | None = None

    @property
    def fits(self) -> bool:
        """Tell whether every member that is to be placed, or as many as are enough, finds its place."""
        if self.asked is None:
            return False
        return bool(self.assignments) and (
            self.act is GangAction.PLACE or len(self.assignments) == len(self.asked.chosen)
        )


def decide_gang(gangs: IndexedGangs, gang: GpuGang) -> GangDecision:
    """Decide about a gang as the controllers would at the moment of the snapshot."""
    view = gangs.view(gang)
    now = seconds_of(gangs.scene.snapshot.taken_at) or 0.0
    decision = decide(view, now_seconds=now)
    reason, message = _told(decision)
    if decision.act not in (GangAction.PLACE, GangAction.REPLACE):
        return GangDecision(view, decision.act, reason, message)
    requests, site = gangs.requests(decision.members), gangs.site(gang)
    if isinstance(requests, Obstacle):
        return GangDecision(view, decision.act, "WaitForQuorum", requests.message)
    if isinstance(site, Obstacle):
        return GangDecision(view, decision.act, site.reason, site.message)
    asked = FindPlacesInput(view, decision.members, requests, site, _landscape(gangs, decision))
    if decision.act is GangAction.REPLACE:
        seats = place_missing(view, asked.chosen, requests, site, asked.landscape)
        left = len(asked.chosen) - len(seats)
        message = f"{left} of {len(asked.chosen)} members that it lacks find no place" if left else message
        return GangDecision(view, decision.act, "WaitForRoom" if left else reason, message, seats, asked)
    answer = find_places(view, asked.chosen, requests, site, asked.landscape)
    if isinstance(answer, NoPlacement):
        return GangDecision(view, decision.act, answer.reason, answer.message, (), asked)
    return GangDecision(view, decision.act, "Admitted", _placed(answer), seats_for(gangs, answer), asked)


def seats_for(gangs: IndexedGangs, found: FoundPlacement) -> tuple[MemberAssignment, ...]:
    """Return who gets which GPUs."""
    return member_assignments(found.placement, found.question.asked, gangs.scene.ledger.nodes)


def _landscape(gangs: IndexedGangs, decision: LifecycleDecision) -> PlacementSnapshot:
    """What is kept for members of the gang is free for it."""
    kept = (gangs.scene.ledger.kept(member.uid) for member in decision.members)
    own = [one for one in kept if one is not None]
    if not own:
        return gangs.landscape
    return with_kept(gangs.landscape, gangs.scene.ledger, own, now_seconds=NOW_SECONDS)


def _told(decision: LifecycleDecision) -> tuple[str, str]:
    """Return what the condition Admitted says after the decision."""
    found = conditions.find(decision.status.conditions, names.CONDITION_ADMITTED)
    return (found.reason, found.message) if found is not None else ("", "")


def _placed(found: FoundPlacement) -> str:
    members = sum(assignment.count for assignment in found.placement.assignments)
    nodes = len({place.host for assignment in found.placement.assignments for place in assignment.members})
    return f"{members} members fit now, on {nodes} nodes"
