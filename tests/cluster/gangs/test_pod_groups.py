"""Kubernetes' PodGroups as gangs: what is kept of each, and what is refused in which words."""

from typing import Any

import msgspec
import pytest

from atoll.api import names
from atoll.api.gangs import MEMBERS_MAX, GpuGang
from atoll.cluster.gangs.pod_groups import PodGroup, conflict, gang_spec, refusal

RACK, ZONE = "example.com/rack", "topology.kubernetes.io/zone"


def group(min_count: int | None = 4, **spec: Any) -> PodGroup:
    """Return a PodGroup, of policy gang unless `min_count` is None."""
    policy: dict[str, Any] = {"basic": {}} if min_count is None else {"gang": {"minCount": min_count}}
    body = {"metadata": {"name": "training"}, "spec": {"schedulingPolicy": policy, **spec}}
    return msgspec.json.decode(msgspec.json.encode(body), type=PodGroup)


KEPT: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, Any]]] = {
    "as many pods as needed": ({}, {"pods": 4}, {"minMember": 4, "podSets": [{"name": "pods", "count": 4}]}),
    "more pods": ({}, {"pods": 6}, {"minMember": 4, "podSets": [{"name": "pods", "count": 6}]}),
    "fewer, after minCount was raised": ({}, {"pods": 3}, {"minMember": 4, "podSets": [{"name": "pods", "count": 4}]}),
    "a leader and workers": (
        {},
        {"workers": 4, "leader": 1},
        {"minMember": 4, "podSets": [{"name": "leader", "count": 1}, {"name": "workers", "count": 4}]},
    ),
    "a required domain": (
        {"schedulingConstraints": {"topology": [{"key": RACK}]}},
        {"pods": 4},
        {
            "minMember": 4,
            "podSets": [{"name": "pods", "count": 4}],
            "topology": {"mode": "required", "level": RACK},
        },
    ),
    "each disrupted by itself": (
        {"disruptionMode": {"single": {}}},
        {"pods": 6},
        {"minMember": 4, "podSets": [{"name": "pods", "count": 6}]},
    ),
    "all disrupted together": (
        {"disruptionMode": {"all": {}}},
        {"pods": 6},
        {"minMember": 6, "podSets": [{"name": "pods", "count": 6}]},
    ),
}


@pytest.mark.parametrize("case", KEPT)
def test_a_group_becomes_a_gang_with_its_quorum_domain_and_unit_of_disruption(case: str) -> None:
    """A group has no upper bound, so the gang has as many members as there are pods."""
    spec, counts, want = KEPT[case]
    made = gang_spec(group(**spec), counts)

    assert made == want
    GpuGang.model_validate({"metadata": {"name": "training"}, "spec": made})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "part of a composite group": ({"parentCompositePodGroupName": "whole"}, "part of CompositePodGroup 'whole'"),
    "shared devices": ({"resourceClaims": [{"name": "d"}]}, "shares resourceClaims"),
    "too many": ({"min_count": MEMBERS_MAX + 1}, "at most 100000 members"),
    "another priority": ({"priority": 7}, "priority 0 and PodGroup 'training' has 7"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_gang_cannot_keep_is_refused(case: str) -> None:
    """The message names the group, and what to do instead."""
    spec, words = REFUSED[case]

    assert words in refusal(group(**spec), priority=0)
    assert refusal(group(priority=7), priority=7) == ""


@pytest.mark.parametrize(("min_member", "words"), [(3, "set minMember to 4 or more"), (4, ""), (5, "")])
def test_a_written_gang_needs_at_least_as_many_as_the_group(min_member: int, words: str) -> None:
    """With a lower quorum Atoll would let members go, with GPUs, that kube-scheduler never starts."""
    spec = {"minMember": min_member, "podSets": [{"name": "all", "count": 8}]}
    gang = GpuGang.model_validate({"apiVersion": names.API_VERSION, "metadata": {"name": "training"}, "spec": spec})

    assert words in conflict(group(), gang, ())
    assert conflict(group(None), gang, ()) == ""


@pytest.mark.parametrize(
    ("topology", "is_kept"),
    [
        pytest.param(None, False, id="no topology"),
        pytest.param({"mode": "preferred", "level": RACK}, False, id="a wish"),
        pytest.param({"mode": "required", "level": ZONE}, False, id="a wider domain"),
        pytest.param({"mode": "required", "level": RACK}, True, id="the same"),
        pytest.param({"mode": "required", "level": "example.com/block"}, True, id="a narrower one"),
        pytest.param({"mode": "required", "level": "kubernetes.io/hostname"}, True, id="one machine"),
    ],
)
def test_a_written_gang_keeps_at_least_the_domain_of_the_group(topology: dict[str, Any] | None, is_kept: bool) -> None:
    """Else members would be pinned, with GPUs, where kube-scheduler's own cycle for the group binds none of them."""
    spec = {"podSets": [{"name": "all", "count": 4}], **({"topology": topology} if topology else {})}
    gang = GpuGang.model_validate({"apiVersion": names.API_VERSION, "metadata": {"name": "training"}, "spec": spec})
    racked = group(schedulingConstraints={"topology": [{"key": RACK}]})

    told = conflict(racked, gang, (ZONE, RACK, "example.com/block"))

    assert (told == "") is is_kept
    assert is_kept or f"set spec.topology to mode required and level {RACK}" in told
    assert conflict(group(), gang, ()) == ""
