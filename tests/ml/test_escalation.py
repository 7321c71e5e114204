"""Escalation of spot jobs: which, when, and to what."""

from typing import Any

import pytest

from atoll.ml.attributes import MlAttributes, MlPriorityClass
from atoll.ml.escalation import escalated_class

ASKS = {"priority_class": "spot", "priority_escalation": True}
HOUR = 3600.0


@pytest.mark.parametrize(
    ("said", "waited_seconds", "expected"),
    [
        pytest.param(ASKS, HOUR - 1, None, id="not-yet"),
        pytest.param(ASKS, HOUR, MlPriorityClass.ON_DEMAND, id="after-an-hour"),
        pytest.param({**ASKS, "escalation_after_s": 60}, 60.0, MlPriorityClass.ON_DEMAND, id="after-its-own-time"),
        pytest.param({**ASKS, "escalation_target_class": "reserved"}, HOUR, MlPriorityClass.RESERVED, id="to-a-target"),
        pytest.param({**ASKS, "escalation_target_class": "spot"}, HOUR, None, id="nowhere"),
        pytest.param({"priority_class": "spot"}, 99 * HOUR, None, id="did-not-ask"),
        pytest.param({**ASKS, "priority_escalation": False}, 99 * HOUR, None, id="asked-not-to"),
        pytest.param({**ASKS, "priority_class": "on-demand"}, 99 * HOUR, None, id="is-no-spot-job"),
        pytest.param({"priority_escalation": True}, 99 * HOUR, None, id="says-no-class"),
    ],
)
def test_starving_spot_job_moves_up(
    said: dict[str, Any], waited_seconds: float, expected: MlPriorityClass | None
) -> None:
    """Only where it asks for it, only from spot, and only when its time is over."""
    assert escalated_class(MlAttributes.model_validate(said), waited_seconds=waited_seconds) == expected
