"""A real Kubernetes with several real nodes on one machine, for the demo, the tests and the benchmarks.

etcd, API server, controller manager, scheduler, kubelets, containerd and runc run in their own namespaces, so a cluster
leaves nothing however it ends. cluster.py has the interface.

Names are imported at first use, so `python -m devcluster.build` and the supervisor load only what they need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from devcluster.cluster import DevCluster
    from devcluster.errors import DevclusterError, RealNodesUnavailableError
    from devcluster.node import DevNode, DevNodeSpec

__all__ = ["DevCluster", "DevNode", "DevNodeSpec", "DevclusterError", "RealNodesUnavailableError"]

_HOMES = {
    "DevCluster": "devcluster.cluster",
    "DevclusterError": "devcluster.errors",
    "DevNode": "devcluster.node",
    "DevNodeSpec": "devcluster.node",
    "RealNodesUnavailableError": "devcluster.errors",
}


def __getattr__(name: str) -> object:
    """Import a public name from the module that defines it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
