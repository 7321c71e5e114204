"""Which GPUs a waiting gang could use: what it contends for with the gangs behind it."""

from typing import Any

import pytest

from atoll.cluster.gangs.contention import usable_positions
from atoll.cluster.gangs.queue import NOBODY
from tests.builders import make_report
from tests.cluster.gangs.test_replacements import PLACES, Ground

A100: dict[str, Any] = {"model": "nvidia-a100-sxm4-40gb"}


@pytest.mark.parametrize(
    ("claim", "positions"),
    [
        pytest.param({"count": 2, "models": ["nvidia-v100"]}, 0b11111000, id="one model"),
        pytest.param({"count": 2, "models": ["nvidia-a100"]}, 0b00000111, id="the other model"),
        pytest.param({"count": 2}, 0b11111111, id="either model"),
        pytest.param({"count": 4}, 0b11111000, id="either model, of one of which there are too few"),
        pytest.param({"count": 4, "mixedModels": True}, 0b11111111, id="both models together"),
    ],
)
def test_a_gang_contends_for_the_cards_that_it_could_use(claim: dict[str, Any], positions: int) -> None:
    """Machines with three cards of one model and five of another: those that it could use, free or not."""
    ground = Ground({}, full=("n1",))
    for name in PLACES:
        ground.ledger.put_report(make_report(name, "dgx1-v100", devices=dict.fromkeys(range(3), A100)))
    asked = ground.request(0, 1, **claim)

    found = usable_positions(ground.gang.spec, asked.chosen, asked.requests, asked.node_domains, asked.cluster)

    assert found == dict.fromkeys(PLACES, positions)


@pytest.mark.parametrize(
    ("usable", "named"),
    [
        pytest.param({"n1": 0b0110}, "first", id="the first of both"),
        pytest.param({"n1": 0b1000}, "second", id="what the second alone could use"),
        pytest.param({"n1": 0b0001}, "", id="other GPUs of the node"),
        pytest.param({"n2": 0b1111}, "", id="another node"),
    ],
)
def test_a_gang_is_held_up_by_the_first_that_could_use_its_gpus(usable: dict[str, int], named: str) -> None:
    """Under strict order, and by nobody else."""
    ahead = NOBODY.with_gang("first", {"n1": 0b0110}).with_gang("second", {"n1": 0b1100})

    assert ahead.in_the_way(usable) == named
