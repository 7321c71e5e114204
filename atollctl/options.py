"""Options that several commands have: which cluster they ask. Separate, so that they are called and told alike."""

from pathlib import Path
from typing import Annotated

import typer

Kubeconfig = Annotated[Path | None, typer.Option(help="Kubeconfig; the usual one by default.")]
ContextName = Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig.")]
