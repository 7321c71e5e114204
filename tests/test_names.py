"""One word, one meaning: no two classes of one name in the tree."""

import ast
from collections import defaultdict

from tests.test_tidy import PACKAGES, REPOSITORY, parsed

FOLDERS = (*PACKAGES, "bench", "tests")
SHARED = {
    "Api": "what each consumer of the API client needs of it, declared by the consumer",
    "Clock": "the protocol of atoll.kube stands beside its user, which may not import atoll.service",
    "Killed": "the end of a process that a test plays, in two harnesses that share no code",
}
"""Names that several classes may bear, and why. A private class (`_Row`) belongs to its module alone."""


def test_no_two_classes_have_one_name() -> None:
    """Whoever searches for a class finds one meaning, in the product and in tests."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in (path for folder in FOLDERS for path in sorted((REPOSITORY / folder).rglob("*.py"))):
        for node in parsed(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(REPOSITORY)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1 and name not in SHARED} == {}
