"""When the agent lets go of the driver, and when it takes it up again.

A driver can be reloaded only while nobody holds it. In: the Node. Out: why to let go, empty while the driver is to be
held. Pure. Three ways to say so: the label `gpu.scheduling/driver-hold: released`, a cordoned Node in one of the
states through which NVIDIA's operator upgrades a driver, and, without any API server, SIGUSR1 (SIGUSR2 takes up again).
"""

from typing import Final

from atoll.api import names
from atoll.cluster.objects import Node

UPGRADE_STATE: Final = "nvidia.com/gpu-driver-upgrade-state"
"""Label in which NVIDIA's operator keeps where the upgrade of a node's driver stands."""
UPGRADING: Final = frozenset(
    {"wait-for-jobs-required", "pod-deletion-required", "drain-required", "pod-restart-required"}
)
"""States from when the node is cordoned until the new driver is loaded; the next one validates it."""


def release_reason(node: Node | None) -> str:
    """Return why the Node wants the driver to be let go; empty where it does not."""
    if node is None:
        return ""
    labels = node.metadata.labels
    if labels.get(names.DRIVER_HOLD) == names.DRIVER_RELEASED:
        return f"the driver was let go: label {names.DRIVER_HOLD}"
    state = labels.get(UPGRADE_STATE, "")
    if node.spec.unschedulable and state in UPGRADING:
        return f"the driver was let go for its upgrade: {state}"
    return ""
