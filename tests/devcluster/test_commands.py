"""Options and messages of `atoll dev`."""

import pytest

from devcluster.commands import parse_node
from devcluster.errors import ClusterStateError


def test_node_with_and_without_a_shape() -> None:
    """A node may name the machine that it plays."""
    assert parse_node("n1").profile == ""
    assert parse_node("n1=dgx-h100").profile == "dgx-h100"


@pytest.mark.parametrize("text", ["n=nosuchprofile", "n="])
def test_unknown_shape_is_refused_before_anything_starts(text: str) -> None:
    """The message names the shapes that there are."""
    with pytest.raises(ClusterStateError, match="dgx-h100"):
        parse_node(text)
