"""The files for kind users fit the manifests that they are used with; kind itself needs Docker and is not run here.

tests/deploy/test_chart.py checks that the chart accepts kind's values.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"


def agent_template() -> dict[str, Any]:
    """The pod template of the shipped DaemonSet."""
    template: dict[str, Any] = yaml.safe_load((DEPLOY / "agent.yaml").read_text())["spec"]["template"]["spec"]
    return template


def test_the_workers_carry_the_label_by_which_agents_find_their_nodes() -> None:
    """Without it no agent would start and no GPU would ever appear."""
    nodes = yaml.safe_load((DEPLOY / "kind" / "cluster.yaml").read_text())["nodes"]
    workers = [node for node in nodes if node["role"] == "worker"]

    assert workers
    assert all(node["labels"] == agent_template()["nodeSelector"] for node in workers)


def test_every_file_that_the_readme_names_exists() -> None:
    """Its commands can be pasted."""
    text = (DEPLOY / "kind" / "README.md").read_text()
    paths = set(re.findall(r"deploy/[\w/.-]+\w", text))

    assert paths
    assert [path for path in sorted(paths) if not (DEPLOY.parent / path).exists()] == []
