"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Kubeconfig = Annotated[Path | None, typer.Option(help="Kubeconfig; kubectl's by default.")]
ContextName = Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig.")]
