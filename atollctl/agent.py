"""`atoll agent`: the node agent, or one look at this machine: `atoll agent --once -o json`.

Passes the agent's own settings on unchanged and returns its exit status. Only the node's name has a default here: the
host name.
"""

import socket
from typing import Annotated, Literal

import typer


def run_agent(
    context: typer.Context,
    output: Annotated[Literal["json"], typer.Option("-o", "--output", help="Format of `--once`.")] = "json",  # noqa: ARG001
) -> None:
    """Report the GPUs of this machine; with --once, print the report and exit. See `python -m agent --help`."""
    from agent.__main__ import main

    arguments = list(context.args)
    if not any(one == "--node" or one.startswith("--node=") for one in arguments):
        arguments = ["--node", socket.gethostname(), *arguments]
    raise typer.Exit(main(arguments))
