"""Settings of one process from four sources: flag, environment, file, default; the earlier wins.

The result is one frozen value of a pydantic model. With the prefix `ATOLL_AGENT` a field
`api.burst` of a nested model is `--api-burst`, `ATOLL_AGENT_API_BURST` and `api: {burst: ...}` in the `--config` file.
Unknown keys are refused in every source, because a misspelt setting would silently have no effect.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import structlog
import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from atoll.api.forms import message_of
from atoll.service.errors import SettingsError

FILE_BYTES_MAX = 1024 * 1024
_SERVICE_LINK = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)$")
_SERVICE_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://")

log = structlog.get_logger(__name__)


class Settings(BaseModel):
    """Base of every part's settings: frozen, unknown keys refused. Secrets are fields of type SecretStr."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


M = TypeVar("M", bound=BaseModel)
Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One setting: its place in the model and its spelling in each source."""

    path: tuple[str, ...]
    field: FieldInfo

    @property
    def destination(self) -> str:
        return "_".join(self.path)

    @property
    def flag(self) -> str:
        return "--" + self.destination.replace("_", "-")


def load(model: type[M], argv: Sequence[str], env_prefix: str, *, environment: Mapping[str, str] | None = None) -> M:
    """Read the settings of `model`; exits with a usage message on a bad flag, as command lines do.

    Raises SettingsError that names the setting and its source.
    """
    leaves = list(_leaves(model, ()))
    flags = vars(_parser(model, leaves).parse_args(argv))
    file = flags.pop("config")
    variables = os.environ if environment is None else environment
    tree: Tree = {}
    _merge(tree, _read_file(file) if file is not None else {})
    _merge(tree, _read_environment(leaves, env_prefix, variables))
    _merge(tree, _read_flags(leaves, flags))
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise SettingsError(_explain(error)) from None


def effective(settings: BaseModel) -> dict[str, Any]:
    """Return the values in use as JSON-ready values, secrets masked."""
    return settings.model_dump(mode="json")


def log_effective(settings: BaseModel) -> None:
    """Log the effective settings once, at the start."""
    log.info("Read settings", settings=effective(settings))


def _leaves(model: type[BaseModel], path: tuple[str, ...]) -> Iterator[_Leaf]:
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _leaves(annotation, (*path, name))
        else:
            yield _Leaf((*path, name), field)


def _parser(model: type[BaseModel], leaves: Sequence[_Leaf]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(model.__doc__ or "").strip(), allow_abbrev=False)
    parser.add_argument("--config", type=Path, help="YAML file with settings")
    for leaf in leaves:
        description = (leaf.field.description or "").replace("%", "%%")
        if leaf.field.annotation is bool:
            action = argparse.BooleanOptionalAction
            parser.add_argument(leaf.flag, dest=leaf.destination, action=action, help=description)
        else:
            parser.add_argument(leaf.flag, dest=leaf.destination, metavar="VALUE", help=description)
    return parser


def _read_file(file: Path) -> Tree:
    try:
        if file.stat().st_size > FILE_BYTES_MAX:
            raise SettingsError(f"settings file {file} is larger than {FILE_BYTES_MAX} bytes")
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"cannot read settings file {file}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"settings file {file} must be a mapping, not a {type(content).__name__}")
    return content


def _read_environment(leaves: Sequence[_Leaf], env_prefix: str, variables: Mapping[str, str]) -> Tree:
    """Read the variables with our prefix, except those that Kubernetes adds for Services of a similar name."""
    prefix = env_prefix.rstrip("_") + "_"
    known = {prefix + leaf.destination.upper(): leaf for leaf in leaves}
    tree: Tree = {}
    for name in sorted(variables):
        if not name.startswith(prefix) or _SERVICE_LINK.search(name) or _SERVICE_LINK_VALUE.match(variables[name]):
            continue
        if name not in known:
            raise SettingsError(f"unknown environment variable {name}; known are {', '.join(sorted(known))}")
        _put(tree, known[name], variables[name])
    return tree


def _read_flags(leaves: Sequence[_Leaf], flags: Mapping[str, Any]) -> Tree:
    tree: Tree = {}
    for leaf in leaves:
        value = flags[leaf.destination]
        if value is not None:
            _put(tree, leaf, value)
    return tree


def _put(tree: Tree, leaf: _Leaf, value: str | bool) -> None:  # noqa: FBT001 - a value, not a switch
    *parents, last = leaf.path
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[last] = _structured(value) if isinstance(value, str) else value


def _structured(text: str) -> Any:  # noqa: ANN401 - any YAML value
    """Parse lists and mappings as YAML; keep all else as text, which the model converts."""
    if text[:1] not in {"[", "{"}:
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _merge(into: Tree, source: Tree) -> None:
    for key, value in source.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _explain(error: ValidationError) -> str:
    """One line per bad setting, without values, which may be secret."""
    lines = [f"{'.'.join(map(str, item['loc'])) or 'settings'}: {message_of(item)}" for item in error.errors()]
    return "bad settings: " + "; ".join(lines)
