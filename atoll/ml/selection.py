"""Selection of workers by a job's selector, affinity and anti-affinity.

Given a worker's labels and the properties of its jobs, finds unmet rules and the weights of met ones. Ordered operators
compare dotted numbers component by component, so that 10.0 is above 9.0 and 8 equals 8.0; any other label meets no
ordered rule.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from atoll.ml.attributes import AffinityRule, LabelAffinity, MlAttributes, Operator

Labels = Mapping[str, str]
DottedNumber = tuple[int, ...]

NODE_LABELS: Final[Mapping[str, str]] = {
    "region": "topology.kubernetes.io/region",
    "zone": "topology.kubernetes.io/zone",
    "instance_type": "node.kubernetes.io/instance-type",
}
"""Short labels of workers to those of nodes that mean the same; workers have both."""
REPORTED_LABELS: Final = ("gpu_type", "gpu_memory", "compute_capability", "gpu_interconnect")
"""Labels of workers that come from the report of their GPUs; no node has them."""

_DOTTED: Final = re.compile(r"[0-9]+(\.[0-9]+)*")


def dotted_number(text: str) -> DottedNumber | None:
    """Return the components without trailing zeros, which sort like the numbers; None for other text."""
    if not text.isascii() or not _DOTTED.fullmatch(text):
        return None
    parts = [int(part) for part in text.split(".")]
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


def _ordered(compare: Callable[[DottedNumber, DottedNumber], bool]) -> Callable[[str | None, tuple[str, ...]], bool]:
    def holds(value: str | None, values: tuple[str, ...]) -> bool:
        number = dotted_number(value or "")
        limit = dotted_number(values[0]) if len(values) == 1 else None
        return number is not None and limit is not None and compare(number, limit)

    return holds


_OPERATORS: Final[Mapping[Operator, Callable[[str | None, tuple[str, ...]], bool]]] = {
    Operator.IN: lambda value, values: value is not None and value in values,
    Operator.NOT_IN: lambda value, values: value is None or value not in values,
    Operator.EXISTS: lambda value, _: value is not None,
    Operator.DOES_NOT_EXIST: lambda value, _: value is None,
    Operator.GT: _ordered(lambda number, limit: number > limit),
    Operator.GTE: _ordered(lambda number, limit: number >= limit),
    Operator.LT: _ordered(lambda number, limit: number < limit),
    Operator.LTE: _ordered(lambda number, limit: number <= limit),
}
ORDERED: Final = frozenset({Operator.GT, Operator.GTE, Operator.LT, Operator.LTE})


def holds(rule: AffinityRule, labels: Labels) -> bool:
    """True if one rule holds for the labels."""
    return _OPERATORS[rule.operator](labels.get(rule.key), rule.values)


def rule_text(rule: AffinityRule) -> str:
    """Return a rule as text."""
    return " ".join((rule.key, rule.operator.value, ", ".join(rule.values))).rstrip()


def unmet(attributes: MlAttributes, labels: Labels, others: Iterable[Labels] = ()) -> tuple[str, ...]:
    """Return the hard conditions that a worker does not meet, in words; empty if it may be used.

    others: properties of the jobs that run on the worker, such as job_type and model_id.
    """
    selector = attributes.node_selector or {}
    affinity, anti = attributes.affinity or LabelAffinity(), attributes.anti_affinity or LabelAffinity()
    running = tuple(others)
    return (
        *(f"label {key} is not {value}" for key, value in sorted(selector.items()) if labels.get(key) != value),
        *(f"required {rule_text(rule)} does not hold" for rule in affinity.required if not holds(rule, labels)),
        *(f"must stay apart from {rule_text(rule)}" for rule in anti.required if _meets(rule, labels, running)),
    )


def score(attributes: MlAttributes, labels: Labels, others: Iterable[Labels] = ()) -> int:
    """Return the weights of the preferred rules that a worker meets, less those of met anti-affinity."""
    affinity, anti = attributes.affinity or LabelAffinity(), attributes.anti_affinity or LabelAffinity()
    running = tuple(others)
    return sum(rule.weight for rule in affinity.preferred if holds(rule, labels)) - sum(
        rule.weight for rule in anti.preferred if _meets(rule, labels, running)
    )


def _meets(rule: AffinityRule, labels: Labels, running: tuple[Labels, ...]) -> bool:
    """True if a rule of anti-affinity matches a worker, by its label or by a job there."""
    if rule.key in labels:
        return holds(rule, labels)
    return any(holds(rule, job) for job in running)
