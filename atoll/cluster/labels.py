"""Label selectors: whether a Requirement or a LabelSelector matches some labels, of nodes and pods alike."""

from collections.abc import Callable, Mapping
from typing import Final

from atoll.cluster.objects import LabelSelector, Requirement


def selects(selector: LabelSelector, labels: Mapping[str, str]) -> bool:
    """Tell whether every condition holds; a selector without conditions selects everything."""
    return all(labels.get(key) == value for key, value in selector.match_labels.items()) and all(
        holds(row, labels) for row in selector.match_expressions
    )


def holds(requirement: Requirement, labels: Mapping[str, str]) -> bool:
    """Tell whether one condition holds; an operator that is not known never does."""
    rule = _OPERATORS.get(requirement.operator)
    return rule is not None and rule(labels.get(requirement.key), requirement.values)


def _compare(value: str | None, values: tuple[str, ...], *, greater: bool) -> bool:
    try:
        number, limit = int(value or ""), int(values[0])
    except (ValueError, IndexError):
        return False
    return number > limit if greater else number < limit


_OPERATORS: Final[Mapping[str, Callable[[str | None, tuple[str, ...]], bool]]] = {
    "In": lambda value, values: value is not None and value in values,
    "NotIn": lambda value, values: value is None or value not in values,
    "Exists": lambda value, _: value is not None,
    "DoesNotExist": lambda value, _: value is None,
    "Gt": lambda value, values: _compare(value, values, greater=True),
    "Lt": lambda value, values: _compare(value, values, greater=False),
}
