"""What to do about each kind of audit finding, and which of it `atoll audit --repair` can do.

A repair never frees a GPU on the word of the audit: it writes what a bound pod proves, removes what a bound pod
disproves, evicts within budgets, or asks the agent for the evidence on which the controllers decide.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from atoll.cluster.consistency import Finding, Problem


class AuditRepair(StrEnum):
    """What the audit does with `--repair`; an empty text where a person must decide."""

    NONE = ""
    ASK = "ask the node's agent for fresh evidence"
    WRITE = "write the missing Lease"
    DELETE = "delete the stray Lease"
    EVICT = "evict the pod"


@dataclass(frozen=True, slots=True)
class Remedy:
    """The next step for a person, and what the audit can do itself."""

    next_step: str
    repair: AuditRepair = AuditRepair.NONE


_RECREATE = "delete the pod, so that its owner makes a new one"
REMEDIES: Mapping[Problem, Remedy] = {
    Problem.DOUBLE_USE: Remedy("end one of the two pods; nothing is released by itself until then"),
    Problem.FOREIGN_LEASE: Remedy(
        "find out which of the two pods uses the GPU (kubectl get gpunodestatus NODE -o yaml), and end the other"
    ),
    Problem.FOREIGN_PROCESS: Remedy(
        "end the pod, or on the node its containers where it no longer exists; "
        "keep other schedulers and device plugins off the node"
    ),
    Problem.FOREIGN_HOST: Remedy("end the processes on the machine; the GPU is given to nobody meanwhile"),
    Problem.WRONG_MEMORY: Remedy("wait a minute; if it stays, restart the extender, which rebuilds its memory"),
    Problem.LEAKED_LEASE: Remedy(
        "see that controllers and the node's agent run; they free it on proof", AuditRepair.ASK
    ),
    Problem.DOUBTFUL_LEASE: Remedy(
        "bring kubelet and agent of the node back, or reboot it; `atoll node release` if the machine is off for good",
        AuditRepair.ASK,
    ),
    Problem.STRAY_LEASE: Remedy("the controllers delete it once they run", AuditRepair.DELETE),
    Problem.OVERDUE_LEASE: Remedy("see that the controllers run, and that the pod takes an annotation from them"),
    Problem.KEPT_FOR_NOBODY: Remedy("the controllers free it once they run"),
    Problem.UNREADABLE_LEASE: Remedy(
        "read it (kubectl -n atoll-system get lease NAME -o yaml) and correct or delete it"
    ),
    Problem.MISSING_LEASE: Remedy("the controllers write it again once they run", AuditRepair.WRITE),
    Problem.MISSING_ALLOCATION: Remedy(f"it was bound past Atoll and sees no GPU: {_RECREATE}"),
    Problem.MALFORMED_ALLOCATION: Remedy(f"somebody changed the annotations: {_RECREATE}"),
    Problem.WRONG_UUID: Remedy(f"the card was replaced or the annotations forged: {_RECREATE}"),
    Problem.WRONG_LEASE_UUID: Remedy("compare both with the node's report; recreate the pod if the Lease is right"),
    Problem.WRONG_CONTAINER_VALUE: Remedy(_RECREATE),
    Problem.GONE_GPU: Remedy(f"its containers cannot start again; controllers evict it if they may, else {_RECREATE}"),
    Problem.STALE_NUMBERS: Remedy("the controllers evict it once its budget allows", AuditRepair.EVICT),
    Problem.WRONG_PRINTED_VALUE: Remedy(f"{_RECREATE}; look for what overrides the variables in the image"),
    Problem.WRONG_HOLDER_NAME: Remedy("compare the Lease with the pods; an administrator must decide"),
}


def remedy(finding: Finding) -> Remedy:
    """Return what to do about a finding."""
    return REMEDIES[finding.problem]
