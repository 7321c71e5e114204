"""Writes what is kept for a waiting pod: the one annotation that hides GPUs from others, fenced."""

from atoll.api import names
from atoll.cluster.objects import Pod
from atoll.cluster.soft_reservations import SoftReservation
from atoll.kube import paths
from atoll.kube.patches import merge_patch
from controllers.context import Context


async def write_kept(context: Context, pod: Pod, kept: SoftReservation | None) -> None:
    """Keep this for the pod, or nothing any more; only while the pod is as it was read. The ledger follows the write.

    Raises NotFound for a pod that is gone, Conflict for one that changed meanwhile, and every other KubeError.
    """
    metadata = pod.metadata
    body = merge_patch(
        uid=metadata.uid,
        resource_version=metadata.resource_version,
        annotations={names.KEPT: str(kept) if kept is not None else None},
    )
    await context.api.patch(paths.pods(metadata.namespace, metadata.name), body)
    context.mirror.ledger.keep(metadata.uid, kept)
