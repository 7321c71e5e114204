"""What a job is expected to cost, with a reason for each figure, and which cheaper GPU would do.

Takes a job, what it needs, the prices, and how long earlier jobs of its kind ran. A figure that nobody can know is
None, and its reason says why.
"""

from dataclasses import dataclass
from typing import Final

from atoll.cluster.quantities import parse_amount
from atoll.jobs.costs.prices import MICROS, PricedCard, PriceTable, usd
from atoll.jobs.model import Job
from atoll.jobs.needs import Needs
from atoll.jobs.words import JobType
from atoll.jobs.working_out import given_attributes
from atoll.ml.attributes import Accelerator

HOUR_SECONDS: Final = 3600
GB: Final = 10**9


@dataclass(frozen=True, slots=True)
class JobKind:
    """Jobs that are alike for an estimate."""

    job_type: str
    gpu_type: str
    gpu_count: int


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """`micros_per_hour` and `micros`: millionths of a dollar, of all GPUs of the job. `seconds`: how long it runs.
    `advice`: a cheaper GPU that would do, empty without one. `reasons`: one sentence for each figure."""

    kind: JobKind
    micros_per_hour: int | None
    seconds: int | None
    reasons: tuple[str, ...]
    advice: str = ""

    @property
    def micros(self) -> int | None:
        """Cost of the whole job; None if its price or its time is not known."""
        if self.micros_per_hour is None or self.seconds is None:
            return None
        return self.micros_per_hour * self.seconds // HOUR_SECONDS


def kind_of(job: Job, needs: Needs) -> JobKind:
    """Return the kind of a job."""
    said = given_attributes(job)
    return JobKind(job.job_type.value, said.gpu_type or "", gpu_total(job, needs))


def gpu_total(job: Job, needs: Needs) -> int:
    """Return how many GPUs the job has at a time when all its pods run; a service at its least replicas."""
    if needs.gpus is None:
        return 0
    if job.job_type is JobType.SERVICE:
        pods = job.policy.least_replicas
    else:
        pods = min(job.parallelism or 1, job.completions or job.parallelism or 1)
    return needs.gpus.claim.count * needs.workers * pods


def estimate(job: Job, needs: Needs, prices: PriceTable, *, learned_seconds: int | None = None) -> CostEstimate:
    """Return the estimate of a job. `learned_seconds`: what earlier jobs of its kind took, None without such jobs."""
    kind = kind_of(job, needs)
    reasons: list[str] = []
    seconds = _seconds(job, needs, learned_seconds, reasons)
    if not kind.gpu_count:
        reasons.append(_without_gpus(needs))
        return CostEstimate(kind, 0, seconds, tuple(reasons))
    memory_gb = _memory_gb(job, needs)
    card = prices.of_type(kind.gpu_type or None, memory_gb, is_spot=needs.is_spot)
    if card is None:
        named = kind.gpu_type or "a GPU"
        size = f" of at least {memory_gb:g} GB" if memory_gb else ""
        reasons.append(f"the price table has no price of {named}{size}")
        return CostEstimate(kind, None, seconds, tuple(reasons))
    where = "on spot machines" if needs.is_spot else "per GPU"
    chosen = "" if kind.gpu_type else ", the cheapest that fits, because the job names no GPU"
    reasons.append(f"{kind.gpu_count} x {card} at {usd(card.micros)} an hour {where}{chosen}")
    advice = right_size(kind.gpu_type, memory_gb, prices, is_spot=needs.is_spot)
    return CostEstimate(kind, card.micros * kind.gpu_count, seconds, tuple(reasons), advice)


def right_size(gpu_type: str, memory_gb: float, prices: PriceTable, *, is_spot: bool = False) -> str:
    """Return which cheaper GPU holds the memory that a job says it needs; empty if none does, or it says nothing."""
    asked = prices.of_type(gpu_type, memory_gb, is_spot=is_spot) if gpu_type else None
    if asked is None or not memory_gb:
        return ""
    least = smallest_card(memory_gb, prices, is_spot=is_spot)
    if least is None or least.micros >= asked.micros:
        return ""
    return (
        f"{least} holds {memory_gb:g} GB and costs {usd(least.micros)} an hour instead of {usd(asked.micros)}: "
        f"ask for ext_ml_gpu_type {least.gpu}, unless the job needs more than memory"
    )


def smallest_card(memory_gb: float, prices: PriceTable, *, is_spot: bool = False) -> PricedCard | None:
    """Return the smallest card that holds so much memory; of equal ones the cheapest."""
    cards = [one for one in prices.cards(is_spot=is_spot) if one.memory_gb and one.memory_gb >= memory_gb]
    return min(cards, key=lambda one: (one.memory_gb, one.micros, one.gpu), default=None)


def _seconds(job: Job, needs: Needs, learned: int | None, reasons: list[str]) -> int | None:
    limit = needs.deadline_seconds
    for seconds, told in (
        (job.intent.expected_duration_hint, "as intent.expected_duration_hint says"),
        (learned, "the median of the last jobs of this kind"),
        (limit, "the most that its time limit allows; intent.expected_duration_hint would be closer"),
    ):
        if seconds is not None:
            shorter = min(seconds, limit) if limit is not None else seconds
            reasons.append(f"{shorter} s: {told if shorter == seconds else 'its time limit'}")
            return shorter
    kind = "a service runs until it is stopped" if job.job_type is JobType.SERVICE else "nothing says how long it runs"
    reasons.append(f"no run time: {kind}; intent.expected_duration_hint tells it")
    return None


def _memory_gb(job: Job, needs: Needs) -> float:
    """Return the memory of each GPU that the job says it needs, in GB; 0 if it says nothing."""
    if job.intent.gpu_memory_hint is not None:
        return float(job.intent.gpu_memory_hint.removesuffix("GB"))
    memory = needs.gpus.claim.memory if needs.gpus is not None else None
    return parse_amount("memory", memory) / GB if memory else 0.0


def _without_gpus(needs: Needs) -> str:
    if needs.attributes.accelerator is Accelerator.TPU:
        return "TPUs have no price here"
    return f"no GPUs, and {usd(0 * MICROS)} for CPU and memory: only GPUs have a price"
