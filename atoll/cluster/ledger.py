"""The ledger: which GPU of which node is held, by whom, and on what evidence.

In: reports, Leases, pods and heartbeats as they are watched, and the verbs of our own binds (assume, forget, expect).
Out: masks of free devices and the story of each device. Held in memory, rebuilt from the API server at every start.

    free --assume--> assumed --Lease seen--> reserved --Binding seen--> bound --pod ended--> releasing --proof--> free
                        |                                                        |
                        +--forget--> free                                        +--no proof--> in doubt --proof--> free

The whole table stands in `atoll.cluster.transitions`; a device's state is what its holds amount to, see `occupancy`.

A device is free only when nothing holds it: no Lease (its existence is the reservation, whatever it says), no bound pod
that has not ended (the pod's annotation outranks the Lease), no bind of ours in flight. A pod that is terminal or gone
holds through its Lease alone, which nobody deletes without proof. Holds are kept by device id *and* by uuid, so neither
a renumbered nor a replaced card is sold twice. Every verb is idempotent.

Questions about all nodes are answered from `cells`, of which a change of one node renews one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from atoll.api import names, node_status
from atoll.api.node_status import GpuNodeStatus
from atoll.cluster import pods
from atoll.cluster.allocations import Allocation, bound_allocation
from atoll.cluster.device_history import DeviceHistory, check_assumable
from atoll.cluster.errors import MalformedValue
from atoll.cluster.fleet import Fleet
from atoll.cluster.foreign import ForeignUse, ForeignUseCache
from atoll.cluster.heartbeats import Heartbeats
from atoll.cluster.holds import BEGINNINGS, ENDS, Hold, HoldSource, discard, pods_of
from atoll.cluster.leases import LeaseRecord, lease_name, parse_lease
from atoll.cluster.lost_leases import Device, LostLeases
from atoll.cluster.machines import Cell, NodeDevices, cell_of, node_devices, parent_uuid_of
from atoll.cluster.objects import Lease, Pod
from atoll.cluster.release import version_number
from atoll.cluster.soft_reservations import SoftReservation, SoftReservations, soft_reservation_of
from topology.demand import PRIOR, Demand, Histogram
from topology.model import DEVICES_MAX


@dataclass(frozen=True, slots=True)
class Assumption:
    """Devices that a bind of ours counts as taken, and the token of the attempt that alone may take that back."""

    allocation: Allocation
    attempt: str


@dataclass(frozen=True, slots=True)
class TentativePlacement:
    """Where the next bind of a pod will probably land; counted for other pods until `until_seconds`."""

    node: str
    device_ids: tuple[int, ...]
    until_seconds: float


class Ledger:
    """Holds of every device of every node. Not thread-safe; one event loop owns it."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeDevices] = {}
        self.uncounted: dict[str, str] = {}
        """Why a node is not among them although it has a report; empty where it has none."""
        self.leases: dict[str, LeaseRecord] = {}
        self.unreadable_leases: dict[str, str] = {}
        self.pods: dict[str, Pod] = {}
        self.malformed_pods: dict[str, str] = {}
        self._allocations: dict[str, Allocation] = {}
        self._assumed: dict[str, Assumption] = {}
        self._expected: dict[str, TentativePlacement] = {}
        self._expected_on: dict[str, dict[str, TentativePlacement]] = {}
        self._expires_seconds = math.inf
        self._keeping = SoftReservations()
        self._sightings = ForeignUseCache()
        self._heartbeats = Heartbeats()
        self._lease_names: dict[str, set[str]] = {}
        self._left: set[str] = set()
        self.lost = LostLeases()
        self._lost_devices: dict[str, tuple[Device, ...]] = {}
        self.stories = DeviceHistory()
        self._by_id: dict[tuple[str, int], set[Hold]] = {}
        self._by_uuid: dict[tuple[str, str], set[Hold]] = {}
        self._free: dict[str, int] = {}
        self._pods_on: dict[str, int] = {}
        self._cells: dict[str, Cell] = {}
        self.fleet = Fleet()
        """The same cells as arrays; `own_cells` brings both up to date."""
        self.sizes = Histogram()
        self._derived = (self.sizes, PRIOR)
        self._stale: set[str] = set()
        self._changed: set[str] = set()
        self.revision = 0
        """Grows with every change that may change an answer."""

    # Reports and heartbeats

    def put_report(self, status: GpuNodeStatus) -> None:
        """Take a node's report; one that contradicts itself leaves the node without devices."""
        name = status.metadata.name
        self._sightings.put(name, status.status)
        for uid in self.lost.observe(name, status.status):
            self._renew_lost(uid)
        devices = node_devices(status)
        if devices is None:
            self.drop_report(name, why=names.REJECT_BAD_REPORT if status.status is not None else "")
            return
        self.nodes[name] = devices
        self._note_change(name)

    def drop_report(self, node: str, *, why: str = "") -> None:
        """Forget a node's report, or count it no more for the reason `why`. Holds stay for a node that comes back."""
        self.nodes.pop(node, None)
        self.uncounted[node] = why
        self._sightings.put(node, None)
        self._note_change(node)

    def put_heartbeat(self, node: str, now_seconds: float, silence_seconds_max: float) -> None:
        """Note that the node's agent was heard at `now_seconds` (our own monotonic clock)."""
        self._heartbeats.put(node, now_seconds, silence_seconds_max)
        if node in self._stale:
            self._note_change(node)

    def is_stale(self, node: str, now_seconds: float) -> bool:
        """Tell whether the agent was silent for too long, or was never heard: nothing new may be placed there."""
        return self._heartbeats.is_stale(node, now_seconds)

    # Leases

    def put_lease(self, lease: Lease) -> None:
        """Take a GPU Lease. One that cannot be read still blocks what its name may mean: see `unreadable_leases`."""
        name = lease.metadata.name
        self.drop_lease(name)
        try:
            record = parse_lease(lease)
        except MalformedValue as error:
            self.unreadable_leases[name] = str(error)
            self._note_change(*self.nodes)
            return
        self.leases[name] = record
        self._lease_names.setdefault(record.holder.uid, set()).add(name)
        self._hold(record.node, (record.device_id,), (record.device_uuid,), Hold(HoldSource.LEASE, name))
        self.lost.note_written(record.holder.uid, name)
        self._renew_lost(record.holder.uid)

    def drop_lease(self, name: str, *, version: int = 0) -> None:
        """Forget a Lease that no longer exists; `version` says since when, 0 where that is not known."""
        if self.unreadable_leases.pop(name, None):
            self._note_change(*self.nodes)
        record = self.leases.pop(name, None)
        if record is not None:
            held = self._lease_names[record.holder.uid]
            held.discard(name)
            if not held:
                del self._lease_names[record.holder.uid]
                self._left.discard(record.holder.uid)
            uid = record.holder.uid
            left_version = self.lost.left_version(uid)
            self._sightings.note_end(record.node, uid, (record.device_uuid,), left_version=left_version)
            self._unhold(record.node, (record.device_id,), (record.device_uuid,), Hold(HoldSource.LEASE, name))
            if version and (uid in self._allocations or self.lost.is_known(uid)):
                self.lost.note_deleted(record, version)
            self._renew_lost(uid)

    def _renew_lost(self, uid: str) -> None:
        """Hold what a pod that left had lost its Leases of, and nothing else for it."""
        if not self.lost.is_known(uid) and uid not in self._lost_devices:
            return
        hold = Hold(HoldSource.LOST, uid)
        for node, device_id, uuid in self._lost_devices.pop(uid, ()):
            self._unhold(node, (device_id,), (uuid,), hold)
        if devices := self.lost.devices(uid):
            self._lost_devices[uid] = devices
        elif uid not in self._allocations and uid not in self._lease_names:
            self.lost.forget(uid)
        for node, device_id, uuid in devices:
            self._hold(node, (device_id,), (uuid,), hold)

    def leases_of(self, pod_uid: str) -> tuple[LeaseRecord, ...]:
        """Return the Leases whose holder is the pod, by node and device id."""
        found = (self.leases[name] for name in self._lease_names.get(pod_uid, ()))
        return tuple(sorted(found, key=lambda record: (record.node, record.device_id)))

    # Pods

    def put_pod(self, pod: Pod) -> None:
        """Take a GPU pod. It holds its devices while it is bound and not terminal."""
        uid = pod.metadata.uid
        self._drop_pod_hold(uid)
        if uid not in self.pods:
            self._note_size(pod)
        self.pods[uid] = pod
        self.keep(uid, soft_reservation_of(pod))
        try:
            allocation = bound_allocation(pod)
        except MalformedValue as error:
            self.malformed_pods[uid] = str(error)
            return
        if pod.spec.node_name:
            self.forget(uid)
            self.drop_tentative(uid)
        self._note_left(uid, has_left=pods.is_terminal(pod))
        if allocation is not None and pods.is_terminal(pod):
            self._note_departure(pod)
        if allocation is not None and not pods.is_terminal(pod):
            self._allocations[uid] = allocation
            self._hold(allocation.node, allocation.device_ids, allocation.uuids, Hold(HoldSource.POD, uid))

    def drop_pod(self, uid: str, *, final: Pod | None = None) -> None:
        """Forget a pod that no longer exists; `final` is its last object. Its Leases stay until its end is proven."""
        last = self.pods.pop(uid, None)
        self._drop_pod_hold(uid)
        if final is not None and last is not None:
            self._note_departure(final)
        self.forget(uid)
        self.drop_tentative(uid)
        self.keep(uid, None)

    def _note_departure(self, pod: Pod) -> None:
        uid = pod.metadata.uid
        self.lost.note_left(pod, version_number(pod.metadata.resource_version), has_leases=uid in self._lease_names)
        self._renew_lost(uid)

    def _note_left(self, uid: str, *, has_left: bool) -> None:
        if has_left and uid in self._lease_names:
            self._left.add(uid)
        else:
            self._left.discard(uid)

    def _drop_pod_hold(self, uid: str) -> None:
        self.malformed_pods.pop(uid, None)
        allocation = self._allocations.pop(uid, None)
        if allocation is not None:
            self._sightings.note_end(allocation.node, uid, allocation.uuids)
            self._unhold(allocation.node, allocation.device_ids, allocation.uuids, Hold(HoldSource.POD, uid))

    @property
    def demand(self) -> Demand:
        """The sizes that pods ask for, of the pods seen here so far: what fragmentation is weighed with."""
        if self._derived[0] is not self.sizes:
            self._derived = (self.sizes, self.sizes.demand())
        return self._derived[1]

    def _note_size(self, pod: Pod) -> None:
        count = pods.device_count(pod)
        if 0 < count <= DEVICES_MAX:
            self.sizes = self.sizes.observed(count)

    def allocation_of(self, uid: str) -> Allocation | None:
        """Return the GPUs that a bound pod may still use."""
        return self._allocations.get(uid)

    # Our own binds

    def assume(self, uid: str, allocation: Allocation, *, attempt: str = "") -> None:
        """Mark devices as taken by a bind of ours that is under way; replaces what was assumed or expected before.

        `attempt` is the token of the bind: only it can take the assumption back, however late an older one ends.
        Without a token the assumption also ends by itself, when the pod is seen bound or gone. Raises
        IllegalTransition, with nothing changed, where a device is not free for this pod.
        """
        self._check_assumable(uid, allocation)
        self._drop_assumed(uid)
        self.drop_tentative(uid)
        self._assumed[uid] = Assumption(allocation, attempt)
        self._hold(allocation.node, allocation.device_ids, allocation.uuids, Hold(HoldSource.ASSUMED, uid))

    def forget(self, uid: str, *, attempt: str = "") -> None:
        """Take back an assumption of this attempt; nothing happens where there is none, or a newer one."""
        assumption = self._assumed.get(uid)
        if assumption is not None and assumption.attempt == attempt:
            self._drop_assumed(uid)

    def assumed(self, uid: str) -> Allocation | None:
        """Return what a bind under way has assumed for the pod."""
        assumption = self._assumed.get(uid)
        return assumption.allocation if assumption is not None else None

    def _check_assumable(self, uid: str, allocation: Allocation) -> None:
        node, own = allocation.node, self._own_holds(uid)
        for device_id, uuid in zip(allocation.device_ids, allocation.uuids, strict=True):
            holds = self._holds(node, device_id, uuid)
            if holds or self.is_blocked(node, device_id):
                check_assumable(self, node, device_id, uuid, own)

    def _drop_assumed(self, uid: str) -> None:
        assumption = self._assumed.pop(uid, None)
        if assumption is not None:
            held = assumption.allocation
            self._unhold(held.node, held.device_ids, held.uuids, Hold(HoldSource.ASSUMED, uid))

    def put_tentative(self, uid: str, expectation: TentativePlacement) -> None:
        """Count devices as spoken for until the pod's bind arrives or `until_seconds` passes."""
        self.drop_tentative(uid)
        self._expected[uid] = expectation
        self._expected_on.setdefault(expectation.node, {})[uid] = expectation
        self._expires_seconds = min(self._expires_seconds, expectation.until_seconds)
        self._note_expected(expectation.node)

    def drop_tentative(self, uid: str) -> None:
        """Drop the expectation of a pod."""
        expectation = self._expected.pop(uid, None)
        if expectation is not None:
            self._note_expected(expectation.node)
            others = self._expected_on[expectation.node]
            del others[uid]
            if not others:
                del self._expected_on[expectation.node]

    def drop_all_tentative(self) -> None:
        """Drop every expectation: whoever made them does not bind any more."""
        for uid in list(self._expected):
            self.drop_tentative(uid)

    # Kept for waiting pods

    def keep(self, uid: str, kept: SoftReservation | None) -> None:
        """Keep devices for a waiting pod, or nothing any more; see atoll.cluster.soft_reservations."""
        for node in self._keeping.put(uid, kept):
            self._note_expected(node)

    def kept(self, uid: str) -> SoftReservation | None:
        """Return what is kept for a waiting pod."""
        return self._keeping.of(uid)

    def kept_mask(self, node: str, asking_uid: str, asking_priority: int | None) -> int:
        """Return the mask of the node's devices that are kept for others, so that the asking pod leaves them alone."""
        devices = self.nodes.get(node)
        if devices is None or not self._keeping:
            return 0
        mask = 0
        for device_ids in self._keeping.on(node, asking_uid=asking_uid, asking_priority=asking_priority):
            mask |= devices.mask_of(device_ids)
        return mask

    # Questions

    def free(self, node: str, *, now_seconds: float, asking_uid: str = "", asking_priority: int | None = None) -> int:
        """Return the mask of devices that nothing holds, less what is expected or kept for other pods.

        What the asking pod itself holds by Leases or by its own bind counts as free for it. What is kept for pods of a
        lower priority than the asking one's does too; without a priority it ranks below all.
        """
        devices = self.nodes.get(node)
        if devices is None:
            return 0
        mask = self._free.get(node)
        if mask is None:
            mask = self._free[node] = sum(1 << i for i, one in enumerate(devices.devices) if self._is_free(node, one))
        if asking_uid in self._lease_names or asking_uid in self._assumed:
            mask |= self._own_mask(devices, asking_uid)
        self._drop_expired(now_seconds)
        for uid, expectation in self._expected_on.get(node, {}).items():
            if uid != asking_uid:
                mask &= ~devices.mask_of(expectation.device_ids)
        return mask & ~self.kept_mask(node, asking_uid, asking_priority)

    def cells(
        self, *, now_seconds: float, asking_uid: str = "", asking_priority: int | None = None
    ) -> Mapping[str, Cell]:
        """Return the cell of every node with a fresh report: what `free` says of its usable devices, for all nodes."""
        own = self.own_cells(now_seconds=now_seconds, asking_uid=asking_uid, asking_priority=asking_priority)
        return {**self._cells, **own} if own else self._cells

    def own_cells(
        self, *, now_seconds: float, asking_uid: str = "", asking_priority: int | None = None
    ) -> dict[str, Cell]:
        """Bring `fleet` up to date, and return the cells of the nodes that are another's for the asking pod."""
        self._drop_expired(now_seconds)
        if now_seconds > self._heartbeats.next_silent_seconds:
            self._find_silent(now_seconds)
        changed, self._changed = self._changed, set()
        for node in changed:
            self._renew_cell(node, now_seconds)
        special = self._own_nodes(asking_uid) | self._keeping.opens_for(asking_uid, asking_priority)
        own = [node for node in special if node in self._cells]
        return {node: self._cell(node, now_seconds, asking_uid, asking_priority) for node in own}

    def holds(self, node: str, device_id: int, uuid: str) -> tuple[Hold, ...]:
        """Return why a device is not free, in a fixed order; empty for a free one."""
        foreign = {Hold(HoldSource.FOREIGN, str(use)) for use in self.foreign_uses(node, uuid)}
        holds = self._holds(node, device_id, uuid) | foreign
        return tuple(sorted(holds, key=lambda hold: (hold.source, hold.key)))

    def foreign_uses(self, node: str, uuid: str) -> tuple[ForeignUse, ...]:
        """Return who uses a device without holding it; see atoll.cluster.foreign."""
        users = self._sightings.users(node, uuid)
        return tuple(use for use in users if not use.pod_uid or not self._may_use(node, uuid, use.pod_uid))

    def _may_use(self, node: str, uuid: str, uid: str) -> bool:
        pod = self.pods.get(uid)
        if pod is not None and pods.is_terminal(pod) and self._sightings.is_old_news(node, pod):
            return True
        return any(
            hold.key == uid or (hold.source is HoldSource.LEASE and self.leases[hold.key].holder.uid == uid)
            for hold in self._by_uuid.get((node, uuid), ())
        )

    def has_left(self, uid: str) -> bool:
        """Tell whether a holder of Leases was seen to end or to go."""
        return uid in self._left

    def _own_mask(self, devices: NodeDevices, uid: str) -> int:
        own = self._own_holds(uid)
        mask = 0
        for position, device in enumerate(devices.devices):
            holds = self._holds(devices.node, device.id, device.uuid)
            is_own = bool(holds) and holds <= own and not self.is_blocked(devices.node, device.id)
            if is_own and not self.foreign_uses(devices.node, device.uuid):
                mask |= 1 << position
        return mask

    def _own_holds(self, uid: str) -> set[Hold]:
        return {
            Hold(HoldSource.ASSUMED, uid),
            *(Hold(HoldSource.LEASE, name) for name in self._lease_names.get(uid, ())),
        }

    def _own_nodes(self, uid: str) -> set[str]:
        """Return the nodes on which something is held for the pod that does not bind the pod itself."""
        nodes = {self.leases[name].node for name in self._lease_names.get(uid, ())}
        nodes |= {holder.node for holder in (self.assumed(uid), self._expected.get(uid)) if holder is not None}
        return nodes

    def _cell(self, node: str, now_seconds: float, asking_uid: str = "", asking_priority: int | None = None) -> Cell:
        devices = self.nodes[node]
        free = self.free(node, now_seconds=now_seconds, asking_uid=asking_uid, asking_priority=asking_priority)
        return cell_of(devices.shape, free & devices.usable)

    def _renew_cell(self, node: str, now_seconds: float) -> None:
        self._cells.pop(node, None)
        self._stale.discard(node)
        if node not in self.nodes:
            self.fleet.forget(node)
        elif self.is_stale(node, now_seconds):
            self._stale.add(node)
            self.fleet.silence(node)
        else:
            self._cells[node] = self._cell(node, now_seconds)
            if node not in self._pods_on:
                holds = [self._holds(node, device.id, device.uuid) for device in self.nodes[node].devices]
                self._pods_on[node] = len(pods_of(holds, self.leases))
            self.fleet.put(node, self._cells[node], pods=self._pods_on[node])

    def _find_silent(self, now_seconds: float) -> None:
        """Mark nodes that have become stale, and note when the next one may."""
        self._changed.update(node for node in self._cells if self.is_stale(node, now_seconds))
        self._heartbeats.look_ahead(now_seconds)

    def _drop_expired(self, now_seconds: float) -> None:
        if now_seconds < self._expires_seconds:
            return
        for uid in [uid for uid, expected in self._expected.items() if expected.until_seconds <= now_seconds]:
            self.drop_tentative(uid)
        self._expires_seconds = min((expected.until_seconds for expected in self._expected.values()), default=math.inf)

    def _is_free(self, node: str, device: node_status.Device) -> bool:
        holds = self._holds(node, device.id, device.uuid) or self._by_uuid.get(
            (node, parent_uuid_of(device) or device.uuid)
        )
        is_held = bool(holds) or self.is_blocked(node, device.id)
        return not is_held and not self.foreign_uses(node, device.uuid)

    def is_blocked(self, node: str, device_id: int) -> bool:
        """Tell whether a Lease that cannot be read may mean the device: only its name can tell."""
        return bool(self.unreadable_leases) and lease_name(node, device_id) in self.unreadable_leases

    def _holds(self, node: str, device_id: int, uuid: str) -> set[Hold]:
        return self._by_id.get((node, device_id), set()) | self._by_uuid.get((node, uuid), set())

    def _hold(self, node: str, ids: tuple[int, ...], uuids: tuple[str, ...], hold: Hold) -> None:
        for device_id in ids:
            self._by_id.setdefault((node, device_id), set()).add(hold)
        for uuid in uuids:
            self._by_uuid.setdefault((node, uuid), set()).add(hold)
        self.stories.tell(node, ids, BEGINNINGS[hold.source], hold.key)
        self._note_change(node)

    def _unhold(self, node: str, ids: tuple[int, ...], uuids: tuple[str, ...], hold: Hold) -> None:
        for device_id in ids:
            discard(self._by_id, (node, device_id), hold)
        for uuid in uuids:
            discard(self._by_uuid, (node, uuid), hold)
        self.stories.tell(node, ids, ENDS[hold.source], hold.key)
        self._note_change(node)

    def _note_expected(self, node: str) -> None:
        self.revision += 1
        self._changed.add(node)

    def _note_change(self, *nodes: str) -> None:
        self.revision += 1
        self._changed.update(nodes)
        for node in nodes:
            self._free.pop(node, None)
            self._pods_on.pop(node, None)
