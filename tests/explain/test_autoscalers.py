"""Autoscalers see only counts of a node; docs/autoscaler.md lists where these differ from Atoll's ledger."""

from dataclasses import replace
from typing import Any

import pytest

from atoll.api import names
from atoll.explain.decision import index_snapshot
from atoll.explain.explanation import PodState, explain
from atoll.explain.overview import overview
from atoll.explain.snapshot import ClusterSnapshot
from tests.builders import make_lease
from tests.explain.situations import holder, situation, waiting


def counted_free(snapshot: ClusterSnapshot, node: str) -> int:
    """Return the GPUs that whoever counts requests against the node's status takes for free."""
    return index_snapshot(snapshot).left(node)[names.GPU_RESOURCE]


def really_free(snapshot: ClusterSnapshot, node: str) -> int:
    """Return the GPUs that Atoll would give out."""
    return next(one for one in overview(index_snapshot(snapshot)).nodes if one.node == node).count("free")


def held(*ids: int, **node: Any) -> ClusterSnapshot:
    """A machine of eight GPUs on which one pod holds some."""
    return situation({"n1": node}, [holder("a", "n1", *ids)]).snapshot


@pytest.mark.parametrize("count", range(9))
def test_counts_agree_where_pods_hold_what_they_ask_for(count: int) -> None:
    """Whatever is bound: what autoscalers count as free is what Atoll would give out."""
    snapshot = held(*range(count))
    assert counted_free(snapshot, "n1") == really_free(snapshot, "n1") == 8 - count


def test_counts_differ_by_what_the_page_says_and_by_nothing_else() -> None:
    """Cordoned and sick GPUs, and those held without a bound pod (an admission, a doubt), look free to who counts."""
    sick = held(0, 1, cordoned=(2,), sick=(3, 4))
    assert (counted_free(sick, "n1"), really_free(sick, "n1")) == (6, 3)
    reserved = held(0, 1)
    reserved = replace(reserved, leases=(*reserved.leases, make_lease("n1", 6), make_lease("n1", 7)))
    assert (counted_free(reserved, "n1"), really_free(reserved, "n1")) == (6, 4)


def test_a_pod_that_waits_for_an_island_fits_by_count() -> None:
    """No autoscaler adds a node for it, so the answer names the node to add, and the machine by its shape."""
    found = situation(
        {"n1": {"profile": "l40s-8"}},
        [holder("a", "n1", 0, 1), holder("b", "n1", 4, 5)],
        waiting(4, claim={"policy": "island"}),
    )
    assert counted_free(found.snapshot, "n1") == 4
    told = explain(index_snapshot(found.snapshot), found.pod)
    assert told.state is PodState.BUSY
    assert any(one.change.added for one in told.help.proposals)
