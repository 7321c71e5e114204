"""The webhook's changes to members of gangs: one annotation, one gate, for every way to name the gang."""

from typing import Any

import pytest

from atoll.api import names
from tests.webhook.test_mutation import admit, make_claim, make_pod, refused

GATE = {"name": names.GANG_GATE}
FOREIGN = {"name": "example.com/quota"}


@pytest.mark.parametrize(
    ("pod", "how"),
    [
        pytest.param(make_pod(annotations={names.GANG: "train"}), {}, id="by-annotation"),
        pytest.param(make_pod(), {"claim": make_claim(gang_ref="train")}, id="by-claim"),
        pytest.param(
            make_pod(annotations={names.GANG: "train"}), {"claim": make_claim(gang_ref="train")}, id="by-both-alike"
        ),
        pytest.param(
            make_pod({"name": "main", "resources": {"limits": {names.GPU_RESOURCE: "2"}}}, claim=None,
                     annotations={names.GANG: "train", names.GANG_SIZE: "4", names.POD_SET: "workers"}),
            {},
            id="without-claim",
        ),
        pytest.param(make_pod(annotations={names.GANG: "train"}, schedulingGates=[GATE]), {}, id="gated-already"),
    ],
)  # fmt: skip
def test_a_member_is_annotated_and_gated(pod: dict[str, Any], how: dict[str, Any]) -> None:
    """Whoever belongs to a gang carries its name and waits behind the gate, once; a second round adds nothing."""
    made = admit(pod, **how)

    assert made["metadata"]["annotations"][names.GANG] == "train"
    assert made["spec"]["schedulingGates"] == [GATE]
    assert admit(made, **how) == made


def test_gates_of_others_stay() -> None:
    """A pod that waits for others too keeps their gates in front of ours."""
    made = admit(make_pod(annotations={names.GANG: "train"}, schedulingGates=[FOREIGN]))

    assert made["spec"]["schedulingGates"] == [FOREIGN, GATE]


def test_a_pod_of_no_gang_gets_no_gate() -> None:
    """The gate is for members alone."""
    assert "schedulingGates" not in admit(make_pod())["spec"]


def test_a_pod_belongs_to_one_gang() -> None:
    """Claim and annotation that name different gangs are a contradiction, told with both names."""
    denial = refused(make_pod(annotations={names.GANG: "other"}), claim=make_claim(gang_ref="train"))

    assert denial.code == 400
    assert "'other'" in denial.message
    assert "'train'" in denial.message
