"""The choice of a cluster for a job: who is a candidate, each one's score, and why.

In: the job's wish and each cluster's offer. Out: a ScoreSheet with one row for each cluster. A cluster where the job
fits now comes before one where it does not; then where it would fit first; then the higher score; then the name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from atoll.jobs.fitting import GpuCapacity, JobFit
from atoll.jobs.words import OptimizationGoal

PRICE_MAX: Final = 5.0
"""US dollars per GPU hour from which the part for cost is 0."""
FREE_MAX: Final = 10
ROOM: Final = JobFit(fits=True, wait_seconds=0.0)
LATENCY_MS_MAX: Final = 100.0
LOCALITY_WEIGHT: Final = 0.1
"""Share of the part for locality, if the job says where its data is; the others share the rest."""
CPU: Final = "cpu"
WEIGHTS: Final[Mapping[OptimizationGoal, Mapping[str, float]]] = {
    OptimizationGoal.BALANCED: {"cost": 0.4, "availability": 0.3, "latency": 0.2, "load": 0.1},
    OptimizationGoal.COST: {"cost": 0.7, "availability": 0.15, "latency": 0.05, "load": 0.1},
    OptimizationGoal.LATENCY: {"cost": 0.1, "availability": 0.3, "latency": 0.5, "load": 0.1},
    OptimizationGoal.THROUGHPUT: {"cost": 0.1, "availability": 0.5, "latency": 0.1, "load": 0.3},
}
"""Weights of the parts for each optimization_goal; they sum to 1."""
EU_REGIONS: Final = frozenset(
    {
        *(f"eu-{side}-{number}" for side in ("central", "west", "north", "south") for number in (1, 2, 3)),
        *(f"europe-{side}" for side in ("west1", "west3", "west4", "west8", "west9", "west10", "west12")),
        *("europe-north1", "europe-north2", "europe-central2", "europe-southwest1"),
        *("westeurope", "northeurope", "francecentral", "germanywestcentral", "swedencentral", "italynorth"),
        *("polandcentral", "spaincentral", "eu"),
    }
) - {"eu-west-2", "eu-central-2"}
"""Regions inside the European Union; eu-west-2 is London and eu-central-2 Zurich."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterWish:
    """What a job wants of a cluster. `gpu_type`: None for any; `gpus`: of all its pods, 0 without GPUs. `data_region`:
    where its data is, if it says so."""

    tenant: str
    gpu_type: str | None = None
    gpus: int = 0
    goal: OptimizationGoal = OptimizationGoal.BALANCED
    is_latency_sensitive: bool = False
    is_eu_only: bool = False
    data_region: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOffer:
    """What a cluster offers for a job. `trouble`: why it takes no jobs now. `tenants`: whom it serves, empty for all.
    `prices`: US dollars per hour by GPU type, and `cpu`. `quota`: the tenant's GPUs, None without a limit."""

    name: str
    trouble: str = ""
    tenants: frozenset[str] = frozenset()
    region: str = ""
    capacity: Sequence[GpuCapacity] = ()
    prices: Mapping[str, float] = field(default_factory=dict)
    latency_ms: float = 0.0
    quota: int | None = None
    fit: JobFit = ROOM


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """One cluster. `excluded`: why it is no candidate; empty if it is one. `parts`: each from 0 to 1."""

    cluster: str
    excluded: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    score: float = 0.0
    price: float | None = None
    fits: bool = False
    wait_seconds: float | None = None
    reason: str = ""

    def plain(self) -> dict[str, Any]:
        """Return the row as plain values."""
        return {name: getattr(self, name) for name in ScoreRow.__slots__} | {"parts": dict(self.parts)}


@dataclass(frozen=True, slots=True)
class ScoreSheet:
    """The rows, best first, and the chosen cluster; None if there is no candidate."""

    rows: tuple[ScoreRow, ...]
    weights: Mapping[str, float]

    @property
    def chosen(self) -> str | None:
        """Return the best candidate."""
        return next((row.cluster for row in self.rows if not row.excluded), None)

    def plain(self) -> dict[str, Any]:
        """Return the sheet as plain values."""
        return {"chosen": self.chosen, "weights": dict(self.weights), "rows": [row.plain() for row in self.rows]}

    def told(self) -> str:
        """Return why there is no candidate."""
        return "; ".join(f"{row.cluster}: {row.excluded}" for row in self.rows if row.excluded) or "there is no cluster"


def choose_cluster(wish: ClusterWish, offers: Sequence[ClusterOffer]) -> ScoreSheet:
    """Return the score sheet of all clusters."""
    weights = weights_of(wish)
    rows = [_row(wish, offer, weights) for offer in offers]
    return ScoreSheet(tuple(sorted(rows, key=_order)), weights)


def weights_of(wish: ClusterWish) -> Mapping[str, float]:
    """Return the weights for a job."""
    weights = WEIGHTS[wish.goal]
    if wish.data_region is None:
        return weights
    return {name: weight * (1 - LOCALITY_WEIGHT) for name, weight in weights.items()} | {"locality": LOCALITY_WEIGHT}


def _order(row: ScoreRow) -> tuple[bool, bool, bool, float, float, str]:
    """Return the key: candidates first, then fit, then wait, then score, then name."""
    waits = 0.0 if row.fits else row.wait_seconds
    return bool(row.excluded), not row.fits, waits is None, waits or 0.0, -row.score, row.cluster


def _row(wish: ClusterWish, offer: ClusterOffer, weights: Mapping[str, float]) -> ScoreRow:
    offered = _offered(wish, offer)
    excluded = _excluded(wish, offer, offered)
    if excluded:
        return ScoreRow(offer.name, excluded)
    price = min((offer.prices[kind] for kind in _priced(wish, offered) if kind in offer.prices), default=None)
    parts = _parts(wish, offer, offered, price)
    score = round(sum(weights[name] * parts[name] for name in weights), 6)
    rounded = {name: round(parts[name], 6) for name in weights}
    fit = offer.fit
    return ScoreRow(offer.name, "", rounded, score, price, fit.fits, fit.wait_seconds, fit.reason)


def _offered(wish: ClusterWish, offer: ClusterOffer) -> list[GpuCapacity]:
    return [one for one in offer.capacity if wish.gpu_type in (None, one.gpu_type)]


def _priced(wish: ClusterWish, offered: Sequence[GpuCapacity]) -> list[str]:
    return [one.gpu_type for one in offered] if wish.gpus else [CPU]


def _excluded(wish: ClusterWish, offer: ClusterOffer, offered: Sequence[GpuCapacity]) -> str:
    """Return why a cluster is no candidate."""
    if offer.trouble:
        return offer.trouble
    if offer.tenants and wish.tenant not in offer.tenants:
        return f"does not serve tenant {wish.tenant}"
    if wish.is_eu_only and offer.region.lower() not in EU_REGIONS:
        return f"region {offer.region or 'unknown'} is not in the EU, and the job has compliance eu-only"
    if not wish.gpus:
        return ""
    if not offered:
        return f"has no {wish.gpu_type or 'GPU'}"
    total = sum(one.total for one in offered)
    if total < wish.gpus:
        return f"has {total} {wish.gpu_type or 'GPUs'}, and the job needs {wish.gpus}"
    if offer.quota is not None and offer.quota < wish.gpus:
        return f"quota of tenant {wish.tenant} is {offer.quota} GPUs, and the job needs {wish.gpus}"
    return ""


def _parts(
    wish: ClusterWish, offer: ClusterOffer, offered: Sequence[GpuCapacity], price: float | None
) -> dict[str, float]:
    free = sum(one.free for one in offered)
    total, unused = sum(one.total for one in offer.capacity), sum(one.free for one in offer.capacity)
    counts_latency = wish.is_latency_sensitive or wish.goal is OptimizationGoal.LATENCY
    cpu_price = 0.0 if not wish.gpus else PRICE_MAX
    return {
        "cost": _clamped((PRICE_MAX - (price if price is not None else cpu_price)) / PRICE_MAX),
        "availability": _clamped(free / FREE_MAX) if wish.gpus else 1.0,
        "latency": _clamped((LATENCY_MS_MAX - offer.latency_ms) / LATENCY_MS_MAX) if counts_latency else 1.0,
        "load": _clamped(unused / total) if total else 1.0,
        "locality": float(wish.data_region == offer.region),
    }


def _clamped(value: float) -> float:
    return min(1.0, max(0.0, value))
