"""Start the extender: `python -m extender --help`."""

import asyncio
import secrets
import ssl
import sys

import structlog

from atoll.kube.authorization import PathAuthorizer
from atoll.kube.budget_list import BudgetList
from atoll.kube.client import ApiClient
from atoll.kube.mirror import ClusterMirror
from atoll.service import logs, settings
from atoll.service.api_metrics import count_calls, register_watch_metrics
from atoll.service.clock import SystemClock
from atoll.service.errors import SettingsError
from atoll.service.http import is_loopback, serve
from atoll.service.metrics import Metrics
from atoll.service.runtime import freeze_garbage, run, supervise
from atoll.service.tls import TlsFiles, server_context
from extender.app import ExtenderParts, build_app, build_health_app
from extender.binder import Binder, BinderSettings
from extender.settings import ExtenderSettings
from extender.warm_up import warm_up

log = structlog.get_logger(__name__)


def main() -> int:
    """Run until a signal; return the exit status, 2 for settings that cannot be used."""
    try:
        values = settings.load(ExtenderSettings, sys.argv[1:], "ATOLL_EXTENDER")
        clock = SystemClock()
        context = _tls(values, clock)
    except (SettingsError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    logs.configure(values.log_level, "extender")
    settings.log_effective(values)
    return run(lambda: _serve(values, clock, context))


async def _serve(values: ExtenderSettings, clock: SystemClock, context: ssl.SSLContext | None) -> None:
    async with await ApiClient.connect(
        values.kubeconfig,
        user_agent="atoll-extender",
        requests_per_second=values.requests_per_second,
        burst=values.burst,
    ) as client:
        mirror = ClusterMirror(client, clock)
        binder_settings = BinderSettings(
            values.answer_seconds, values.reservation_seconds, values.visible_devices, values.binds_at_once
        )
        binder = Binder(client, mirror, clock, binder_settings, new_token=lambda: secrets.token_hex(8))
        metrics = Metrics("extender")
        count_calls(metrics, client)
        register_watch_metrics(metrics, {kind.value: watch for kind, watch in mirror.reflectors.items()})
        budgets = BudgetList(client, clock)
        parts = ExtenderParts(
            mirror,
            binder,
            clock,
            metrics,
            values.expectation_seconds,
            budgets=budgets.read,
            doorkeeper=PathAuthorizer(client),
            scheduler_lease=values.scheduler_lease,
            node_hints=values.node_hints,
        )
        servers = {"http": serve(build_app(parts), values.host, values.port, context)}
        if values.health_port:
            servers["health"] = serve(build_health_app(parts), values.health_host, values.health_port)
        try:
            await supervise(mirror=_follow(mirror, clock), **servers)
        finally:
            await binder.drain()


async def _follow(mirror: ClusterMirror, clock: SystemClock) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(mirror.run())
        await mirror.synced()
        await warm_up(mirror.ledger, clock)
        freeze_garbage()
        ledger = mirror.ledger
        log.info("Built the ledger", nodes=len(ledger.nodes), leases=len(ledger.leases), pods=len(ledger.pods))


def _tls(values: ExtenderSettings, clock: SystemClock) -> ssl.SSLContext | None:
    """Return the TLS context; plain HTTP is allowed on loopback alone."""
    if values.tls_cert is not None and values.tls_key is not None and values.client_ca is not None:
        files = TlsFiles(values.tls_cert, values.tls_key, values.client_ca)
        return server_context(files, monotonic_seconds=clock.monotonic_seconds)
    if not is_loopback(values.host):
        raise SettingsError(
            f"host {values.host} is not loopback: set tls_cert, tls_key and client_ca; only kube-scheduler may call"
        )
    return None


if __name__ == "__main__":
    sys.exit(main())
