"""Whether a spot job that has waited too long moves up, and to which priority class. Pure.

Only the decision: a pod's priority cannot be changed, so the job service takes the job out of its queue and submits it
again. Without the service nothing moves up.
"""

from dataclasses import dataclass

from atoll.ml.attributes import MlAttributes, MlPriorityClass
from atoll.ml.infer import DEFAULTS


@dataclass(frozen=True, slots=True)
class Escalation:
    """The class that a job moves up to after so many seconds in its queue."""

    target: MlPriorityClass
    after_seconds: int


def escalation_of(attributes: MlAttributes) -> Escalation | None:
    """Return when a job moves up, and to what; None if it stays.

    Only spot jobs that ask for it move, and only up. Without a target they move to the next class.
    """
    own = attributes.priority_class or DEFAULTS["priority_class"]
    target = attributes.escalation_target_class or MlPriorityClass.ON_DEMAND
    if not attributes.priority_escalation or own is not MlPriorityClass.SPOT or target is MlPriorityClass.SPOT:
        return None
    after = attributes.escalation_after_s
    return Escalation(target, DEFAULTS["escalation_after_s"] if after is None else after)
