"""Selector, affinity, anti-affinity: every operator, requirements and preferences."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.ml import selection
from atoll.ml.attributes import AffinityRule, MlAttributes
from atoll.ml.envelope import parse
from atoll.ml.policy import MlPolicy
from tests.ml.strategies import KEYS, VALUES, affinities

TRUTH: dict[str, tuple[str, tuple[str, ...], str | None, bool]] = {
    "In holds for a listed value": ("In", ("a", "b"), "b", True),
    "In does not hold for another": ("In", ("a", "b"), "c", False),
    "In does not hold without the label": ("In", ("a",), None, False),
    "In compares text": ("In", ("8.0",), "8", False),
    "NotIn does not hold for a listed value": ("NotIn", ("a", "b"), "a", False),
    "NotIn holds for another": ("NotIn", ("a",), "b", True),
    "NotIn holds without the label": ("NotIn", ("a",), None, True),
    "Exists holds with the label": ("Exists", (), "", True),
    "Exists does not hold without": ("Exists", (), None, False),
    "Exists takes no notice of values": ("Exists", ("z",), "a", True),
    "DoesNotExist holds without the label": ("DoesNotExist", (), None, True),
    "DoesNotExist does not hold with it": ("DoesNotExist", (), "", False),
    "DoesNotExist takes no notice of values": ("DoesNotExist", ("z",), None, True),
    "Gt holds above": ("Gt", ("8.0",), "8.6", True),
    "Gt does not hold at the number": ("Gt", ("8.0",), "8.0", False),
    "Gt knows that ten is above nine": ("Gt", ("9.0",), "10.0", True),
    "Gt knows that 8.10 is above 8.9": ("Gt", ("8.9",), "8.10", True),
    "Gt knows that 8.0 is 8": ("Gt", ("8",), "8.0", False),
    "Gt does not hold without the label": ("Gt", ("8",), None, False),
    "Gt does not hold for words": ("Gt", ("8",), "nine", False),
    "Gt does not hold for a signed number": ("Gt", ("8",), "-9", False),
    "Gte holds at the number": ("Gte", ("8",), "8.0.0", True),
    "Gte does not hold below": ("Gte", ("8.0",), "7.5", False),
    "Lt holds below": ("Lt", ("9.0",), "8.9", True),
    "Lt does not hold at the number": ("Lt", ("9",), "9.0", False),
    "Lt does not hold for words": ("Lt", ("9",), "", False),
    "Lt does not hold without the label": ("Lt", ("9",), None, False),
    "Lte holds at the number": ("Lte", ("9.0",), "9", True),
    "Lte does not hold above": ("Lte", ("9.0",), "10", False),
    "Lte does not hold without the label": ("Lte", ("9.0",), None, False),
    "an ordered operator over words never holds": ("Lte", ("many",), "1", False),
    "an ordered operator over two numbers never holds": ("Gt", ("1", "2"), "3", False),
    "digits of other scripts are no numbers": ("Gt", ("1",), "\u0663", False),
}


@pytest.mark.parametrize(("operator", "values", "label", "expected"), TRUTH.values(), ids=TRUTH)
def test_operator_holds_exactly_when_it_should(
    operator: str, values: tuple[str, ...], label: str | None, expected: bool
) -> None:
    """The truth table of the eight operators, a missing label included."""
    rule = AffinityRule.model_construct(key="k", operator=operator, values=values)

    assert selection.holds(rule, {} if label is None else {"k": label}) is expected


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.lists(st.integers(0, 30), min_size=1, max_size=4))
def test_dotted_numbers_order_as_their_components(left: list[int], right: list[int]) -> None:
    """Component by component, a missing one counting as nothing: 8 is 8.0, and 8.0.1 is above both."""
    width = max(len(left), len(right))
    padded = [parts + [0] * (width - len(parts)) for parts in (left, right)]
    first, second = (selection.dotted_number(".".join(map(str, parts))) for parts in (left, right))

    assert first is not None
    assert second is not None
    assert (first < second, first == second) == (padded[0] < padded[1], padded[0] == padded[1])


def attributes(**fields: Any) -> MlAttributes:
    """Return attributes as an envelope gives them."""
    return MlAttributes.model_validate(fields)


WORKERS = st.dictionaries(st.sampled_from(KEYS), st.sampled_from(VALUES), max_size=5)


@settings(deadline=None)
@given(
    affinities(),
    affinities(),
    st.dictionaries(st.sampled_from(KEYS), st.sampled_from(VALUES), max_size=2),
    WORKERS,
    WORKERS,
)
def test_required_is_never_broken_and_preferred_never_blocks(
    affinity: dict[str, Any],
    anti: dict[str, Any],
    selector: dict[str, str],
    labels: dict[str, str],
    job: dict[str, str],
) -> None:
    """A worker is refused exactly by a pair, a required rule or a required distance; preferred ones only weigh."""
    wanted = attributes(affinity=affinity, anti_affinity=anti, node_selector=selector)
    assert wanted.affinity is not None
    assert wanted.anti_affinity is not None
    near = all(selection.holds(rule, labels) for rule in wanted.affinity.required)
    clash = any(selection.holds(rule, labels if rule.key in labels else job) for rule in wanted.anti_affinity.required)
    pairs = selector.items() <= labels.items()
    without = attributes(
        affinity={**affinity, "preferred": []}, anti_affinity={**anti, "preferred": []}, node_selector=selector
    )

    assert (selection.unmet(wanted, labels, (job,)) == ()) == (near and not clash and pairs)
    assert selection.unmet(wanted, labels, (job,)) == selection.unmet(without, labels, (job,))
    assert selection.score(without, labels, (job,)) == 0


def test_weights_of_what_holds_are_added() -> None:
    """The higher sum wins; what a worker should stay apart from is taken away."""
    wanted = attributes(
        affinity={
            "preferred": [
                {"key": "zone", "operator": "In", "values": ["a"], "weight": 80},
                {"key": "compute_capability", "operator": "Gte", "values": ["9.0"], "weight": 30},
            ]
        },
        anti_affinity={"preferred": [{"key": "job_type", "operator": "In", "values": ["training"], "weight": 50}]},
    )

    assert selection.score(wanted, {"zone": "a", "compute_capability": "10.0"}) == 110
    assert selection.score(wanted, {"zone": "b", "compute_capability": "9.0"}) == 30
    assert selection.score(wanted, {"zone": "a"}, ({"job_type": "training"},)) == 30
    assert selection.score(wanted, {}) == 0


def test_replicas_of_one_model_stay_on_different_hosts() -> None:
    """Anti-affinity asks what else runs on a worker."""
    wanted = attributes(anti_affinity={"required": [{"key": "model_id", "operator": "In", "values": ["llama"]}]})

    assert selection.unmet(wanted, {}, ({"model_id": "bert"},)) == ()
    assert selection.unmet(wanted, {}, ({"model_id": "bert"}, {"model_id": "llama"})) == (
        "must stay apart from model_id In llama",
    )


INJECTED: dict[str, dict[str, Any]] = {
    "a cost centre": {"node_selector": {"cost_center": "other-team"}},
    "a security zone": {"affinity": {"required": [{"key": "security_zone", "operator": "Exists"}]}},
    "a role of the node": {"node_selector": {"node-role.kubernetes.io/control-plane": ""}},
    "a label that kubelets may not set": {"node_selector": {"node-restriction.kubernetes.io/pool": "x"}},
    "a label of Atoll's own": {"anti_affinity": {"preferred": [{"key": "gpu.scheduling/x", "operator": "Exists"}]}},
    "a second pair inside of a value": {"node_selector": {"zone": "a,cost_center=b"}},
    "a line inside of a value": {"node_selector": {"zone": "a\ncost_center: b"}},
    "an expression inside of a key": {"node_selector": {"zone in (a),tier": "b"}},
    "a path inside of a key": {"node_selector": {"../zone": "b"}},
    "a very long value": {"node_selector": {"zone": "a" * 64}},
}


@pytest.mark.parametrize("given_", INJECTED.values(), ids=INJECTED)
def test_labels_cannot_be_injected_and_administrators_keep_theirs(given_: dict[str, Any]) -> None:
    """Keys and values are of the alphabet of labels, and some keys are not for whoever submits jobs."""
    found = parse(json.dumps({f"ext_ml_{name}": value for name, value in given_.items()}).encode())

    assert [problem.attribute.partition(".")[0] for problem in found.problems] == [f"ext_ml_{name}" for name in given_]


def test_keys_may_be_limited_to_a_list() -> None:
    """Where a list is configured, jobs choose by these labels alone."""
    policy = MlPolicy(selector_keys=("zone", "topology.kubernetes.io/*"))
    text = '{"ext_ml_node_selector": {"%s": "a"}}'

    assert not parse((text % "topology.kubernetes.io/zone").encode(), policy).problems
    assert parse((text % "tier").encode(), policy).problems
