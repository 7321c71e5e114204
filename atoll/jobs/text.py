"""Rendered objects as YAML for kubectl, with comments that map fields to objects.

User text is escaped in comments, and every string that a YAML parser could take for a number or a boolean is quoted.
"""

import re
from collections.abc import Iterable, Iterator
from textwrap import wrap
from typing import Any, Final

import yaml

from atoll.jobs.notes import Note
from atoll.jobs.rendering import HelmInstall, Rendered

WIDTH: Final = 116
_PLAIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9._/-]*\Z", re.ASCII)
_WORDS: Final = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n", "nan", "inf"})


class _Dumper(yaml.SafeDumper):
    """Writes strings that every YAML parser reads as strings, and lists indented as for kubectl."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - as yaml calls it
        return True


def _text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    is_plain = _PLAIN.match(value) is not None and value.lower() not in _WORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if is_plain else '"')


_Dumper.add_representer(str, _text)


def yaml_text(value: Any) -> str:  # noqa: ANN401 - plain values
    """Return plain values as YAML."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=False)


def manifest_text(rendered: Rendered) -> str:
    """Return the objects as one file of YAML."""
    known = {f"{one['kind']}/{one['metadata']['name']}" for one in rendered.objects}
    head = [note for note in rendered.notes if note.object not in known]
    parts = ["".join(_comments(head)) + _helm(rendered.helm)]
    for one in rendered.objects:
        notes = [note for note in rendered.notes if note.object == f"{one['kind']}/{one['metadata']['name']}"]
        parts.append("".join(_comments(notes)) + yaml_text(one))
    return "---\n".join(part for part in parts if part)


def _comments(notes: Iterable[Note]) -> Iterator[str]:
    for note in notes:
        for line in wrap(harmless(str(note)), WIDTH, initial_indent="# ", subsequent_indent="#   "):
            yield line + "\n"


def harmless(text: str) -> str:
    """Return a text that stays on its comment line, whatever it contains."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


def _helm(install: HelmInstall | None) -> str:
    """Return how to install the chart, with its values, as comments."""
    if install is None:
        return ""
    version = f" --version {install.version}" if install.version else ""
    lines = [f"helm install {install.release} {install.chart}{version} --values VALUES, where VALUES holds:"]
    lines += [f"  {line}" for line in yaml_text(dict(install.values)).splitlines()]
    return "".join(f"# {harmless(line)}\n" for line in lines)
