"""`atoll jobs serve`: the job service; its own settings are passed on unchanged, and its exit status is returned."""

import typer

app = typer.Typer(no_args_is_help=True)


@app.callback()
def jobs() -> None:
    """The job service: records jobs, submits them to a cluster, and tracks their state."""


@app.command(
    name="serve",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def serve(context: typer.Context) -> None:
    """Serve the API and reconcile jobs. See `python -m jobs --help`."""
    try:
        from jobs.__main__ import main
    except ModuleNotFoundError as error:
        typer.echo(f"the job service needs {error.name}: pip install 'atoll-gpu[jobs]'", err=True)
        raise typer.Exit(2) from error
    raise typer.Exit(main(context.args))
