"""Builders of gangs and members for tests of pure decisions."""

from typing import Any

from atoll.api import names
from atoll.api.gangs import GpuGang
from atoll.cluster.gangs.lifecycle import GangView, LifecycleDecision, decide
from atoll.cluster.gangs.membership import GangMember, MemberStage
from atoll.cluster.gangs.readiness_policy import ReadinessPolicy
from tests.builders import make_pod

GATES = [{"name": names.GANG_GATE}]
NOW = 1_800_000_000.0
WAITING = ReadinessPolicy(enable=True, timeout_seconds=300, recovery_timeout_seconds=60)


def make_gang(count: int = 4, *, name: str = "g", status: dict[str, Any] | None = None, **spec: Any) -> GpuGang:
    """Return a gang; by default with one pod set `workers`."""
    return GpuGang.model_validate(
        {
            "metadata": {"name": name, "namespace": "team", "uid": f"uid-of-{name}", "generation": 1},
            "spec": {"podSets": [{"name": "workers", "count": count}], **spec},
            "status": status,
        }
    )


def member(
    number: int, stage: MemberStage, *, holds: bool = False, pod_set: str = "workers", **options: Any
) -> GangMember:
    """Return one member at a stage."""
    gates = (
        GATES if stage is MemberStage.GATED else [*GATES, {"name": "other"}] if stage is MemberStage.HELD_BACK else []
    )
    pod = make_pod(f"p{number}", annotations={names.GANG: "g"}, schedulingGates=gates, **options)
    return GangMember(pod, pod_set, number, stage, holds)


def members(*stages: MemberStage, holds: bool = False) -> tuple[GangMember, ...]:
    """Return one member per stage."""
    return tuple(member(number, stage, holds=holds) for number, stage in enumerate(stages))


class Life:
    """A gang whose decisions are stored in its status, with a clock that the test moves."""

    def __init__(self, gang: GpuGang, policy: ReadinessPolicy = WAITING) -> None:
        self.gang = gang
        self.policy = policy
        self.now = NOW

    def look(self, *found: GangMember, after: float = 0.0, **view: Any) -> LifecycleDecision:
        """Move the clock, decide, and store the status."""
        self.now += after
        decision = decide(GangView(self.gang, found, self.policy, **view), now_seconds=self.now)
        self.write(decision.status)
        return decision

    def write(self, status: Any) -> None:
        """Store a status, and set spec.active if the status requires it."""
        self.gang = self.gang.model_copy(update={"status": status})

    def set_active(self, *, active: bool) -> None:
        """Set spec.active."""
        self.gang = self.gang.model_copy(update={"spec": self.gang.spec.model_copy(update={"active": active})})

    def condition(self, kind: str) -> tuple[str, str]:
        """Return (status, reason) of a condition; empty texts if there is none."""
        status = self.gang.status
        found = [one for one in (status.conditions if status else ()) if one.type == kind]
        return (found[0].status, found[0].reason) if found else ("", "")
