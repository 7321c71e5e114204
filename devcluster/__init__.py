"""A real Kubernetes with several real nodes on one machine, for the demo, the tests and the benchmarks.

etcd, API server, controller manager, scheduler, kubelets, containerd and runc, all in namespaces of their own: nothing
of a cluster is left when it ends, however it ends. See cluster.py for what one can do with it.
"""

from devcluster.cluster import Cluster
from devcluster.errors import DevclusterError, RealNodesUnavailableError
from devcluster.node import Node, NodeSpec

__all__ = ["Cluster", "DevclusterError", "Node", "NodeSpec", "RealNodesUnavailableError"]
