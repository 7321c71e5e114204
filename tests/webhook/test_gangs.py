"""The webhook's changes to members of gangs: one annotation, one gate, for every way to name the gang."""

from typing import Any

import pytest

from atoll.api import names
from tests.webhook.test_mutation import admit, container, decide, make_claim, make_pod, refused
from webhook.requests import Defaults
from webhook.review import Mutation

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


def test_a_member_without_gpus_is_gated_and_gets_nothing_of_gpus() -> None:
    """A launcher gets gate and scheduler, no count, variable or class, and a warning in case GPUs were forgotten."""
    pod = make_pod(container(), claim=None, annotations={names.GANG: "train"})
    defaults = Defaults(inject_runtime_class=True)
    made, decision = admit(pod, defaults=defaults), decide(pod, defaults=defaults)

    assert made["spec"] == {**pod["spec"], "schedulerName": names.SCHEDULER_NAME, "schedulingGates": [GATE]}
    assert made["metadata"]["annotations"] == {names.GANG: "train"}
    assert isinstance(decision, Mutation)
    assert [warning for warning in decision.warnings if "without GPUs" in warning]
    assert admit(made, defaults=defaults) == made


@pytest.mark.parametrize("claim", ["eight", None], ids=["with GPUs", "without"])
def test_a_member_that_asks_for_its_rendezvous_gets_the_variables(claim: str | None) -> None:
    """They refer to the annotations that come with the open gate; a variable of the user with such a name stays."""
    own = {"name": "ATOLL_GANG_RANK", "value": "7"}
    pod = make_pod(
        container(), container("side", env=[own]), claim=claim, annotations={names.GANG: "g", names.RENDEZVOUS: "true"}
    )
    made = admit(pod)
    main, side = ({one["name"]: one for one in c["env"]} for c in made["spec"]["containers"])

    for variable, annotation in names.GANG_VARIABLES.items():
        reference = {"fieldRef": {"fieldPath": f"metadata.annotations['{annotation}']"}}
        assert main[variable] == {"name": variable, "valueFrom": reference}
    assert side["ATOLL_GANG_RANK"] == own
    assert (names.CUDA_VISIBLE_DEVICES in main) is (claim is not None)
    assert admit(made) == made


MOUNT = {"name": "devices", "mountPath": "/var/run/nvidia-container-devices/all"}
CDI = {"cdi.k8s.io/mine": "nvidia.com/gpu=all"}


@pytest.mark.parametrize(
    ("pod", "told"),
    [
        ({"schedulerName": "volcano"}, "schedulerName"),
        ({"nodeName": "n1"}, "nodeName"),
        ({"runtimeClassName": names.RUNTIME_CLASS}, "runtimeClassName"),
        ({"containers": [container(volumeMounts=[MOUNT])]}, "mounts '/var/run/nvidia-container-devices/all'"),
        ({"annotations": CDI}, "annotation cdi.k8s.io/mine"),
    ],
)
def test_a_member_without_gpus_is_refused_what_would_go_past_its_gang(pod: dict[str, Any], told: str) -> None:
    """Another scheduler, a node by hand, the class that opens GPUs, or GPUs past Atoll by mount or by annotation."""
    spec = {"containers": [container()], **pod}
    annotations = {names.GANG: "train", **spec.pop("annotations", {})}
    denial = refused(make_pod(*spec.pop("containers"), claim=None, annotations=annotations, **spec))

    assert told in denial.message


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
