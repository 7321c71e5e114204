"""The GPUs of completed attributes (after atoll.ml.infer), as a GpuClaim.

Rendering and matching share this module, so that a rendered claim and the comparison with a worker agree.
"""

from atoll.api.claims import DeviceClaim, InterconnectKind, Vendor
from atoll.ml.attributes import Accelerator, MlAttributes
from atoll.ml.tables import claim_memory, gpu_models


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
