"""Prices, estimates with reasons, budgets, advice and feedback."""

from decimal import Decimal
from typing import Any

import pytest
from pydantic import ValidationError

from atoll.jobs.costs.estimates import estimate, right_size, smallest_card
from atoll.jobs.costs.feedback import estimate_error, learned_seconds
from atoll.jobs.costs.prices import MICROS, PriceTable, is_spot_node
from atoll.jobs.costs.spending import decide_budget
from atoll.jobs.model import Job
from atoll.jobs.needs import needs_of
from atoll.jobs.notes import NoteBook
from atoll.jobs.policy import JobIntent
from atoll.jobs.settings import SPOT_TAINTS, RenderSettings
from atoll.jobs.words import BudgetAction
from tests.jobservice.service import PRICES

GIB = 2**30


def estimated(prices: PriceTable = PRICES, learned: int | None = None, **fields: Any) -> Any:
    """Return the estimate of a job."""
    job = Job.model_validate({"name": "tune", "job_type": "batch", "container": {"image": "busybox:1"}} | fields)
    needs = needs_of(job, RenderSettings(), now_seconds=0, book=NoteBook())
    return estimate(job, needs, prices, learned_seconds=learned)


@pytest.mark.parametrize(
    ("fields", "usd", "seconds", "reason"),
    [
        pytest.param(
            {"ext_ml_gpu_type": "nvidia-h100", "ext_ml_gpu_count": 2, "intent": {"expected_duration_hint": 1800}},
            4.0,
            1800,
            "2 x nvidia-h100 with 80 GB at 4.00 USD an hour per GPU",
            id="two cards for half an hour",
        ),
        pytest.param(
            {"ext_ml_gpu_type": "nvidia-a100", "ext_ml_gpu_count": 1, "policy": {"max_runtime": 3600}},
            1.8,
            3600,
            "3600 s: the most that its time limit allows",
            id="the cheapest size of the type, for its time limit",
        ),
        pytest.param(
            {"ext_ml_gpu_count": 1, "ext_ml_gpu_memory_gb": 60, "intent": {"expected_duration_hint": 3600}},
            2.5,
            3600,
            "1 x nvidia-a100 with 80 GB at 2.50 USD an hour per GPU, the cheapest that fits",
            id="any type with the memory",
        ),
        pytest.param(
            {
                "ext_ml_gpu_type": "nvidia-h100",
                "ext_ml_gpu_count": 1,
                "intent": {"expected_duration_hint": 3600, "spot_eligible": True},
            },
            1.2,
            3600,
            "at 1.20 USD an hour on spot machines",
            id="spot",
        ),
        pytest.param(
            {"ext_ml_gpu_count": 1, "parallelism": 4, "completions": 4, "intent": {"expected_duration_hint": 3600}},
            4.0,
            3600,
            "4 x nvidia-a10g",
            id="four pods at a time",
        ),
        pytest.param({"intent": {"expected_duration_hint": 9}}, 0.0, 9, "no GPUs", id="no GPUs"),
        pytest.param(
            {"ext_ml_gpu_type": "nvidia-t4", "ext_ml_gpu_count": 1, "intent": {"expected_duration_hint": 9}},
            None,
            9,
            "the price table has no price of nvidia-t4",
            id="no price",
        ),
        pytest.param(
            {"job_type": "service", "ext_ml_gpu_type": "nvidia-h100", "ext_ml_gpu_count": 1},
            None,
            None,
            "a service runs until it is stopped",
            id="service",
        ),
    ],
)
def test_an_estimate_says_where_each_figure_comes_from(
    fields: dict[str, Any], usd: float | None, seconds: int | None, reason: str
) -> None:
    """COST-1: price and run time have a reason each; what nobody knows is not made up."""
    told = estimated(**fields)

    assert (None if told.micros is None else told.micros / MICROS, told.seconds) == (usd, seconds)
    assert any(reason in one for one in told.reasons), told.reasons


def test_earlier_jobs_tell_how_long_the_next_one_runs() -> None:
    """The median of at least three; the job's own hint goes before it, its time limit caps both."""
    assert learned_seconds([100, 300]) is None
    assert learned_seconds([100, 5000, 300]) == 300
    assert estimated(learned=300).seconds == 300
    assert estimated(learned=300, intent={"expected_duration_hint": 40}).seconds == 40
    assert estimated(learned=300, policy={"max_runtime": 60}).seconds == 60


@pytest.mark.parametrize(
    ("memory_gb", "chosen"),
    [(40, "nvidia-a100 with 40 GB"), (24, "nvidia-a10g with 24 GB"), (41, "nvidia-a100 with 80 GB"), (81, "None")],
)
def test_the_smallest_card_that_holds_the_request_is_chosen(memory_gb: int, chosen: str) -> None:
    """COST-3: 40 GB: the 80 GB cards are too large, the 24 GB card too small."""
    assert str(smallest_card(memory_gb, PRICES)) == chosen


def test_a_cheaper_card_is_advised() -> None:
    """Whoever asks for an H100 and says that 40 GB are enough learns of the smaller card, and its price."""
    told = estimated(ext_ml_gpu_type="nvidia-h100", ext_ml_gpu_count=1, intent={"gpu_memory_hint": "40GB"})

    assert "nvidia-a100 with 40 GB holds 40 GB and costs 1.80 USD an hour instead of 4.00 USD" in told.advice
    assert right_size("nvidia-a10g", 20, PRICES) == ""
    assert right_size("nvidia-h100", 0, PRICES) == ""


@pytest.mark.parametrize(
    ("model", "gib", "spot", "usd"),
    [
        pytest.param("nvidia-a100-sxm4-80gb", 80, False, 2.5, id="by size"),
        pytest.param("nvidia-a100-pcie-40gb", 40, False, 1.8, id="the other size"),
        pytest.param("nvidia-h100-80gb-hbm3", 80, True, 1.2, id="spot is 70 percent cheaper"),
        pytest.param("nvidia-h1000", 80, False, None, id="a longer word is another model"),
        pytest.param("nvidia-a100-sxm4-80gb", 64, False, None, id="a size without a price"),
    ],
)
def test_a_card_of_a_report_has_its_price(model: str, gib: int, spot: bool, usd: float | None) -> None:
    """By the slug that the agent reports and the nominal size."""
    micros = PRICES.of_card(model, gib * GIB, is_spot=spot)

    assert (None if micros is None else micros / MICROS) == usd


@pytest.mark.parametrize(
    "gpus",
    [
        [{"gpu": "H100", "usd_per_hour": 1}, {"gpu": "nvidia-h100", "usd_per_hour": 2}],
        [{"gpu": "H100", "usd_per_hour": -1}],
        [{"gpu": "x", "usd_per_hour": 1}],
    ],
)
def test_a_price_table_with_a_mistake_is_refused(gpus: list[dict[str, Any]]) -> None:
    """Two prices of one card, a price below zero, an unknown word."""
    with pytest.raises(ValidationError):
        PriceTable.model_validate({"gpus": gpus})


def test_spot_nodes_are_known_by_their_taints() -> None:
    """As each provider taints them; another value of the key is not spot."""
    assert is_spot_node([("eks.amazonaws.com/capacityType", "SPOT")], SPOT_TAINTS)
    assert not is_spot_node([("eks.amazonaws.com/capacityType", "ON_DEMAND")], SPOT_TAINTS)


@pytest.mark.parametrize("action", list(BudgetAction))
def test_a_spent_budget_acts_once(action: BudgetAction) -> None:
    """At the cap, not before; not again for the same budget, but again for a raised one."""
    intent = JobIntent(budget_cap=Decimal("1.50"), budget_action=action)
    decided = decide_budget(intent, 1_500_000, mark="")
    raised = JobIntent(budget_cap=Decimal(3), budget_action=action)

    assert decide_budget(intent, 1_499_999, mark="") is None
    assert decided is not None
    assert decided.action is action
    assert "its cost of 1.50 USD reached the budget of 1.50 USD" in decided.message
    assert decide_budget(intent, 9_000_000, mark=decided.mark) is None
    assert decide_budget(raised, 3_000_000, mark=decided.mark) is not None
    assert decide_budget(JobIntent(), 10**12, mark="") is None


@pytest.mark.parametrize(
    ("estimated_micros", "actual", "is_far"),
    [(100, 119, False), (100, 121, True), (100, 79, True), (100, 81, False), (0, 5, None), (None, 5, None)],
)
def test_an_estimate_that_was_more_than_a_fifth_off_is_told(
    estimated_micros: int | None, actual: int, is_far: bool | None
) -> None:
    """COST-6, EDGE-5: 19 percent is near, 21 is far, in both directions; without an estimate there is nothing to
    compare."""
    off = estimate_error(estimated_micros, actual)

    assert (off.is_far if off is not None else None) == is_far
