"""Selectors and rules of a job in Kubernetes' form.

Gives parts of a pod's affinity; or a JobMistake that says what to do about a rule that Kubernetes cannot express.
Kubernetes compares only whole numbers and only node labels: rules with dotted numbers or about hardware are resolved
against known nodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from atoll.api import job_names
from atoll.api.topologies import HOSTNAME
from atoll.jobs.errors import JobMistake, NodesUnknown
from atoll.jobs.labels import label_value
from atoll.ml.attributes import PREFIX, AffinityRule, LabelAffinity, MlAttributes, Operator
from atoll.ml.selection import NODE_LABELS, ORDERED, REPORTED_LABELS, holds, rule_text

RESOLVED_MAX: Final = 1000
"""Limit of values in a resolved rule."""
_DIGITS_MAX: Final = 15
JOB_PROPERTIES: Final[Mapping[str, str]] = {
    "job_type": job_names.JOB_TYPE,
    "job_name": job_names.JOB_NAME,
    "model_id": job_names.MODEL_ID,
    "model_version": job_names.MODEL_VERSION,
    "tenant_id": job_names.TENANT_ID,
    "project_id": job_names.PROJECT_ID,
    "workload_class": job_names.WORKLOAD_CLASS,
    "priority_class": job_names.PRIORITY,
}
"""Properties of jobs for anti-affinity, and the label of their pods."""


@dataclass(frozen=True, slots=True)
class KnownNode:
    """A node with its labels and hardware, by the names used in rules."""

    name: str
    labels: Mapping[str, str]


Expression = dict[str, Any]
R = TypeVar("R", bound=AffinityRule)


def expression_of(rule: AffinityRule, nodes: Sequence[KnownNode] | None, *, field: str) -> Expression:
    """Return one matchExpression for a rule about nodes. Raises JobMistake."""
    native = _native(rule)
    if native is not None:
        return native
    told = rule_text(rule)
    if nodes is None:
        raise NodesUnknown(
            field,
            told,
            "Kubernetes cannot express it: it compares whole numbers, and labels of nodes alone",
            "render against a cluster (--cluster or --snapshot FILE), or list the wanted values by operator In",
        )
    return _resolved(rule, nodes, field=field, told=told)


def _native(rule: AffinityRule) -> Expression | None:
    """Return the rule in Kubernetes' form; None if there is no equivalent."""
    key = NODE_LABELS.get(rule.key, rule.key)
    if rule.key in REPORTED_LABELS:
        return None
    if rule.operator in (Operator.IN, Operator.NOT_IN):
        return {"key": key, "operator": rule.operator.value, "values": list(rule.values)}
    if rule.operator in (Operator.EXISTS, Operator.DOES_NOT_EXIST):
        return {"key": key, "operator": rule.operator.value}
    value = rule.values[0] if len(rule.values) == 1 else ""
    if not (value.isascii() and value.isdigit()) or len(value) > _DIGITS_MAX:
        return None
    number = int(value)
    operator, limit = {
        Operator.GT: ("Gt", number),
        Operator.GTE: ("Gt", number - 1),
        Operator.LT: ("Lt", number),
        Operator.LTE: ("Lt", number + 1),
    }[rule.operator]
    return {"key": key, "operator": operator, "values": [str(limit)]}


def _resolved(rule: AffinityRule, nodes: Sequence[KnownNode], *, field: str, told: str) -> Expression:
    """Return the label values among known nodes that satisfy the rule; without a label, the nodes."""
    meeting = [node for node in nodes if holds(rule, node.labels)]
    is_property = rule.key in REPORTED_LABELS
    values = sorted(
        {node.labels.get(HOSTNAME, node.name) if is_property else node.labels[rule.key] for node in meeting}
    )
    if not values:
        raise JobMistake(
            field, told, f"none of the {len(nodes)} known nodes meets it", "change the rule, or label nodes"
        )
    if len(values) > RESOLVED_MAX:
        limit = f"{len(values)} values meet it, and {RESOLVED_MAX} can be listed"
        raise JobMistake(field, told, limit, "label the nodes, and choose by that label")
    return {"key": HOSTNAME if is_property else NODE_LABELS.get(rule.key, rule.key), "operator": "In", "values": values}


def affinity_of(
    attributes: MlAttributes,
    nodes: Sequence[KnownNode] | None,
    *,
    required: Sequence[Expression] = (),
    apart: Sequence[Mapping[str, str]] = (),
    beside: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the affinity of a pod; empty for none. Raises JobMistake.

    `required`: more expressions that nodes must meet. `apart`: labels of pods that must not be on the same node.
    `beside`: the term of pods that must be near, if any. Anti-affinity rules about nodes are inverted.
    """
    affinity, anti = attributes.affinity or LabelAffinity(), attributes.anti_affinity or LabelAffinity()
    must = [*required, *_expressions(affinity.required, nodes, f"{PREFIX}affinity.required")]
    must += _expressions(_opposites(anti.required), nodes, f"{PREFIX}anti_affinity.required")
    preferred = [
        {"weight": rule.weight, "preference": {"matchExpressions": [expression_of(rule, nodes, field=field)]}}
        for rules, field in (
            (affinity.preferred, f"{PREFIX}affinity.preferred"),
            (_opposites(anti.preferred), f"{PREFIX}anti_affinity.preferred"),
        )
        for rule in rules
        if rule.weight
    ]
    node = _part({"nodeSelectorTerms": [{"matchExpressions": must}]} if must else None, preferred)
    terms = [{"labelSelector": {"matchLabels": dict(labels)}, "topologyKey": HOSTNAME} for labels in apart]
    terms += [_pod_term(rule, f"{PREFIX}anti_affinity.required") for rule in anti.required if not is_of_nodes(rule.key)]
    likely = [
        {"weight": rule.weight, "podAffinityTerm": _pod_term(rule, f"{PREFIX}anti_affinity.preferred")}
        for rule in anti.preferred
        if rule.weight and not is_of_nodes(rule.key)
    ]
    parts = {
        "nodeAffinity": node,
        "podAffinity": _part([dict(beside)] if beside else None, []),
        "podAntiAffinity": _part(terms or None, likely),
    }
    return {name: part for name, part in parts.items() if part}


def _part(required: object, preferred: Sequence[object]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    if required is not None:
        told["requiredDuringSchedulingIgnoredDuringExecution"] = required
    if preferred:
        told["preferredDuringSchedulingIgnoredDuringExecution"] = list(preferred)
    return told


def _expressions(rules: Sequence[AffinityRule], nodes: Sequence[KnownNode] | None, field: str) -> list[Expression]:
    return [expression_of(rule, nodes, field=field) for rule in rules]


def is_of_nodes(key: str) -> bool:
    """True if a rule with this key is about nodes; others are about jobs."""
    return key in NODE_LABELS or key in NODE_LABELS.values() or key in REPORTED_LABELS


_OPPOSITES: Final[Mapping[Operator, Operator]] = {
    Operator.IN: Operator.NOT_IN,
    Operator.NOT_IN: Operator.IN,
    Operator.EXISTS: Operator.DOES_NOT_EXIST,
    Operator.DOES_NOT_EXIST: Operator.EXISTS,
    Operator.GT: Operator.LTE,
    Operator.GTE: Operator.LT,
    Operator.LT: Operator.GTE,
    Operator.LTE: Operator.GT,
}


def _opposites(rules: Sequence[R]) -> list[R]:
    """Return the inverse of the rules about nodes."""
    return [rule.model_copy(update={"operator": _OPPOSITES[rule.operator]}) for rule in rules if is_of_nodes(rule.key)]


def _pod_term(rule: AffinityRule, field: str) -> dict[str, Any]:
    """Return the term for a rule about jobs' pods in the same namespace. Raises JobMistake for ordered operators."""
    if rule.operator in ORDERED:
        raise JobMistake(
            field,
            rule_text(rule),
            "what else runs on a node is not compared by order",
            "list the values by operator In",
        )
    expression: Expression = {"key": JOB_PROPERTIES.get(rule.key, rule.key), "operator": rule.operator.value}
    if rule.operator in (Operator.IN, Operator.NOT_IN):
        expression["values"] = [label_value(value) for value in rule.values]
    jobs = {"key": job_names.JOB_TYPE, "operator": "Exists"}
    expressions = [expression] if expression["operator"] in ("In", "Exists") else [expression, jobs]
    return {"labelSelector": {"matchExpressions": expressions}, "topologyKey": HOSTNAME}
