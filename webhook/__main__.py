"""Starts the webhook: `python -m webhook`.

It waits for its certificate, which the controllers make, and then serves; until then it is alive but not ready.
"""

import sys
from collections.abc import Sequence

from atoll.api import names
from atoll.api.claims import GpuClaim
from atoll.kube import paths
from atoll.kube.cache import Change
from atoll.kube.client import ApiClient
from atoll.kube.reflector import Reflector
from atoll.service import logs, settings
from atoll.service.api_metrics import count_calls, register_watch_metrics
from atoll.service.clock import SystemClock
from atoll.service.errors import SettingsError
from atoll.service.http import add_health, application, serve
from atoll.service.metrics import Metrics
from atoll.service.runtime import run, supervise
from webhook.app import Lookups, webhook_application
from webhook.claims import ClaimFinder
from webhook.device_lookup import DeviceFinder
from webhook.group_lookup import GroupFinder
from webhook.metrics import webhook_metrics
from webhook.requests import Defaults
from webhook.serving import ServingCertificate, TlsSecret, decode_secret
from webhook.settings import WebhookSettings


def main(argv: Sequence[str] | None = None) -> int:
    """Run until a signal; returns the exit status, 2 for settings that cannot be used."""
    try:
        values = settings.load(WebhookSettings, sys.argv[1:] if argv is None else argv, "ATOLL_WEBHOOK")
        logs.configure(values.log_level, "webhook")
    except (SettingsError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    settings.log_effective(values)
    return run(lambda: serve_webhook(values))


async def serve_webhook(values: WebhookSettings) -> None:
    """Watch claims and the certificate, and answer reviews, until cancelled."""
    clock, metrics = SystemClock(), Metrics("webhook")
    certificate = ServingCertificate(client_ca=values.client_ca)
    counted = webhook_metrics(metrics, certificate)
    async with await ApiClient.connect(values.kubeconfig, user_agent="atoll-webhook") as client:
        claims = Reflector(
            client, paths.gpuclaims(), GpuClaim.model_validate_json, on_event=_take_no_notice, clock=clock
        )
        secret: Reflector[TlsSecret] = Reflector(
            client,
            paths.secrets(names.SYSTEM_NAMESPACE),
            decode_secret,
            on_event=certificate.on_change,
            field_selector=f"metadata.name={names.WEBHOOK_SECRET}",
            clock=clock,
        )
        count_calls(metrics, client)
        register_watch_metrics(metrics, {"claim": claims, "secret": secret})
        health = application()
        checks = {
            "certificate": lambda: (
                None if certificate.loaded.is_set() else f"Secret {names.WEBHOOK_SECRET} not there yet"
            ),
            "claims": lambda: None if claims.synced.is_set() else "GpuClaims not listed yet",
        }
        add_health(health, ready=checks, metrics=metrics)
        defaults = Defaults(
            visible_devices=values.visible_devices,
            inject_runtime_class=values.inject_runtime_class,
            keep_nodes=values.keep_nodes,
        )
        app = webhook_application(
            lookups=Lookups(ClaimFinder(client, claims, counted), DeviceFinder(client), GroupFinder(client)),
            defaults=defaults,
            metrics=counted,
        )

        async def serve_reviews() -> None:
            await certificate.loaded.wait()
            await serve(app, values.host, values.port, certificate.context())

        await supervise(
            claims=claims.run(),
            secret=secret.run(),
            health=serve(health, values.health_host, values.health_port),
            reviews=serve_reviews(),
        )


def _take_no_notice(_change: Change[GpuClaim]) -> None:
    """Claims are looked up when a pod names them; a change by itself concerns nobody."""


if __name__ == "__main__":
    raise SystemExit(main())
