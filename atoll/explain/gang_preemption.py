"""Whom a gang that finds no place would push out: the controllers' plan, on a snapshot.

In: a scene made ready for gangs, the gang's decision. Out: pods. The plan is `atoll.cluster.gangs.preemption`'s own;
disruption budgets hold. That the controllers wait a few seconds first, and give one gang a turn at a time, is left out.
"""

from atoll.cluster.budgets import DisruptionBudgets, violations
from atoll.cluster.gangs.preemption import EvictionUnit, GangRequest, holdings_of, plan_preemption
from atoll.cluster.objects import Pod
from atoll.explain.gang_decision import GangDecision
from atoll.explain.gang_index import IndexedGangs


def gang_victims(gangs: IndexedGangs, decision: GangDecision) -> tuple[Pod, ...]:
    """Return the pods that would be evicted for the gang; none where it may not, or where that would not help."""
    asked = decision.asked
    if asked is None:
        return ()
    asking = GangRequest(asked.view, asked.chosen, asked.requests, asked.site, asked.landscape)
    if not asking.may_preempt:
        return ()
    budgets, holdings = DisruptionBudgets(gangs.scene.snapshot.budgets), holdings_of(gangs.scene.ledger)
    allowed, protecting = budgets.allowed(), {one.pod.metadata.uid: budgets.of(one.pod) for one in holdings}

    def is_spared(unit: EvictionUnit) -> bool:
        return violations((protecting.get(uid, ()) for uid in sorted(unit.uids)), allowed) > 0

    clearing = plan_preemption(asking, holdings, gangs.admitted(), is_spared=is_spared)
    uids = sorted({uid for unit in clearing.evicted for uid in unit.uids}) if clearing is not None else ()
    by_uid = gangs.scene.by_uid
    return tuple(by_uid[uid] for uid in uids if uid in by_uid)
