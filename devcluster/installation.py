"""Installs Atoll on a development cluster: the shipped manifests, and every part as a process with its own identity.

Tests can kill and restart parts and check their health. The manifests of deploy/ are applied unchanged, but processes
replace Deployments: each gets a token of its own ServiceAccount, the agents' tokens are bound to their Node, and the
extender shares kube-scheduler's.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import yaml

from atoll.api import names
from atoll.kube.election import EXIT_STATUS_OVERRUN
from devcluster.cluster import DevCluster
from devcluster.errors import DevclusterError
from devcluster.machines import GpuMachine
from devcluster.waiting import wait_until

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
WORKLOADS = ("agent.yaml", "controllers.yaml", "webhook-deployment.yaml", "scheduler/deployment.yaml")
"""Files of deploy/kustomization.yaml that processes replace; everything else is applied as shipped."""
WEBHOOK_PORT = 9443
EXTENDER_PORT = 8888
HEALTH_PORTS = {"webhook": 9444, "controllers": 9445, "agent": 9446, "extender": EXTENDER_PORT}
READY_SECONDS = 240.0
LAST_POLICY = "atoll-gone-machines"

_FORGED_WORD = """\
apiVersion: gpu.scheduling/v1
kind: GpuNodeStatus
metadata: {name: probe}
spec: {gone: [{nodeUid: none, reason: probe, by: nobody}]}
"""

_ENDPOINTS = """\
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: {service}-dev
  namespace: {namespace}
  labels:
    kubernetes.io/service-name: {service}
    endpointslice.kubernetes.io/managed-by: atoll-devcluster
addressType: {kind}
ports:
  - name: https
    port: {port}
    protocol: TCP
endpoints:
  - addresses: ["{address}"]
    conditions: {{ready: true}}
"""

_PROBE = """\
import sys, urllib.request
sys.exit(0 if urllib.request.urlopen(sys.argv[1], timeout=2).status == 200 else 1)
"""


@dataclass(frozen=True, slots=True)
class AtollPart:
    """One process of Atoll: name, command, node and identity."""

    name: str
    module: str
    account: str
    arguments: tuple[str, ...]
    health_port: int
    node: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


class Installation:
    """Atoll installed on one cluster."""

    def __init__(
        self,
        cluster: DevCluster,
        *,
        options: Mapping[str, Sequence[str]] | None = None,
        machines: Mapping[str, GpuMachine] | None = None,
    ) -> None:
        """`options` adds command-line arguments per module: {"agent": ["--poll-seconds", "2"]}.

        Agents of nodes in `machines` read these through the vendor's real bindings; the others simulate their node's
        profile.
        """
        self.cluster = cluster
        self._options = options or {}
        self._machines = machines or {}
        self.parts = {part.name: part for part in self._all_parts()}

    def install(self) -> None:
        """Apply the manifests and start every part; return when all are ready and the policies refuse. Raises
        DevclusterError."""
        self.apply_manifests()
        wait_until(self._is_guarded, what="the policies", timeout_seconds=READY_SECONDS)
        self.start_parts()

    def start_parts(self) -> None:
        """Start every part and kube-scheduler; return when all are ready. Raises StartError."""
        for name in self.parts:
            self.start(name, wait=False)
        self.start_scheduler()
        self.wait_ready(self.parts)

    def start_scheduler(self, config: Path = DEPLOY / "scheduler" / "config.yaml") -> None:
        """Start kube-scheduler with the shipped flags and, as shipped, configuration, as the extender's account."""
        account = self._kubeconfig(self.parts["extender"])
        self.cluster.start_scheduler(config, account, flags=shipped_scheduler_flags())

    def apply_manifests(self) -> None:
        """Apply deploy/ in order; objects of new kinds wait until the API server serves the kind."""
        resources = yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())["resources"]
        shipped = [str(DEPLOY / file) for file in resources if file not in WORKLOADS]
        kinds = [file for file in shipped if "/crds/" in file]
        namespaces = [file for file in shipped if file.endswith("/namespaces.yaml")]
        self._kubectl("apply", "--server-side", *_files(namespaces + kinds))
        self._kubectl("wait", "--for=condition=Established", "--timeout=120s", *_files(kinds))
        rest = [file for file in shipped if file not in namespaces + kinds]
        self._kubectl("apply", "--server-side", *_files(rest))
        network = self.cluster.layout.network
        endpoints = _ENDPOINTS.format(
            service=names.WEBHOOK_SERVICE,
            namespace=names.SYSTEM_NAMESPACE,
            kind=network.slice_type,
            port=WEBHOOK_PORT,
            address=network.bridge,
        )
        self._kubectl("apply", "--server-side", "-f", "-", text=endpoints)

    def _is_guarded(self) -> bool:
        """True once the policy that is applied last refuses a word in another's name: the API server takes policies up
        in their order, a moment after they were applied."""
        return LAST_POLICY in self.cluster.kubectl("create", "--dry-run=server", "-f", "-", input=_FORGED_WORD).stderr

    def start(self, name: str, *, wait: bool = True) -> None:
        """Start a part that is not running; with `wait`, return when it is ready."""
        part = self.parts[name]
        command = [sys.executable, "-m", part.module, "--kubeconfig", str(self._kubeconfig(part)), *part.arguments]
        options = self._options.get(part.module, ())
        self.cluster.spawn(part.name, [*command, *options], node=part.node, env=part.environment)
        if wait:
            self.wait_ready([name])

    def stop(self, name: str) -> None:
        """End a part with SIGTERM, as Kubernetes does first: it finishes its work and releases leadership."""
        self.cluster.signal(name, "TERM")
        self.cluster.wait_exit(name)

    def kill(self, name: str) -> None:
        """End a part with SIGKILL, as the kernel does when memory runs out; does nothing if it has ended already."""
        self.cluster.signal(name, "KILL")
        self.cluster.wait_exit(name)

    def revive(self) -> None:
        """Restart parts that ended because they lost leadership, as a Deployment would; return at once."""
        processes = self.cluster.processes()
        for name in self.parts:
            if name in processes and processes[name].exit_code == EXIT_STATUS_OVERRUN:
                self.start(name, wait=False)

    def restart(self, name: str) -> None:
        """Kill and start a part; return when it is ready."""
        self.kill(name)
        self.start(name)

    def log_lines(self, name: str) -> list[str]:
        """Return the output of a part so far."""
        return self.cluster.logs(name).read_text(errors="replace").splitlines()

    def wait_ready(self, part_names: Iterable[str]) -> None:
        """Wait until the parts are ready. Raises StartError with the tail of the log."""
        for name in part_names:
            wait_until(
                partial(self.is_ready, name),
                what=name,
                timeout_seconds=READY_SECONDS,
                control=self.cluster.control,
                process=name,
                log=self.cluster.logs(name),
            )

    def is_ready(self, name: str) -> bool:
        """True if a part's /readyz answers 200."""
        part = self.parts[name]
        url = f"http://127.0.0.1:{part.health_port}/readyz"
        return self.cluster.run(sys.executable, "-c", _PROBE, url, node=part.node).returncode == 0

    def _all_parts(self) -> tuple[AtollPart, ...]:
        ports = HEALTH_PORTS
        host = self.cluster.layout.network.bridge
        webhook = ("--host", host, "--port", str(WEBHOOK_PORT), "--health-port", str(ports["webhook"]))
        controllers = ("--health-port", str(ports["controllers"]))
        return (
            AtollPart("controllers", "controllers", "atoll-controllers", controllers, ports["controllers"]),
            AtollPart("webhook", "webhook", "atoll-webhook", webhook, ports["webhook"]),
            AtollPart("extender", "extender", "atoll-scheduler", ("--port", str(EXTENDER_PORT)), EXTENDER_PORT),
            *(self._agent(node.name, node.profile) for node in self.cluster.nodes),
        )

    def _agent(self, node: str, profile: str) -> AtollPart:
        machine = self.cluster.node(node)
        played = self._machines.get(node)
        source = {"--backend": "simulated", "--profile": profile}
        if played:
            source = {"--backend": played.backend, "--pci-devices": str(played.pci_devices)}
        settings = {
            "--node": node,
            **source,
            "--cgroup-root": machine.cgroup_root,
            "--start-jitter-seconds": "0.1",
            "--health-host": "*",  # as shipped
            "--health-port": str(HEALTH_PORTS["agent"]),
        }
        arguments = tuple(word for setting in settings.items() for word in setting)
        environment = played.environment if played else {}
        return AtollPart(f"agent@{node}", "agent", "atoll-agent", arguments, HEALTH_PORTS["agent"], node, environment)

    def _kubeconfig(self, part: AtollPart) -> Path:
        namespace = names.HEARTBEAT_NAMESPACE if part.module == "agent" else names.SYSTEM_NAMESPACE
        return self.cluster.service_account_kubeconfig(namespace, part.account, node=part.node)

    def _kubectl(self, *arguments: str, text: str | None = None) -> None:
        done = self.cluster.kubectl(*arguments, input=text)
        if done.returncode != 0:
            raise DevclusterError(f"kubectl {' '.join(arguments)} failed:\n{done.stderr.strip()}")


def shipped_scheduler_flags() -> list[str]:
    """Return the flags of kube-scheduler in deploy/, without the path of its configuration file."""
    documents = yaml.safe_load_all((DEPLOY / "scheduler" / "deployment.yaml").read_text())
    pods = [document["spec"]["template"]["spec"] for document in documents if document["kind"] == "Deployment"]
    command = next(c["command"] for c in pods[0]["containers"] if c["name"] == "kube-scheduler")
    return [word for word in command[1:] if not word.startswith("--config=")]


def _files(paths: Iterable[str]) -> list[str]:
    return [word for path in paths for word in ("-f", path)]
