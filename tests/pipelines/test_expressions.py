"""The expression language: values, types, and that nothing escapes from it or costs much."""

import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from atoll.pipelines.expressions import (
    LENGTH_MAX,
    ExpressionFailed,
    ExpressionInvalid,
    ValueType,
    compiled,
    expressions_in,
    filled,
    is_json,
)

NAMES = {"steps.a.body": ValueType.ANY, "steps.a.n": ValueType.INTEGER, "inputs.s": ValueType.TEXT}
VALUES: dict[str, Any] = {"steps.a.body": {"x": [1, {"y": None}], "f": 1.5}, "steps.a.n": 3, "inputs.s": "a}b"}
CPU_SECONDS_MAX = 2.0


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("${steps.a.n}", 3),
        ("${steps.a.body}", {"x": [1, {"y": None}], "f": 1.5}),
        ("n=${steps.a.n + 1}!", "n=4!"),
        ("${inputs.s}-${steps.a.body.x}", 'a}b-[1, {"y": null}]'),
        ("$${steps.a.n}", "${steps.a.n}"),
        ("${{'k': '}'}}", {"k": "}"}),
        ("${'\\'}'}", "'}"),
        ("plain $ text", "plain $ text"),
        ("${steps.a.n > 2 ? 'big' : 'small'}", "big"),
    ],
)
def test_texts_are_filled(text: str, wanted: Any) -> None:
    """A text that is one expression has its value; in other texts the values stand as text."""
    assert filled(text, NAMES, VALUES) == wanted


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("steps.a.body.zz", "Key not found"),
        ("1 / (steps.a.n - 3)", "divide by zero"),
        ("steps.a.body.x[9]", "index"),
        ("b'x'", "is no JSON value"),
        ("timestamp('2026-01-01T00:00:00Z')", "is no JSON value"),
        ("{1: 2}", "is no JSON value"),
        ("1.0 / 0.0", "is no JSON value"),
    ],
)
def test_what_has_no_value_fails_in_the_run(source: str, told: str) -> None:
    """The message has the expression and the reason."""
    with pytest.raises(ExpressionFailed, match=told):
        compiled(source, NAMES).value(VALUES)


@pytest.mark.parametrize(
    "source",
    [
        "[1, 2].map(x, x)",
        "[1].exists(x, true)",
        "__import__('os')",
        "steps",
        "inputs.s.__class__",
        "open('/etc/passwd')",
        "getenv('HOME')",
        "x" * (LENGTH_MAX + 1),
        "(" * 100 + "1" + ")" * 100,
        "",
    ],
)
def test_loops_calls_and_unknown_names_are_refused(source: str) -> None:
    """Nothing but the given names and the operators of the language."""
    with pytest.raises(ExpressionInvalid):
        compiled(source, NAMES)


SOURCES = st.text(
    st.sampled_from("steps.a.body.x inputs.s [](){}'\"+-*/%<>=!&|?:,.0123456789 in true null size(\\\n$"), max_size=60
)


@given(SOURCES | st.text(max_size=60))
@example("size('" + "a" * 1000 + "')")
@example("'a'.matches('" + "(a*)*" * 40 + "b')")
def test_any_expression_ends_in_a_value_or_a_refusal(source: str) -> None:
    """No input raises another exception, gives another kind of value, or takes long."""
    began = time.process_time()
    with suppress(ExpressionInvalid, ExpressionFailed):
        assert is_json(compiled(source, NAMES).value(VALUES))
    assert time.process_time() - began < CPU_SECONDS_MAX


@given(st.text(st.sampled_from("${}'\"\\ab"), max_size=40))
def test_any_text_has_parts_or_is_refused(text: str) -> None:
    """Finding the expressions in a text never fails otherwise."""
    try:
        found = expressions_in(text)
    except ExpressionInvalid:
        return
    assert len(found) <= text.count("${")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_any_output_of_a_step_can_be_read(value: Any) -> None:
    """What an API answered comes back the same, or the expression fails; nothing else happens."""
    try:
        found = filled("${steps.a.body}", NAMES, VALUES | {"steps.a.body": value})
    except ExpressionFailed:
        return
    assert found == value
