"""Prices of GPUs: a table from a file, and the price of one device of a report.

Prices are US dollars per hour of one whole GPU. They become whole micro-dollars, so that sums are exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Final, Self

from pydantic import Field, field_validator, model_validator

from atoll.jobs.aliases import gpu_model
from atoll.jobs.base import JobPart
from atoll.jobs.policy import JobToleration
from atoll.ml.tables import gpu_models

MICROS: Final = 1_000_000
PRICES_MAX: Final = 256
GIB: Final = 2**30

Usd = Annotated[Decimal, Field(ge=0, le=10_000, max_digits=12, decimal_places=6)]


class GpuPrice(JobPart):
    """Price of one type of GPU."""

    gpu: Annotated[str, Field(max_length=63, description="such as A100, H100 or nvidia-a100")]
    memory_gb: Annotated[
        int | None, Field(strict=True, ge=1, le=4096, description="nominal size of the card; every size by default")
    ] = None
    usd_per_hour: Annotated[Usd, Field(description="US dollars per hour of one GPU")]
    spot_usd_per_hour: Annotated[
        Usd | None, Field(description="the same on spot machines; by spot_share when absent")
    ] = None

    @field_validator("gpu")
    @classmethod
    def know_type(cls, value: str) -> str:
        """Accept short names of models."""
        known = gpu_model(value)
        if known is None:
            raise ValueError("must be a known GPU such as A100, H100 or T4, or of the form vendor-model")
        return known

    def micros(self, *, is_spot: bool, spot_share: Decimal) -> int:
        """Return the price in millionths of a dollar per GPU hour."""
        spot = self.usd_per_hour * spot_share if self.spot_usd_per_hour is None else self.spot_usd_per_hour
        return int((spot if is_spot else self.usd_per_hour) * MICROS)


class PriceTable(JobPart):
    """Prices of the GPUs of a cluster."""

    gpus: Annotated[tuple[GpuPrice, ...], Field(max_length=PRICES_MAX)] = ()
    spot_share: Annotated[
        Decimal, Field(ge=0, le=1, max_digits=5, decimal_places=4, description="price on spot machines / usual price")
    ] = Decimal("0.3")

    @model_validator(mode="after")
    def check(self) -> Self:
        """Refuse two prices of one card."""
        names = [(price.gpu, price.memory_gb) for price in self.gpus]
        twice = sorted({f"{gpu} {size or ''}".strip() for gpu, size in names if names.count((gpu, size)) > 1})
        if twice:
            raise ValueError(f"two prices of {', '.join(twice)}: keep one of each")
        return self

    def of_card(self, model: str, memory_bytes: int, *, is_spot: bool) -> int | None:
        """Return the price of a whole card by the slug and the nominal size of a report, in millionths of a dollar per
        hour; None without one. A price for the size goes before one for every size, a longer name before a shorter."""
        fitting = [one for one in self.gpus if _is_for(one, model, memory_bytes)]
        if not fitting:
            return None
        best = max(fitting, key=lambda one: (one.memory_gb is not None, len(one.gpu)))
        return best.micros(is_spot=is_spot, spot_share=self.spot_share)

    def of_type(self, gpu: str | None, memory_gb: float, *, is_spot: bool) -> "PricedCard | None":
        """Return the cheapest card of a type, or of any, with at least this memory; None without one."""
        cards = [one for one in self.cards(is_spot=is_spot) if gpu in (None, one.gpu) and one.holds(memory_gb)]
        return min(cards, key=lambda one: (one.micros, one.memory_gb, one.gpu), default=None)

    def cards(self, *, is_spot: bool) -> "Sequence[PricedCard]":
        """Return every priced card, in the order of the table."""
        return [
            PricedCard(one.gpu, one.memory_gb or 0, one.micros(is_spot=is_spot, spot_share=self.spot_share))
            for one in self.gpus
        ]


@dataclass(frozen=True, slots=True)
class PricedCard:
    """One row of the table for one kind of machine. `memory_gb`: 0 for every size. `micros`: per hour."""

    gpu: str
    memory_gb: int
    micros: int

    def holds(self, memory_gb: float) -> bool:
        """Return whether so much memory is there; a row for every size says nothing against it."""
        return not self.memory_gb or self.memory_gb >= memory_gb

    def __str__(self) -> str:
        return f"{self.gpu} with {self.memory_gb} GB" if self.memory_gb else self.gpu


def usd(micros: float) -> str:
    """Return an amount for people, in dollars and cents."""
    return f"{micros / MICROS:.2f} USD"


def is_spot_node(taints: Sequence[tuple[str, str]], spot: Sequence[JobToleration]) -> bool:
    """Return whether a node, by its taints as (key, value), is one that can disappear at any time."""
    return any(
        key == one.key and (one.operator == "Exists" or value == one.value) for key, value in taints for one in spot
    )


def _is_for(price: GpuPrice, model: str, memory_bytes: int) -> bool:
    is_model = any(model == one or model.startswith(f"{one}-") for one in gpu_models(price.gpu))
    return is_model and price.memory_gb in (None, round(memory_bytes / GIB))
