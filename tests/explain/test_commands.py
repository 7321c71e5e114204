"""Promises about the commands that docs/explain.md tells of: they exist, with those options, also for kubectl."""

import re
import shlex
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from atollctl.__main__ import app, main

PAGE = Path(__file__).parents[2] / "docs" / "explain.md"
TOLD = re.findall(r"^(atoll [^#\n]+)", PAGE.read_text(), flags=re.MULTILINE)
READING = ("explain", "simulate", "snapshot", "top", "gangs", "history", "defrag")


def command(name: str) -> Any:
    """Return a command of the command line."""
    found: Any = typer.main.get_command(app)
    return found.commands[name]


@pytest.mark.parametrize("line", TOLD)
def test_command_of_the_page_is_accepted(line: str) -> None:
    """Its words are read without complaint: no option is told that there is not, no argument is missing."""
    _, name, *words = shlex.split(line)

    context = command(name).make_context(name, words)

    assert context.params


def test_page_tells_every_reading_command() -> None:
    """None of them is forgotten."""
    assert {shlex.split(line)[1] for line in TOLD} == set(READING)


@pytest.mark.parametrize("name", [name for name in READING if name != "snapshot"])
def test_reading_commands_share_their_options(name: str) -> None:
    """Which cluster or file is asked, and how the answer is shown, is said alike everywhere."""
    options = {option for param in command(name).params for option in param.opts}

    assert {"-o", "--output", "--context", "--kubeconfig", "--snapshot"} <= options
    assert name == "history" or "-n" in options


def test_kubectl_finds_the_plugin() -> None:
    """kubectl runs an executable of the name kubectl-atoll for `kubectl atoll`."""
    scripts = {one.name: one for one in entry_points(group="console_scripts") if one.name.endswith("atoll")}

    assert set(scripts) == {"atoll", "kubectl-atoll"}
    assert scripts["kubectl-atoll"].load() is main


def test_shells_can_complete() -> None:
    """The completion of a shell lists the commands."""
    variables = {"_ATOLL_COMPLETE": "complete_bash", "COMP_WORDS": "atoll de", "COMP_CWORD": "1"}
    answer = CliRunner().invoke(app, [], prog_name="atoll", env=variables)

    assert "defrag" in answer.output.split()
