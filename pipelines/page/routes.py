"""The HTTP interface of the page of runs, beside that of jobs, with which it shares its style and its stream."""

from pathlib import Path
from typing import Final

from fastapi import FastAPI

from atoll.service.pages import files_of
from jobs.page.routes import PageBoard, add_page
from pipelines.page.board import read_runs, run_mark

RUNS_PAGE: Final = "/runs"
RUN_FILES: Final = files_of(Path(__file__).parent / "static", {"runs.html": RUNS_PAGE})
RUN_EVENTS: Final = "/page/runs/events"


def add_runs_page(app: FastAPI) -> None:
    """Add the page to the application."""
    add_page(app, RUN_FILES, RUN_EVENTS, PageBoard(run_mark, read_runs))
