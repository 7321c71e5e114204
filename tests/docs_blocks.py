"""The command blocks of README and docs/, and the reasons why some are not run.

A block is fenced and marked `sh`. tests/e2e/test_docs.py runs it, unless a hidden comment right above it says why not:
`<!-- not run here: REASON -->`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PAGES = sorted([REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md"), *(REPOSITORY / "deploy").rglob("*.md")])
REASONS = {
    "starts a cluster of its own, as tests of the demo do",
    "ends the cluster that the other blocks run on",
    "installs, upgrades or takes away what the other blocks run on, as tests of the chart do",
    "runs the tests",
    "starts the job service, as tests of its own do",
    "needs the job service, whose own tests run it",
    "sets up what runs the other blocks",
    "forwards until it is ended",
    "goes into an image of a training",
    "needs a container engine and a registry",
    "needs a machine that will never come back",
    "a test of its own reloads a driver by it",
    "needs a machine set up by kubeadm",
    "needs a metrics server",
    "needs a node with NVIDIA's device plugin",
    "needs a pod of a training",
    "needs Docker and kind",
    "it is refused, as tests of the policies show",
    "needs NVIDIA's operator on a node with GPUs",
    "needs the Prometheus operator",
}
"""Why a block is not run."""
COMMANDS = ("kubectl", "atoll", "make", "docker", "kind", "helm", "mv", "export", "git", "pip", ".venv", "python")
_BLOCK = re.compile(
    r"(?:^ *<!-- not run here: (?P<reason>[^\n]+) -->\n)?^(?P<indent> *)```(?P<kind>[^\n]*)\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its lines, and why it is not run; empty where it is."""

    page: Path
    line: int
    kind: str
    text: str
    reason: str


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    content = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(content):
        indent = len(found["indent"])
        text = "".join(line[indent:] for line in found["text"].splitlines(keepends=True))
        line = content.count("\n", 0, found.start()) + 1
        yield Block(page, line, found["kind"].strip(), text, found["reason"] or "")


def commands(page: Path) -> list[Block]:
    """Return the blocks of commands."""
    return [block for block in blocks(page) if block.kind == "sh"]
