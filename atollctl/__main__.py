"""Entry point: mounts the commands. Heavy imports stay inside the commands, so that `atoll --help` is quick."""

from importlib.metadata import version

import typer

from atollctl import agent, audit, choose, defrag, explain, gangs, gpu, history, simulate, snapshot, top, topo
from devcluster.commands import app as dev

app = typer.Typer(name="atoll", help="The right GPUs for every pod.", no_args_is_help=True, add_completion=True)
app.add_typer(dev, name="dev", help="A real Kubernetes with real nodes on this machine.")
app.add_typer(gpu.app, name="gpu", help="Cordon single GPUs, and see how they are.")
app.command(name="agent", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(agent.run_agent)
app.command(name="audit")(audit.audit_cluster)
app.command(name="explain")(explain.explain_subject)
app.command(name="simulate")(simulate.simulate_pods)
app.command(name="top")(top.show_top)
app.command(name="gangs")(gangs.list_gangs)
app.command(name="history")(history.show_history)
app.command(name="defrag")(defrag.find_plans)
app.command(name="snapshot")(snapshot.save_snapshot)
app.command(name="topo")(topo.show_topology)
app.command(name="choose")(choose.choose_gpus)


@app.command(name="version")
def show_version() -> None:
    """Print the version."""
    typer.echo(version("atoll-gpu"))


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
