"""Command lines of a cluster's control plane: etcd, API server, controller manager and scheduler.

Returns argument lists and file contents; starts nothing. All processes listen only in the cluster's own network
namespace: the API server on the bridge, for the nodes, the others on loopback.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from devcluster.addresses import ClusterNetwork, in_url
from devcluster.build import Binaries
from devcluster.certificates import CertificateAuthority, KeyPairFiles, Subject, write_signing_key
from devcluster.errors import StartError
from devcluster.fake_nodes import FAKE_ANNOTATION, KWOK
from devcluster.kubeconfigs import write_kubeconfig

SERVER_PORT = 6443
SCHEDULER_PORT = 10259
CONTROLLER_MANAGER_PORT = 10257
NODE_GRACE_SECONDS = 50

_ETCD = "http://127.0.0.1:2379"
SERVICE_PORT = 443
"""Port of the Service `kubernetes`, which pods use to reach the API server."""


@dataclass(frozen=True, slots=True)
class Layout:
    """File layout and addresses of one cluster."""

    folder: Path
    network: ClusterNetwork = field(default_factory=ClusterNetwork)

    @property
    def server_inside(self) -> str:
        """URL of the API server for processes inside."""
        return f"https://{in_url(self.network.bridge)}:{SERVER_PORT}"

    @property
    def pki(self) -> Path:
        """Certificates and keys."""
        return self.folder / "pki"

    @property
    def kubeconfigs(self) -> Path:
        """One file per identity."""
        return self.folder / "kubeconfigs"

    @property
    def logs(self) -> Path:
        """One file per process."""
        return self.folder / "logs"

    @property
    def etcd(self) -> Path:
        """Data of etcd."""
        return self.folder / "etcd"

    @property
    def audit_policy(self) -> Path:
        """Audit policy of the API server; the file is missing if auditing is off."""
        return self.folder / "audit-policy.yaml"

    @property
    def audit_log(self) -> Path:
        """Audit log: one line of JSON per request."""
        return self.logs / "audit.log"

    @property
    def shared(self) -> Path:
        """Folder for data that pods on different nodes share; every node sees it under the same path."""
        return self.folder / "shared"

    def node(self, name: str) -> Path:
        """Folder of one node."""
        return self.folder / "nodes" / name

    def kubeconfig(self, name: str) -> Path:
        """Kubeconfig of one identity."""
        return self.kubeconfigs / f"{name}.kubeconfig"


def authority(layout: Layout) -> CertificateAuthority:
    """Return the cluster's certificate authority; create it at the first call."""
    return CertificateAuthority(layout.pki, now=dt.datetime.now(dt.UTC))


def write_identities(layout: Layout, *, port: int) -> None:
    """Write certificates and kubeconfigs of the control plane; the administrator's also works from the host.

    Called again, it keeps the key that signs tokens: issued tokens stay valid.
    """
    signer = authority(layout)
    server = Subject(
        "kube-apiserver",
        dns_names=("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"),
        addresses=("127.0.0.1", *layout.network.bridges, layout.network.service),
    )
    signer.issue("apiserver", server)
    signer.issue("apiserver-kubelet-client", Subject("kube-apiserver-kubelet-client", "system:masters"))
    if not (layout.pki / "service-accounts.key").exists():
        write_signing_key(layout.pki / "service-accounts.key")
    for component in ("kube-scheduler", "kube-controller-manager"):
        pair = signer.issue(component, Subject(f"system:{component}"))
        write_inside(layout, signer, name=component, client=pair)
    administrator = signer.issue("admin", Subject("admin", "system:masters"))
    outside = f"https://127.0.0.1:{port}"
    certificate = signer.pair.certificate
    write_kubeconfig(layout.kubeconfig("admin"), server=outside, authority=certificate, client=administrator)
    write_inside(layout, signer, name="admin-inside", client=administrator)


def write_inside(layout: Layout, signer: CertificateAuthority, *, name: str, client: KeyPairFiles) -> Path:
    """Write a kubeconfig for use inside the cluster's namespaces."""
    return write_kubeconfig(
        layout.kubeconfig(name), server=layout.server_inside, authority=signer.pair.certificate, client=client
    )


def write_kwok_identity(layout: Layout) -> None:
    """Write kwok's identity; it simulates kubelets and so needs their group to report the state of containers."""
    signer = authority(layout)
    write_inside(layout, signer, name=KWOK, client=signer.issue(KWOK, Subject(KWOK, "system:nodes")))


def etcd_command(binaries: Binaries, layout: Layout) -> list[str]:
    """Command line of etcd without fsync: faster, but data does not survive a crash of the machine."""
    return [
        str(binaries["etcd"]),
        f"--data-dir={layout.etcd}",
        "--unsafe-no-fsync",
        f"--listen-client-urls={_ETCD}",
        f"--advertise-client-urls={_ETCD}",
        "--listen-peer-urls=http://127.0.0.1:2380",
        "--initial-advertise-peer-urls=http://127.0.0.1:2380",
        "--initial-cluster=default=http://127.0.0.1:2380",
        "--quota-backend-bytes=4294967296",
        "--log-level=warn",
    ]


def write_audit_policy(layout: Layout) -> None:
    """Write a policy that logs who requested what, without request or response bodies."""
    policy = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"]}
    layout.audit_policy.write_text(yaml.safe_dump({**policy, "rules": [{"level": "Metadata"}]}))


def gate_flags(feature_gates: Sequence[str]) -> list[str]:
    """Return the flag that turns these feature gates on."""
    return [f"--feature-gates={','.join(f'{gate}=true' for gate in feature_gates)}"] if feature_gates else []


def api_server_command(binaries: Binaries, layout: Layout, *, feature_gates: Sequence[str] = ()) -> list[str]:
    """Command line of the API server: RBAC, NodeRestriction, service accounts, webhooks by Service without kube-proxy.

    It writes an audit log if there is an audit policy. With feature gates it also serves the beta API of PodGroups.
    """
    pki = layout.pki
    audit = [f"--audit-policy-file={layout.audit_policy}", f"--audit-log-path={layout.audit_log}"]
    return [
        str(binaries["kube-apiserver"]),
        f"--etcd-servers={_ETCD}",
        f"--bind-address={layout.network.bridge}",
        f"--advertise-address={layout.network.bridge}",
        f"--secure-port={SERVER_PORT}",
        f"--cert-dir={pki}",
        f"--tls-cert-file={pki / 'apiserver.crt'}",
        f"--tls-private-key-file={pki / 'apiserver.key'}",
        f"--client-ca-file={pki / 'ca.crt'}",
        f"--kubelet-certificate-authority={pki / 'ca.crt'}",
        f"--kubelet-client-certificate={pki / 'apiserver-kubelet-client.crt'}",
        f"--kubelet-client-key={pki / 'apiserver-kubelet-client.key'}",
        "--kubelet-preferred-address-types=InternalIP",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={pki / 'service-accounts.key'}",
        f"--service-account-signing-key-file={pki / 'service-accounts.key'}",
        f"--service-cluster-ip-range={layout.network.service_networks}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--enable-aggregator-routing=true",
        "--endpoint-reconciler-type=none",
        "--allow-privileged=true",
        *(audit if layout.audit_policy.exists() else ()),
        *(["--runtime-config=scheduling.k8s.io/v1beta1=true"] if feature_gates else []),
        *gate_flags(feature_gates),
    ]


def controller_manager_command(
    binaries: Binaries,
    layout: Layout,
    *,
    node_grace_seconds: int = NODE_GRACE_SECONDS,
    feature_gates: Sequence[str] = (),
) -> list[str]:
    """Command line of the controller manager, each controller with its own service account.

    A node that is silent for `node_grace_seconds` counts as lost.
    """
    kubeconfig = layout.kubeconfig("kube-controller-manager")
    return [
        str(binaries["kube-controller-manager"]),
        *_own_server(CONTROLLER_MANAGER_PORT, kubeconfig=kubeconfig, certificates=layout.pki),
        f"--kubeconfig={kubeconfig}",
        f"--root-ca-file={layout.pki / 'ca.crt'}",
        f"--service-account-private-key-file={layout.pki / 'service-accounts.key'}",
        "--use-service-account-credentials=true",
        "--leader-elect=false",
        f"--node-monitor-grace-period={node_grace_seconds}s",
        f"--flex-volume-plugin-dir={layout.folder / 'volume-plugins'}",
        "--kube-api-qps=200",
        "--kube-api-burst=400",
        *gate_flags(feature_gates),
    ]


def scheduler_command(binaries: Binaries, layout: Layout, *, config: Path, flags: Sequence[str] = ()) -> list[str]:
    """Command line of the stock scheduler; its configuration file names its kubeconfig."""
    kubeconfig = layout.kubeconfig("kube-scheduler")
    return [
        str(binaries["kube-scheduler"]),
        *_own_server(SCHEDULER_PORT, kubeconfig=kubeconfig, certificates=layout.pki),
        f"--config={config}",
        "--v=2",
        *flags,
    ]


def kwok_command(binaries: Binaries, layout: Layout, *, stages: Path) -> list[str]:
    """Command line of kwok, which simulates the pods of fake nodes; it writes no heartbeats."""
    return [
        str(binaries["kwok"]),
        f"--kubeconfig={layout.kubeconfig(KWOK)}",
        f"--config={stages}",
        f"--manage-nodes-with-annotation-selector={FAKE_ANNOTATION}=fake",
        "--node-lease-duration-seconds=0",
        f"--node-ip={layout.network.bridge}",
        "--server-address=127.0.0.1:0",
    ]


def scheduler_configuration(given: str | None, *, kubeconfig: Path) -> str:
    """Return the given KubeSchedulerConfiguration, or a plain one, with the given kubeconfig.

    Raises StartError if the text is not a KubeSchedulerConfiguration.
    """
    default: dict[str, Any] = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
    }
    config: Any = default if given is None else yaml.safe_load(given)
    if not isinstance(config, dict) or config.get("kind") != "KubeSchedulerConfiguration":
        problem = "was given a configuration that is not a KubeSchedulerConfiguration"
        raise StartError("kube-scheduler", problem=problem, log_tail=str(config)[:200])
    connection = {"qps": 500, "burst": 1000, **config.get("clientConnection", {}), "kubeconfig": str(kubeconfig)}
    return yaml.safe_dump({**config, "clientConnection": connection})


def _own_server(port: int, *, kubeconfig: Path, certificates: Path) -> list[str]:
    """Flags for a component's own HTTPS port on loopback; the API server authorizes its readers."""
    return [
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        f"--cert-dir={certificates / f'port-{port}'}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--authorization-always-allow-paths=/healthz,/readyz,/livez,/metrics",
    ]
