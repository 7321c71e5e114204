"""Finds the GpuClaim that a pod names: in the watched copy, and before a pod is denied by one live GET.

A claim and a pod from one file arrive within milliseconds, so a miss proves nothing; a copy that has heard nothing for
a while is not believed at all. Errors of the API client become a `ClaimLookup`.
"""

import asyncio
from collections.abc import Mapping
from typing import Final, Protocol

import structlog
from pydantic import ValidationError

from atoll.api.claims import GpuClaim
from atoll.api.forms import message_of
from atoll.kube import paths
from atoll.kube.api import ApiReader
from atoll.kube.errors import KubeError, NotFound
from webhook.metrics import WebhookMetrics
from webhook.requests import ClaimLookup, ClaimMissing, ClaimUnavailable, ClaimUnreadable

log = structlog.get_logger(__name__)

COPY_SECONDS_MAX: Final = 150.0
"""The API server sends a bookmark about once a minute; a copy that missed two of them may be anything."""
LOOKUP_SECONDS: Final = 2.0
"""The whole answer must come before the API server gives up on the webhook, which it does after 5 s."""


class ClaimCopy(Protocol):
    """What is needed of the reflector."""

    synced: asyncio.Event

    @property
    def store(self) -> Mapping[tuple[str, str], GpuClaim]: ...

    @property
    def untrusted(self) -> Mapping[tuple[str, str], str]: ...

    def seconds_since_heard(self) -> float: ...


class ClaimFinder:
    """Looks claims up for one webhook process."""

    def __init__(self, client: ApiReader, copy: ClaimCopy, metrics: WebhookMetrics) -> None:
        self._client = client
        self._copy = copy
        self._lookups = metrics.lookups

    async def find(self, namespace: str, name: str) -> ClaimLookup:
        """Return the claim, or what is known instead. The name must be one that `claim_name_of` let pass."""
        found = self._watched(namespace, name)
        if found is not None:
            self._lookups.labels("watch").inc()
            return found
        lookup = await self._ask(namespace, name)
        self._lookups.labels("failed" if isinstance(lookup, ClaimUnavailable) else "live").inc()
        return lookup

    def _watched(self, namespace: str, name: str) -> GpuClaim | None:
        key = (namespace, name)
        is_fresh = self._copy.synced.is_set() and self._copy.seconds_since_heard() <= COPY_SECONDS_MAX
        return self._copy.store.get(key) if is_fresh and key not in self._copy.untrusted else None

    async def _ask(self, namespace: str, name: str) -> ClaimLookup:
        try:
            raw = await self._client.get(paths.gpuclaims(namespace, name), timeout_seconds=LOOKUP_SECONDS)
            return GpuClaim.model_validate_json(raw)
        except NotFound:
            return ClaimMissing()
        except ValidationError as error:
            first = error.errors()[0]
            return ClaimUnreadable(f"{'.'.join(map(str, first['loc']))}: {message_of(first)}")
        except KubeError as error:
            log.warning("Could not look a claim up", claim=f"{namespace}/{name}", err=str(error))
            return ClaimUnavailable()
