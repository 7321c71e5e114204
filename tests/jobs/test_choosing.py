"""The choice of a cluster: the formula with numbers, who is a candidate, ties, and what comes before the score."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.jobs.choosing import WEIGHTS, ClusterOffer, ClusterWish, choose_cluster
from atoll.jobs.fitting import GpuCapacity, JobFit
from atoll.jobs.words import OptimizationGoal

H100 = "nvidia-h100"


def gpus(free: int, total: int = 20, kind: str = H100) -> tuple[GpuCapacity, ...]:
    """Return a capacity of one type."""
    return (GpuCapacity(kind, total, free, {}),)


def offer(name: str = "east", free: int = 10, price: float = 2.5, **fields: Any) -> ClusterOffer:
    """Return a cluster with free GPUs at a price."""
    return ClusterOffer(**{"name": name, "capacity": gpus(free), "prices": {H100: price}} | fields)


def wish(**fields: Any) -> ClusterWish:
    """Return the wish of a job with eight GPUs."""
    return ClusterWish(**{"tenant": "acme", "gpu_type": H100, "gpus": 8} | fields)


@pytest.mark.parametrize(
    ("asked", "given_offer", "parts", "score"),
    [
        (wish(), offer(), (0.5, 1.0, 1.0, 0.5), 0.4 * 0.5 + 0.3 + 0.2 + 0.1 * 0.5),
        (wish(), offer(free=5), (0.5, 0.5, 1.0, 0.25), 0.4 * 0.5 + 0.3 * 0.5 + 0.2 + 0.1 * 0.25),
        (wish(is_latency_sensitive=True), offer(latency_ms=40), (0.5, 1.0, 0.6, 0.5), 0.2 + 0.3 + 0.12 + 0.05),
        (wish(), offer(price=7.0), (0.0, 1.0, 1.0, 0.5), 0.3 + 0.2 + 0.05),
        (wish(is_latency_sensitive=True), offer(latency_ms=300), (0.5, 1.0, 0.0, 0.5), 0.2 + 0.3 + 0.05),
        (wish(goal=OptimizationGoal.COST), offer(), (0.5, 1.0, 1.0, 0.5), 0.35 + 0.15 + 0.05 + 0.05),
        (wish(goal=OptimizationGoal.LATENCY), offer(latency_ms=50), (0.5, 1.0, 0.5, 0.5), 0.05 + 0.3 + 0.25 + 0.05),
        (wish(gpus=0, gpu_type=None), offer(prices={"cpu": 1.0}), (0.8, 1.0, 1.0, 0.5), 0.32 + 0.3 + 0.2 + 0.05),
    ],
    ids=["balanced", "half free", "latency", "dear", "far", "goal cost", "goal latency", "cpu"],
)  # fmt: skip
def test_the_formula_with_numbers(
    asked: ClusterWish, given_offer: ClusterOffer, parts: tuple[float, ...], score: float
) -> None:
    """MC-2, C-20, C-38: each part from 0 to 1, weighted by the goal; jobs without GPUs count the price of CPUs."""
    row = choose_cluster(asked, [given_offer]).rows[0]

    assert tuple(row.parts[name] for name in ("cost", "availability", "latency", "load")) == pytest.approx(parts)
    assert row.score == pytest.approx(score)


@pytest.mark.parametrize(
    ("asked", "given_offer", "told"),
    [
        (wish(), offer(trouble="is draining"), "is draining"),
        (wish(), offer(tenants=frozenset({"globex"})), "does not serve tenant acme"),
        (wish(gpu_type="nvidia-a100"), offer(), "has no nvidia-a100"),
        (wish(gpus=21), offer(), "has 20 nvidia-h100, and the job needs 21"),
        (wish(), offer(quota=4), "quota of tenant acme is 4 GPUs, and the job needs 8"),
        (wish(is_eu_only=True), offer(region="us-east-1"), "region us-east-1 is not in the EU"),
        (wish(is_eu_only=True), offer(region="eu-west-2"), "region eu-west-2 is not in the EU"),
        (wish(is_eu_only=True), offer(), "region unknown is not in the EU"),
    ],
)
def test_who_is_no_candidate(asked: ClusterWish, given_offer: ClusterOffer, told: str) -> None:
    """MC-1: each condition alone excludes a cluster, and the sheet says why; then there is no cluster."""
    sheet = choose_cluster(asked, [given_offer])

    assert sheet.chosen is None
    assert sheet.rows[0].excluded.startswith(told)
    assert told in sheet.told()


def test_the_cheapest_first_and_the_next_when_it_is_full() -> None:
    """MC-5: 0.80 on premises, then 2.50, then 2.80; a job overflows when the cheaper ones have no room."""
    prices = {"on-premises": 0.8, "cloud-a": 2.5, "cloud-b": 2.8}
    full = JobFit(fits=False, reason="no free GPU", wait_seconds=None)
    chosen = []
    for taken in range(3):
        offers = [
            offer(name, price=price, free=0 if number < taken else 10, fit=full if number < taken else JobFit(True))
            for number, (name, price) in enumerate(prices.items())
        ]
        chosen.append(choose_cluster(wish(), offers).chosen)

    assert chosen == list(prices)


def test_room_comes_before_price() -> None:
    """A cheap cluster with enough free GPUs that are scattered loses to a dear one where the set fits now."""
    scattered = offer("cheap", price=0.5, fit=JobFit(fits=False, reason="no island", wait_seconds=60))
    dear = offer("dear", price=4.5)

    assert choose_cluster(wish(), [scattered, dear]).chosen == "dear"


def test_without_room_the_first_to_have_it_is_chosen() -> None:
    """Nothing fits now: the cluster where it would fit soonest, known before unknown, then by score."""
    waits = {"late": 600.0, "soon": 60.0, "unknown": None}
    offers = [offer(name, price=1, fit=JobFit(False, "full", wait)) for name, wait in waits.items()]

    assert [row.cluster for row in choose_cluster(wish(), offers).rows] == ["soon", "late", "unknown"]


def test_ties_go_by_name_and_data_may_count() -> None:
    """C-20, MC-3: equal clusters in the order of their names; a job that says where its data is prefers that region."""
    equal = [offer("b"), offer("a")]
    near = [offer("a", region="us-east-1"), offer("b", region="eu-west-1")]

    assert choose_cluster(wish(), equal).chosen == "a"
    assert choose_cluster(wish(data_region="eu-west-1"), near).chosen == "b"


def test_weights_sum_to_one() -> None:
    """Every goal has its row, and a score is never above 1."""
    assert set(WEIGHTS) == set(OptimizationGoal)
    assert all(sum(weights.values()) == pytest.approx(1.0) for weights in WEIGHTS.values())


@given(
    st.lists(
        st.tuples(
            st.floats(-1, 20),
            st.integers(0, 30),
            st.floats(0, 500),
            st.booleans(),
            st.sampled_from(["", "is draining"]),
        ),
        max_size=5,
    ),
    st.sampled_from(OptimizationGoal),
)
def test_scores_are_bounded_and_the_order_of_clusters_does_not_matter(
    rows: list[tuple[float, int, float, bool, str]], goal: OptimizationGoal
) -> None:
    """Whatever the prices and latencies: scores from 0 to 1, the same choice in any order, never an excluded one."""
    offers = [
        offer(f"c{number}", price=price, free=free, latency_ms=latency, fit=JobFit(fits), trouble=trouble)
        for number, (price, free, latency, fits, trouble) in enumerate(rows)
    ]
    asked = wish(goal=goal)
    sheet = choose_cluster(asked, offers)

    assert all(0 <= row.score <= 1 for row in sheet.rows)
    assert choose_cluster(asked, offers[::-1]) == sheet
    assert sheet.chosen is None or not next(row for row in sheet.rows if row.cluster == sheet.chosen).excluded
