"""Every command reports errors in the same words, with the next step."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll.kube.errors import Forbidden, NotFound, Unanswered, Unauthorized
from atollctl.__main__ import app
from atollctl.sentences import OPERATORS, sentence
from tests.fakes.listening import kubeconfig

NOBODY = "GET failed: ClientConnectorError: Cannot connect to host 10.0.0.1:6443 ssl:default [Connect call failed]"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Unanswered(NOBODY, path="/api/v1/pods", sent=False), "no API server answers at 10.0.0.1:6443 (Connect call"),
        (Unanswered("GET failed: cut", path="/api/v1/pods", sent=True), "outcome unknown"),
        (Unauthorized("Unauthorized", status=401, reason="Unauthorized", path="/api/v1/pods"), "log in anew"),
        (Forbidden("may not list", status=403, reason="Forbidden", path="/api/v1/pods"), "atoll-ledger-reader"),
        (NotFound("?", status=404, reason="", path="/apis/gpu.scheduling/v1/gpuclaims"), "is Atoll installed"),
        (NotFound("no n1", status=404, reason="", path="/apis/gpu.scheduling/v1/gpunodestatuses/n1"), "no n1"),
        (FileNotFoundError(2, "No such file or directory", "x.json"), "x.json: No such file or directory"),
        (OSError("http://x answers 403"), "http://x answers 403"),
    ],
    ids=["nobody", "cut", "unauthorized", "forbidden", "no-kinds", "no-object", "no-file", "extender"],
)
def test_each_fault_has_a_next_step(error: Exception, words: str) -> None:
    """Where somebody can do something about it, the sentence says what; and it is one line."""
    assert words in sentence(error)
    assert "\n" not in sentence(error)


def test_right_that_is_missing_is_that_of_the_command() -> None:
    """Who may not cordon is told the role that cordons."""
    error = Forbidden("may not patch", status=403, reason="Forbidden", path="/x")

    assert sentence(error, roles=OPERATORS) == f"may not patch; what allows it: {OPERATORS}"


@pytest.mark.parametrize(
    "words",
    [
        ("explain", "pod/p"),
        ("simulate", "-f", "x"),
        ("top", "--once"),
        ("gangs",),
        ("history", "n1/0"),
        ("defrag", "--count", "1"),
        ("snapshot", "x"),
        ("audit",),
        ("topo", "n1"),
        ("gpu", "list"),
        ("gpu", "cordon", "n1/0", "--reason", "x"),
    ],
    ids=" ".join,
)
def test_cluster_that_does_not_answer_is_told_alike(words: tuple[str, ...], tmp_path: Path) -> None:
    """Every command that asks a cluster ends with status 2, what it could not do, and a question back."""
    config = kubeconfig(tmp_path, "http://127.0.0.1:1")

    result = CliRunner().invoke(app, [*words, "--kubeconfig", str(config)])

    assert result.exit_code == 2
    assert result.output.startswith("cannot ")
    assert result.output.count("\n") == 1
    assert "no API server answers at 127.0.0.1:1" in result.output
