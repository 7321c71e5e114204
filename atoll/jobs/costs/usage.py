"""Sums over spans of GPU time: GPU-seconds of each state, and money, by tenant, project, user, model or job.

Only held time costs: used, idle and reserved, because nobody else could have the GPU. Sums are exact fractions until
they are shown.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from fractions import Fraction
from typing import Final

from atoll.jobs.costs.prices import MICROS
from atoll.jobs.costs.spans import HELD, WHOLE_PPM, GpuFact, GpuSpan, TimeUse

HOUR_SECONDS: Final = 3600


class UsageKey(StrEnum):
    """What usage is summed by."""

    TENANT = "tenant"
    PROJECT = "project"
    USER = "user"
    MODEL = "model"
    JOB = "job"
    NAMESPACE = "namespace"
    NODE = "node"


_READ: Final[Mapping[UsageKey, Callable[[GpuFact], str]]] = {
    UsageKey.TENANT: lambda fact: fact.account.tenant,
    UsageKey.PROJECT: lambda fact: fact.account.project,
    UsageKey.USER: lambda fact: fact.account.user,
    UsageKey.MODEL: lambda fact: fact.model,
    UsageKey.JOB: lambda fact: fact.account.job_id,
    UsageKey.NAMESPACE: lambda fact: fact.account.namespace,
    UsageKey.NODE: lambda fact: fact.node,
}


@dataclass(slots=True)
class UsageSum:
    """Sums of one group. `ppm_seconds`: seconds times the share of a GPU in millionths, by state. `cost_micros`: in
    millionths of a dollar. `unpriced_ppm_seconds`: held time of GPUs without a price."""

    ppm_seconds: dict[TimeUse, int] = field(default_factory=lambda: dict.fromkeys(TimeUse, 0))
    cost_micros: Fraction = Fraction(0)
    unpriced_ppm_seconds: int = 0

    def gpu_hours(self, *uses: TimeUse) -> float:
        """Return the GPU-hours of the states; of all without any."""
        return sum(self.ppm_seconds[use] for use in uses or TimeUse) / (WHOLE_PPM * HOUR_SECONDS)

    def gpu_seconds(self, *uses: TimeUse) -> Fraction:
        """Return the GPU-seconds of the states, exactly; of all without any."""
        return Fraction(sum(self.ppm_seconds[use] for use in uses or TimeUse), WHOLE_PPM)

    @property
    def usd(self) -> float:
        """Return the cost in dollars, rounded to a millionth."""
        return round(float(self.cost_micros / MICROS), 6)


def sum_usage(
    spans: Iterable[GpuSpan], start: datetime, end: datetime, by: tuple[UsageKey, ...]
) -> dict[tuple[str, ...], UsageSum]:
    """Return the sums of the parts of the spans from `start` to `end`, by the values of the keys."""
    sums: dict[tuple[str, ...], UsageSum] = {}
    for span in spans:
        seconds = int((min(span.end, end) - max(span.start, start)).total_seconds())
        if seconds <= 0:
            continue
        fact = span.fact
        group = sums.setdefault(tuple(_READ[key](fact) for key in by), UsageSum())
        amount = seconds * fact.share_ppm
        group.ppm_seconds[fact.use] += amount
        if fact.use not in HELD:
            continue
        if fact.price_micros is None:
            group.unpriced_ppm_seconds += amount
        else:
            group.cost_micros += Fraction(amount * fact.price_micros, WHOLE_PPM * HOUR_SECONDS)
    return sums
