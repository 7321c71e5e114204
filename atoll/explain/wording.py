"""Proposals and explanations as sentences that say what to do on which object, and as JSON. Pure."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, Final

from atoll.cluster import pods
from atoll.cluster.objects import Pod
from atoll.explain.changes import tolerable
from atoll.explain.decision import IndexedSnapshot
from atoll.explain.explanation import Explanation, NodeGroup
from atoll.explain.nodes import IslandState, NodeAnswer
from atoll.explain.proposals import Proposal, ProposalKind

NAMED_MAX: Final = 8
"""Limit of pods or GPUs in one sentence."""

HELPLESS: Final[Mapping[ProposalKind, str]] = {
    ProposalKind.ENDING: "no pod that is ending makes room",
    ProposalKind.RELAX: "no claim that asks less of the GPUs would fit",
    ProposalKind.COUNT: "no smaller count fits",
    ProposalKind.OPEN: "no node is closed that would fit if it were opened",
    ProposalKind.GPU: "no cordoned GPUs would make room",
    ProposalKind.REPAIR: "no sick GPUs would make room",
    ProposalKind.END: "no running pods of one node would make room by their end",
    ProposalKind.ADD: "no node of a known shape would fit",
}
"""Sentence for each kind of change that does not help."""


def sentence(proposal: Proposal, scene: IndexedSnapshot, pod: Pod) -> str:
    """Return what to do, and the result for the pod."""
    gpus = f"GPU{'s' if len(proposal.device_ids) > 1 else ''} {_list(proposal.device_ids)}"
    return f"{_what(proposal, scene, pod)}: then it fits on {proposal.node} with {gpus}"


def _what(proposal: Proposal, scene: IndexedSnapshot, pod: Pod) -> str:
    change = proposal.change
    if proposal.kind is ProposalKind.RELAX:
        return f"use a claim with {', '.join(change.relaxed)}"
    if proposal.kind is ProposalKind.COUNT:
        return f"ask for {change.count}"
    if proposal.kind is ProposalKind.OPEN:
        return _opening(change.opened[0], scene, pod)
    if proposal.kind in (ProposalKind.GPU, ProposalKind.REPAIR):
        gpus = ", ".join(gpu_text(scene, node, uuid) for node, uuid in (*change.uncordoned, *change.healed)[:NAMED_MAX])
        return f"uncordon {gpus}" if proposal.kind is ProposalKind.GPU else f"get {gpus} well"
    if proposal.kind is ProposalKind.ADD:
        return f"add a node ({change.added[0].shape})"
    return when_ended([pod_text(scene, uid) for uid in change.ended], is_proof=proposal.kind is ProposalKind.ENDING)


def when_ended(named: Sequence[str], *, is_proof: bool) -> str:
    """Return `when these pods end`, or are proven to have ended, in singular or plural."""
    is_one = len(named) == 1
    verb = ("is" if is_one else "are") + " proven to have ended" if is_proof else "ends" if is_one else "end"
    return f"when {listed(named)} {verb}"


def _opening(name: str, scene: IndexedSnapshot, pod: Pod) -> str:
    node = scene.nodes[name]
    parts = ["uncordon the node"] if node.spec.unschedulable else []
    parts += [
        f"tolerate {taint.key}{'=' + taint.value if taint.value else ''}:{taint.effect}"
        for taint in tolerable(pod, node)
    ]
    parts += [
        f"label it {key}={value}"
        for key, value in sorted(pod.spec.node_selector.items())
        if node.metadata.labels.get(key) != value
    ]
    return f"open node {name} ({', '.join(parts)})"


def gpu_text(scene: IndexedSnapshot, node: str, uuid: str) -> str:
    """Return a GPU's name for people."""
    devices = scene.ledger.nodes[node]
    return f"GPU {node}/{devices.devices[devices.position_by_uuid[uuid]].id}"


def pod_text(scene: IndexedSnapshot, uid: str) -> str:
    """Return a pod's name for people; for one that is gone, from its Leases."""
    found = scene.by_uid.get(uid)
    if found is not None:
        return f"{found.metadata.namespace}/{found.metadata.name}"
    records = scene.ledger.leases_of(uid)
    return f"{records[0].holder.namespace}/{records[0].holder.name} (gone)" if records else f"pod {uid}"


def nodes_text(count: int) -> str:
    """Return a number of nodes in words."""
    return "1 node" if count == 1 else f"{count} nodes"


def group_text(count: int, standing: str, reason: str, others: Sequence[str]) -> str:
    """Return the number of nodes with a blocker, and the reasons, each once."""
    reasons = ", ".join(dict.fromkeys(part for part in (reason, *others) if part)) or "the pod fits"
    return f"{nodes_text(count)} {standing}: {reasons}"


def explanation_json(told: Explanation, scene: IndexedSnapshot, pod: Pod) -> dict[str, Any]:
    """Return an explanation as plain values."""
    return {
        "pod": told.pod,
        "state": str(told.state),
        "headline": told.headline,
        "asked": told.asked,
        "waitsSeconds": round(told.waits_seconds) if isfinite(told.waits_seconds) else None,
        "node": told.node,
        "deviceIds": list(told.device_ids),
        "groups": [_group_json(group) for group in told.groups],
        "proposals": [proposal_json(proposal, scene, pod) for proposal in told.help.proposals],
        "helpless": {str(kind): HELPLESS[kind] for kind in told.help.helpless},
        "searchCut": [str(kind) for kind in told.help.cut],
    }


def proposal_json(proposal: Proposal, scene: IndexedSnapshot, pod: Pod) -> dict[str, Any]:
    """Return a proposal as plain values."""
    change = proposal.change
    return {
        "kind": str(proposal.kind),
        "text": sentence(proposal, scene, pod),
        "node": proposal.node,
        "deviceIds": list(proposal.device_ids),
        "relaxed": list(change.relaxed),
        "count": change.count,
        "gpus": [gpu_text(scene, node, uuid) for node, uuid in (*change.uncordoned, *change.healed)],
        "pods": [pod_text(scene, uid) for uid in change.ended],
        "openedNode": "".join(change.opened),
        "addedShape": change.added[0].shape if change.added else "",
    }


def holders_text(scene: IndexedSnapshot, node: str) -> str:
    """Return the holders of a node's GPUs."""
    found = []
    for uid in sorted(scene.ledger.pods):
        allocation = scene.ledger.allocation_of(uid)
        if allocation is not None and allocation.node == node:
            holder = pods.holder_of(scene.ledger.pods[uid])
            found.append(f"{holder.namespace}/{holder.name}: {_list(allocation.device_ids)}")
    return "; ".join(found)


def _group_json(group: NodeGroup) -> dict[str, Any]:
    return {
        "standing": str(group.standing),
        "reason": group.reason,
        "others": list(group.others),
        "nodes": [_node_json(one) for one in group.nodes],
    }


def _node_json(one: NodeAnswer) -> dict[str, Any]:
    return {"node": one.node, "detail": one.detail, "islands": [_island_json(part) for part in one.islands]}


def _island_json(part: IslandState) -> dict[str, Any]:
    return {
        "name": part.name,
        "kind": part.kind,
        "free": list(part.free),
        "held": list(part.held),
        "withheld": list(part.withheld),
        "unfit": list(part.unfit),
    }


def listed(texts: Sequence[str]) -> str:
    """Return the first of some texts, and the number of the rest."""
    more = f" and {len(texts) - NAMED_MAX} more" if len(texts) > NAMED_MAX else ""
    return ", ".join(texts[:NAMED_MAX]) + more


def _list(ids: tuple[int, ...]) -> str:
    return ",".join(map(str, ids))
