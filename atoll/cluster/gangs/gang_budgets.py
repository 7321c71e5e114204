"""What gangs promise to their members, as disruption budgets: how many may be evicted before a gang must end.

A search for victims among single pods thereby spares the members that a gang needs. Whole gangs are weighed in
`preemption`.
"""

from collections.abc import Iterable
from typing import Final

from atoll.cluster import pods
from atoll.cluster.budgets import GangBudgets, gang_promise
from atoll.cluster.gangs.lifecycle import GangView
from atoll.cluster.gangs.membership import COUNTING, STARTED, GangMember
from atoll.cluster.gangs.readiness import counted, minimum_of, placed

ALL_MAY_GO: Final = 2**31


def gang_budgets(views: Iterable[GangView], *, whole_below: int | None = None) -> GangBudgets:
    """Return the budgets of the admitted gangs. With `whole_below`, gangs whose members all have a lower priority and
    may all be preempted have none: such a gang may be preempted as a whole."""
    keys: dict[str, tuple[str, ...]] = {}
    allowed: dict[str, int] = {}
    for view in views:
        metadata, spec = view.gang.metadata, view.gang.spec
        whole = gang_promise(metadata.namespace, metadata.name)
        counting = [member for member in view.members if member.stage in COUNTING]
        counts = counted(view.members, COUNTING, view.status.succeeded)
        gives_way = whole_below is not None and priority_of(view) < whole_below and may_end_whole(view)
        allowed[whole] = ALL_MAY_GO if gives_way else counts.total() - spec.quorum
        for pod_set in spec.pod_sets:
            spare = counts[pod_set.name] - minimum_of(spec, pod_set.name)
            allowed[f"{whole}/{pod_set.name}"] = ALL_MAY_GO if gives_way else spare
        keys.update({member.uid: (whole, f"{whole}/{member.pod_set}") for member in counting})
    return GangBudgets(keys, allowed)


def priority_of(view: GangView) -> int:
    """Return the highest priority among the members that were let go: what must be surpassed for all of them to go."""
    return max((member.pod.spec.priority for member in view.members if member.stage in STARTED), default=0)


def may_end_whole(view: GangView) -> bool:
    """Return whether every running member may be preempted."""
    return all(pods.may_be_preempted(member.pod) for member in view.members if member.stage in STARTED)


def needs(view: GangView, gone: Iterable[GangMember]) -> bool:
    """Tell whether the gang is below what it needs once these members are gone."""
    uids = {member.uid for member in gone}
    rest = (member for member in view.members if member.uid not in uids)
    return not placed(view.gang.spec, rest, view.status.succeeded).is_enough
