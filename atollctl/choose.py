"""`atoll choose`: which GPUs Atoll would give, how good they are, and what the best would be, without a cluster.

In: a saved matrix or a known machine, the GPUs that are free, and what is asked for. Out: the answer as text or JSON;
status 1 when no set fits, status 2 and one sentence when the question makes no sense.
"""

import json
from enum import StrEnum
from typing import Annotated

import typer

from atollctl.topo import STATUS_BAD_INPUT, FromFile, Model, ProfileName
from topology.device_requests import Interconnect, Policy

STATUS_REFUSED = 1


class Output(StrEnum):
    """How the answer is shown."""

    TABLE = "table"
    JSON = "json"


def choose_gpus(
    count: Annotated[int, typer.Option(help="How many GPUs are asked for.")],
    from_file: FromFile = None,
    profile_name: ProfileName = None,
    model: Model = "",
    free: Annotated[str | None, typer.Option(help="GPUs that are free, such as 0,1,3; all by default.")] = None,
    required: Annotated[str, typer.Option(help="GPUs that the set must hold, such as 4.")] = "",
    policy: Annotated[Policy, typer.Option(help="How the GPUs should lie to each other.")] = Policy.CONTIGUOUS,
    interconnect: Annotated[Interconnect, typer.Option(help="What must join every pair.")] = Interconnect.ANY,
    min_bandwidth: Annotated[float, typer.Option(help="GB/s that the ring of the set must reach.")] = 0.0,
    output: Annotated[Output, typer.Option("-o", "--output", help="How to show it.")] = Output.TABLE,
) -> None:
    """Show which GPUs of a machine Atoll would give, and why."""
    from atollctl.choose_answer import answer, answer_lines, ask_of, gpu_numbers
    from atollctl.drawing import REMARK, print_lines
    from atollctl.topo_reading import read_offline
    from atollctl.topo_source import InputError

    try:
        ask = ask_of(count, policy=policy, interconnect=interconnect, min_bandwidth_gbps=min_bandwidth)
        must_hold = gpu_numbers(required, option="--required")
        source = read_offline(from_file, profile_name, model)
        given = source.ids if free is None else gpu_numbers(free, option="--free")
        found = answer(source, ask, free=given, required=must_hold)
    except InputError as error:
        typer.echo(f"cannot choose: {error}", err=True)
        raise typer.Exit(STATUS_BAD_INPUT) from error
    if output is Output.JSON:
        typer.echo(json.dumps(found.as_json(), indent=2))
    else:
        print_lines((*answer_lines(found), *(((remark, REMARK),) for remark in source.remarks)))
    if not found.devices:
        raise typer.Exit(STATUS_REFUSED)
