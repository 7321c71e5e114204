"""Escalation of spot jobs: which, when, and to what."""

from typing import Any

import pytest

from atoll.ml.attributes import MlAttributes, MlPriorityClass
from atoll.ml.escalation import Escalation, escalation_of

ASKS = {"priority_class": "spot", "priority_escalation": True}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        pytest.param(ASKS, Escalation(MlPriorityClass.ON_DEMAND, 3600), id="after-an-hour"),
        pytest.param(
            {**ASKS, "escalation_after_s": 60}, Escalation(MlPriorityClass.ON_DEMAND, 60), id="after-its-own-time"
        ),
        pytest.param(
            {**ASKS, "escalation_target_class": "reserved"},
            Escalation(MlPriorityClass.RESERVED, 3600),
            id="target",
        ),
        pytest.param({**ASKS, "escalation_target_class": "spot"}, None, id="nowhere"),
        pytest.param({"priority_class": "spot"}, None, id="did-not-ask"),
        pytest.param({**ASKS, "priority_escalation": False}, None, id="asked-not-to"),
        pytest.param({**ASKS, "priority_class": "on-demand"}, None, id="is-no-spot-job"),
        pytest.param({"priority_escalation": True}, None, id="says-no-class"),
    ],
)
def test_starving_spot_job_moves_up(said: dict[str, Any], expected: Escalation | None) -> None:
    """Only where it asks for it, and only from spot."""
    assert escalation_of(MlAttributes.model_validate(said)) == expected
