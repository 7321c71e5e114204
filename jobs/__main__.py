"""Starts the job service: `python -m jobs --help`."""

import sys
from collections.abc import Sequence

from atoll.kube.errors import ConfigurationError
from atoll.service import logs, settings
from atoll.service.errors import CertificateError, SettingsError
from atoll.service.runtime import run
from jobs.errors import DatabaseUnfit
from jobs.serving import serve_jobs
from jobs.settings import JobServiceSettings
from pipelines.serving import PipelineService

STATUS_UNFIT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run until a signal; returns the exit status, 2 for unusable settings."""
    try:
        values = settings.load(JobServiceSettings, sys.argv[1:] if argv is None else argv, "ATOLL_JOBS")
        logs.configure(values.log_level, "jobs")
    except (SettingsError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return STATUS_UNFIT
    settings.log_effective(values)
    unfit: list[str] = []

    async def serve() -> None:
        try:
            await serve_jobs(values, (PipelineService,))
        except (SettingsError, DatabaseUnfit, ConfigurationError, CertificateError, OSError) as error:
            unfit.append(str(error))

    status = run(serve)
    if unfit:
        sys.stderr.write(f"cannot serve: {unfit[0]}\n")
        return STATUS_UNFIT
    return status


if __name__ == "__main__":
    raise SystemExit(main())
