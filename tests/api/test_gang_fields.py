"""Impossible requests are refused with clear messages when a gang or topology is created."""

from typing import Any

import pytest
from pydantic import ValidationError

from atoll.api.gangs import GpuGangSpec
from atoll.api.topologies import TopologySpec

RACK, BLOCK, HOST = "example.com/rack", "example.com/block", "kubernetes.io/hostname"
BALANCED = {"mode": "preferred", "level": RACK, "balanced": True}
SLICES = [{"size": 2, "level": RACK}]
GANGS: dict[str, tuple[dict[str, Any], str]] = {
    "a rank label of the whole gang": (
        {"topology": {"podIndexLabel": "rank"}, "podSets": [{"name": "w", "count": 4}]},
        "podIndexLabel and sub-groups belong to the topology of a pod set",
    ),
    "sub-groups of the whole gang": (
        {
            "topology": {"subGroupIndexLabel": "group", "subGroupCount": 2},
            "podSets": [{"name": "w", "count": 4}],
        },
        "podIndexLabel and sub-groups belong to the topology of a pod set",
    ),
    "slices over several pod sets": (
        {"topology": {"slices": SLICES}, "podSets": [{"name": "a", "count": 4}, {"name": "b", "count": 4}]},
        "slices cut the members of one pod set",
    ),
    "slices beside a pod set's own topology": (
        {"topology": {"slices": SLICES}, "podSets": [{"name": "w", "count": 4, "topology": {"slices": SLICES}}]},
        "slices cut the members of one pod set",
    ),
    "balance without a preferred level": (
        {
            "podSets": [
                {"name": "w", "count": 4, "topology": {"mode": "required", "level": RACK, "balanced": True}},
            ]
        },
        "balanced spreads members over the domains below a preferred level",
    ),
    "balance of the whole over several pod sets": (
        {"topology": BALANCED, "podSets": [{"name": "a", "count": 4}, {"name": "b", "count": 4}]},
        "balanced spreads the members of one pod set",
    ),
    "a group of one": ({"podSets": [{"name": "w", "count": 4, "group": "g"}]}, "a group is a leader and its workers"),
    "a group without a leader": (
        {"podSets": [{"name": "a", "count": 2, "group": "g"}, {"name": "b", "count": 4, "group": "g"}]},
        "a group is a leader and its workers",
    ),
    "a group of three": (
        {"podSets": [{"name": name, "count": 1, "group": "g"} for name in "abc"]},
        "a group is a leader and its workers",
    ),
    "a leader with a topology of its own": (
        {
            "podSets": [
                {"name": "l", "count": 1, "group": "g", "topology": {"mode": "required", "level": BLOCK}},
                {"name": "w", "count": 4, "group": "g", "topology": {"mode": "required", "level": RACK}},
            ]
        },
        "a leader is placed by the topology of its workers",
    ),
    "a leader that asks where its workers do not": (
        {
            "podSets": [
                {"name": "l", "count": 1, "group": "g", "topology": {"mode": "required", "level": BLOCK}},
                {"name": "w", "count": 4, "group": "g"},
            ]
        },
        "a leader is placed by the topology of its workers",
    ),
}
TOPOLOGIES: dict[str, tuple[list[str], str]] = {
    "a host above a rack": ([BLOCK, HOST, RACK], "kubernetes.io/hostname can only be the last level"),
    "a level twice": ([BLOCK, RACK, BLOCK], "levels names one node label twice"),
}


@pytest.mark.parametrize("case", GANGS)
def test_fields_that_nobody_could_honour_are_refused(case: str) -> None:
    """A field is honoured on the way to real pods, or the gang is not created."""
    spec, words = GANGS[case]
    with pytest.raises(ValidationError, match=words):
        GpuGangSpec.model_validate(spec)


@pytest.mark.parametrize("case", TOPOLOGIES)
def test_levels_without_sense_are_refused(case: str) -> None:
    """Levels go from wide to narrow, each once."""
    levels, words = TOPOLOGIES[case]
    with pytest.raises(ValidationError, match=words):
        TopologySpec.model_validate({"levels": [{"nodeLabel": label} for label in levels]})


def test_slices_of_a_gang_with_one_kind_of_members_are_fine() -> None:
    """They mean that pod set."""
    spec = GpuGangSpec.model_validate({"topology": {"slices": SLICES}, "podSets": [{"name": "w", "count": 4}]})

    assert spec.topology is not None
    assert spec.topology.slices[0].size == 2


def test_a_leader_without_a_topology_lies_by_that_of_its_workers() -> None:
    """The level is theirs; slices cut the workers alone."""
    asked = {"mode": "required", "level": BLOCK, "slices": SLICES}
    spec = GpuGangSpec.model_validate(
        {
            "podSets": [
                {"name": "l", "count": 1, "group": "g"},
                {"name": "w", "count": 4, "group": "g", "topology": asked},
                {"name": "x", "count": 2},
            ]
        }
    )
    leader, workers, others = (spec.topology_of(pod_set) for pod_set in spec.pod_sets)

    assert leader is not None
    assert workers is not None
    assert (leader.mode, leader.level, leader.slices) == (workers.mode, BLOCK, ())
    assert others is None
