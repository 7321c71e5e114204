"""Whether a pod that asks Atoll for GPUs would get others too, by Kubernetes' dynamic resource allocation (DRA).

In: the pod's ResourceClaims, templates of them and resources, and the cluster's DeviceClasses. Out: the denial of a pod
that asks for GPUs twice, or None. A DeviceClass stands for GPUs where it says so: by a driver of GPUs in its selectors
or those of the request, by the extended resource that it is an alias of, or by selecting any device at all. A class
that picks GPUs in words that name no known driver cannot be told from others; see docs/security.md.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

from webhook.pods import RESOURCE_PREFIX, AdmittedPod, PodResourceClaim, WireView, placed_containers
from webhook.review import Denial

GPU_DRIVERS: Final = ("gpu.nvidia.com", "gpu.amd.com", "gpu.intel.com")
"""DRA drivers whose devices are GPUs. NVIDIA's compute-domain.nvidia.com hands out channels of a fabric, no GPU."""
FOREIGN_RESOURCE_PREFIXES: Final = ("nvidia.com/gpu", "nvidia.com/mig-", "amd.com/gpu")
"""Counted and handed out by the vendors' device plugins, which know nothing of Atoll's choice."""
CLASS_RESOURCE_PREFIX: Final = "deviceclass.resource.kubernetes.io/"
"""With the name of a DeviceClass behind it: the extended resource that every class has."""
CLAIMS_MAX: Final = 32
_DRIVER: Final = re.compile(rf"(?<![\w.-])(?:{'|'.join(map(re.escape, GPU_DRIVERS))})(?![\w.-])")


class CelSelector(WireView, frozen=True):
    """`cel` of a selector."""

    expression: str = ""


class DeviceSelector(WireView, frozen=True):
    """Which devices are meant."""

    cel: CelSelector = CelSelector()


class DeviceClassSpec(WireView, frozen=True):
    """The part of a DeviceClass that tells what it stands for."""

    selectors: tuple[DeviceSelector, ...] = ()
    extended_resource_name: str = ""


class Named(WireView, frozen=True):
    """`metadata`."""

    name: str = ""


class DeviceClass(WireView, frozen=True):
    """A kind of devices."""

    metadata: Named
    spec: DeviceClassSpec = DeviceClassSpec()

    @property
    def resources(self) -> frozenset[str]:
        """Extended resources that mean devices of this class."""
        return frozenset({self.spec.extended_resource_name, f"{CLASS_RESOURCE_PREFIX}{self.metadata.name}"} - {""})

    def why_gpus(self, selectors: Iterable[DeviceSelector] = ()) -> str:
        """Return why devices of the class, narrowed by a request's own selectors, may be GPUs; empty for others."""
        all_selectors = (*self.spec.selectors, *selectors)
        found = next((match for one in all_selectors if (match := _DRIVER.search(one.cel.expression))), None)
        if found is not None:
            return f"its devices are those of the driver {found[0]}"
        if self.spec.extended_resource_name.startswith(FOREIGN_RESOURCE_PREFIXES):
            return f"it stands for {self.spec.extended_resource_name}"
        return "" if all_selectors else "it selects any device, GPUs too"


class ClassRequest(WireView, frozen=True):
    """Devices of one class."""

    device_class_name: str = ""
    selectors: tuple[DeviceSelector, ...] = ()


class ClassRequestEntry(WireView, frozen=True):
    """One entry of a claim: devices exactly so, or the first of several kinds that is there."""

    exactly: ClassRequest | None = None
    first_available: tuple[ClassRequest, ...] = ()


class DeviceDemand(WireView, frozen=True):
    """`spec.devices`."""

    requests: tuple[ClassRequestEntry, ...] = ()


class ResourceClaimSpec(WireView, frozen=True):
    """`spec` of a ResourceClaim."""

    devices: DeviceDemand = DeviceDemand()

    def requests(self) -> Iterator[ClassRequest]:
        """Yield everything that the claim may be given."""
        for entry in self.devices.requests:
            yield from entry.first_available if entry.exactly is None else (entry.exactly, *entry.first_available)


class ResourceClaim(WireView, frozen=True):
    """A claim of devices."""

    spec: ResourceClaimSpec


class ResourceClaimTemplate(WireView, frozen=True):
    """What claims of devices are made of; the same thing one level deeper."""

    spec: ResourceClaim


def unknown_resources(pod: AdmittedPod) -> frozenset[str]:
    """Return the extended resources that a DeviceClass could stand for."""
    asked = {name for placed in placed_containers(pod) for name in placed.container.resource_names()}
    return frozenset(name for name in asked if "/" in name and not name.startswith(RESOURCE_PREFIX))


def refuse_resources(pod: AdmittedPod, classes: Iterable[DeviceClass]) -> Denial | None:
    """Refuse extended resources that stand for GPUs."""
    asked = unknown_resources(pod)
    for one in classes:
        why, named = one.why_gpus(), sorted(one.resources & asked)
        if why and named:
            return Denial(
                f"the pod also asks for {named[0][:120]}, which stands for DeviceClass {one.metadata.name!r}: {why}; "
                "Atoll gives the pod its GPUs, remove it"
            )
    return None


def refuse_claim(claim: PodResourceClaim, spec: ResourceClaimSpec, classes: Mapping[str, DeviceClass]) -> Denial | None:
    """Refuse a claim of devices that may be GPUs."""
    for request in spec.requests():
        known = classes.get(request.device_class_name)
        if known is None:
            return Denial(
                f"{claim.words} asks for DeviceClass {request.device_class_name[:120]!r}, which does not exist; create "
                "it before the pod, so that it can be told whether its devices are GPUs"
            )
        why = known.why_gpus(request.selectors)
        if why:
            return Denial(
                f"{claim.words} asks for DeviceClass {known.metadata.name!r}, and {why}; Atoll gives the pod its GPUs, "
                "remove the claim"
            )
    return None


decode_class = msgspec.json.Decoder(DeviceClass).decode
decode_claim = msgspec.json.Decoder(ResourceClaim).decode
decode_template = msgspec.json.Decoder(ResourceClaimTemplate).decode
