"""Pods of Kubernetes' own PodGroups at admission: gated as a gang, left alone, or refused in words."""

import json
from typing import Any

import pytest

from atoll.api import names
from tests.webhook.test_device_claims import DeviceApi
from tests.webhook.test_gangs import GATE
from tests.webhook.test_mutation import admit, container, make_claim, make_pod, refused
from webhook.group_lookup import GroupFinder
from webhook.pods import decode_pod
from webhook.review import Denial

PATH = "/apis/scheduling.k8s.io/v1beta1/namespaces/team/podgroups/training"
MEMBER = {"schedulingGroup": {"podGroupName": "training"}}


def pod_group(policy: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """Return a PodGroup."""
    return {"metadata": {"name": "training"}, "spec": {"schedulingPolicy": policy, **spec}}


async def found(groups: dict[str, Any], **spec: Any) -> str:
    """Return the gang of a pod, or why it is refused."""
    answer = await GroupFinder(DeviceApi(groups)).gang_of("team", decode_pod(json.dumps(make_pod(**spec)).encode()))
    return answer.message if isinstance(answer, Denial) else answer


async def test_only_groups_of_policy_gang_are_gangs() -> None:
    """Pods of a basic group, and pods of none, are placed one by one; nothing is read for the latter."""
    gang = {PATH: pod_group({"gang": {"minCount": 4}})}

    assert await found(gang, **MEMBER) == "training"
    assert await found({PATH: pod_group({"basic": {}})}, **MEMBER) == ""
    assert await found({}) == ""


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({}, "does not exist in namespace 'team'; create it before its pods"),
        ({PATH: {"metadata": {"name": "training"}, "spec": {"schedulingPolicy": 7}}}, "could not be looked up"),
        ({PATH: pod_group({"gang": {"minCount": 4}}, priority=9)}, "set the same priorityClassName on both"),
    ],
    ids=["missing", "unreadable", "another priority"],
)
async def test_a_pod_whose_group_cannot_start_is_refused(groups: dict[str, Any], words: str) -> None:
    """The gate cannot be added later, and kube-scheduler would never start such a group."""
    assert words in await found(groups, **MEMBER)


@pytest.mark.parametrize("how", [{}, {"claim": make_claim(gang_ref="training")}], ids=["alone", "by claim too"])
def test_a_member_of_a_group_is_annotated_and_gated(how: dict[str, Any]) -> None:
    """As a member of a GpuGang is; a second round adds nothing."""
    made = admit(make_pod(**MEMBER), pod_group="training", **how)

    assert made["metadata"]["annotations"][names.GANG] == "training"
    assert made["spec"]["schedulingGates"] == [GATE]
    assert admit(made, pod_group="training", **how) == made


def test_a_launcher_without_gpus_joins_by_the_annotation() -> None:
    """Nobody but its user knows that it belongs to GPUs; without the annotation it is not Atoll's."""
    launcher = make_pod(container(), claim=None, annotations={names.GANG: "training"}, **MEMBER)

    assert admit(launcher, pod_group="training")["spec"]["schedulingGates"] == [GATE]


@pytest.mark.parametrize(
    ("annotations", "words"),
    [
        ({names.GANG: "other"}, "of PodGroup 'training', whose pods start together, and of gang 'other'"),
        ({names.GANG_SIZE: "4"}, "has no effect beside minCount of PodGroup 'training'"),
    ],
)
def test_a_member_of_a_group_names_no_other_gang_or_size(annotations: dict[str, str], words: str) -> None:
    """Two quorums of two gangs could each hold half."""
    assert words in refused(make_pod(annotations=annotations, **MEMBER), pod_group="training").message
