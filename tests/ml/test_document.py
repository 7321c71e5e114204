"""Parsing of arbitrary bytes: values, refusals and their lines; never an exception."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll.ml.document import BYTES_MAX, DEPTH_MAX, VALUES_MAX, Document, read
from atoll.ml.envelope import Parsed, parse
from atoll.ml.problems import AttributeProblem

READ: dict[str, tuple[bytes, Any]] = {
    "JSON": (b'{"a": [1, 2.5, true, null, "x"]}', {"a": [1, 2.5, True, None, "x"]}),
    "JSON with tabs": (b'{\n\t"a":\t1\n}', {"a": 1}),
    "JSON with a character beyond 16 bits": (b'{"a": "\\ud83d\\ude00"}', {"a": "\N{GRINNING FACE}"}),
    "JSON with a key longer than YAML takes": (b'{"' + b"k" * 2000 + b'": 1}', {"k" * 2000: 1}),
    "YAML in block style": (b"a:\n- 1\n- b: two\n", {"a": [1, {"b": "two"}]}),
    "YAML in flow style": (b"{a: 1, b: [x, 'y\tz']}", {"a": 1, "b": ["x", "y\tz"]}),
    "words that YAML 1.1 would change": (
        b"a: yes\nb: 2026-01-31\nc: 1:30\nd: 010",
        {"a": "yes", "b": "2026-01-31", "c": "1:30", "d": 10},
    ),
    "words in quotes": (b"a: '8'\nb: \"true\"\nc: 'null'", {"a": "8", "b": "true", "c": "null"}),
    "a mark at the start of the file": (b"\xef\xbb\xbfa: 1", {"a": 1}),
    "an anchor that nothing refers to": (b"a: &x 1", {"a": 1}),
}

REFUSED: dict[str, tuple[bytes, str, int | None]] = {
    "nothing": (b"  \n", "must hold a job", None),
    "too many bytes": (b"a: " + b"x" * BYTES_MAX, f"may have {BYTES_MAX} bytes at most", None),
    "no UTF-8": (b"a: 1\nb: \xff", "must be UTF-8", 2),
    "broken JSON": (b'{"a": 1,\n "b" 2 "c"}', "must be JSON or YAML", 2),
    "broken YAML": (b"a: 1\nb: ]", "must be JSON or YAML", 2),
    "a control character": (b"a: \x01", "must be JSON or YAML", None),
    "an alias": (b"a: &x [1]\nb: *x", "may hold no aliases", 2),
    "an alias in flow style": (b'{"a": 1,\n"b": *x}', "may hold no aliases", 2),
    "a billion laughs": (b"a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]", "may hold no aliases", 2),
    "a tag": (b"a: !!python/object/apply:os.system [ls]", "may hold no tags", 1),
    "two documents": (b"a: 1\n---\nb: 2", "may hold one job or one workflow", 2),
    "a key twice in YAML": (b"a: 1\nb: 2\na: 3", "may hold each key once", 3),
    "a key twice in JSON": (b'{"a": {"b": 1,\n"b": 2}}', "may hold each key once", 2),
    "a number for a key": (b"1: x", "must have text for keys", 1),
    "a list for a key": (b"? [a]\n: x", "must have text for keys", 1),
    "infinity in JSON": (b'{"a": Infinity}', "must hold finite numbers", None),
    "infinity in YAML": (b"a: .inf", "must hold finite numbers", 1),
    "a number beyond all": (b'{"a":\n1e999}', "must hold finite numbers", 2),
    "a number of many digits": (b'{"a": ' + b"1" * 5000 + b"}", "may hold numbers of at most", 1),
    "deep JSON": (b"[" * 100_000, f"may be nested at most {DEPTH_MAX} deep", None),
    "deep YAML": (b"a:\n" + b"- " * 1000, f"may be nested at most {DEPTH_MAX} deep", 2),
    "many values": (b"[" + b"1," * VALUES_MAX + b"1]", f"may hold at most {VALUES_MAX} values", 1),
    "half a character": (b'{"a": "\\ud83d"}', "must hold whole characters", None),
    "a NUL in YAML": (b"a: 1\nb: \0", "must be JSON or YAML", 2),
    "a bell in YAML": (b"a: \xc3\xa9\nb: \a", "must be JSON or YAML", 2),
    "a NUL": (b'{"a": "\\u0000"}', "must hold whole characters", 1),
}  # fmt: skip


@pytest.mark.parametrize(("data", "value"), READ.values(), ids=READ)
def test_text_is_read_as_it_is_meant(data: bytes, value: Any) -> None:
    """JSON means what JSON means, and YAML's plain words mean the same."""
    found = read(data)

    assert isinstance(found, Document)
    assert found.value == value


@pytest.mark.parametrize(("data", "limit", "line"), REFUSED.values(), ids=REFUSED)
def test_text_that_harms_or_misleads_is_refused(data: bytes, limit: str, line: int | None) -> None:
    """Size, depth, aliases, tags, repeated keys and odd numbers end the reading, with the line where it is known."""
    found = read(data)

    assert isinstance(found, AttributeProblem)
    assert found.limit.startswith(limit)
    assert found.hint
    assert line is None or found.line == line


def test_what_reaches_a_limit_is_read() -> None:
    """The largest and the deepest that is allowed; one more is not."""
    largest, deepest = b"a: " + b"x" * (BYTES_MAX - 3), b"[" * DEPTH_MAX + b"]" * DEPTH_MAX
    block = b"- " * DEPTH_MAX + b"a"

    assert [type(read(data)) for data in (largest, deepest, block)] == [Document] * 3
    assert [type(read(data)) for data in (largest + b"x", b"[" + deepest + b"]", b"- " + block)] == [
        AttributeProblem
    ] * 3


def test_every_value_has_its_line() -> None:
    """Lines count from 1, in JSON as in YAML; a value that has none takes that of what is around it."""
    yaml = read(b"a: 1\nb:\n  - x\n  - c: 2\n")
    json_ = read(b'{\n"a": 1,\n"b": [\n"x",\n{"c": 2}]}')

    assert isinstance(yaml, Document)
    assert isinstance(json_, Document)
    assert [yaml.line_of(path) for path in ((), ("a",), ("b", 0), ("b", 1, "c"), ("b", 1, "d"))] == [1, 1, 3, 4, 4]
    assert [json_.line_of(path) for path in ((), ("a",), ("b", 0), ("b", 1, "c"), ("b", 1, "d"))] == [1, 2, 4, 5, 5]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**38), 10**38) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_characters="\0")),
    lambda children: st.lists(children, max_size=4)
    | st.dictionaries(st.text(st.characters(codec="utf-8", exclude_characters="\0")), children, max_size=4),
    max_leaves=20,
)  # fmt: skip


@settings(deadline=None)
@given(st.dictionaries(st.text("abc", min_size=1), JSON_VALUES, min_size=1), st.sampled_from((None, 1)), st.booleans())
def test_every_json_text_is_read_as_json(value: dict[str, Any], indent: int | None, ascii_only: bool) -> None:
    """What the lines are looked up with changes no value."""
    found = read(json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode())

    assert isinstance(found, Document)
    assert found.value == value


@given(st.binary(max_size=300) | st.text("{}[]:,-?*&!#|>'\"\n\t \\ab1.e%@`", max_size=80).map(str.encode))
@settings(deadline=None)
@example(b"{" * 2000)
@example(b"- " * 2000)
@example(b"? " * 2000)
@example(b"{a: " * 2000)
@example(b'{"ext_ml_affinity": {"required": [{"key": {}}]}}')
@example(b'{"workflow_type": [], "steps": {}}')
@example(b'{"type": "chain", "jobs": null}')
@example(b'{"workflow_type": "batch", "jobs": [1], "callbacks": {"on_x": []}}')
@example(b'{"attributes": [], "meta": 1, "args": {}}')
@example(b'{"ext_ml_": 1, "ext_ml_\\u202e": 2}')
def test_no_bytes_raise_an_exception(data: bytes) -> None:
    """Whatever comes in, an envelope or words about it come out."""
    found = parse(data)

    assert isinstance(found, Parsed)
    assert (found.envelope is None) == bool(found.problems)
    assert all(str(problem).isprintable() for problem in found.problems)


@pytest.mark.parametrize("piece", [b'{"ext_ml_a":', b"[", b"- ", b"a: &a\n", b"? ", b'"x",', b"{}", b"ext_ml_x: 1\n"])
def test_size_costs_no_more_than_reading(piece: bytes) -> None:
    """As much as is allowed of anything is answered in words."""
    found = parse(piece * (BYTES_MAX // len(piece)))

    assert found.envelope is None
    assert 1 <= len(found.problems) <= 100
