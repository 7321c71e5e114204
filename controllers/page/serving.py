"""Serves the page beside the reconcilers, and never at their expense.

`view` says what is shown, `authorization` who may see it, `controllers.settings` where it listens.

A port that is taken is logged and tried again; the controllers do not end because of the page.
"""

import asyncio
import ssl

import structlog
from aiohttp import web

from atoll.kube.api import Api
from atoll.kube.authorization import PathAuthorizer
from atoll.kube.clock import Clock
from atoll.kube.mirror import ClusterMirror
from atoll.service.http import is_loopback, serve
from atoll.service.metrics import Metrics
from atoll.service.tls import TlsFiles, server_context
from controllers.page.app import PageParts, build_page
from controllers.page.authorization import PageAuthorizer
from controllers.page.refresher import OverviewRefresher
from controllers.settings import PageSettings

log = structlog.get_logger(__name__)

RETRY_SECONDS = 30.0


async def serve_page(
    settings: PageSettings, mirror: ClusterMirror, client: Api, clock: Clock, metrics: Metrics
) -> None:
    """Serve the page until cancelled. Raises CertificateError."""
    if not settings.serve:
        await asyncio.Event().wait()
    authorizer = None if is_loopback(settings.host) else PathAuthorizer(client)
    context = tls_context(settings, clock)
    refresher = OverviewRefresher(mirror, clock)
    register_page_metrics(metrics, refresher)
    parts = PageParts(refresher, PageAuthorizer(authorizer, clock.monotonic_seconds), clock, settings.watchers_max)
    looking = asyncio.ensure_future(refresher.run())
    try:
        while True:
            await _serve(settings, build_page(parts), context)
            await clock.sleep(RETRY_SECONDS)
    finally:
        looking.cancel()
        refresher.close()


def register_page_metrics(metrics: Metrics, refresher: OverviewRefresher) -> None:
    """Count who watches, and what it costs."""
    metrics.gauge_of("page_watchers", "Browsers that watch the page now", lambda: float(refresher.watchers))
    metrics.counter_of(
        "page_cpu_seconds", "CPU time of overviews and explanations for the page", lambda: refresher.spent_seconds
    )


async def _serve(settings: PageSettings, app: web.Application, context: ssl.SSLContext | None) -> None:
    """Serve until cancelled; return where the port cannot be had."""
    try:
        await serve(app, settings.host, settings.port, context, on_listening=_log_address)
    except OSError as error:
        log.warning("Could not serve the page", host=settings.host, port=settings.port, err=str(error))


def tls_context(settings: PageSettings, clock: Clock) -> ssl.SSLContext | None:
    """Return what to listen with; None where the page is served in the clear. Raises CertificateError."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return server_context(TlsFiles(settings.tls_cert, settings.tls_key), monotonic_seconds=clock.monotonic_seconds)


def _log_address(port: int) -> None:
    log.info("Serving the page", port=port)
