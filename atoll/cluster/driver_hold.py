"""When the agent releases the driver, and when it opens it again. Pure.

A driver can be reloaded only while no process has it open. Three signals release it: the label
`gpu.scheduling/driver-hold: released`, a cordoned Node in one of the states in which NVIDIA's operator upgrades a
driver, and, without an API server, SIGUSR1 (SIGUSR2 opens it again).
"""

from typing import Final

from atoll.api import names
from atoll.cluster.objects import Node

UPGRADE_STATE: Final = "nvidia.com/gpu-driver-upgrade-state"
"""Label of NVIDIA's operator with the state of a node's driver upgrade."""
UPGRADING: Final = frozenset(
    {"wait-for-jobs-required", "pod-deletion-required", "drain-required", "pod-restart-required"}
)
"""States from cordoning the node until the new driver is loaded; the next state validates it."""


def release_reason(node: Node | None) -> str:
    """Return why the Node wants the driver released; empty if it does not."""
    if node is None:
        return ""
    labels = node.metadata.labels
    if labels.get(names.DRIVER_HOLD) == names.DRIVER_RELEASED:
        return f"the driver was released: label {names.DRIVER_HOLD}"
    state = labels.get(UPGRADE_STATE, "")
    if node.spec.unschedulable and state in UPGRADING:
        return f"the driver was released for its upgrade: {state}"
    return ""
