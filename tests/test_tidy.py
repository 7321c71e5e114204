"""Style checks of the repository: sizes that only shrink, tests with a stated promise, pages with one title."""

import ast
import gc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PACKAGES = (
    "topology",
    "atoll",
    "extender",
    "webhook",
    "agent",
    "controllers",
    "jobs",
    "pipelines",
    "atollctl",
    "devcluster",
    "worker",
)
FUNCTION_LINES_MAX = 60
MODULE_LINES_MAX = 500
NESTING_MAX = 4
BANNED_NAMES = {"utils", "helpers", "helper", "manager", "managers", "misc", "common"}
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)

PRODUCT = sorted(path for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py"))
TESTS = sorted((REPOSITORY / "tests").rglob("test_*.py"))
PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / "deploy").rglob("*.md")])


def name_of(path: Path) -> str:
    """Return a readable test id."""
    return str(path.relative_to(REPOSITORY))


def parsed(text: str) -> ast.Module:
    """Return the syntax tree; CPython 3.11 fails where a collection runs finalizers while it builds one."""
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        gc.enable()


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def nesting(node: ast.AST, depth: int = 0) -> int:
    """Return how deep blocks stand in one another; an `elif` is no deeper than its `if`."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and child in node.orelse
        deepest = max(deepest, nesting(child, depth + (isinstance(child, BLOCKS) and not is_elif)))
    return deepest


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_modules_and_functions_stay_small(path: Path) -> None:
    """A function fits on a screen, a module holds one noun, and nothing hides four blocks deep."""
    text = path.read_text()
    tree = parsed(text)

    assert text.count("\n") <= MODULE_LINES_MAX
    assert path.stem not in BANNED_NAMES
    for function in functions(tree):
        assert (function.end_lineno or 0) - function.lineno < FUNCTION_LINES_MAX, function.name
        assert nesting(function) <= NESTING_MAX, function.name


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_every_module_says_what_it_is(path: Path) -> None:
    """A module begins with what comes in, what goes out and why it stands alone."""
    text = path.read_text()

    assert not text.strip() or ast.get_docstring(parsed(text))


@pytest.mark.parametrize("path", TESTS, ids=name_of)
def test_every_test_states_its_promise(path: Path) -> None:
    """A test's docstring is the promise that it keeps."""
    tests = [function for function in functions(parsed(path.read_text())) if function.name.startswith("test_")]

    assert [function.name for function in tests if not ast.get_docstring(function)] == []


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_page_has_one_title_and_links_that_lead_somewhere(path: Path) -> None:
    """A page has one heading of the first level, and what it links to exists."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]

    assert len(re.findall(r"^# ", text, flags=re.MULTILINE)) == 1
    assert [target for target in targets if target and not (path.parent / target).exists()] == []
