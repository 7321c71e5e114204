"""Explanations and proposals for gangs as sentences and as JSON. Pure."""

from math import isfinite
from typing import Any

from atoll.explain.decision import IndexedSnapshot
from atoll.explain.gang_explanation import GangExplanation
from atoll.explain.gang_proposals import GangProposal
from atoll.explain.proposals import ProposalKind
from atoll.explain.wording import gpu_text, listed, nodes_text, pod_text, when_ended
from topology.gangs.domains import DomainFit

GANG_HELPLESS = {
    ProposalKind.ENDING: "no pods that are ending make room",
    ProposalKind.RELAX: "no gang or claim that asks less would fit",
    ProposalKind.COUNT: "no smaller number of members fits",
    ProposalKind.OPEN: "no closed nodes would fit it if they were opened",
    ProposalKind.GPU: "no cordoned GPUs would make room",
    ProposalKind.REPAIR: "no sick GPUs would make room",
    ProposalKind.END: "no end of other pods would make room",
    ProposalKind.ADD: "no nodes of a known shape would fit it",
}
"""Sentence for each kind of change that does not help a gang."""


def gang_sentence(proposal: GangProposal, scene: IndexedSnapshot) -> str:
    """Return what to do, and the result for the gang."""
    nodes = listed(proposal.nodes)
    return f"{_what(proposal, scene)}: then {proposal.members} members fit on {nodes}"


def _what(proposal: GangProposal, scene: IndexedSnapshot) -> str:
    change = proposal.change
    if proposal.kind is ProposalKind.RELAX:
        return f"ask for less: {', '.join(change.relaxed)}"
    if proposal.kind is ProposalKind.COUNT:
        counts = ", ".join(f"{count} of {name}" for name, count in change.members)
        return f"accept {counts} (minMember {sum(count for _, count in change.members)})"
    if proposal.kind is ProposalKind.OPEN:
        return (
            f"open {nodes_text(len(change.opened))} to its members (uncordon, tolerate, label): {listed(change.opened)}"
        )
    if proposal.kind is ProposalKind.GPU:
        return f"uncordon {listed([gpu_text(scene, *one) for one in change.uncordoned])}"
    if proposal.kind is ProposalKind.REPAIR:
        return f"get {listed([gpu_text(scene, *one) for one in change.healed])} well"
    if proposal.kind is ProposalKind.ADD:
        return f"add {nodes_text(len(change.added))} ({change.added[0].shape})"
    return when_ended([pod_text(scene, uid) for uid in change.ended], is_proof=proposal.kind is ProposalKind.ENDING)


def domain_text(fit: DomainFit) -> str:
    """Return one domain as a line: rack r1 fits 3 of 8 pods; 4 hosts; excluded: too few free GPUs: 2."""
    where = f"{fit.level.rpartition('/')[2]} {'/'.join(fit.path)} fits" if fit.level else "all hosts fit"
    hosts = "1 host" if fit.hosts == 1 else f"{fit.hosts} hosts"
    text = f"{where} {fit.fits} of {fit.of} {fit.unit}s; {hosts}"
    reasons = ", ".join(f"{reason}: {count}" for reason, count in fit.excluded)
    return f"{text}; excluded: {reasons}" if reasons else text


def gang_json(told: GangExplanation, scene: IndexedSnapshot) -> dict[str, Any]:
    """Return an explanation as plain values."""
    return {
        "gang": told.gang,
        "state": str(told.state),
        "reason": told.reason,
        "headline": told.headline,
        "present": told.present,
        "stages": dict(told.stages),
        "waitsSeconds": round(told.waits_seconds) if isfinite(told.waits_seconds) else None,
        "asked": [{"podSet": name, "topology": asked} for name, asked in told.asked],
        "domains": [
            {
                "podSet": fit.pod_set,
                "level": fit.level,
                "domain": list(fit.path),
                "fits": fit.fits,
                "of": fit.of,
                "unit": fit.unit,
                "hosts": fit.hosts,
                "excluded": dict(fit.excluded),
            }
            for fit in told.domains
        ],
        "members": [{"pod": name, "node": node, "deviceIds": list(ids)} for name, node, ids in told.assignments],
        "proposals": [_proposal_json(proposal, scene) for proposal in told.help.proposals],
        "helpless": {str(kind): GANG_HELPLESS[kind] for kind in told.help.helpless},
        "searchCut": [str(kind) for kind in told.help.cut],
    }


def _proposal_json(proposal: GangProposal, scene: IndexedSnapshot) -> dict[str, Any]:
    change = proposal.change
    return {
        "kind": str(proposal.kind),
        "text": gang_sentence(proposal, scene),
        "members": proposal.members,
        "nodes": list(proposal.nodes),
        "relaxed": list(change.relaxed),
        "counts": dict(change.members),
        "gpus": [gpu_text(scene, *one) for one in (*change.uncordoned, *change.healed)],
        "pods": [pod_text(scene, uid) for uid in change.ended],
        "openedNodes": list(change.opened),
        "addedShape": change.added[0].shape if change.added else "",
        "addedCount": len(change.added),
    }
