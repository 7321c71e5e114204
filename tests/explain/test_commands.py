"""The commands in docs/explain.md exist with their options, also as kubectl plugins."""

import json
import re
import shlex
from dataclasses import replace
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from atoll.api import names
from atoll.explain.codec import encode_snapshot
from atollctl.__main__ import app, main
from tests.builders import make_pod
from tests.explain.gang_situations import gang_situation
from tests.explain.situations import holder, situation, waiting
from tests.explain.test_simulate import pod_manifest

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


PLAIN = {"FORCE_COLOR": "1", "NO_COLOR": "1"}
QUESTIONS = {
    "a pod that waits": (["explain", "pod/p", "-n", "team"], 1),
    "every pod of a claim": (["explain", "claim/c", "-n", "team"], 1),
    "a pod that is to come": (["simulate", "-f", "POD", "-n", "team"], 1),
    "the cluster": (["top", "--once"], 0),
    "its gangs": (["gangs"], 0),
    "a card": (["history", "n1/0"], 0),
    "moves that make room": (["defrag", "--count", "8"], 1),
}


@pytest.mark.parametrize(("words", "status"), QUESTIONS.values(), ids=QUESTIONS)
def test_every_form_of_an_answer_has_its_status(words: list[str], status: int, tmp_path: Path) -> None:
    """In short, at length and for programs, a command answers with the same status; JSON is all that a program reads;
    with NO_COLOR no control characters are written, although colour is asked for."""
    found = situation({"n1": {}}, [holder("a", "n1", *range(8))], waiting(2, claim={}))
    snapshot, manifest = tmp_path / "cluster.json", tmp_path / "pod.yaml"
    snapshot.write_bytes(encode_snapshot(found.snapshot))
    manifest.write_text(json.dumps({"kind": "List", "items": [pod_manifest(claim="c")]}))
    words = [str(manifest) if word == "POD" else word for word in words]
    for form in ([], ["-o", "wide"], ["-o", "json"]):
        answer = CliRunner().invoke(app, [*words, *form, "--snapshot", str(snapshot)], env=PLAIN)
        assert answer.exit_code == status, answer.output
        assert "\x1b" not in answer.output
        assert answer.output.strip()
    json.loads(answer.stdout)


def test_colour_is_there_where_nobody_minds(tmp_path: Path) -> None:
    """Without NO_COLOR a held card is yellow: that the test above finds none means something."""
    path = tmp_path / "cluster.json"
    path.write_bytes(encode_snapshot(situation({"n1": {}}, [holder("a", "n1", 0)]).snapshot))
    answer = CliRunner().invoke(app, ["top", "--once", "--snapshot", str(path)], env={"FORCE_COLOR": "1"})
    assert "\x1b[33m" in answer.output


def test_kubectl_finds_the_plugin() -> None:
    """kubectl runs an executable of the name kubectl-atoll for `kubectl atoll`."""
    scripts = {one.name: one for one in entry_points(group="console_scripts") if one.name.endswith("atoll")}

    assert set(scripts) == {"atoll", "kubectl-atoll"}
    assert scripts["kubectl-atoll"].load() is main


@pytest.mark.parametrize("words", [["--version"], ["version"]], ids=" ".join)
def test_version_is_told(words: list[str]) -> None:
    """Either way that people try."""
    assert CliRunner().invoke(app, words).output.strip() == version("atoll-gpu")


def test_shells_can_complete() -> None:
    """The completion of a shell lists the commands."""
    variables = {"_ATOLL_COMPLETE": "complete_bash", "COMP_WORDS": "atoll de", "COMP_CWORD": "1"}
    answer = CliRunner().invoke(app, [], prog_name="atoll", env=variables)

    assert "defrag" in answer.output.split()


EVIL = "\x1b[2J\x9b31m\u202e"


@pytest.mark.parametrize(
    "words",
    [
        ["top", "--once"],
        ["top", "--once", "-o", "wide"],
        ["explain", "pod/p", "-n", "team"],
        ["explain", "gang/g", "-n", "team"],
        ["gangs"],
        ["history", "n1/0"],
        ["history", "n1/7", "-o", "wide"],
    ],
    ids=" ".join,
)
def test_texts_of_others_steer_no_terminal(words: list[str], tmp_path: Path) -> None:
    """A reason, a message or an annotation with control characters is shown with them spelled out."""
    waits = {"type": "Admitted", "status": "False", "reason": "WaitForRoom", "message": f"full {EVIL}"}
    status = {"conditions": [{**waits, "lastTransitionTime": "2026-01-31T11:00:00Z"}]}
    ill = {7: {"health": {"state": "unhealthy", "reason": f"XID {EVIL}", "since": "2026-01-31T11:00:00Z"}}}
    gangs = gang_situation({"n1": {"devices": ill}}, [holder("a", "n1", 0)], status=status)
    odd = make_pod("odd", gpus=1, annotations={names.GANG: EVIL})
    snapshot = replace(gangs.snapshot, pods=(*gangs.snapshot.pods, odd, waiting(8)[0]))
    path = tmp_path / "cluster.json"
    path.write_bytes(encode_snapshot(snapshot))

    told = CliRunner().invoke(app, [*words, "--snapshot", str(path)], env={"NO_COLOR": "1"})

    assert told.exit_code in (0, 1), told.output
    assert all(one.isprintable() for one in told.output.replace("\n", ""))


def test_ages_that_nobody_knows_are_no_numbers(tmp_path: Path) -> None:
    """JSON has no infinity: a gang whose creation cannot be read has an age of null."""
    found = gang_situation({"n1": {}})
    metadata = found.gang.metadata.model_copy(update={"creation_timestamp": None})
    snapshot = replace(found.snapshot, gangs=(found.gang.model_copy(update={"metadata": metadata}),))
    path = tmp_path / "cluster.json"
    path.write_bytes(encode_snapshot(snapshot))

    told = CliRunner().invoke(app, ["gangs", "--snapshot", str(path), "-o", "json"])
    text = CliRunner().invoke(app, ["gangs", "--snapshot", str(path)])

    assert msgspec.json.decode(told.stdout)[0]["ageSeconds"] is None
    assert text.exit_code == 0
