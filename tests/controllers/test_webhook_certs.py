"""The reconciler of the webhook's certificates against an API server in memory that checks preconditions."""

import asyncio
import base64
import itertools
import json
from collections.abc import Coroutine, Mapping
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cryptography import x509

from atoll.api import names
from atoll.kube.errors import AlreadyExists, Conflict, NotFound, Unanswered
from atoll.kube.patches import STRATEGIC_MERGE_PATCH
from atoll.service.metrics import Metrics
from controllers import runner
from controllers.certificates import Lifetimes
from controllers.metrics import controller_metrics
from controllers.settings import ControllersSettings
from controllers.webhook_certs import WebhookCertReconciler

SECRETS = "/api/v1/namespaces/atoll-system/secrets"
AUTHORITY = f"{SECRETS}/atoll-authority"
SERVING = f"{SECRETS}/atoll-webhook-tls"
CONFIGURATION = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/zz-atoll-webhook"


class CertApi:
    """Objects by path; writes carry a uid and resourceVersion or are refused. Counts writes, can fail the n-th call."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.writes: list[str] = []
        self.versions = itertools.count(1)
        self.calls = itertools.count(1)
        self.fail_call = 0
        self.fail_after_acting = False

    def apply_configuration(self, *webhooks: str) -> None:
        """Put the configuration there as `kubectl apply` would: without a caBundle."""
        config = [{"name": name, "clientConfig": {"service": {"name": names.WEBHOOK_SERVICE}}} for name in webhooks]
        metadata = {"name": names.WEBHOOK_CONFIGURATION, "uid": "u", "resourceVersion": str(next(self.versions))}
        self.objects[CONFIGURATION] = {"metadata": metadata, "webhooks": config}

    async def get(self, path: str) -> bytes:
        await asyncio.sleep(0)
        self._maybe_fail(acted=False)
        if path not in self.objects:
            raise NotFound("not found", status=404, reason="NotFound", path=path)
        return json.dumps(self.objects[path]).encode()

    async def create(self, path: str, body: Mapping[str, Any]) -> bytes:
        self._maybe_fail(acted=False)
        item = f"{path}/{body['metadata']['name']}"
        if item in self.objects:
            raise AlreadyExists("exists", status=409, reason="AlreadyExists", path=path)
        stored = json.loads(json.dumps(body))
        stored["metadata"] |= {"uid": item, "resourceVersion": str(next(self.versions))}
        self.objects[item] = stored
        self.writes.append(item)
        self._maybe_fail(acted=True)
        return b"{}"

    async def patch(self, path: str, body: Mapping[str, Any], *, content_type: str = "") -> bytes:
        self._maybe_fail(acted=False)
        stored = self.objects[path]
        if any(stored["metadata"][key] != body["metadata"][key] for key in ("uid", "resourceVersion")):
            raise Conflict("changed", status=409, reason="Conflict", path=path)
        if content_type == STRATEGIC_MERGE_PATCH:
            by_name = {webhook["name"]: webhook for webhook in stored["webhooks"]}
            for webhook in body["webhooks"]:
                by_name[webhook["name"]]["clientConfig"] |= webhook["clientConfig"]
        else:
            merged = {**stored["data"], **body["data"]}
            stored["data"] = {key: value for key, value in merged.items() if value is not None}
        stored["metadata"]["resourceVersion"] = str(next(self.versions))
        self.writes.append(path)
        self._maybe_fail(acted=True)
        return b"{}"

    def bundle(self, index: int = 0) -> bytes:
        return base64.b64decode(self.objects[CONFIGURATION]["webhooks"][index]["clientConfig"].get("caBundle", ""))

    def secret(self, path: str) -> dict[str, bytes]:
        return {key: base64.b64decode(value) for key, value in self.objects[path]["data"].items()}

    def _maybe_fail(self, *, acted: bool) -> None:
        if acted != self.fail_after_acting:
            return
        if next(self.calls) == self.fail_call:
            raise Unanswered("cut", path="/", sent=acted)


class RoundsClock:
    """Wall time that tests move; sleeping moves it too, until `rounds` sleeps have been slept."""

    def __init__(self) -> None:
        self.time = datetime(2026, 3, 1, tzinfo=UTC)
        self.rounds = 0
        self.is_over = asyncio.Event()

    def now(self) -> datetime:
        return self.time

    def monotonic_seconds(self) -> float:
        return self.time.timestamp()

    async def sleep(self, seconds: float) -> None:
        self.time += timedelta(seconds=seconds)
        self.rounds -= 1
        if self.rounds <= 0:
            self.is_over.set()
            await asyncio.Event().wait()
        await asyncio.sleep(0)


async def run_rounds(clock: RoundsClock, *reconcilers: WebhookCertReconciler, rounds: int) -> None:
    """Run the reconcilers side by side until that many rounds have ended between them."""
    clock.rounds = rounds
    clock.is_over.clear()
    tasks = [asyncio.create_task(reconciler.run()) for reconciler in reconcilers]
    await clock.is_over.wait()
    for task in tasks:
        task.cancel()


@pytest.fixture
def api() -> CertApi:
    fake = CertApi()
    fake.apply_configuration("pods.gpu.scheduling")
    return fake


@pytest.fixture
def clock() -> RoundsClock:
    return RoundsClock()


async def test_the_first_round_stores_publishes_and_serves_in_this_order(api: CertApi, clock: RoundsClock) -> None:
    """The authority is safe before anything trusts it, and trusted before anything serves under it."""
    reconciler = WebhookCertReconciler(api, clock)

    await reconciler.reconcile()

    assert api.writes == [AUTHORITY, CONFIGURATION, SERVING]
    assert set(api.secret(AUTHORITY)) == {"ca.crt", "ca.key"}
    assert set(api.secret(SERVING)) == {"tls.crt", "tls.key", "ca.crt"}
    assert api.objects[SERVING]["type"] == "kubernetes.io/tls"
    assert api.bundle() == api.secret(AUTHORITY)["ca.crt"] == api.secret(SERVING)["ca.crt"]


async def test_a_round_with_nothing_due_writes_nothing(api: CertApi, clock: RoundsClock) -> None:
    """The configuration is patched only if it differs: every write wakes every API server."""
    reconciler = WebhookCertReconciler(api, clock)
    await reconciler.reconcile()
    api.writes.clear()

    await reconciler.reconcile()

    assert api.writes == []


async def test_a_configuration_applied_anew_is_trusted_again(api: CertApi, clock: RoundsClock) -> None:
    """`kubectl replace` drops the caBundle; the next round puts it back, on every webhook of the configuration."""
    reconciler = WebhookCertReconciler(api, clock)
    await reconciler.reconcile()
    api.apply_configuration("pods.gpu.scheduling", "second.gpu.scheduling")

    await reconciler.reconcile()

    assert api.bundle(0) == api.bundle(1) == api.secret(AUTHORITY)["ca.crt"]


async def test_without_a_configuration_the_secrets_are_made_all_the_same(clock: RoundsClock) -> None:
    """Parts may be applied in any order; the webhook can start before its configuration exists."""
    api = CertApi()

    await WebhookCertReconciler(api, clock).reconcile()

    assert api.writes == [AUTHORITY, SERVING]


@pytest.mark.parametrize("are_alike", [True, False], ids=["on every webhook", "on one of two webhooks"])
async def test_the_serving_certificate_is_renewed_before_it_ends(
    api: CertApi, clock: RoundsClock, *, are_alike: bool
) -> None:
    """By an authority that is published: where one webhook does not trust it yet, it is told so first."""
    api.apply_configuration("pods.gpu.scheduling", "second.gpu.scheduling")
    reconciler = WebhookCertReconciler(api, clock)
    await reconciler.reconcile()
    if not are_alike:
        api.objects[CONFIGURATION]["webhooks"][1]["clientConfig"].pop("caBundle")
    api.writes.clear()
    clock.time += Lifetimes().serving * 0.9

    await reconciler.reconcile()

    assert api.writes == [SERVING if are_alike else CONFIGURATION]
    await reconciler.reconcile()
    assert api.writes[-1] == SERVING


async def test_a_rotation_leaves_no_key_behind(api: CertApi, clock: RoundsClock) -> None:
    """After the overlap the old certificate is gone from the Secret; its key went when the new authority came."""
    reconciler = WebhookCertReconciler(api, clock)
    await reconciler.reconcile()
    first = api.secret(AUTHORITY)
    for _ in range(400):
        clock.time += timedelta(days=1)
        await reconciler.reconcile()
        if "previous.crt" in api.secret(AUTHORITY):
            assert api.secret(AUTHORITY)["previous.crt"] == first["ca.crt"]
            assert first["ca.crt"] in api.bundle()

    last = api.secret(AUTHORITY)
    assert set(last) == {"ca.crt", "ca.key"}
    assert last["ca.key"] != first["ca.key"]


async def test_who_does_not_lead_writes_nothing(api: CertApi, clock: RoundsClock) -> None:
    """A controller that lost its Lease in the middle of a round leaves the field to the next."""
    await WebhookCertReconciler(api, clock, may_write=lambda: False).reconcile()

    assert api.writes == []


@pytest.mark.parametrize("acted", [False, True], ids=["never-arrived", "answer-lost"])
async def test_every_single_failing_call_is_survived(clock: RoundsClock, acted: bool) -> None:
    """Whichever call fails, before or after it acted, the rounds that follow end in the one consistent state."""
    for failing in range(1, 8):
        api = CertApi()
        api.apply_configuration("pods.gpu.scheduling")
        api.fail_call, api.fail_after_acting = failing, acted
        await run_rounds(clock, WebhookCertReconciler(api, clock), rounds=4)

        assert api.bundle() == api.secret(AUTHORITY)["ca.crt"] == api.secret(SERVING)["ca.crt"]
        assert len(api.writes) == 3


async def test_two_reconcilers_at_once_end_in_one_authority(api: CertApi, clock: RoundsClock) -> None:
    """During a change of leader both may run: preconditions let one win, the other follows it."""
    await run_rounds(clock, WebhookCertReconciler(api, clock), WebhookCertReconciler(api, clock), rounds=8)

    assert api.bundle() == api.secret(AUTHORITY)["ca.crt"] == api.secret(SERVING)["ca.crt"]
    assert sorted(api.writes) == sorted([AUTHORITY, CONFIGURATION, SERVING])


@pytest.mark.parametrize("name", ["10.255.0.1", "fd00:255::1", "webhook.example"])
async def test_extra_names_are_served(api: CertApi, clock: RoundsClock, name: str) -> None:
    """A development cluster reaches the webhook under an address of its own, of either family."""
    await WebhookCertReconciler(api, clock, extra_names=(name,)).reconcile()
    first = api.secret(SERVING)["tls.crt"]
    served = x509.load_pem_x509_certificate(first).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    kind = x509.DNSName if name.endswith("example") else x509.IPAddress
    assert name in {str(one) for one in served.get_values_for_type(kind)}

    await WebhookCertReconciler(api, clock).reconcile()

    assert api.secret(SERVING)["tls.crt"] != first


@pytest.mark.parametrize("keep", [True, False])
async def test_certificates_that_somebody_else_keeps_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, api: CertApi, clock: RoundsClock, *, keep: bool
) -> None:
    """With --no-keep-certificates a leader does all of its work but this."""
    begun: set[str] = set()

    async def supervise(**work: Coroutine[Any, Any, None]) -> None:
        begun.update(work)
        for coroutine in work.values():
            coroutine.close()

    async def synced() -> None:
        return None

    monkeypatch.setattr(runner, "supervise", supervise)
    monkeypatch.setattr(runner, "build_loops", lambda *_: ())
    monkeypatch.setattr(runner, "freeze_garbage", lambda: None)
    process = SimpleNamespace(
        settings=ControllersSettings(keep_certificates=keep),
        clock=clock,
        client=api,
        identity="a",
        mirror=SimpleNamespace(synced=synced),
        terminations=None,
        restored=asyncio.Event(),
        context=lambda _events: None,
        metrics=controller_metrics(Metrics("controllers")),
    )
    await runner._lead(cast("Any", process))

    assert begun == {"events", "resync", *(["authority"] if keep else [])}
