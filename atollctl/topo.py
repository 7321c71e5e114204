"""`atoll topo`: draw a machine's islands and links.

The machine is a node, a saved matrix or a known machine. Prints text, SVG or JSON; status 2 and one sentence if there
is nothing to draw. Read-only.
"""

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer

from atollctl.options import ContextName, Kubeconfig
from atollctl.output import DrawingOption

STATUS_BAD_INPUT = 2

FromFile = Annotated[Path | None, typer.Option("--from", help="Saved `nvidia-smi topo -m`; - reads standard input.")]
ProfileName = Annotated[str | None, typer.Option("--profile", help="A known machine, such as dgx-h100.")]
Model = Annotated[str, typer.Option("--model", help="GPU model of the saved matrix, such as nvidia-h100-nvl.")]


def show_topology(
    node: Annotated[str | None, typer.Argument(help="A node of the cluster.")] = None,
    from_file: FromFile = None,
    profile_name: ProfileName = None,
    model: Model = "",
    kubeconfig: Kubeconfig = None,
    context: ContextName = None,
    output: DrawingOption = "table",
) -> None:
    """Draw a machine's islands and links."""
    from atollctl.drawing import machine_json, machine_lines, machine_svg, print_lines
    from atollctl.topo_source import InputError, read_node, read_offline, refuse_options_of_files

    try:
        if node is None:
            source = read_offline(from_file, profile_name, model, or_this="a node of the cluster, ")
        else:
            refuse_options_of_files(from_file, profile_name, model)
            source = asyncio.run(read_node(node, kubeconfig, context))
    except InputError as error:
        typer.echo(f"cannot draw: {error}", err=True)
        raise typer.Exit(STATUS_BAD_INPUT) from error
    if output == "table":
        print_lines(machine_lines(source))
    else:
        typer.echo(machine_svg(source) if output == "svg" else json.dumps(machine_json(source), indent=2))
