"""Whether a spot job that has waited too long moves up, and to which priority class. Pure.

Only the decision: a pod's priority cannot be changed, so the owner of the queue creates the job again or moves it.
"""

from atoll.ml.attributes import MlAttributes, MlPriorityClass
from atoll.ml.infer import DEFAULTS


def escalated_class(attributes: MlAttributes, *, waited_seconds: float) -> MlPriorityClass | None:
    """Return the class that the job moves up to by now; None if it stays.

    Only spot jobs that ask for it move, and only up. Without a target they move to the next class.
    """
    own = attributes.priority_class or DEFAULTS["priority_class"]
    after = attributes.escalation_after_s
    patience_seconds = DEFAULTS["escalation_after_s"] if after is None else after
    if not attributes.priority_escalation or own is not MlPriorityClass.SPOT or waited_seconds < patience_seconds:
        return None
    target = attributes.escalation_target_class or MlPriorityClass.ON_DEMAND
    return None if target is MlPriorityClass.SPOT else target
