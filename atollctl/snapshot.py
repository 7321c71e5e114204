"""`atoll snapshot`: saves all input of Atoll's decisions in one JSON file, for a bug report or offline work.

`atoll explain` and `atoll simulate` accept the file in place of the cluster. It has no environment, image or command;
with `--replace-names` no names either. Read-only.
"""

from pathlib import Path
from typing import Annotated

import typer

from atollctl.cluster_source import (
    STATUS_UNREACHABLE,
    Extender,
    ExtenderAuthority,
    SnapshotFile,
    read_cluster,
    with_past_asks,
)
from atollctl.options import ContextName, Kubeconfig
from atollctl.sentences import sentence


def save_snapshot(
    file: Annotated[Path, typer.Argument(help="File to write.")],
    kubeconfig: Kubeconfig = None,
    context: ContextName = None,
    snapshot: SnapshotFile = None,
    extender: Extender = "",
    extender_ca: ExtenderAuthority = None,
    *,
    replace_names: Annotated[
        bool, typer.Option("--replace-names", help="Replace names, labels, uids and uuids by numbers; order is kept.")
    ] = False,
) -> None:
    """Save nodes, pods, claims, GPU reports and Leases, gangs and topologies as one file."""
    from atoll.explain.anonymize import anonymize
    from atoll.explain.codec import encode_snapshot

    found = read_cluster(kubeconfig, context, snapshot=snapshot, purpose="take a snapshot")
    found = with_past_asks(found, extender, extender_ca, purpose="take a snapshot")
    data = encode_snapshot(anonymize(found) if replace_names else found)
    try:
        file.write_bytes(data)
    except OSError as error:
        typer.echo(f"cannot write the snapshot: {sentence(error)}", err=True)
        raise typer.Exit(STATUS_UNREACHABLE) from error
    counts = f"{len(found.nodes)} nodes, {len(found.pods)} pods, {len(found.reports)} GPU reports"
    typer.echo(f"{file}: {counts}, {len(data)} bytes")
