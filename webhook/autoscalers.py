"""Annotates pods with GPUs so that autoscalers leave their nodes alone: to them, GPUs that they do not know look idle.

Cluster Autoscaler and Karpenter heed these annotations. Values that the user wrote under the same keys stay.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Final

from atoll.kube.patches import add_op, pointer
from webhook.pods import AdmittedPod

ANNOTATIONS: Final = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}
"""By the documentation of Cluster Autoscaler and of Karpenter."""


class KeepNodes(StrEnum):
    """Whose nodes autoscalers are told to leave alone."""

    NONE = "none"
    GANGS = "gangs"
    ALL = "all"


def keep_node(pod: AdmittedPod, *, gang: str, choice: KeepNodes) -> Iterator[dict[str, Any]]:
    """Yield the operations that annotate the pod where the choice says so; nothing for what is annotated already."""
    if choice is KeepNodes.NONE or (choice is KeepNodes.GANGS and not gang):
        return
    missing = {key: value for key, value in ANNOTATIONS.items() if key not in pod.annotations}
    if not pod.annotations:
        yield add_op(pointer("metadata", "annotations"), missing)
        return
    for key, value in missing.items():
        yield add_op(pointer("metadata", "annotations", key), value)
