"""What nobody could honour is refused in words when a gang or topology is created."""

from typing import Any

import pytest
from pydantic import ValidationError

from atoll.api.gangs import GpuGangSpec
from atoll.api.topologies import TopologySpec

RACK, BLOCK, HOST = "example.com/rack", "example.com/block", "kubernetes.io/hostname"
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
