"""How far estimates were from what jobs cost, and what earlier jobs say of the next one."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

ERROR_MAX: Final = 0.20
"""An estimate that is further off than this asks for a new look at jobs of its kind."""
LESSONS_MIN: Final = 3
"""Fewer earlier jobs of a kind say nothing of the next one."""
LESSONS_MAX: Final = 20


@dataclass(frozen=True, slots=True)
class EstimateError:
    """`error`: (actual - estimated) / estimated. `is_far`: the estimate was too far off."""

    error: float
    is_far: bool


def estimate_error(estimated_micros: float | None, actual_micros: float) -> EstimateError | None:
    """Return how far an estimate was off; None if there was none, or one of zero."""
    if not estimated_micros:
        return None
    error = (actual_micros - estimated_micros) / estimated_micros
    return EstimateError(error, abs(error) > ERROR_MAX)


def learned_seconds(earlier: Sequence[int]) -> int | None:
    """Return how long a job of a kind runs, from the run times of earlier ones, newest first; None for too few."""
    if len(earlier) < LESSONS_MIN:
        return None
    return int(median(earlier[:LESSONS_MAX]))
