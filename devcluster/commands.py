"""`atoll dev`: a development cluster from the command line.

Turns options into calls of cluster.py and errors into one sentence. Atoll's command line mounts `app`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from devcluster import state
from devcluster.addresses import IpFamily
from devcluster.build import report_to_stderr
from devcluster.cluster import DevCluster
from devcluster.errors import ClusterStateError, DevclusterError
from devcluster.node import DevNodeSpec
from devcluster.programs import DEFAULT_KUBERNETES
from topology.errors import ProfileError
from topology.profiles import profile

app = typer.Typer(help="Development clusters: a real Kubernetes with real nodes on this machine.", no_args_is_help=True)

DEFAULT_NAME = "dev"
DEFAULT_NODE = "node1"

Name = Annotated[str, typer.Argument(help="Name of the cluster.")]


@app.command()
def up(
    name: Name = DEFAULT_NAME,
    node: Annotated[
        list[str] | None, typer.Option(help="A real node as NAME or NAME=PROFILE; repeatable. Default: node1.")
    ] = None,
    control_plane_only: Annotated[bool, typer.Option(help="Start no real node; needs no root.")] = False,  # noqa: FBT002
    kubernetes: Annotated[
        str, typer.Option(envvar="ATOLL_KUBERNETES", help="Version of Kubernetes.")
    ] = DEFAULT_KUBERNETES,
    ip_family: Annotated[IpFamily, typer.Option(help="IP families of nodes, pods and Services.")] = IpFamily.IPV4,
) -> None:
    """Start a cluster that runs until `down`."""
    with _one_sentence():
        nodes = [] if control_plane_only else [parse_node(text) for text in node or [DEFAULT_NODE]]
        cluster = DevCluster.start(name, nodes=nodes, kubernetes=kubernetes, persistent=True, ip_family=ip_family)
        typer.echo(f"cluster {name} is up: export KUBECONFIG={cluster.kubeconfig}")


@app.command()
def down(name: Name = DEFAULT_NAME) -> None:
    """Stop a cluster; remove its files and the leftovers of killed clusters."""
    with _one_sentence():
        swept = state.sweep()
        if name not in swept:
            DevCluster.attach(name).stop()
        typer.echo(f"cluster {name} is gone")


@app.command()
def status() -> None:
    """Show running clusters and their processes; remove the leftovers of killed clusters."""
    with _one_sentence():
        for left in state.sweep():
            report_to_stderr(f"removed the leftovers of cluster {left}")
        for record in state.running_clusters():
            lifetime = "until down" if record.persistent else "until its owner ends"
            typer.echo(f"{record.name}: Kubernetes {record.kubernetes}, port {record.port}, {lifetime}")
            for process, facts in DevCluster.attach(record.name).processes().items():
                condition = "running" if facts.running else f"ended with {facts.exit_code}"
                typer.echo(f"  {process:32} {condition:18} {facts.rss_bytes / 1e6:6.0f} MB")


@app.command()
def kubeconfig(name: Name = DEFAULT_NAME) -> None:
    """Print the path of a cluster's kubeconfig, for `export KUBECONFIG=$(...)`."""
    with _one_sentence():
        typer.echo(DevCluster.attach(name).kubeconfig)


@app.command()
def logs(
    process: Annotated[str, typer.Argument(help="A process, named as in `status`.")],
    name: Annotated[str, typer.Option(help="Name of the cluster.")] = DEFAULT_NAME,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log.")] = False,  # noqa: FBT002
) -> None:
    """Print the log of a process of a cluster."""
    with _one_sentence():
        path = log_path(DevCluster.attach(name), process)
        subprocess.run(["tail", "-n", "+1", *(["-f"] if follow else []), str(path)], check=False)


def parse_node(text: str) -> DevNodeSpec:
    """Parse NAME or NAME=PROFILE. Raises ClusterStateError for an unknown profile, before anything starts."""
    name, separator, shape = text.partition("=")
    if separator:
        try:
            profile(shape)
        except ProfileError as error:
            raise ClusterStateError(f"node {name!r}: {error}") from error
    return DevNodeSpec(name, profile=shape)


def log_path(cluster: DevCluster, process: str) -> Path:
    """Path of a process's log. Raises ClusterStateError with the logs that exist."""
    present = sorted(path.stem for path in cluster.layout.logs.glob("*.log"))
    if process not in present:
        raise ClusterStateError(f"no log of {process!r}; there are: {', '.join(present)}")
    return cluster.logs(process)


@contextmanager
def _one_sentence() -> Iterator[None]:
    """End the command with the message of a DevclusterError instead of a traceback."""
    try:
        yield
    except DevclusterError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
