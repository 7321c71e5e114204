"""docs/jobs.md: what it shows below its commands is what they print."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from atoll.cluster.objects import Metadata, PriorityClass
from atoll.explain.changes import with_nodes
from atoll.explain.codec import encode_snapshot
from atoll.explain.shapes import known_machine
from tests.docs_blocks import REPOSITORY
from tests.jobs.test_job_command import EMPTY, run
from tests.jobs.test_job_examples import EXAMPLES

PAGE = (REPOSITORY / "docs/jobs.md").read_text(encoding="utf-8")
MISTAKEN = """\
name: tune
job_type: training
container: {image: a:1}
ext_ml_gpu_count: 1000
policy:
  max_retries: 3
  min_replicas: 2
"""


def shown_below(text: str) -> str:
    """Return the indented lines that follow a text of the page, without the indentation."""
    found = re.search(r"^ {4}.*\n(?: {4}.*\n|\n)*", PAGE.partition(text)[2], re.MULTILINE)
    assert found is not None, text
    return re.sub(r"^ {4}", "", found[0], flags=re.MULTILINE).strip("\n")


def check_shown(shown: str, printed: str) -> None:
    """Find each part of what is shown, between lines of `...`, one after the other in what was printed."""
    rest = printed
    for part in re.split(r"^\.\.\.\n?", shown, flags=re.MULTILINE):
        assert part.strip("\n") in rest, rest
        rest = rest.partition(part.strip("\n"))[2]


@pytest.fixture
def hoppers(tmp_path: Path) -> Path:
    """A saved cluster of two free machines with eight H100 each, and the PriorityClasses of jobs."""
    nodes = [known_machine("dgx-h100", EMPTY, name=f"hopper-{number}") for number in (1, 2)]
    classes = [PriorityClass(Metadata(name), 10) for name in ("critical", "high", "normal", "low")]
    path = tmp_path / "cluster.json"
    path.write_bytes(encode_snapshot(replace(with_nodes(EMPTY, nodes), priority_classes=tuple(classes))))
    return path


def test_what_a_job_becomes_is_shown_as_it_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of `validate`, and the manifests of `render` with their comments."""
    monkeypatch.chdir(REPOSITORY)
    example = "examples/jobs/complete/chain-2-train.yaml"

    check_shown(shown_below(f"atoll job validate -f {example}\n```"), run("validate", "-f", example)[1])
    check_shown(shown_below(f"atoll job render -f {example}\n```"), run("render", "-f", example)[1])


def test_mistakes_are_shown_as_they_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its line, its value, the limit and the fix."""
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(MISTAKEN)

    check_shown(shown_below("the allowed values and the fix:"), run("validate", "-f", "job.yaml")[2])


def test_places_and_reasons_are_shown_as_they_are_told(hoppers: Path, tmp_path: Path) -> None:
    """Two workers have their places; of three the page says why not, and what would help."""
    many = EXAMPLES / "many-nodes.yaml"
    check_shown(
        shown_below("On two free machines with eight H100s:"), run("explain", "-f", many, "--snapshot", hoppers)[1]
    )

    three = tmp_path / "three.yaml"
    three.write_text(yaml.safe_dump(yaml.safe_load(many.read_text()) | {"workers": 3, "ext_ml_gpu_count": 24}))
    told = run("explain", "-f", three, "--snapshot", hoppers)[1]
    check_shown(shown_below("With three workers on the same machines:"), told)
