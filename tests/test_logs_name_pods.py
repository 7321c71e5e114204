"""Logs: a line about a pod has its uid, a line of a bind its attempt, and messages are constant."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_tidy import parsed

REPOSITORY = Path(__file__).parent.parent
SHELLS = ("extender", "webhook", "agent", "controllers", "atoll")
LEVELS = {"debug", "info", "warning", "error", "critical", "exception", "bind"}
LOGGERS = {"log", "facts"}
FILES = sorted(path for shell in SHELLS for path in (REPOSITORY / shell).rglob("*.py"))


def log_calls() -> Iterator[tuple[str, ast.Call]]:
    """Yield every call that writes a line, or binds facts for later lines, with its place."""
    for path in FILES:
        for node in ast.walk(parsed(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value
                if isinstance(owner, ast.Name) and owner.id in LOGGERS and node.func.attr in LEVELS:
                    yield f"{path.relative_to(REPOSITORY)}:{node.lineno}", node


CALLS = dict(log_calls())


def test_lines_about_a_pod_carry_its_uid() -> None:
    """Who filters by a uid finds every line about that pod, and none about its successor."""
    keys = {place: {keyword.arg for keyword in call.keywords} for place, call in CALLS.items()}
    about_pods = {place for place, used in keys.items() if "pod" in used}

    assert len(about_pods) > 10
    assert [place for place in sorted(about_pods) if "uid" not in keys[place]] == []


@pytest.mark.parametrize("place", CALLS)
def test_messages_are_constant(place: str) -> None:
    """Lines can be grouped by message; what differs stands in keys."""
    call = CALLS[place]

    assert isinstance(call.func, ast.Attribute)
    if call.func.attr != "bind":
        assert isinstance(call.args[0], ast.Constant)
