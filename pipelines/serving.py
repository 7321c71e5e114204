"""Pipelines as a part of the job service's process: routes in every replica, the engine in the leader."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

import structlog
from fastapi import FastAPI

from atoll.ml.document import read
from atoll.ml.problems import AttributeProblem
from atoll.pipelines.workflows import Runners
from atoll.service.clock import SystemClock
from atoll.service.errors import SettingsError
from atoll.service.runtime import supervise
from jobs.api_parts import ApiParts
from pipelines.api import add_pipelines
from pipelines.engine import PipelineEngine
from pipelines.firing import TriggerKeeper
from pipelines.outgoing import OutgoingClient
from pipelines.page.routes import add_runs_page
from pipelines.performing import Function, StepParts
from pipelines.records import migrate_pipelines
from pipelines.trigger_api import add_triggers
from pipelines.usecase_api import add_usecases
from pipelines.usecases import DeploymentKeeper, read_templates

log = structlog.get_logger(__name__)

FUNCTIONS: Final = "atoll.pipeline_functions"
"""Entry points of this group are the functions that steps may call."""


class PipelineService:
    """Pipelines of one process."""

    def __init__(self, parts: ApiParts, clock: SystemClock) -> None:
        url = parts.settings.database.get_secret_value()
        migrate_pipelines(url)
        self._functions = registered_functions()
        self._runners = read_runners(parts.settings.runners)
        outgoing = OutgoingClient(allowed=parts.settings.outgoing_hosts, secrets=parts.settings.secrets)
        step_parts = StepParts(parts, outgoing, self._functions, clock)
        self._engine = PipelineEngine(step_parts, clock, url)
        self._triggers = TriggerKeeper(parts.database, clock)
        self._templates = read_templates(parts.settings.usecase_templates)
        self._deployments = DeploymentKeeper(parts.database, clock)

    def add_routes(self, app: FastAPI) -> None:
        """Add the routes of pipelines."""
        add_pipelines(app, self._functions, self._runners)
        add_triggers(app)
        add_usecases(app, self._templates)
        add_runs_page(app)

    async def lead(self) -> None:
        """Run pipelines, fire triggers and remove deleted use cases until cancelled."""
        await supervise(engine=self._engine.run(), triggers=self._triggers.run(), usecases=self._deployments.run())


def read_runners(file: Path | None) -> Runners:
    """Return what runs each type of envelope. Raises SettingsError."""
    if file is None:
        return {}
    try:
        found = read(file.read_bytes())
    except OSError as error:
        raise SettingsError(f"cannot read runners file {file}: {error}") from error
    if isinstance(found, AttributeProblem):
        raise SettingsError(f"bad runners file {file}: {found}")
    value = found.value
    if not isinstance(value, dict) or not all(isinstance(one, dict) for one in value.values()):
        raise SettingsError(f"bad runners file {file}: must be a mapping of types to jobs without names")
    return value


def registered_functions() -> Mapping[str, Function]:
    """Return the functions that steps may call: `echo`, and those of installed packages."""
    found: dict[str, Function] = {"echo": echo}
    for one in entry_points(group=FUNCTIONS):
        found[one.name] = one.load()
        log.info("Registered a function", name=one.name, value=one.value)
    return found


def echo(parameters: Mapping[str, Any], key: str) -> dict[str, Any]:  # noqa: ARG001 - as functions are called
    """Return the parameters."""
    return dict(parameters)
