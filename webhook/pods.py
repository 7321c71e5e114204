"""The part of a pod that the webhook reads, typed and frozen, and where in it each container is.

`None` means absent, so that a patch creates the parent first. `atoll.cluster` reads stored pods, which never show which
maps and lists are absent.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from atoll.api.names import GROUP
from webhook.errors import MalformedPod

RESOURCE_PREFIX: Final = f"{GROUP}/"


class WireView(msgspec.Struct, frozen=True, rename="camel"):
    """Base of the views: camelCase on the wire, unknown fields ignored."""


class FieldReference(WireView, frozen=True):
    """`valueFrom.fieldRef` of a variable."""

    field_path: str = ""


class ValueSource(WireView, frozen=True):
    """`valueFrom` of a variable; sources other than fieldRef are never Atoll's."""

    field_ref: FieldReference | None = None


class Variable(WireView, frozen=True):
    """One entry of a container's `env`."""

    name: str
    value: str = ""
    value_from: ValueSource | None = None


class AdmittedResources(WireView, frozen=True):
    """Limits and requests of a container; quantities as the API server wrote them."""

    limits: dict[str, str | int | float] | None = None
    requests: dict[str, str | int | float] | None = None


class VolumeMount(WireView, frozen=True):
    """Where a volume appears in a container."""

    mount_path: str = ""


class AdmittedContainer(WireView, frozen=True):
    """A container or init container."""

    name: str
    env: tuple[Variable, ...] | None = None
    resources: AdmittedResources | None = None
    restart_policy: str | None = None
    volume_mounts: tuple[VolumeMount, ...] = ()

    @property
    def entries_count(self) -> int:
        """Variables, mounts and resources, all of which rules look at."""
        resources = self.resources or AdmittedResources()
        return sum(map(len, (self.env or (), self.volume_mounts, resources.limits or (), resources.requests or ())))

    def resource_names(self) -> frozenset[str]:
        """Return the names of all resources that stand in its limits or requests, with whatever value."""
        if self.resources is None:
            return frozenset()
        return frozenset(self.resources.limits or ()) | frozenset(self.resources.requests or ())


class AdmittedGate(WireView, frozen=True):
    """One entry of `spec.schedulingGates`."""

    name: str = ""


class AdmittedGroup(WireView, frozen=True):
    """`spec.schedulingGroup`: Kubernetes' own group of the pod."""

    pod_group_name: str = ""


class PodResourceClaim(WireView, frozen=True):
    """One entry of `spec.resourceClaims`: devices by dynamic resource allocation."""

    name: str = ""
    resource_claim_name: str | None = None
    resource_claim_template_name: str | None = None

    @property
    def words(self) -> str:
        """Name of the entry in messages."""
        if self.resource_claim_template_name:
            return f"ResourceClaimTemplate {self.resource_claim_template_name[:120]!r} of resource claim {self.name!r}"
        return f"ResourceClaim {(self.resource_claim_name or '')[:120]!r}"


class AdmittedPodSpec(WireView, frozen=True):
    """The part of `spec` that decides what a pod may see."""

    containers: tuple[AdmittedContainer, ...]
    init_containers: tuple[AdmittedContainer, ...] = ()
    ephemeral_containers: tuple[AdmittedContainer, ...] = ()
    scheduler_name: str = ""
    node_name: str = ""
    runtime_class_name: str | None = None
    scheduling_gates: tuple[AdmittedGate, ...] = ()
    scheduling_group: AdmittedGroup | None = None
    priority: int = 0
    resource_claims: tuple[PodResourceClaim, ...] = ()


class AdmittedMetadata(WireView, frozen=True):
    """Name and annotations; a generated name is still empty at CREATE."""

    name: str = ""
    annotations: dict[str, str] | None = None


class AdmittedPod(WireView, frozen=True):
    """A pod as it arrives at CREATE."""

    metadata: AdmittedMetadata
    spec: AdmittedPodSpec

    @property
    def annotations(self) -> dict[str, str]:
        """The annotations, empty where the pod has none."""
        return self.metadata.annotations or {}


class PodTemplate(WireView, frozen=True):
    """What a Job makes its pods of."""

    spec: AdmittedPodSpec
    metadata: AdmittedMetadata = AdmittedMetadata()


class JobSpec(WireView, frozen=True):
    """The part of a Job's `spec` that decides what its pods ask for."""

    template: PodTemplate


class AdmittedJob(WireView, frozen=True):
    """A Job as it arrives."""

    spec: JobSpec


class PlacedContainer(msgspec.Struct, frozen=True):
    """A container together with where it stands in the pod."""

    container: AdmittedContainer
    where: tuple[str | int, ...]
    """Segments of its JSON pointer, for example ("spec", "initContainers", 0)."""
    may_ask: bool
    """Regular containers and sidecars live as long as the pod and may ask for GPUs; plain init containers may not."""


_DECODER: Final = msgspec.json.Decoder(AdmittedPod)
_JOB_DECODER: Final = msgspec.json.Decoder(AdmittedJob)


def decode_pod(raw: bytes | memoryview) -> AdmittedPod:
    """Decode the JSON of a pod; raises `MalformedPod` with the first field that is wrong."""
    try:
        return _DECODER.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedPod(str(error)) from error


def decode_template(raw: bytes | memoryview) -> AdmittedPod:
    """Decode the JSON of a Job and return the pod that its template describes; raises `MalformedPod`."""
    try:
        template = _JOB_DECODER.decode(raw).spec.template
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedPod(str(error)) from error
    return AdmittedPod(metadata=template.metadata, spec=template.spec)


def placed_containers(pod: AdmittedPod) -> Iterator[PlacedContainer]:
    """Yield regular containers, then init containers, each in the pod's order."""
    for index, container in enumerate(pod.spec.containers):
        yield PlacedContainer(container=container, where=("spec", "containers", index), may_ask=True)
    for index, container in enumerate(pod.spec.init_containers):
        is_sidecar = container.restart_policy == "Always"
        yield PlacedContainer(container=container, where=("spec", "initContainers", index), may_ask=is_sidecar)


def atoll_resources(pod: AdmittedPod) -> frozenset[str]:
    """Return the names of Atoll's resources that any container mentions."""
    sections = (
        section
        for container in (*pod.spec.containers, *pod.spec.init_containers)
        if container.resources is not None
        for section in (container.resources.limits, container.resources.requests)
    )
    return frozenset(name for section in sections for name in section or () if name.startswith(RESOURCE_PREFIX))
