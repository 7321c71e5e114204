"""Settings: clear precedence of sources, misspellings are refused, secrets are hidden."""

from pathlib import Path

import pytest
from pydantic import Field, SecretStr
from structlog.testing import capture_logs

from atoll.service.errors import SettingsError
from atoll.service.settings import Settings, effective, load, log_effective


class ApiOptions(Settings):
    """How to talk to the API server."""

    burst: int = Field(default=100, ge=1)
    """Requests at once."""


class AgentOptions(Settings):
    """An agent for tests."""

    node_name: str
    """Name of the Node, 100% literal."""
    poll_seconds: float = 30.0
    port: int = 8080
    enabled: bool = True
    kubeconfig: Path | None = None
    models: tuple[str, ...] = ()
    token: SecretStr = SecretStr("")
    api: ApiOptions = ApiOptions()


def read(*argv: str, **environment: str) -> AgentOptions:
    variables = {"ATOLL_AGENT_NODE_NAME": "n1", **environment}
    return load(AgentOptions, argv, "ATOLL_AGENT", environment=variables)


def write(folder: Path, text: str) -> str:
    path = folder / "settings.yaml"
    path.write_text(text)
    return str(path)


def test_defaults_hold_where_nothing_is_said() -> None:
    """Only what must be said needs saying."""
    assert read() == AgentOptions(node_name="n1")


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    """Each source overrides the slower one, also inside nested settings."""
    file = write(tmp_path, "poll_seconds: 1\nport: 1\nenabled: false\napi: {burst: 1}\n")
    values = read("--config", file, "--port", "3", ATOLL_AGENT_PORT="2", ATOLL_AGENT_API_BURST="2")

    assert (values.poll_seconds, values.port, values.enabled, values.api.burst) == (1.0, 3, False, 2)


def test_values_are_converted_from_text() -> None:
    """Flags and variables are text; the model makes numbers, paths, booleans and lists of it."""
    values = read("--no-enabled", "--kubeconfig", "/x", "--models", "[a, b]", "--api-burst", "7")

    assert (values.enabled, values.kubeconfig, values.models, values.api.burst) == (False, Path("/x"), ("a", "b"), 7)
    assert read(ATOLL_AGENT_ENABLED="false").enabled is False
    assert read(ATOLL_AGENT_NODE_NAME="1.0").node_name == "1.0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pol_seconds: 1", r"pol_seconds: Extra inputs"),
        ("api: {bursts: 1}", r"api\.bursts: Extra inputs"),
        ("api: {burst: 0}", r"api\.burst: .*greater than or equal to 1"),
        ("port: many", r"port: .*valid integer"),
        ("[1, 2]", "must be a mapping, not a list"),
        ("a: b: c", "cannot read settings file"),
    ],
)
def test_bad_file_is_refused_with_the_setting_named(tmp_path: Path, text: str, message: str) -> None:
    """A misspelled or impossible setting stops the start; it never silently does not hold."""
    with pytest.raises(SettingsError, match=message):
        read("--config", write(tmp_path, text))


def test_empty_file_is_fine_and_missing_or_huge_ones_are_not(tmp_path: Path) -> None:
    """Nothing said is a valid thing to say."""
    assert read("--config", write(tmp_path, "")) == AgentOptions(node_name="n1")
    with pytest.raises(SettingsError, match="cannot read"):
        read("--config", str(tmp_path / "nowhere"))
    with pytest.raises(SettingsError, match="larger than"):
        read("--config", write(tmp_path, "#" * (1024 * 1024 + 1)))


def test_unknown_variable_is_refused_with_the_known_ones() -> None:
    """A typo in a Deployment's environment is found at start."""
    with pytest.raises(
        SettingsError, match=r"unknown environment variable ATOLL_AGENT_PROT; known are .*ATOLL_AGENT_PORT"
    ):
        read(ATOLL_AGENT_PROT="1")


def test_variables_of_a_service_of_the_same_name_are_no_settings() -> None:
    """Kubernetes adds <SERVICE>_PORT=tcp://... to every pod beside a Service `atoll-agent`: that is not our port."""
    values = read(
        ATOLL_AGENT_PORT="tcp://10.0.0.1:443",
        ATOLL_AGENT_PORT_443_TCP="tcp://10.0.0.1:443",
        ATOLL_AGENT_PORT_443_TCP_ADDR="10.0.0.1",
        ATOLL_AGENT_SERVICE_HOST="10.0.0.1",
        ATOLL_AGENT_SERVICE_PORT_HTTPS="443",
    )

    assert values.port == 8080


@pytest.mark.parametrize("argv", [["--prot", "1"], ["--por", "1"], ["stray"]])
def test_unknown_flag_is_a_usage_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Flags are neither guessed nor abbreviated."""
    with pytest.raises(SystemExit):
        read(*argv)
    assert "usage:" in capsys.readouterr().err


def test_help_shows_every_setting_with_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    """The settings document themselves."""
    with pytest.raises(SystemExit):
        read("--help")
    shown = capsys.readouterr().out

    for flag in ("--node-name", "--poll-seconds", "--no-enabled", "--api-burst", "--config"):
        assert flag in shown
    assert "100% literal" in shown


def test_secrets_stay_out_of_logs_and_errors() -> None:
    """Neither the effective values nor a refusal repeat a secret."""
    values = read(ATOLL_AGENT_TOKEN="s3cret")
    with capture_logs() as logs:
        log_effective(values)
    assert values.token.get_secret_value() == "s3cret"
    assert "s3cret" not in repr(values) + str(logs) + str(effective(values))
    assert logs[0]["settings"]["node_name"] == "n1"

    with pytest.raises(SettingsError) as caught:
        read(ATOLL_AGENT_TOKEN="[s3cret]")
    assert "s3cret" not in str(caught.value)
