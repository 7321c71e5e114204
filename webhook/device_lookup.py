"""Looks up the devices behind the ResourceClaims and extended resources of pods that also ask for GPUs of Atoll.

Live reads, only for the few pods that ask Atoll for GPUs and also for other devices; a watch would burden every
cluster. A pod whose devices cannot be read is denied.
"""

import asyncio
from typing import Final

import msgspec
import structlog

from atoll.kube import paths
from atoll.kube.api import ApiReader
from atoll.kube.errors import KubeError, NotFound
from webhook.device_claims import (
    CLAIMS_MAX,
    ResourceClaimSpec,
    decode_claim,
    decode_class,
    decode_template,
    refuse_claim,
    refuse_resources,
    unknown_resources,
)
from webhook.pods import AdmittedPod, PodResourceClaim
from webhook.review import Denial

log = structlog.get_logger(__name__)

LOOKUP_SECONDS: Final = 1.5
"""The API server waits 5 s for the webhook, and reading the GpuClaim may take 2 s."""


class DeviceFinder:
    """Looks up devices for one webhook process."""

    def __init__(self, client: ApiReader) -> None:
        self._client = client

    async def refusal(self, namespace: str, pod: AdmittedPod) -> Denial | None:
        """Return the denial of a pod that also asks for GPUs from another source. The pod asks Atoll for GPUs."""
        claims = pod.spec.resource_claims
        if not claims and not unknown_resources(pod):
            return None
        if len(claims) > CLAIMS_MAX:
            return Denial(f"the pod has {len(claims)} resourceClaims, {CLAIMS_MAX} are allowed with GPUs", 400)
        try:
            async with asyncio.timeout(LOOKUP_SECONDS):
                listing, specs = await asyncio.gather(
                    self._client.list(paths.deviceclasses(), decode_class),
                    asyncio.gather(*(self._spec(namespace, one) for one in claims)),
                )
        except (KubeError, TimeoutError, msgspec.DecodeError) as error:
            log.warning("Could not look up devices", namespace=namespace, err=str(error))
            return Denial("the webhook could not check whether the pod's other devices are GPUs; try again", 503)
        refused = refuse_resources(pod, listing.items)
        classes = {one.metadata.name: one for one in listing.items}
        for claim, spec in zip(claims, specs, strict=True):
            refused = refused or (_missing(claim) if spec is None else refuse_claim(claim, spec, classes))
        return refused

    async def _spec(self, namespace: str, claim: PodResourceClaim) -> ResourceClaimSpec | None:
        """Return the spec of a claim; None if it does not exist."""
        try:
            if claim.resource_claim_template_name:
                template = claim.resource_claim_template_name
                raw = await self._client.get(paths.resourceclaimtemplates(namespace, template))
                return decode_template(raw).spec.spec
            raw = await self._client.get(paths.resourceclaims(namespace, claim.resource_claim_name or ""))
            return decode_claim(raw).spec
        except NotFound:
            return None


def _missing(claim: PodResourceClaim) -> Denial:
    return Denial(f"{claim.words} does not exist; create it before the pod, so that the webhook can check its devices")
