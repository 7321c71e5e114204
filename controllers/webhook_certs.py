"""Keeps the webhook's certificates: its own authority, the serving certificate, and the caBundle that trusts them.

Each round reads two Secrets and the webhook configuration anew, and writes what `plan_certificates` wants different,
each with a precondition, so that nothing is served before it is trusted. It watches nothing, because it must work when
nothing else does.

    Secret atoll-authority     ca.crt, ca.key (signs), previous.crt (still trusted)   read by controllers alone
    Secret atoll-webhook-tls   tls.crt, tls.key (served), ca.crt (what to trust)       read by the webhook
    zz-atoll-webhook           webhooks[*].clientConfig.caBundle

To replace a leaked key, delete the Secret atoll-authority: a new authority is made at once. Until every API server and
webhook has followed (seconds), pods that ask for GPUs are refused.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
import structlog

from atoll.api import names
from atoll.kube import paths
from atoll.kube.api import Api
from atoll.kube.errors import AlreadyExists, Conflict, KubeError, MalformedAnswer, NotFound
from atoll.kube.patches import MERGE_PATCH, STRATEGIC_MERGE_PATCH, merge_patch
from atoll.service.clock import Clock
from controllers.certificates import CertificatePlan, KeyPair, Lifetimes, StoredCertificates, plan_certificates

T = TypeVar("T")

log = structlog.get_logger(__name__)

INTERVAL_SECONDS: Final = 10.0
"""Three small GETs a round: cheap, and a configuration that was applied anew is trusted again within seconds."""
WEBHOOK_NAMES: Final = (
    f"{names.WEBHOOK_SERVICE}.{names.SYSTEM_NAMESPACE}.svc",
    f"{names.WEBHOOK_SERVICE}.{names.SYSTEM_NAMESPACE}.svc.cluster.local",
)


_CONFIGURATION_PATH: Final = paths.mutatingwebhookconfigurations(names.WEBHOOK_CONFIGURATION)


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    uid: str = ""
    resource_version: str = ""


class _Secret(msgspec.Struct, frozen=True):
    metadata: _Metadata
    data: dict[str, bytes] = {}

    def pair(self, prefix: str) -> KeyPair | None:
        """Return the pair `<prefix>.crt`, `<prefix>.key`; None unless both are there."""
        certificate, key = self.data.get(f"{prefix}.crt"), self.data.get(f"{prefix}.key")
        return KeyPair(certificate, key) if certificate and key else None


class _ClientConfig(msgspec.Struct, frozen=True, rename="camel"):
    ca_bundle: bytes = b""


class _Webhook(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    client_config: _ClientConfig


class _Configuration(msgspec.Struct, frozen=True):
    metadata: _Metadata
    webhooks: tuple[_Webhook, ...] = ()


@dataclass(frozen=True, slots=True)
class _Observed:
    """The three objects as read at the beginning of a round; None for what does not exist."""

    authority: _Secret | None
    serving: _Secret | None
    configuration: _Configuration | None

    def stored(self) -> StoredCertificates:
        bundles = (
            {webhook.client_config.ca_bundle for webhook in self.configuration.webhooks}
            if self.configuration
            else set()
        )
        return StoredCertificates(
            authority=self.authority.pair("ca") if self.authority else None,
            previous=self.authority.data.get("previous.crt", b"") if self.authority else b"",
            serving=self.serving.pair("tls") if self.serving else None,
            published=bundles.pop() if len(bundles) == 1 else b"",
        )


class WebhookCertReconciler:
    """Brings the three objects to what the plan wants, round by round; `may_write` is asked before each write."""

    def __init__(
        self,
        client: Api,
        clock: Clock,
        *,
        extra_names: Sequence[str] = (),
        lifetimes: Lifetimes | None = None,
        interval_seconds: float = INTERVAL_SECONDS,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self._client = client
        self._clock = clock
        self._names = (*WEBHOOK_NAMES, *extra_names)
        self._lifetimes = lifetimes or Lifetimes()
        self._interval_seconds = interval_seconds
        self._may_write = may_write

    async def run(self) -> None:
        """Reconcile until cancelled; what fails is tried again in the next round."""
        while True:
            try:
                await self.reconcile()
            except (AlreadyExists, Conflict) as error:
                log.info("Lost a race for the webhook's certificates", err=str(error))
            except KubeError as error:
                log.warning("Could not keep the webhook's certificates", err=str(error))
            await self._clock.sleep(self._interval_seconds)

    async def reconcile(self) -> None:
        """Do one round; raises KubeError, after which everything already written is still consistent."""
        observed = await self._observe()
        stored = observed.stored()
        plan = plan_certificates(stored, names=self._names, now=self._clock.now(), lifetimes=self._lifetimes)
        if not self._may_write():
            return
        await self._store_authority(observed.authority, plan)
        if observed.configuration is not None:
            await self._publish(observed.configuration, plan.bundle)
        await self._store_serving(observed.serving, plan)

    async def _observe(self) -> _Observed:
        return _Observed(
            authority=await self._read(_secret_path(names.AUTHORITY_SECRET), _Secret),
            serving=await self._read(_secret_path(names.WEBHOOK_SECRET), _Secret),
            configuration=await self._read(_CONFIGURATION_PATH, _Configuration),
        )

    async def _read(self, path: str, kind: type[T]) -> T | None:
        try:
            return msgspec.json.decode(await self._client.get(path), type=kind)
        except NotFound:
            return None
        except msgspec.DecodeError as error:
            raise MalformedAnswer(f"cannot read {path}: {error}") from error

    async def _store_authority(self, existing: _Secret | None, plan: CertificatePlan) -> None:
        wanted = {"ca.crt": plan.authority.certificate, "ca.key": plan.authority.key, "previous.crt": plan.previous}
        if await self._write_secret(names.AUTHORITY_SECRET, existing, wanted=wanted, kind="Opaque"):
            log.info("Stored a new webhook authority", overlaps=bool(plan.previous))

    async def _store_serving(self, existing: _Secret | None, plan: CertificatePlan) -> None:
        wanted = {"tls.crt": plan.serving.certificate, "tls.key": plan.serving.key, "ca.crt": plan.bundle}
        if await self._write_secret(names.WEBHOOK_SECRET, existing, wanted=wanted, kind="kubernetes.io/tls"):
            log.info("Stored the webhook's serving certificate", ends=plan.serving_ends.isoformat())

    async def _write_secret(
        self, name: str, existing: _Secret | None, *, wanted: Mapping[str, bytes], kind: str
    ) -> bool:
        """Create the Secret or patch what differs; empty values stand for absent keys. Returns whether it wrote."""
        filled = {key: value for key, value in wanted.items() if value}
        encoded = {key: base64.b64encode(value).decode() for key, value in filled.items()}
        if existing is None:
            metadata = {"name": name, "namespace": names.SYSTEM_NAMESPACE}
            body = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": kind, "data": encoded}
            await self._client.create(paths.secrets(names.SYSTEM_NAMESPACE), body)
            return True
        if existing.data == filled:
            return False
        stale = dict.fromkeys(key for key in existing.data if key not in filled)
        await self._client.patch(
            _secret_path(name), _fenced(existing.metadata, data={**stale, **encoded}), content_type=MERGE_PATCH
        )
        return True

    async def _publish(self, configuration: _Configuration, bundle: bytes) -> None:
        different = [webhook.name for webhook in configuration.webhooks if webhook.client_config.ca_bundle != bundle]
        if not different:
            return
        encoded = base64.b64encode(bundle).decode()
        webhooks = [{"name": name, "clientConfig": {"caBundle": encoded}} for name in different]
        body = _fenced(configuration.metadata, webhooks=webhooks)
        await self._client.patch(_CONFIGURATION_PATH, body, content_type=STRATEGIC_MERGE_PATCH)
        log.info("Published the webhook's authority", configuration=configuration.metadata.name)


def _fenced(metadata: _Metadata, **sections: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    return merge_patch(uid=metadata.uid, resource_version=metadata.resource_version, **sections)


def _secret_path(name: str) -> str:
    return paths.secrets(names.SYSTEM_NAMESPACE, name)
