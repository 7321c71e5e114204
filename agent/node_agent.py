"""The agent at work: follows its pods, its Node and its report, looks at the machine, publishes.

A thin shell: pure functions elsewhere decide what a look means, when the next one is due and what is written. The order
here matters for evidence: the position in the pod watch is taken first, then the machine is read.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from agent.capacity import capacity_patch, in_use, offer, with_withdrawn
from agent.evidence import EvidenceReading, GpuUse, PodInventory, collect_evidence, with_allocations
from agent.heartbeat import HeartbeatWriter
from agent.identities import LeaseLookup, assign
from agent.inventory import MachineInventory
from agent.kubelet import Kubelet, kubelet_url
from agent.observation import MachineObserver, Observation
from agent.pod_resources import plugin_names
from agent.poll_schedule import PollSchedule, start_wait_seconds
from agent.publishing import StatusWriter, stored_of
from agent.report import ReportContext, build_report, inventory_of, uuids_by_slot
from atoll.api import names
from atoll.api.node_status import Device, GpuNodeStatus, GpuNodeStatusReport
from atoll.api.times import format_microtime
from atoll.cluster.driver_hold import release_reason
from atoll.cluster.leases import lease_name
from atoll.cluster.objects import Node, Pod, decode_lease, decode_node, decode_pod
from atoll.cluster.pods import is_gpu_pod, is_terminal
from atoll.cluster.release import has_ended
from atoll.kube import patches, paths
from atoll.kube.cache import Change, ChangeKind, is_older
from atoll.kube.client import ApiClient
from atoll.kube.clock import Clock, within
from atoll.kube.errors import KubeError, NotFound
from atoll.kube.limits import Backoff
from atoll.kube.reflector import Reflector

SEE_OWN_WRITE_SECONDS = 5.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Intervals:
    """Waits of one agent, in seconds."""

    poll_seconds: float
    urgent_seconds: float
    heartbeat_seconds: float
    start_spread_seconds: float


class NodeAgent:
    """Reports one node. Run the coroutines of `tasks()` concurrently; each runs until cancelled."""

    def __init__(
        self,
        node: str,
        *,
        client: ApiClient,
        observer: MachineObserver,
        kubelet: Kubelet,
        intervals: Intervals,
        agent_version: str,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self.node = node
        self._client = client
        self._observer = observer
        self._kubelet = kubelet
        self._intervals = intervals
        self._agent_version = agent_version
        self._clock = clock
        self._rng = rng
        self._writer = StatusWriter(client, node, clock=clock)
        self._heartbeat = HeartbeatWriter(client, node, clock=clock, period_seconds=intervals.heartbeat_seconds)
        self._inventory = PodInventory()
        self._schedule = PollSchedule(intervals.poll_seconds, intervals.urgent_seconds)
        self._evidence: EvidenceReading | None = None
        self._fresh_version = ""
        self._wants_fresh_version = False
        self._wake = asyncio.Event()
        self._capacity_wake = asyncio.Event()
        self._published = asyncio.Event()
        self._looked_at = self._tried_at = clock.monotonic_seconds()
        self._refused_at: float | None = None
        self._signalled = ""
        self._rewinds_count = 0
        self.kubelet_url = ""
        self.observations_count = 0
        self.failures_count = 0
        self.observation_seconds = 0.0
        self.publications_count = 0
        named = f"metadata.name={node}"

        def watch(path: str, decode: Any, on_event: Any, selector: str = named) -> Reflector[Any]:  # noqa: ANN401
            rewind = self._on_rewind
            options: dict[str, Any] = {"field_selector": selector, "clock": clock, "on_rewind": rewind}
            return Reflector(client, path, decode, on_event=on_event, **options)

        self.pods: Reflector[Pod] = watch(paths.pods(), decode_pod, self._on_pod, f"spec.nodeName={node}")
        self._nodes: Reflector[Node] = watch(paths.nodes(), self._decode_node, self._on_node)
        self._reports: Reflector[GpuNodeStatus] = watch(paths.gpunodestatuses(), stored_of, self._on_report)

    @property
    def has_published(self) -> bool:
        """True once this process has published a report."""
        return self._published.is_set()

    @property
    def evidence_is_complete(self) -> bool:
        """True if absence from the last look means that a pod is gone."""
        return self._evidence is not None and self._evidence.is_complete

    @property
    def devices(self) -> tuple[Device, ...]:
        """Devices of the stored report."""
        report = self._writer.stored_report
        return report.devices if report is not None else ()

    @property
    def watches(self) -> dict[str, Reflector[Any]]:
        """Every watched collection by its kind."""
        return {"pod": self.pods, "node": self._nodes, "report": self._reports}

    def seconds_since_observation(self) -> float:
        """Age of the last look whose result is published, if it was due."""
        return self._clock.monotonic_seconds() - self._looked_at

    def seconds_stuck(self) -> float:
        """Age of the last finished look, published or not; 0 before the API server's first answer, when no look can
        start."""
        if not all(reflector.synced.is_set() for reflector in self.watches.values()):
            return 0.0
        return self._clock.monotonic_seconds() - self._tried_at

    @property
    def driver_problem(self) -> str:
        """Why the last observation found no driver; empty if it found one, or if the driver is released on purpose."""
        return self._observer.problem

    def seconds_refused(self) -> float:
        """Seconds for which the driver library as a whole has failed without a break; 0 while it answers."""
        return self._clock.monotonic_seconds() - self._refused_at if self._refused_at is not None else 0.0

    def release_driver(self, reason: str) -> None:
        """Release the driver until `release_driver("")`, whatever the Node says."""
        self._signalled = reason
        self._wake.set()

    def _release_reason(self) -> str:
        return self._signalled or release_reason(self._nodes.store.get(("", self.node)))

    async def follow_pods(self) -> None:
        """Keep the pods of this node."""
        await self._wait_for_turn()
        await self.pods.run()

    async def follow_node(self) -> None:
        """Keep the Node."""
        await self._wait_for_turn()
        await self._nodes.run()

    async def follow_report(self) -> None:
        """Keep the stored report."""
        await self._wait_for_turn()
        await self._reports.run()

    async def _synced(self) -> None:
        """Wait until every collection was listed."""
        for reflector in self.watches.values():
            await reflector.synced.wait()

    async def _wait_for_turn(self) -> None:
        """Wait before the agent's first request to the API server."""
        await self._clock.sleep(start_wait_seconds(self.node, spread_seconds=self._intervals.start_spread_seconds))

    async def keep_observing(self) -> None:
        """Look at the machine when due, and publish."""
        await self._synced()
        self._tried_at = self._clock.monotonic_seconds()
        backoff = Backoff(self._rng)
        while True:
            self._wake.clear()
            not_before = self._clock.monotonic_seconds() + self._intervals.urgent_seconds
            try:
                await self.observe_once()
                backoff.reset()
                seconds = self._schedule.wait_seconds(
                    has_terminating=bool(self._evidence and self._evidence.terminating)
                )
            except KubeError as error:
                seconds = backoff.next_seconds()
                self.failures_count += 1
                log.warning("Could not publish", err=str(error))
            self._tried_at = self._clock.monotonic_seconds()
            await self._rest(seconds, not_before=not_before)

    async def observe_once(self) -> None:
        """Take one observation; publish it if it is new or owed. Raises KubeError.

        It has a position in the watch of pods, or it would prove nothing. One that began before the API server was
        restored is dropped: its position lies in a future that never was."""
        await self._synced()
        schedule, rewinds_count = self._schedule, self._rewinds_count
        position = await self._position()
        inventory = self._inventory.with_pods(self.pods.by_uid.values(), position=position)
        previous = self._writer.known_report
        if not self.has_published and previous is not None:
            inventory = inventory.with_reported(pod.uid for pod in previous.pods)
        self._inventory = inventory
        began_seconds = self._clock.monotonic_seconds()
        looking = self._observer.observe(release_reason=self._release_reason())
        observation, kubelet = await asyncio.gather(looking, self._kubelet.read())
        self._note_refusal()
        self.observation_seconds = self._clock.monotonic_seconds() - began_seconds
        self.observations_count += 1
        previous = self._writer.known_report
        evidence = collect_evidence(
            inventory,
            cgroups=observation.cgroups,
            kubelet=kubelet,
            use=self._use(observation, previous),
            last_pods=previous.pods if previous else (),
            last_empty=self._evidence.empty if self._evidence else frozenset(),
            last_host=previous.host_uses if previous else (),
        )
        if not self.has_published and not evidence.live_read and await self._heartbeat.was_silent():
            self._writer.is_restored = True
        report = await self._compose(observation, evidence, previous, position=position)
        if rewinds_count != self._rewinds_count:
            return
        is_owed = schedule.must_publish(is_complete=evidence.is_complete, live_read=evidence.live_read)
        if self._writer.is_news(report) or is_owed:
            if not await self._writer.publish(report):
                self._on_rewind()
                return
            self.publications_count += 1
        self._remember(evidence, schedule)

    async def keep_heartbeat(self) -> None:
        """Renew the heartbeat Lease while looks succeed; an agent that cannot look or publish stops renewing. After a
        restore of the API server the report comes first."""
        intervals = self._intervals
        silent_after_seconds = max(3 * intervals.poll_seconds, intervals.heartbeat_seconds)
        backoff = Backoff(self._rng, base_seconds=1.0, max_seconds=intervals.heartbeat_seconds)
        while True:
            await self._published.wait()
            seconds = intervals.heartbeat_seconds * (0.9 + 0.2 * self._rng.random())
            try:
                if self.seconds_since_observation() <= silent_after_seconds:
                    if not await self._heartbeat.renew():
                        log.error("Versions have gone back, or the heartbeat was deleted: etcd may be restored")
                        self._on_rewind()
                        continue
                    backoff.reset()
            except KubeError as error:
                seconds = min(seconds, backoff.next_seconds())
                log.warning("Could not renew the heartbeat", err=str(error))
            await self._clock.sleep(seconds)

    async def keep_capacity(self) -> None:
        """Make the Node offer its GPUs; restore them if somebody removes them."""
        await self._published.wait()
        backoff = Backoff(self._rng, base_seconds=0.5)
        while True:
            self._capacity_wake.clear()
            try:
                await self.offer_once()
                backoff.reset()
                await self._capacity_wake.wait()
            except KubeError as error:
                log.warning("Could not publish the capacity", err=str(error))
                await self._clock.sleep(backoff.next_seconds())

    async def offer_once(self) -> None:
        """Patch the Node's status if its counts are wrong. Raises KubeError."""
        node = self._nodes.store.get(("", self.node))
        report = self._writer.stored_report
        if node is None or report is None:
            return
        offered = with_withdrawn(offer(report), node)
        patch = capacity_patch(node, offered=offered, used=in_use(self.pods.by_uid.values(), offered))
        if patch is None:
            return
        path = paths.nodes(self.node, "status")
        answer = await self._client.patch(path, patches.merge_patch(uid=node.metadata.uid, **patch))
        log.info("Published capacity", **patch["status"]["capacity"])
        version = decode_node(answer).metadata.resource_version
        await self._nodes.wait_for_resource_version(version, SEE_OWN_WRITE_SECONDS)

    def _use(self, observation: Observation, previous: GpuNodeStatusReport | None) -> GpuUse:
        known = [device.uuid for device in previous.devices] if previous is not None else []
        use = observation.use.with_missing(known, observation.machine.pids_by_uuid())
        if observation.plugin_allocations is None:
            return use
        slots = plugin_names(previous.devices if previous is not None else ())
        own = {uuid: uuid for uuid in (*known, *observation.machine.pids_by_uuid())}
        return with_allocations(use, observation.plugin_allocations, self.pods.by_uid.values(), slots | own)

    def _note_refusal(self) -> None:
        now = self._clock.monotonic_seconds()
        self._refused_at = (self._refused_at or now) if self._observer.is_refused else None

    def _remember(self, evidence: EvidenceReading, schedule: PollSchedule) -> None:
        """Remember an observation. It does not settle a deletion that arrived during it."""
        self._evidence = evidence
        self._looked_at = self._clock.monotonic_seconds()
        self._inventory = self._inventory.forget_gone(evidence)
        if self._schedule is schedule:
            self._schedule = schedule.after_reading(is_complete=evidence.is_complete, live_read=evidence.live_read)
        if not self._published.is_set():
            self._published.set()
        self._capacity_wake.set()

    async def _rest(self, seconds: float, *, not_before: float) -> None:
        """Wait `seconds`, or until something requests an observation, but at least until `not_before`."""
        try:
            await within(self._clock, seconds, self._woken())
        except TimeoutError:
            return
        await self._clock.sleep(max(0.0, not_before - self._clock.monotonic_seconds()))

    async def _woken(self) -> None:
        await self._wake.wait()

    async def _position(self) -> str:
        """Position in the pod watch; after a controller's request, at least the API server's current one."""
        if self._wants_fresh_version:
            self._wants_fresh_version = False
            try:
                selector = {"fieldSelector": f"spec.nodeName={self.node}"}
                self._fresh_version = await self._client.current_version(paths.pods(), selector)
            except KubeError:
                self._wants_fresh_version = True
                raise
        watched = self.pods.resource_version
        return self._fresh_version if is_older(watched, self._fresh_version) else watched

    async def _compose(
        self,
        observation: Observation,
        evidence: EvidenceReading,
        previous: GpuNodeStatusReport | None,
        *,
        position: str,
    ) -> GpuNodeStatusReport:
        node = self._nodes.store.get(("", self.node))
        context = ReportContext(
            agent_version=self._agent_version,
            boot_id=observation.boot_id,
            node_uid=node.metadata.uid if node is not None else "",
            position=position,
            now=format_microtime(self._clock.now()),
            releases=self._writer.releases,
            is_first_since_restore=self._writer.is_restored,
        )
        machine = observation.machine
        inventory = inventory_of(previous, machine, context)
        return build_report(
            machine,
            ids=await self._ids(uuids_by_slot(machine), inventory),
            evidence=evidence,
            previous=previous,
            context=context,
        )

    async def _ids(self, uuids: Sequence[str], inventory: MachineInventory) -> dict[str, int]:
        """Ids of the devices; Leases are read only if a new device needs an id."""
        leases: dict[int, str | None] = {}
        known, free_from = inventory.ids, inventory.free_ids_from
        while isinstance(step := assign(uuids, known=known, leases=leases, free_from=free_from), LeaseLookup):
            for device_id in step.ids:
                leases[device_id] = await self._lease_uuid(device_id)
        return dict(step.ids)

    async def _lease_uuid(self, device_id: int) -> str | None:
        """Device uuid in the Lease of an id, empty if it names none; None without a Lease."""
        path = paths.leases(names.SYSTEM_NAMESPACE, lease_name(self.node, device_id))
        try:
            lease = decode_lease(await self._client.get(path))
        except NotFound:
            return None
        return lease.metadata.annotations.get(names.LEASE_DEVICE_UUID, "")

    def _decode_node(self, raw: bytes) -> Node:
        self.kubelet_url = kubelet_url(raw) or self.kubelet_url
        return decode_node(raw)

    def _on_pod(self, change: Change[Pod]) -> None:
        pod = change.object
        self._inventory = self._inventory.with_pod(pod)
        self._capacity_wake.set()
        was_terminal = change.old is not None and is_terminal(change.old)
        departs = change.kind is ChangeKind.DELETED or (is_terminal(pod) and not was_terminal)
        if departs and is_gpu_pod(pod) and not has_ended(pod):
            self._request_report()

    def _on_node(self, change: Change[Node]) -> None:
        self._capacity_wake.set()
        if change.kind is not ChangeKind.MODIFIED or release_reason(change.old) != release_reason(change.object):
            self._wake.set()

    def _on_report(self, change: Change[GpuNodeStatus]) -> None:
        new, stored = change.object, self._writer.stored
        if change.kind is ChangeKind.DELETED:
            if stored is None or stored.metadata.uid == new.metadata.uid:
                self._writer.stored = None
                self._wake.set()
            return
        self._writer.take(new)
        asked = new.metadata.annotations.get(names.EVIDENCE_WANTED)
        before = change.old.metadata.annotations.get(names.EVIDENCE_WANTED) if change.old is not None else None
        if asked is not None and asked != before:
            self._wants_fresh_version = True
            self._request_report()

    def _on_rewind(self) -> None:
        """The API server was restored: forget versions and the stored object, list again, and publish a report."""
        self._rewinds_count += 1
        self._writer.forget()
        self._published.clear()
        self._fresh_version = ""
        for reflector in self.watches.values():
            reflector.begin_anew()
        self._request_report()

    def _request_report(self) -> None:
        self._schedule = self._schedule.after_deletion()
        self._wake.set()
