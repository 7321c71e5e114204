"""The administrators' policy: upper bounds, models, places of checkpoints, labels in selectors.

An empty list of allowed values allows everything, except for hosts: an empty list allows only public ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Final

YEAR_SECONDS: Final = 366 * 24 * 3600
BOUNDS: Final[Mapping[str, float]] = MappingProxyType(
    {
        "gpu_count": 512,
        "gpu_memory_gb": 1024,
        "tpu_chip_count": 16_384,
        "memory_gb": 65_536,
        "storage_gb": 1_000_000,
        "shm_size_gb": 65_536,
        "cpu_cores": 4096,
        "max_tokens": 100_000_000,
        "max_batch_size": 10_000_000,
        "timeout_seconds": YEAR_SECONDS,
        "preemption_grace_period_s": 24 * 3600,
        "reservation_timeout_s": YEAR_SECONDS,
        "escalation_after_s": YEAR_SECONDS,
        "checkpoint_interval_s": YEAR_SECONDS,
        "checkpoint_max_count": 1000,
    }
)
"""Upper bound of each numeric attribute."""

ADMINISTRATIVE_KEYS: Final = (
    "cost_center",
    "security_zone",
    "*gpu.scheduling/*",
    "node-role.kubernetes.io/*",
    "node-restriction.kubernetes.io/*",
    "*.node-restriction.kubernetes.io/*",
)
"""Labels of a node's purpose, which jobs may not select by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlPolicy:
    """model_ids, selector_keys, forbidden_selector_keys: patterns with *. checkpoint_prefixes: URIs, slash at the end.
    hosts: names or addresses of registries inside the cluster's own networks. bounds: see BOUNDS."""

    bounds: Mapping[str, float] = field(default_factory=lambda: BOUNDS)
    model_ids: tuple[str, ...] = ()
    checkpoint_prefixes: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    selector_keys: tuple[str, ...] = ()
    forbidden_selector_keys: tuple[str, ...] = ADMINISTRATIVE_KEYS

    def __post_init__(self) -> None:
        """Raise ValueError for a bound of an unknown attribute or a prefix without a slash at its end."""
        if unknown := sorted(set(self.bounds) - set(BOUNDS)):
            raise ValueError(f"bounds names {', '.join(unknown)}; bounds exist for {', '.join(BOUNDS)}")
        if open_ended := [prefix for prefix in self.checkpoint_prefixes if not prefix.endswith("/")]:
            raise ValueError(f"checkpoint prefix {open_ended[0]} has no slash at its end and would allow its namesakes")

    def bound_of(self, name: str) -> float | None:
        """Return the upper bound of an attribute; None if unbounded."""
        return self.bounds.get(name, BOUNDS.get(name))

    def allows_model(self, model_id: str) -> bool:
        """True if jobs may name the model."""
        return not self.model_ids or any(fnmatchcase(model_id, pattern) for pattern in self.model_ids)

    def allows_key(self, key: str) -> bool:
        """True if a job may select workers by the label."""
        if any(fnmatchcase(key, pattern) for pattern in self.forbidden_selector_keys):
            return False
        return not self.selector_keys or any(fnmatchcase(key, pattern) for pattern in self.selector_keys)
