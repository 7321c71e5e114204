"""Logs: one JSON line per record, ours and the libraries', and never a secret."""

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from atoll.service.logs import MASK, configure

TOKEN = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhdG9sbCJ9.c2lnbmF0dXJl"


@pytest.fixture(autouse=True)
def own_configuration() -> Iterator[None]:
    """Leave the process's logs as they were."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers, root.level = handlers, level
    structlog.contextvars.clear_contextvars()
    structlog.reset_defaults()


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def fail(message: str) -> None:
    """Raise with a local variable whose value must not be shown."""
    local = message.upper()
    assert local
    raise ValueError(message)


def test_line_has_component_level_and_facts(capsys: pytest.CaptureFixture[str]) -> None:
    """A record is one line of JSON with everything in keys."""
    configure("info", "agent", as_json=True)
    structlog.get_logger().info("Published report", node="n1", devices=8)
    structlog.get_logger().debug("Hidden")

    (line,) = lines(capsys)
    assert (line["event"], line["component"], line["level"], line["node"], line["devices"]) == (
        "Published report",
        "agent",
        "info",
        "n1",
        8,
    )
    assert str(line["timestamp"]).endswith("Z")


def test_libraries_speak_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    """A warning of a library is JSON too; its chatter stays away."""
    configure("info", "agent", as_json=True)
    logging.getLogger("kubernetes").warning("trouble with %s", "x")
    logging.getLogger("kubernetes").info("chatter")

    (line,) = lines(capsys)
    assert (line["event"], line["component"]) == ("trouble with x", "agent")


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param({"token": TOKEN}, id="key names a token"),
        pytest.param({"headers": {"Authorization": f"Bearer {TOKEN}"}}, id="nested header"),
        pytest.param({"err": f"401 for Bearer {TOKEN}"}, id="bearer inside text"),
        pytest.param({"body": ["x", TOKEN]}, id="bare JWT inside a list"),
        pytest.param({"err": ValueError(f"bad {TOKEN}")}, id="exception"),
        pytest.param({"users": {"a": {"client-key-data": TOKEN}}}, id="kubeconfig key"),
        pytest.param({"deep": {"a": {"b": {"c": {"d": {"e": {"f": {"g": TOKEN}}}}}}}}, id="deeper than we look"),
        pytest.param({"pem": f"-----BEGIN PRIVATE KEY-----\n{TOKEN}\n-----END PRIVATE KEY-----"}, id="private key"),
    ],
)
def test_secrets_are_masked_wherever_they_stand(facts: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever logs a secret by mistake does not publish it."""
    configure("info", "agent", as_json=True)
    structlog.get_logger().info("Called", **facts)

    shown = capsys.readouterr().err
    assert TOKEN not in shown
    assert "c2lnbmF0dXJl" not in shown
    assert MASK in shown or "..." in shown


def test_traceback_is_masked_and_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A fault shows its stack, without values of variables and without secrets in messages."""
    configure("info", "agent", as_json=True)
    try:
        fail(f"refused {TOKEN}")
    except ValueError:
        structlog.get_logger().exception("Failed")

    (line,) = lines(capsys)
    assert "ValueError" in str(line["exception"])
    assert TOKEN not in str(line)


def test_console_shows_no_variables(capsys: pytest.CaptureFixture[str]) -> None:
    """The readable form is plain as well: no dump of local variables."""
    configure("debug", "agent", as_json=False)
    try:
        fail("some value")
    except ValueError:
        structlog.get_logger().exception("Failed")

    shown = capsys.readouterr().err
    assert "some value" in shown
    assert "SOME VALUE" not in shown


def test_endless_text_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    """A peer's megabytes do not fill the disk."""
    configure("info", "agent", as_json=True)
    structlog.get_logger().info("Called", body="x" * 1_000_000)

    assert len(capsys.readouterr().err) < 10_000


def test_unknown_level_is_refused() -> None:
    """A typo in the level is told at start."""
    with pytest.raises(ValueError, match="unknown log level 'loud'"):
        configure("loud", "agent")
