"""A user changes a gang during its admission: all members start, or the gang holds nothing."""

from pathlib import Path
from typing import Any

import pytest

from atoll.api import names
from tests.controllers.gang_harness import GANGS, cluster, settled, term
from tests.controllers.test_gang_adversities import add_gang, is_let_go, reserve

pytestmark = pytest.mark.asyncio


def edit(made: Any, name: str = "g", **spec: Any) -> None:
    """Change the spec of a gang, as its user does."""
    gang = made.gang(name)
    metadata = {key: value for key, value in gang["metadata"].items() if key != "resourceVersion"}
    made.server.put(f"{GANGS}/{name}", {**gang, "metadata": metadata, "spec": {**gang["spec"], **spec}})


async def test_a_gang_that_grows_before_the_gates_open_waits_for_the_rest(tmp_path: Path) -> None:
    """Two were reserved for, three are needed by now: the two give theirs back, and start with the third."""
    async with cluster("n1", "n2") as made:
        add_gang(made)
        await reserve(made, tmp_path)
        edit(made, podSets=[{"name": "workers", "count": 3}])
        async with term(made, tmp_path) as second:
            await settled(second, lambda: made.held() == 0 and made.reason("g") == "WaitForQuorum")
            assert made.is_gated("g-0")
            made.add_member("g", 2)
            await settled(second, lambda: is_let_go(made, "g-0", "g-1", "g-2"))


async def test_a_gang_that_is_switched_off_before_the_gates_open_gives_everything_back(tmp_path: Path) -> None:
    """Its members stay gated and hold nothing; switched on and off and on again it starts whole."""
    async with cluster() as made:
        add_gang(made)
        await reserve(made, tmp_path)
        edit(made, active=False)
        async with term(made, tmp_path) as second:
            await settled(second, lambda: made.held() == 0)
            await settled(second, lambda: made.reason("g", names.CONDITION_ACTIVE) == "Deactivated")
            assert made.is_gated("g-0")
            assert made.is_gated("g-1")
            for active in (True, False, True, False, True):
                edit(made, active=active)
            await settled(second, lambda: is_let_go(made, "g-0", "g-1"))
        assert made.held() == 8


async def test_a_gang_whose_level_is_misspelt_once_its_gpus_are_reserved_starts_where_it_was_put(
    tmp_path: Path,
) -> None:
    """An admission that is written down goes on as it was decided; the mistake counts for the next one."""
    async with cluster() as made:
        add_gang(made)
        await reserve(made, tmp_path)
        edit(made, topology={"mode": "required", "level": "example.com/rcak"})
        async with term(made, tmp_path) as second:
            await settled(second, lambda: is_let_go(made, "g-0", "g-1"))
        assert made.held() == 8


async def test_members_whose_claim_is_missing_wait_and_are_told_which(tmp_path: Path) -> None:
    """Nobody knows what they ask for: the gang holds nothing, and its condition names the claim."""
    async with cluster() as made, term(made, tmp_path) as running:
        made.add_gang("g", 1)
        made.add_member("g", 0, gpus=0, annotations={names.CLAIM: "nowhere"})
        await settled(running, lambda: "create GpuClaim 'nowhere'" in condition_of(made, "g").get("message", ""))
        assert made.held() == 0


async def test_a_member_that_asks_for_no_gpu_keeps_its_gang_waiting_and_is_named(tmp_path: Path) -> None:
    """Every member asks for GPUs; one that does not is a mistake that people are told of."""
    async with cluster() as made, term(made, tmp_path) as running:
        made.add_gang("g", 2)
        made.add_member("g", 0)
        made.add_member("g", 1, gpus=0)
        await settled(running, lambda: "g-1: GPU requests" in condition_of(made, "g").get("message", ""))
        assert made.held() == 0


def condition_of(made: Any, name: str) -> dict[str, Any]:
    """Return the condition Admitted of a gang."""
    found = made.gang(name).get("status", {}).get("conditions", [])
    return next((one for one in found if one["type"] == names.CONDITION_ADMITTED), {})
