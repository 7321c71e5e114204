"""The GPUs of completed attributes, as a GpuClaim and as a request of the search.

Rendering and matching share this module, so that a rendered claim and the comparison with a worker agree.
"""

from atoll.api.claims import DeviceClaim, InterconnectKind, Vendor
from atoll.cluster.machines import parse_capability
from atoll.cluster.quantities import parse_bytes
from atoll.cluster.requests import Request
from atoll.ml.attributes import Accelerator, MlAttributes
from atoll.ml.tables import claim_memory, gpu_models
from topology.device_requests import DeviceRequest, Interconnect, Policy


def device_claim(attributes: MlAttributes) -> DeviceClaim | None:
    """Return the GPUs of a job that runs in one pod; None for a job without GPUs. Raises pydantic's ValidationError for
    more GPUs than a pod can have, see atoll.api.claims.COUNT_MAX."""
    if attributes.accelerator is not Accelerator.GPU or not attributes.gpu_count:
        return None
    gpu_type, memory = attributes.gpu_type, attributes.gpu_memory_gb
    return DeviceClaim(
        count=attributes.gpu_count,
        models=gpu_models(gpu_type) if gpu_type is not None else (),
        memory=claim_memory(memory, gpu_type) if memory is not None else None,
        compute_capability=attributes.gpu_compute_capability,
        interconnect=attributes.gpu_interconnect or InterconnectKind.ANY,
        vendor=Vendor.AMD if (gpu_type or "").startswith("amd-") else Vendor.NVIDIA,
    )


def device_request(claim: DeviceClaim) -> Request:
    """Return the search's request for the claim's GPUs, for a pod whose containers all see them."""
    return Request(
        ask=DeviceRequest(
            count=claim.count,
            policy=Policy(claim.policy.value),
            interconnect=Interconnect(claim.interconnect.value),
            min_bandwidth_gbps=claim.min_bandwidth_gbps,
        ),
        models=claim.models,
        mixed_models=claim.mixed_models,
        memory_bytes=parse_bytes(claim.memory) if claim.memory else 0,
        compute_capability=parse_capability(claim.compute_capability or "0"),
        mig_profile=claim.mig_profile,
        vendor=claim.vendor.value,
        claim="",
        visible_devices=None,
        container_counts=(),
    )
