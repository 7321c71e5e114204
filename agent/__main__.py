"""`python -m agent`: reads settings, builds the parts, runs them until a signal.

Exit status: 0 after an orderly end, 1 after a fault, 2 for invalid settings.
"""

import asyncio
import random
import signal
import ssl
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import orjson
import structlog
from aiohttp import web

from agent.amd import AmdBackend
from agent.backends import Backend
from agent.errors import SettingsMistake
from agent.evidence import PodInventory, collect_evidence
from agent.identities import LeaseLookup, assign
from agent.kubelet import Kubelet, unverified_context
from agent.metrics import agent_metrics
from agent.node_agent import Intervals, NodeAgent
from agent.nvml import NvmlBackend
from agent.observation import MachineObserver
from agent.report import ReportContext, build_report, uuids_by_slot
from agent.settings import AgentSettings, BackendName
from agent.simulated import SimulatedBackend, play
from atoll import VERSION
from atoll.api.times import format_microtime
from atoll.kube.client import ApiClient
from atoll.kube.credentials import Credentials
from atoll.service import logs, settings
from atoll.service.api_metrics import count_calls
from atoll.service.clock import SystemClock
from atoll.service.errors import SettingsError
from atoll.service.http import Check, add_health, application, serve
from atoll.service.metrics import Metrics
from atoll.service.runtime import run, supervise
from topology.errors import ProfileError
from topology.profiles import profile

log = structlog.get_logger(__name__)

STATUS_SETTINGS = 2
BODY_BYTES_MAX = 4096
READY_SECONDS_MIN = 120.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent and return its exit status."""
    try:
        values = settings.load(AgentSettings, sys.argv[1:] if argv is None else argv, "ATOLL_AGENT")
        logs.configure(values.log_level, "agent")
        backend = _backend(values)
    except (SettingsError, SettingsMistake, ProfileError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return STATUS_SETTINGS
    if values.once:
        sys.stdout.write(asyncio.run(report_once(values, backend)) + "\n")
        return 0
    settings.log_effective(values)
    return run(lambda: serve_agent(values, backend))


async def serve_agent(values: AgentSettings, backend: Backend) -> None:
    """Report until cancelled."""
    credentials = await Credentials.load(values.kubeconfig)
    clock = SystemClock()
    trust = _trust(values, credentials)
    async with ApiClient(credentials, user_agent="atoll-agent", requests_per_second=10, burst=50) as client:
        kubelet = Kubelet(
            lambda: values.kubelet_url or agent.kubelet_url,
            headers=credentials.headers,
            context=trust,
        )
        agent = NodeAgent(
            values.node,
            client=client,
            observer=_observer(values, backend),
            kubelet=kubelet,
            intervals=Intervals(
                values.poll_seconds, values.urgent_seconds, values.heartbeat_seconds, values.start_jitter_seconds
            ),
            agent_version=VERSION,
            clock=clock,
            rng=random.Random(),  # noqa: S311 - jitter
        )
        app = application(body_bytes_max=BODY_BYTES_MAX)
        stale_seconds = values.start_jitter_seconds + max(READY_SECONDS_MIN, 4 * values.poll_seconds)
        metrics = Metrics("agent")
        agent_metrics(metrics, agent)
        count_calls(metrics, client)
        add_agent_health(
            app, agent, metrics, stale_seconds=stale_seconds, driver_seconds_max=values.driver_restart_seconds
        )
        handle_signals(agent)
        try:
            await supervise(
                pods=agent.follow_pods(),
                node=agent.follow_node(),
                report=agent.follow_report(),
                looks=agent.keep_observing(),
                heartbeat=agent.keep_heartbeat(),
                capacity=agent.keep_capacity(),
                http=serve(app, values.health_host, values.health_port),
            )
        finally:
            await kubelet.close()
            backend.close()


def _trust(values: AgentSettings, credentials: Credentials) -> Callable[[], ssl.SSLContext]:
    """Return what makes a context that trusts the kubelet's certificate."""
    if values.kubelet_insecure:
        log.warning("The kubelet's certificate is not verified, as kubelet_insecure says")
        return unverified_context
    if values.kubelet_ca is not None:
        return partial(ssl.create_default_context, cafile=str(values.kubelet_ca))
    return credentials.authority_context


async def report_once(values: AgentSettings, backend: Backend) -> str:
    """Return this machine's report as JSON text without asking any cluster. Ids are those of a new node, pods are all
    that have a cgroup here, and the kubelet's list counts as unread."""
    observation = await _observer(values, backend).observe()
    backend.close()
    uuids = uuids_by_slot(observation.machine)
    leases: dict[int, str | None] = {}
    while isinstance(step := assign(uuids, known={}, leases=leases), LeaseLookup):
        leases |= dict.fromkeys(step.ids)
    report = build_report(
        observation.machine,
        ids=step.ids,
        evidence=collect_evidence(PodInventory(), cgroups=observation.cgroups, kubelet=None, use=observation.use),
        previous=None,
        context=ReportContext(
            agent_version=VERSION,
            boot_id=observation.boot_id,
            node_uid="",
            position="",
            now=format_microtime(SystemClock().now()),
        ),
    )
    return orjson.dumps(report.to_json(), option=orjson.OPT_INDENT_2).decode()


def _backend(values: AgentSettings) -> Backend:
    if values.backend is BackendName.NVML:
        return NvmlBackend(
            step_seconds=values.step_seconds, boot_id_path=values.boot_id_file, pci_devices=values.pci_devices
        )
    if values.backend is BackendName.AMD:
        return AmdBackend(
            step_seconds=values.step_seconds, boot_id_path=values.boot_id_file, pci_devices=values.pci_devices
        )
    uuids = tuple(part for part in values.simulated_uuids.split(",") if part)
    machine = play(
        profile(values.profile), seed=values.seed or values.node, order=values.simulated_order, given_uuids=uuids
    )
    return SimulatedBackend(machine, state_path=values.simulated_state)


def _observer(values: AgentSettings, backend: Backend) -> MachineObserver:
    return MachineObserver(
        backend,
        cgroup_root=values.cgroup_root,
        cgroup_mount=values.cgroup_mount,
        proc_mount=values.proc_mount,
        timeout_seconds=values.read_timeout_seconds,
        pod_resources=values.pod_resources,
    )


def handle_signals(agent: NodeAgent) -> None:
    """Release the driver on SIGUSR1, open it again on SIGUSR2."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, agent.release_driver, "the driver was released: SIGUSR1")
    loop.add_signal_handler(signal.SIGUSR2, agent.release_driver, "")


def add_agent_health(
    app: web.Application, agent: NodeAgent, metrics: Metrics, *, stale_seconds: float, driver_seconds_max: float
) -> None:
    """Live while observations finish and the driver library has not failed for too long; ready once the first report
    is published and the driver answers. An agent that cannot reach the API server stays live: a restart would not help,
    and would delay its first report once the server is back."""
    checks: Mapping[str, Check] = {
        "looks": lambda: None if agent.seconds_stuck() <= stale_seconds else "no observation of the machine finishes",
        "driver": lambda: None if agent.seconds_refused() <= driver_seconds_max else agent.driver_problem,
    }
    ready: Mapping[str, Check] = {
        "report": lambda: None if agent.has_published else "no report is published yet",
        "driver": lambda: agent.driver_problem or None,
    }
    add_health(app, live=checks, ready=ready, metrics=metrics)


if __name__ == "__main__":
    sys.exit(main())
