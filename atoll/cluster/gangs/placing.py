"""Places for a whole gang, or why there are none: one pure decision.

All present members are tried first. If they do not fit and fewer are enough, as many as fit are taken, never fewer than
the quorum. Each choice of models is tried by itself; of those that the claims prefer equally, the one whose members are
nearest to each other is taken. The work of one search is bounded, so that no gang keeps others waiting for long.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from atoll.cluster import pod_fit
from atoll.cluster.feasibility import listed
from atoll.cluster.gangs.arranging import arrange
from atoll.cluster.gangs.lifecycle import GangView, Obstacle
from atoll.cluster.gangs.membership import GangMember
from atoll.cluster.gangs.node_domains import NodeDomains
from atoll.cluster.gangs.readiness import done_before
from atoll.cluster.gangs.rehearsal import Circle, Clash, VolumeClash
from atoll.cluster.gangs.search_input import (
    GangSearchInput,
    Models,
    PlacementSnapshot,
    gpu_requests,
    model_choices,
    search_input,
    unknown_nodes,
)
from atoll.cluster.objects import Pod, PodSpec
from atoll.cluster.requests import Request, Verdict
from topology.errors import TopologyError
from topology.gangs.descent import StepBudget
from topology.gangs.model import Placement, PlacementRefusal


@dataclass(frozen=True, slots=True)
class FoundPlacement:
    """A placement, and the question that it answers."""

    question: GangSearchInput
    placement: Placement


@dataclass(frozen=True, slots=True)
class NoPlacement:
    """Why there are no places: the verdict, and a message. `reason`: of the condition Admitted; `waits_for_nodes`: what
    is not known yet concerns nodes, and not the gang."""

    verdict: Verdict
    message: str
    reason: str
    waits_for_nodes: bool = False

    @property
    def contends(self) -> bool:
        """Whether the gang could use GPUs of the cluster, now or once facts about nodes are known."""
        return self.verdict is Verdict.BUSY or self.waits_for_nodes


def refused(by: PlacementRefusal | Clash | Circle | VolumeClash) -> NoPlacement:
    """Return the answer for what finds no place on a snapshot."""
    if isinstance(by, Circle):
        return NoPlacement(Verdict.NEVER, by.text, "NeverFits")
    if isinstance(by, VolumeClash):
        return NoPlacement(Verdict.UNKNOWN, by.text, "WaitForQuorum")
    return NoPlacement(Verdict.BUSY, by.text, "WaitForRoom")


Search = Callable[[PlacementSnapshot], Iterable[str] | NoPlacement]
"""Returns the hosts of a placement on a snapshot, or why there is none."""


def find_places(
    view: GangView,
    chosen: Sequence[GangMember],
    requests: Mapping[str, Request],
    node_domains: NodeDomains,
    cluster: PlacementSnapshot,
) -> FoundPlacement | NoPlacement:
    """Decide where the members go."""
    answer = search(view, chosen, requests, node_domains, cluster)
    if isinstance(answer, FoundPlacement) or answer.verdict is not Verdict.BUSY:
        return answer

    def hosts_on(snapshot: PlacementSnapshot) -> Iterable[str] | NoPlacement:
        found = search(view, chosen, requests, node_domains, with_company(snapshot, chosen, cluster))
        if isinstance(found, NoPlacement):
            return found
        return dict.fromkeys(one.host for part in found.placement.assignments for one in part.members)

    return judged(answer.message, hosts_on, cluster, lambda: unknown_nodes(chosen, requests, node_domains, cluster))


def with_company(
    emptied: PlacementSnapshot, chosen: Iterable[GangMember], cluster: PlacementSnapshot
) -> PlacementSnapshot:
    """Return an emptied snapshot with the pods of the cluster that members have to be near, as if they took no room."""
    templates = {one.pod_set: one.pod for one in chosen if pod_fit.affinity_terms(one.pod)}.values()
    if not templates:
        return emptied

    def is_needed(other: Pod) -> bool:
        return any(
            all(
                pod_fit.term_matches(term, of=pod, other=other, labels=cluster.namespaces)
                for term in pod_fit.affinity_terms(pod)
            )
            for pod in templates
        )

    on = {name: list(found) for name, found in emptied.pods_on.items()}
    for name, found in cluster.pods_on.items():
        there = {pod.metadata.uid for pod in on.get(name, ())}
        needed = [pod for pod in found if pod.metadata.uid not in there and is_needed(pod)]
        if needed:
            bare = (msgspec.structs.replace(pod, spec=PodSpec(node_name=pod.spec.node_name)) for pod in needed)
            on.setdefault(name, []).extend(bare)
    return replace(emptied, pods_on=on)


def judged(
    message: str, hosts_on: Search, cluster: PlacementSnapshot, unknown_of: Callable[[], Sequence[str]]
) -> NoPlacement:
    """Return the verdict on what finds no place now: what becomes of it without other pods, then with every node in
    order, then once the nodes of `unknown_of` have said what they have; only then these are looked for. If none of that
    helps, and something else than room is missing, such as volumes, that is told."""
    emptied = hosts_on(cluster.emptied())
    fits_emptied = not isinstance(emptied, NoPlacement)
    if cluster.pool is not None:
        held = sum(mask.bit_count() for mask in cluster.pool.positions.values())
        why = "waits for" if fits_emptied else "does not fit, even if no pod used"
        message = f"{why} the {held} GPUs of its GpuReservation: {message}"
        return _lacking(emptied) or NoPlacement(Verdict.BUSY, message, "WaitForRoom")
    if fits_emptied:
        return NoPlacement(Verdict.BUSY, message, "WaitForRoom")
    hosts = hosts_on(cluster.opened())
    if not isinstance(hosts, NoPlacement):
        facts = [fact for host in hosts if (fact := cluster.withheld(host))]
        message = f"fits when {listed(facts, 'and')}; now {message}"
        return NoPlacement(Verdict.UNKNOWN, message, "WaitForNodes", waits_for_nodes=True)
    if unknown := unknown_of():
        count = f"{len(unknown)} node{'s' if len(unknown) > 1 else ''}"
        message = f"waits for the report of {count}: {listed(unknown, 'and')}; now {message}"
        return NoPlacement(Verdict.UNKNOWN, message, "WaitForNodes", waits_for_nodes=True)
    return _lacking(emptied) or _lacking(hosts) or NoPlacement(Verdict.NEVER, message, "NeverFits")


def _lacking(answer: Iterable[str] | NoPlacement) -> NoPlacement | None:
    """Return the answer if it lacks something else than room, such as volumes."""
    return answer if isinstance(answer, NoPlacement) and answer.verdict is Verdict.UNKNOWN else None


def search(
    view: GangView,
    chosen: Sequence[GangMember],
    requests: Mapping[str, Request],
    node_domains: NodeDomains,
    cluster: PlacementSnapshot,
) -> FoundPlacement | NoPlacement:
    """Try all members, then as few as are enough, on this snapshot alone."""
    done = done_before(view.members, view.status.succeeded, chosen)
    needed = view.gang.spec.quorum - done.total()
    first: NoPlacement | None = None
    budget = StepBudget()
    choices = model_choices(gpu_requests(chosen, requests), node_domains, cluster)
    for is_elastic in (False, True) if len(chosen) > needed else (False,):
        found: dict[int, list[tuple[tuple[int, ...], FoundPlacement]]] = {}
        for rank, models in choices:
            if (found and rank not in found) or budget.is_over():
                break
            answer = _search(
                view,
                chosen,
                requests,
                node_domains,
                cluster,
                done=done if is_elastic else None,
                models=models,
                needed=needed,
                budget=budget,
            )
            if isinstance(answer, FoundPlacement):
                found.setdefault(rank, []).append((_distance(answer), answer))
            elif answer is not None:
                first = first or answer
        if found:
            best = min(next(iter(found.values())), key=lambda entry: entry[0])
            return best[1]
    if first is not None and len(choices) > 1:
        return replace(first, message=f"no model alone holds all members: {first.message}")
    return first or NoPlacement(Verdict.BUSY, f"fewer than {needed} members find a place", "WaitForRoom")


def _search(
    view: GangView,
    chosen: Sequence[GangMember],
    requests: Mapping[str, Request],
    node_domains: NodeDomains,
    cluster: PlacementSnapshot,
    *,
    done: Mapping[str, int] | None,
    models: Models,
    needed: int,
    budget: StepBudget,
) -> FoundPlacement | NoPlacement | None:
    """Try one choice of models. None: fewer members than needed find a place."""
    question = search_input(view.gang.spec, chosen, requests, node_domains, cluster, done=done, models=models)
    if isinstance(question, Obstacle):
        return NoPlacement(Verdict.UNKNOWN, question.message, "WaitForQuorum")
    budget.count(len(question.snapshot.hosts) * len(question.gang.pod_sets))
    try:
        answer = arrange(question, cluster, budget)
    except TopologyError as error:
        return NoPlacement(Verdict.NEVER, str(error), "NeverFits")
    if not isinstance(answer, tuple):
        return refused(answer)
    arranged, placement = answer
    if sum(assignment.count for assignment in placement.assignments) < needed:
        return None
    return FoundPlacement(arranged, placement)


def _distance(found: FoundPlacement) -> tuple[int, ...]:
    """Return how far apart the members lie: the deepest level that holds all of them, each pod set's, then hosts."""
    placement, snapshot = found.placement, found.question.snapshot
    hosts = {member.host for part in placement.assignments for member in part.members}
    paths = [snapshot.hosts[snapshot.index[host]].path for host in hosts]
    shared = next(
        (depth for depth, names in enumerate(zip(*paths, strict=True)) if len(set(names)) > 1), len(placement.levels)
    )
    levels = [*placement.levels]
    depths = [levels.index(part.level) if part.level in levels else -1 for part in placement.assignments]
    return (-shared, *(-depth for depth in depths), len(hosts))
