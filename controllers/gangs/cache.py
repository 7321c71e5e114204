"""What the gang reconcilers share: members by gang, candidates for admission, snapshots of the cluster.

A gang that one reconciler works on is in `busy`, and the others leave it alone. Nothing here outlives a leadership
term: all of it is read from the objects again.
"""

import asyncio
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from atoll.api import names
from atoll.api.gangs import PRESENT_MAX, GpuGang, GpuGangStatus
from atoll.api.times import seconds_of
from atoll.api.topologies import Topology
from atoll.cluster import host_fit, pods, volume_fit
from atoll.cluster.daemons import coming_daemons, waits_for_node
from atoll.cluster.gangs import conditions
from atoll.cluster.gangs.bind_order import bind_waves
from atoll.cluster.gangs.lifecycle import GangView, Obstacle
from atoll.cluster.gangs.member_requests import member_requests
from atoll.cluster.gangs.membership import (
    STARTED,
    GangKey,
    GangMember,
    MemberStage,
    gang_key,
    has_gate,
    key_of,
    members_of,
    stage_of,
)
from atoll.cluster.gangs.node_domains import (
    NodeDomains,
    choose_topology,
    demands_a_level,
    fabric_clique,
    node_domains_of,
)
from atoll.cluster.gangs.pod_groups import group_of
from atoll.cluster.gangs.queue import AdmissionAttempts
from atoll.cluster.gangs.readiness_policy import OutOfBounds, PolicyBounds, ReadinessPolicy, policy_for
from atoll.cluster.gangs.search_input import PlacementSnapshot
from atoll.cluster.gangs.sizes import size_conflict_of
from atoll.cluster.gangs.succeeded import known_uids
from atoll.cluster.leases import LeaseRecord, lease_name
from atoll.cluster.machines import Cell
from atoll.cluster.objects import Node, Pod, PodSpec
from atoll.cluster.pod_fit import affinity_terms
from atoll.cluster.release import version_number
from atoll.cluster.requests import Request
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.clock import Clock
from atoll.kube.events import ObjectReference
from atoll.kube.mirror import ClusterMirror, WatchedKind


@dataclass(frozen=True, slots=True)
class GangRules:
    """What the administrator says about gangs. `strict_order`: a gang that finds no place keeps later ones waiting.

    `preemption`: pods of lower priority are evicted for a gang that has waited for `preemption_delay_seconds`.
    `hold_after_seconds`: when GPUs that fall free begin to be kept for the gang that is first in order;
    `hold_seconds`: how long, at most; 0 for never.
    """

    policy: ReadinessPolicy = field(default_factory=ReadinessPolicy)
    bounds: PolicyBounds = field(default_factory=PolicyBounds)
    strict_order: bool = False
    preemption: bool = True
    preemption_delay_seconds: float = 5.0
    preemption_timeout_seconds: float = 600.0
    hold_after_seconds: float = 60.0
    hold_seconds: float = 600.0


class GangCache:
    """Members by gang, and what goes on. One event loop owns it."""

    def __init__(self, mirror: ClusterMirror, clock: Clock, rules: GangRules) -> None:
        self.mirror = mirror
        self.clock = clock
        self.rules = rules
        self.busy: set[GangKey] = set()
        self.candidates: set[GangKey] = set()
        self.attempts: dict[GangKey, AdmissionAttempts] = {}
        self.room_at_seconds = 0.0
        self.group_conflicts: dict[GangKey, str] = {}
        """Why the GpuGang contradicts the PodGroup of its members; empty if it does not."""
        self._uids: dict[GangKey, set[str]] = {}
        self._gone: dict[GangKey, dict[str, Pod]] = {}
        self._homes: dict[str, str] = {}
        self._written: dict[str, int] = {}
        self._unanswered: dict[GangKey, tuple[str, str]] = {}
        """The gang's uid, and its version on which a write of its status was based that got no answer."""
        self._node_domains: dict[tuple[str, str, bool, bool], NodeDomains | Obstacle] = {}
        self._snapshot: tuple[tuple[object, ...], PlacementSnapshot] | None = None
        self._needs: dict[str, tuple[PodSpec, dict[str, int]]] = {}
        for pod in mirror.pods.by_uid.values():
            self._note(pod)

    def observe(self, kind: WatchedKind, change: Change[Any]) -> GangKey | None:
        """Take a change of any object; return the gang that it concerns."""
        if kind in {WatchedKind.NODE, WatchedKind.TOPOLOGY, WatchedKind.REPORT} and not _is_in_place(kind, change):
            self._node_domains.clear()
        if kind is WatchedKind.POD and change.kind is ChangeKind.DELETED:
            self._needs.pop(change.object.metadata.uid, None)
        if kind is WatchedKind.GANG:
            return self._observe_gang(change)
        if kind is not WatchedKind.POD:
            return None
        key = gang_key(change.object)
        if key is None:
            return None
        if change.kind is ChangeKind.DELETED or not has_gate(change.object):
            self._homes.pop(change.object.metadata.uid, None)
        if change.kind is ChangeKind.DELETED:
            self._note_gone(key, change)
            self._uids.get(key, set()).discard(change.object.metadata.uid)
            if not self._uids.get(key):
                self._uids.pop(key, None)
        else:
            self._note(change.object)
        return key

    def _observe_gang(self, change: Change[GpuGang]) -> GangKey:
        key = key_of(change.object)
        if change.kind is ChangeKind.DELETED:
            self._gone.pop(key, None)
            self.group_conflicts.pop(key, None)
        if not self.is_in_doubt(change.object):
            self._unanswered.pop(key, None)
        return key

    def _note(self, pod: Pod) -> None:
        key = gang_key(pod)
        if key is not None:
            self._uids.setdefault(key, set()).add(pod.metadata.uid)

    def _note_gone(self, key: GangKey, change: Change[Pod]) -> None:
        """Keep a member that succeeded and was deleted before a reconcile saw it, until the status counts it."""
        last, is_known = change.old or change.object, self.gang(key) is not None
        if is_known and stage_of(last) is MemberStage.SUCCEEDED and len(self._gone.get(key, ())) < PRESENT_MAX:
            self._gone.setdefault(key, {})[last.metadata.uid] = last

    def _gone_of(self, gang: GpuGang) -> list[Pod]:
        """Return members that succeeded in this admission and were deleted, but are not in the status yet; also for a
        GpuGang that is about to take over running members."""
        status, gone = gang.status or GpuGangStatus(), self._gone.pop(key_of(gang), None)
        is_admitted = conditions.is_true(status.conditions, names.CONDITION_ADMITTED)
        if not gone or not (is_admitted or any(stage_of(pod) in STARTED for pod in self.pods_of(key_of(gang)))):
            return []
        known = known_uids(status.succeeded)
        self._gone[key_of(gang)] = left = {uid: pod for uid, pod in gone.items() if uid not in known}
        return list(left.values())

    def attempts_of(self, gang: GpuGang) -> AdmissionAttempts:
        """Return the attempts in vain of this very gang, as it is written now."""
        identity = (gang.metadata.uid, gang.metadata.generation or 0)
        known = self.attempts.get(key_of(gang))
        return known if known is not None and known.gang == identity else AdmissionAttempts(identity)

    def note_capacity(self) -> None:
        """Remember that something has made room just now."""
        self.room_at_seconds = self.clock.monotonic_seconds()

    def now_seconds(self) -> float:
        """Return the time in seconds since 1970."""
        return self.clock.now().timestamp()

    # Gangs

    def keys(self) -> set[GangKey]:
        """Return every gang that exists or has members."""
        stored = self.mirror.gangs.store if self.mirror.gangs is not None else {}
        return {*stored, *self._uids}

    def gangs(self) -> list[GpuGang]:
        """Return all GpuGangs, by name."""
        stored = self.mirror.gangs.store if self.mirror.gangs is not None else {}
        return [stored[key] for key in sorted(stored)]

    def gang(self, key: GangKey) -> GpuGang | None:
        """Return the GpuGang as last seen."""
        return self.mirror.gangs.store.get(key) if self.mirror.gangs is not None else None

    def topologies(self) -> list[Topology]:
        """Return all Topologies, by name."""
        stored = self.mirror.topologies.store if self.mirror.topologies is not None else {}
        return [stored[key] for key in sorted(stored)]

    def pods_of(self, key: GangKey) -> list[Pod]:
        """Return the pods of a gang."""
        found = (self.mirror.pods.by_uid.get(uid) for uid in self._uids.get(key, ()))
        return [pod for pod in found if pod is not None]

    def note_written(self, gang_uid: str, version: str) -> None:
        """Remember which version our own write left, so that nothing is decided on an older one."""
        self._written[gang_uid] = version_number(version)
        while len(self._written) > 100_000:
            del self._written[next(iter(self._written))]

    def note_unanswered(self, gang: GpuGang) -> None:
        """Remember that a write of this gang's status may still arrive, as long as the gang has this version."""
        self._unanswered[key_of(gang)] = (gang.metadata.uid, gang.metadata.resource_version)

    def is_in_doubt(self, gang: GpuGang) -> bool:
        """Tell whether a write of the gang's status may still arrive: another version refuses it."""
        return self._unanswered.get(key_of(gang)) == (gang.metadata.uid, gang.metadata.resource_version)

    def gangs_in_doubt(self) -> list[GpuGang]:
        """Return the gangs in doubt on which no reconciler works, by name."""
        found = (self.gang(key) for key in sorted(self._unanswered.keys() - self.busy))
        return [gang for gang in found if gang is not None and self.is_in_doubt(gang)]

    def is_current(self, gang: GpuGang) -> bool:
        """Tell whether the mirror shows our own last write of the gang, or something newer, and none may still
        arrive; and the open gates of its members that hold nothing, by which alone they differ from others."""
        version = version_number(gang.metadata.resource_version)
        are_seen = self._homes.keys().isdisjoint(self._uids.get(key_of(gang), ()))
        return are_seen and version >= self._written.get(gang.metadata.uid, 0) and not self.is_in_doubt(gang)

    def view(self, gang: GpuGang) -> GangView:
        """Return everything that a decision about the gang is made on."""
        found = [*self.pods_of(key_of(gang)), *self._gone_of(gang)]
        holders = {pod.metadata.uid: self.holds(pod) for pod in found}
        members = members_of(found, gang.spec, holders, {pod.metadata.uid: self._held_since(pod) for pod in found})
        policy = policy_for(self.rules.policy, self.rules.bounds, gang.spec.wait_for_pods_ready)
        if isinstance(policy, OutOfBounds):
            return GangView(gang, members, self.rules.policy, Obstacle("OutOfBounds", policy.message))
        conflict = size_conflict_of(gang, found)
        problem = str(conflict or self.group_conflicts.get(key_of(gang), ""))
        if problem:
            return GangView(gang, members, policy, Obstacle("Invalid", problem))
        domains = self.node_domains(gang)
        return GangView(gang, members, policy, domains if isinstance(domains, Obstacle) else None)

    def holds(self, pod: Pod) -> bool:
        """Tell whether GPUs are reserved for a pod, or are just being reserved."""
        ledger = self.mirror.ledger
        return bool(ledger.leases_of(pod.metadata.uid)) or ledger.assumed(pod.metadata.uid) is not None

    def reservation(self, member: GangMember) -> tuple[str, tuple[str, ...]]:
        """Return the node and the Leases of what is reserved for a gated member: what this process has assumed, else
        the most Leases of one attempt, and no Leases where those are too few."""
        ledger = self.mirror.ledger
        assumed = ledger.assumed(member.uid)
        if assumed is not None:
            return assumed.node, tuple(lease_name(assumed.node, device_id) for device_id in assumed.device_ids)
        attempts: dict[str, list[LeaseRecord]] = {}
        for record in ledger.leases_of(member.uid):
            attempts.setdefault(record.attempt, []).append(record)
        records = max(attempts.values(), key=len, default=[])
        requests = self.requests([member])
        is_whole = isinstance(requests, Obstacle) or len(records) == requests[member.uid].ask.count
        node = records[0].node if records else ""
        return node, tuple(record.lease_name for record in records) if is_whole else ()

    def _held_since(self, pod: Pod) -> float | None:
        """Return when the first of a pod's Leases came to be; None for a pod that has none, or is bound."""
        if pod.spec.node_name:
            return None
        times = (seconds_of(record.created) for record in self.mirror.ledger.leases_of(pod.metadata.uid))
        return min((time for time in times if time is not None), default=None)

    def assume_home(self, uid: str, node: str) -> None:
        """Count a member without GPUs on its node until its gate is seen open, so that no other takes its place."""
        self._homes[uid] = node
        self._snapshot = None

    def forget_home(self, uid: str) -> None:
        """Count a member on no node: it was not let go."""
        if self._homes.pop(uid, None) is not None:
            self._snapshot = None

    def node_domains(self, gang: GpuGang) -> NodeDomains | Obstacle:
        """Return where the nodes stand for this gang."""
        topology = choose_topology(gang.spec, self.topologies())
        if isinstance(topology, Obstacle):
            return topology
        nodes = self.mirror.nodes.store.values()
        is_strict = demands_a_level(gang.spec)
        is_confined = is_strict or gang.spec.topology_name is not None
        version = topology.metadata.resource_version if topology is not None else ""
        key = (topology.metadata.name if topology is not None else "", version, is_strict, is_confined)
        if key not in self._node_domains:
            self._node_domains[key] = node_domains_of(
                topology, nodes, self.mirror.reports, strict=is_strict, confined=is_confined
            )  # fmt: skip
        return self._node_domains[key]

    def requests(self, members: Iterable[GangMember]) -> dict[str, Request] | Obstacle:
        """Return what each member asks for, by uid, without those that need no GPUs; or why one cannot be served."""
        mirror = self.mirror
        return member_requests(
            members, lambda pod: mirror.claim(pod.metadata.namespace, pods.claim_name(pod)), mirror.reservation_of
        )

    # The cluster

    def snapshot(self, reservation: str = "") -> PlacementSnapshot:
        """Return the cluster at this moment; the same one as long as nothing changes. `reservation`: uid of the
        GpuReservation that the gang is confined to."""
        mirror, ledger, now = self.mirror, self.mirror.ledger, self.clock.monotonic_seconds()
        cells = ledger.cells(now_seconds=now)
        csi = (mirror.csi_nodes, mirror.csi_drivers, mirror.capacities)
        volumes = (mirror.volumes, mirror.volume_claims, mirror.storage_classes, *csi)
        watched = (mirror.pods, mirror.nodes, mirror.namespaces, *volumes)
        moment = (ledger.revision, *(one.resource_version for one in watched if one is not None))
        if self._snapshot is None or self._snapshot[0] != moment:
            self._snapshot = (moment, self._take_snapshot(dict(cells)))
        return self._snapshot[1].confined(ledger, reservation, now_seconds=now)

    async def bindable(self, view: GangView, homes: Mapping[str, str]) -> set[str]:
        """Return the gated members, of those with these nodes by uid, that kube-scheduler can bind now. Others wait
        until the members whom they have to be near are bound; not those of a PodGroup, which it binds together."""
        unbound = (one for one in view.members if one.stage in STARTED and not one.pod.spec.node_name)
        known = {**{one.uid: self._coming_to(one.pod) for one in unbound}, **homes}
        members = [one for one in view.members if known.get(one.uid)]
        if any(map(group_of, (one.pod for one in members))) or not any(affinity_terms(one.pod) for one in members):
            return set(homes)
        placed = [(one.pod_set, one.pod, known[one.uid]) for one in members]
        first, *_ = await asyncio.to_thread(bind_waves, placed, self.snapshot())
        return {members[number].uid for number in first} & homes.keys()

    def admitted(self) -> dict[GangKey, GangView]:
        """Return every admitted gang."""
        views = {(one.metadata.namespace, one.metadata.name): self.view(one) for one in self.gangs()}
        return {key: view for key, view in views.items() if view.is_admitted}

    def _take_snapshot(self, cells: dict[str, Cell]) -> PlacementSnapshot:
        on: dict[str, list[Pod]] = {}
        for pod in self.mirror.pods.by_uid.values():
            node = pod.spec.node_name or self._coming_to(pod)
            if node and not pods.is_terminal(pod):
                on.setdefault(node, []).append(pod)
        nodes = {node.metadata.name: node for node in self.mirror.nodes.store.values()}
        for name, coming in coming_daemons(nodes, on, now_seconds=self.now_seconds()).items():
            on.setdefault(name, []).extend(coming)
        return PlacementSnapshot(
            nodes=nodes,
            devices=dict(self.mirror.ledger.nodes),
            cells=cells,
            pods_on=on,
            free={name: self._free(node, on.get(name, ())) for name, node in nodes.items()},
            volumes=self._volumes(),
            namespaces=self._namespaces(),
        )

    def _volumes(self) -> volume_fit.Volumes:
        """Return the current volumes that bind pods to nodes."""
        volumes, claims, classes = self.mirror.volumes, self.mirror.volume_claims, self.mirror.storage_classes
        nodes, drivers, capacities = self.mirror.csi_nodes, self.mirror.csi_drivers, self.mirror.capacities
        if volumes is None or claims is None or classes is None:
            return volume_fit.Volumes()
        return volume_fit.Volumes(
            dict(claims.store),
            {name: one for (_, name), one in volumes.store.items()},
            {name: one for (_, name), one in classes.store.items()},
            {name: one for (_, name), one in nodes.store.items()} if nodes is not None else {},
            {name: one for (_, name), one in drivers.store.items()} if drivers is not None else {},
            dict(capacities.store) if capacities is not None else {},
        )

    def _namespaces(self) -> dict[str, dict[str, str]]:
        """Return the labels of all namespaces."""
        stored = self.mirror.namespaces.store if self.mirror.namespaces is not None else {}
        return {name: one.metadata.labels for (_, name), one in stored.items()}

    def _free(self, node: Node, occupants: Iterable[Pod]) -> dict[str, int]:
        """Return what pods leave of a node; what a pod needs is computed once per version of it."""
        left = host_fit.free(node, ())
        for pod in occupants:
            uid = pod.metadata.uid
            known = self._needs.get(uid)
            if known is None or known[0] is not pod.spec:
                known = self._needs[uid] = (pod.spec, host_fit.needs(pod))
            for resource, amount in known[1].items():
                left[resource] = left.get(resource, 0) - amount
        return left

    def _coming_to(self, pod: Pod) -> str:
        """Return the node that a pod without one is about to start on, as far as somebody has said so. A nomination
        that was left on a gated member without Leases means nothing."""
        uid = pod.metadata.uid
        assumed = self.mirror.ledger.assumed(uid)
        if assumed is not None:
            return assumed.node
        leases = self.mirror.ledger.leases_of(uid)
        nominated = "" if has_gate(pod) else pod.status.nominated_node_name
        return leases[0].node if leases else nominated or self._homes.get(uid, "") or waits_for_node(pod)


def _is_in_place(kind: WatchedKind, change: Change[Any]) -> bool:
    """Tell whether a node, topology or report still says the same about where a node stands."""
    if change.kind is not ChangeKind.MODIFIED or change.old is None:
        return False
    if kind is WatchedKind.NODE:
        return bool(change.old.metadata.labels == change.object.metadata.labels)
    return kind is WatchedKind.REPORT and fabric_clique(change.old) == fabric_clique(change.object)


def gang_reference(gang: GpuGang) -> ObjectReference:
    """Return the reference under which events of a gang are found."""
    metadata = gang.metadata
    return ObjectReference(names.API_VERSION, "GpuGang", metadata.name, metadata.namespace, metadata.uid)


def jitter_of(token: str) -> float:
    """Return a number from 0 to 1 that a fresh token decides."""
    return zlib.crc32(token.encode()) / 2**32
