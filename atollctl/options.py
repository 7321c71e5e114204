"""Options that several commands share."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

Kubeconfig = Annotated[Path | None, typer.Option(help="Kubeconfig; kubectl's by default.")]
ContextName = Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig.")]


def name_and_value(text: str) -> tuple[str, Any]:
    """Return the parts of NAME=VALUE; a value that is JSON is read as such."""
    name, separator, value = text.partition("=")
    if not separator:
        raise typer.BadParameter(f"{text} has no value: write NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
