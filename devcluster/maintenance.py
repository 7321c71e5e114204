"""What administrators do to a running control plane: replace its certificate authority, back up etcd, restore it.

Each restarts the control plane. The caller restarts kube-scheduler afterwards: it ends when the API server is away for
longer than its leadership lasts, and does not read a new authority by itself. After a restoration the caller restarts
the kubelets too, as Kubernetes' documentation asks. Everything else in the cluster runs on.
"""

import shutil
from pathlib import Path

from devcluster import control_plane, state
from devcluster.cluster import DevCluster
from devcluster.kubeconfigs import replace_authority
from devcluster.node import NodeFiles


def replace_certificate_authority(cluster: DevCluster) -> None:
    """Replace the API server's authority and everything that it signed, in the files of every kubeconfig too; the old
    one is not trusted any more. Restarts the kubelets."""
    layout, record = cluster.layout, state.read_record(cluster.layout.folder)
    accounts = sorted(layout.kubeconfigs.glob("account_*.kubeconfig"))

    def between() -> None:
        for file in ("ca.crt", "ca.key"):
            (layout.pki / file).unlink()
        signer = control_plane.authority(layout)
        control_plane.write_identities(layout, port=record.port)
        for node in record.nodes:
            NodeFiles(layout, node, record.name).write_identity(signer)
        for kubeconfig in accounts:
            replace_authority(kubeconfig, signer.pair.certificate)

    cluster.restart_control_plane(between)
    for node in record.nodes:
        cluster.restart_kubelet(node.name)


def back_up_etcd(cluster: DevCluster, folder: Path) -> None:
    """Copy etcd's data into a new folder, while it is stopped."""
    cluster.restart_control_plane(lambda: shutil.copytree(cluster.layout.etcd, folder))


def restore_etcd(cluster: DevCluster, folder: Path, *, raise_versions_by: int = 0) -> None:
    """Put a copy back: everything that was written since is lost, and versions go back, unless they are raised past
    those that clients have seen."""

    def between() -> None:
        shutil.rmtree(cluster.layout.etcd)
        shutil.copytree(folder, cluster.layout.etcd)

    cluster.restart_control_plane(between, raise_versions_by=raise_versions_by)
