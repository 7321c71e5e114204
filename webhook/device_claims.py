"""Denies pods that ask Atoll for GPUs and also get GPUs by Kubernetes' dynamic resource allocation (DRA).

Checks the pod's ResourceClaims, their templates and its extended resources against the cluster's DeviceClasses. A
DeviceClass counts as a class of GPUs if its selectors or those of the request name a GPU driver, if it is an alias of
an extended resource of GPUs, or if it selects any device. A class whose selectors name no known driver cannot be
recognized; see docs/security.md.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

from webhook.pods import RESOURCE_PREFIX, AdmittedPod, PodResourceClaim, WireView, placed_containers
from webhook.review import Denial

GPU_DRIVERS: Final = ("gpu.nvidia.com", "gpu.amd.com", "gpu.intel.com")
"""DRA drivers whose devices are GPUs. NVIDIA's compute-domain.nvidia.com allocates fabric channels, not GPUs."""
FOREIGN_RESOURCE_PREFIXES: Final = ("nvidia.com/gpu", "nvidia.com/mig-", "amd.com/gpu")
"""Allocated by the vendors' device plugins, which do not know Atoll's choice."""
CLASS_RESOURCE_PREFIX: Final = "deviceclass.resource.kubernetes.io/"
"""Followed by the name of a DeviceClass: the extended resource that every class has."""
CLAIMS_MAX: Final = 32
_DRIVER: Final = re.compile(rf"(?<![\w.-])(?:{'|'.join(map(re.escape, GPU_DRIVERS))})(?![\w.-])")


class CelSelector(WireView, frozen=True):
    """`cel` of a selector."""

    expression: str = ""


class DeviceSelector(WireView, frozen=True):
    """Selects devices."""

    cel: CelSelector = CelSelector()


class DeviceClassSpec(WireView, frozen=True):
    """The part of a DeviceClass that tells which devices it covers."""

    selectors: tuple[DeviceSelector, ...] = ()
    extended_resource_name: str = ""


class Named(WireView, frozen=True):
    """`metadata`."""

    name: str = ""


class DeviceClass(WireView, frozen=True):
    """A class of devices."""

    metadata: Named
    spec: DeviceClassSpec = DeviceClassSpec()

    @property
    def resources(self) -> frozenset[str]:
        """Extended resources that stand for devices of this class."""
        return frozenset({self.spec.extended_resource_name, f"{CLASS_RESOURCE_PREFIX}{self.metadata.name}"} - {""})

    def why_gpus(self, selectors: Iterable[DeviceSelector] = ()) -> str:
        """Return why devices of the class, narrowed by the request's selectors, may be GPUs; empty if they are not."""
        all_selectors = (*self.spec.selectors, *selectors)
        found = next((match for one in all_selectors if (match := _DRIVER.search(one.cel.expression))), None)
        if found is not None:
            return f"its devices are of the driver {found[0]}"
        if self.spec.extended_resource_name.startswith(FOREIGN_RESOURCE_PREFIXES):
            return f"it stands for {self.spec.extended_resource_name}"
        return "" if all_selectors else "it selects any device, including GPUs"


class ClassRequest(WireView, frozen=True):
    """A request for devices of one class."""

    device_class_name: str = ""
    selectors: tuple[DeviceSelector, ...] = ()


class ClassRequestEntry(WireView, frozen=True):
    """One entry of a claim: an exact request, or a list of alternatives of which the first available is used."""

    exactly: ClassRequest | None = None
    first_available: tuple[ClassRequest, ...] = ()


class DeviceDemand(WireView, frozen=True):
    """`spec.devices`."""

    requests: tuple[ClassRequestEntry, ...] = ()


class ResourceClaimSpec(WireView, frozen=True):
    """`spec` of a ResourceClaim."""

    devices: DeviceDemand = DeviceDemand()

    def requests(self) -> Iterator[ClassRequest]:
        """Yield every request that may be allocated."""
        for entry in self.devices.requests:
            yield from entry.first_available if entry.exactly is None else (entry.exactly, *entry.first_available)


class ResourceClaim(WireView, frozen=True):
    """A claim on devices."""

    spec: ResourceClaimSpec


class ResourceClaimTemplate(WireView, frozen=True):
    """A template of ResourceClaims; its spec is one level deeper."""

    spec: ResourceClaim


def unknown_resources(pod: AdmittedPod) -> frozenset[str]:
    """Return the extended resources that may belong to a DeviceClass."""
    asked = {name for placed in placed_containers(pod) for name in placed.container.resource_names()}
    return frozenset(name for name in asked if "/" in name and not name.startswith(RESOURCE_PREFIX))


def refuse_resources(pod: AdmittedPod, classes: Iterable[DeviceClass]) -> Denial | None:
    """Deny extended resources that stand for GPUs."""
    asked = unknown_resources(pod)
    for one in classes:
        why, named = one.why_gpus(), sorted(one.resources & asked)
        if why and named:
            return Denial(
                f"the pod also asks for {named[0][:120]}, which stands for DeviceClass {one.metadata.name!r}: {why}; "
                "Atoll provides the pod's GPUs, remove it"
            )
    return None


def refuse_claim(claim: PodResourceClaim, spec: ResourceClaimSpec, classes: Mapping[str, DeviceClass]) -> Denial | None:
    """Deny a claim on devices that may be GPUs."""
    for request in spec.requests():
        known = classes.get(request.device_class_name)
        if known is None:
            return Denial(
                f"{claim.words} asks for DeviceClass {request.device_class_name[:120]!r}, which does not exist; create "
                "it before the pod, so that the webhook can check whether its devices are GPUs"
            )
        why = known.why_gpus(request.selectors)
        if why:
            return Denial(
                f"{claim.words} asks for DeviceClass {known.metadata.name!r}, and {why}; Atoll provides the pod's "
                "GPUs, remove the claim"
            )
    return None


decode_class = msgspec.json.Decoder(DeviceClass).decode
decode_claim = msgspec.json.Decoder(ResourceClaim).decode
decode_template = msgspec.json.Decoder(ResourceClaimTemplate).decode
