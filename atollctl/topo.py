"""`atoll topo`: draw a machine's islands and links.

In: a node's name and a kubeconfig, a saved matrix, or the name of a known machine. Out: text, SVG or JSON on standard
output; status 2 and one sentence when there is nothing to draw. Reads only.
"""

import asyncio
import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from atollctl.options import ContextName, Kubeconfig

STATUS_BAD_INPUT = 2

FromFile = Annotated[Path | None, typer.Option("--from", help="Saved `nvidia-smi topo -m`; - reads standard input.")]
ProfileName = Annotated[str | None, typer.Option("--profile", help="A known machine, such as dgx-h100.")]
Model = Annotated[str, typer.Option("--model", help="GPU model of the saved matrix, such as nvidia-h100-nvl.")]


class Output(StrEnum):
    """How the machine is shown."""

    TABLE = "table"
    SVG = "svg"
    JSON = "json"


def show_topology(
    node: Annotated[str | None, typer.Argument(help="A node of the cluster.")] = None,
    from_file: FromFile = None,
    profile_name: ProfileName = None,
    model: Model = "",
    kubeconfig: Kubeconfig = None,
    context: ContextName = None,
    output: Annotated[Output, typer.Option("-o", "--output", help="How to show it.")] = Output.TABLE,
) -> None:
    """Draw a machine's islands and links."""
    from atollctl.drawing import machine_json, machine_lines, print_lines
    from atollctl.drawing_svg import machine_svg
    from atollctl.topo_reading import read_node, read_offline, refuse_options_of_files
    from atollctl.topo_source import InputError

    try:
        if node is None:
            source = read_offline(from_file, profile_name, model, or_this="a node of the cluster, ")
        else:
            refuse_options_of_files(from_file, profile_name, model)
            source = asyncio.run(read_node(node, kubeconfig, context))
    except InputError as error:
        typer.echo(f"cannot draw: {error}", err=True)
        raise typer.Exit(STATUS_BAD_INPUT) from error
    if output is Output.TABLE:
        print_lines(machine_lines(source))
    else:
        typer.echo(machine_svg(source) if output is Output.SVG else json.dumps(machine_json(source), indent=2))
