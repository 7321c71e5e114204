"""Who holds which device, and on what evidence: Leases, bound pods, binds of ours, Leases that were lost.

A device is free only when nothing holds it: no Lease (its existence is the reservation, whatever it says), no bound pod
that has not ended (the pod's annotation outranks the Lease), no bind of ours in flight. A pod that is terminal or gone
holds through its Lease alone, which nobody deletes without proof. Holds are kept by device id *and* by uuid, so neither
a renumbered nor a replaced card is sold twice.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

from atoll.api import node_status
from atoll.api.node_status import GpuNodeStatusReport
from atoll.cluster import pods
from atoll.cluster.allocations import Allocation, bound_allocation
from atoll.cluster.device_history import DeviceHistory
from atoll.cluster.errors import MalformedValue
from atoll.cluster.foreign import ForeignUse, ForeignUseCache
from atoll.cluster.leases import LeaseRecord, lease_name, parse_lease
from atoll.cluster.lost_leases import Device, LostLeases
from atoll.cluster.machines import NodeDevices, parent_uuid_of
from atoll.cluster.objects import Lease, Pod
from atoll.cluster.release import version_number
from atoll.cluster.repairs import lacking_records
from atoll.cluster.transitions import Occupancy, Verb, occupancy_of, step

K = TypeVar("K")


class HoldSource(StrEnum):
    """What a hold is known from, strongest last."""

    __hash__ = str.__hash__
    """Enum's own is written in Python, and holds are looked up for every device of every change."""

    FOREIGN = "foreign"
    LOST = "lost"
    ASSUMED = "assumed"
    LEASE = "lease"
    POD = "pod"


@dataclass(frozen=True, slots=True)
class Hold:
    """One reason why a device is not free. `key` is the pod uid, or the Lease name for a Lease."""

    source: HoldSource
    key: str


BEGINNINGS: Final = {
    HoldSource.LOST: Verb.DOUBT,
    HoldSource.ASSUMED: Verb.ASSUME,
    HoldSource.LEASE: Verb.RESERVE,
    HoldSource.POD: Verb.CONFIRM,
}
ENDS: Final = {
    HoldSource.LOST: Verb.RELEASE,
    HoldSource.ASSUMED: Verb.FORGET,
    HoldSource.LEASE: Verb.RELEASE,
    HoldSource.POD: Verb.END,
}
"""Verbs of the table in `atoll.cluster.transitions`; what is foreign has no place in it."""


def pods_of(holds: Iterable[Collection[Hold]], leases: Mapping[str, LeaseRecord]) -> set[str]:
    """Return the uids of the pods that hold anything, whatever it is known from; a Lease that is not known stands for
    one."""
    told = {hold for device in holds for hold in device}
    return {
        leases[hold.key].holder.uid if hold.source is HoldSource.LEASE and hold.key in leases else hold.key
        for hold in told
    }


def discard(index: dict[K, set[Hold]], key: K, hold: Hold) -> None:
    """Take a hold out of an index by device; a device that nothing holds any more leaves the index."""
    holds = index.get(key)
    if holds is not None:
        holds.discard(hold)
        if not holds:
            del index[key]


@dataclass(frozen=True, slots=True)
class Assumption:
    """Devices that a bind of ours counts as taken, and the token of the attempt that alone may take that back."""

    allocation: Allocation
    attempt: str


class DeviceHolds:
    """Holds of every device of every node. `changed` is called with each node on which one begins or ends, and without
    any where every node may be concerned."""

    def __init__(self, changed: Callable[..., None]) -> None:
        self._changed = changed
        self.leases: dict[str, LeaseRecord] = {}
        self.unreadable_leases: dict[str, str] = {}
        self.pods: dict[str, Pod] = {}
        self.malformed_pods: dict[str, str] = {}
        self.lost = LostLeases()
        self._allocations: dict[str, Allocation] = {}
        self._assumed: dict[str, Assumption] = {}
        self._foreign = ForeignUseCache()
        self._lease_names: dict[str, set[str]] = {}
        self._left: set[str] = set()
        self._lost_devices: dict[str, tuple[Device, ...]] = {}
        self._history = DeviceHistory()
        self._by_id: dict[tuple[str, int], set[Hold]] = {}
        self._by_uuid: dict[tuple[str, str], set[Hold]] = {}

    def observe_report(self, node: str, report: GpuNodeStatusReport | None) -> None:
        """Take what a report proves of lost Leases, and which pods it saw on the devices; None forgets the latter."""
        self._foreign.put(node, report)
        if report is not None:
            for uid in self.lost.observe(node, report):
                self._renew_lost(uid)

    def forget_versions(self) -> None:
        """Forget lost Leases, and which pods held what until a moment ago."""
        self._foreign.forget_former()
        self.lost = LostLeases()
        for uid in list(self._lost_devices):
            self._renew_lost(uid)

    def forget_history(self, node: str) -> None:
        """Forget the history of a deleted node's devices; holds there stay."""
        self._history.forget(node)

    def put_lease(self, lease: Lease) -> None:
        """Take a GPU Lease. One that cannot be read still blocks what its name may mean: see `unreadable_leases`."""
        name = lease.metadata.name
        try:
            record = parse_lease(lease)
        except MalformedValue as error:
            self.drop_lease(name)
            self.unreadable_leases[name] = str(error)
            self._changed()
            return
        former = self.leases.get(name)
        is_passed_on = former is not None and former.holder.uid != record.holder.uid
        self.drop_lease(name, version=version_number(record.resource_version) if is_passed_on else 0)
        self.leases[name] = record
        self._lease_names.setdefault(record.holder.uid, set()).add(name)
        self._hold(record.node, (record.device_id,), (record.device_uuid,), Hold(HoldSource.LEASE, name))
        self.lost.note_written(record.holder.uid, name)
        self._renew_lost(record.holder.uid)

    def drop_lease(self, name: str, *, version: int = 0) -> None:
        """Forget a Lease that no longer exists; `version` says since when, 0 where that is not known."""
        if self.unreadable_leases.pop(name, None):
            self._changed()
        record = self.leases.pop(name, None)
        if record is not None:
            held = self._lease_names[record.holder.uid]
            held.discard(name)
            if not held:
                del self._lease_names[record.holder.uid]
                self._left.discard(record.holder.uid)
            uid = record.holder.uid
            left_version = self.lost.left_version(uid)
            self._foreign.note_end(record.node, uid, (record.device_uuid,), left_version=left_version)
            self._unhold(record.node, (record.device_id,), (record.device_uuid,), Hold(HoldSource.LEASE, name))
            if version:
                self.lost.note_deleted(record, version, is_bound=uid in self._allocations)
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

    def put_pod(self, pod: Pod) -> None:
        """Take a GPU pod. It holds its devices while it is bound and not terminal."""
        uid = pod.metadata.uid
        lacking = self._lacking(uid) if pods.is_terminal(pod) else ()
        self._drop_pod_hold(uid)
        self.pods[uid] = pod
        try:
            allocation = bound_allocation(pod)
        except MalformedValue as error:
            self.malformed_pods[uid] = str(error)
            return
        if pod.spec.node_name:
            self.forget(uid)
        self._note_left(uid, has_left=pods.is_terminal(pod))
        if allocation is not None and pods.is_terminal(pod):
            self._note_termination(pod, lacking)
        if allocation is not None and not pods.is_terminal(pod):
            self._allocations[uid] = allocation
            self._hold(allocation.node, allocation.device_ids, allocation.uuids, Hold(HoldSource.POD, uid))

    def drop_pod(self, uid: str, *, final: Pod | None = None) -> None:
        """Forget a pod that no longer exists; `final` is its last object. Its Leases stay until its end is proven."""
        lacking = self._lacking(uid)
        last = self.pods.pop(uid, None)
        self._drop_pod_hold(uid)
        if final is not None and last is not None:
            is_inferred = final.metadata.resource_version == last.metadata.resource_version
            self._note_termination(final, () if is_inferred else lacking)
        self.forget(uid)

    def _note_termination(self, pod: Pod, lacking: Iterable[LeaseRecord]) -> None:
        uid, version = pod.metadata.uid, version_number(pod.metadata.resource_version)
        self.lost.note_left(pod, version, has_leases=uid in self._lease_names, lacking=lacking)
        self._renew_lost(uid)

    def _lacking(self, uid: str) -> tuple[LeaseRecord, ...]:
        """Return the Leases that a bound pod should have and has not, as they would be written again."""
        if uid not in self._allocations:
            return ()
        present = self._lease_names.get(uid, set()) | self.unreadable_leases.keys()
        return lacking_records(self.pods[uid], present)

    def _note_left(self, uid: str, *, has_left: bool) -> None:
        if has_left and uid in self._lease_names:
            self._left.add(uid)
        else:
            self._left.discard(uid)

    def _drop_pod_hold(self, uid: str) -> None:
        self.malformed_pods.pop(uid, None)
        allocation = self._allocations.pop(uid, None)
        if allocation is not None:
            self._foreign.note_end(allocation.node, uid, allocation.uuids)
            self._unhold(allocation.node, allocation.device_ids, allocation.uuids, Hold(HoldSource.POD, uid))

    def allocation_of(self, uid: str) -> Allocation | None:
        """Return the GPUs that a bound pod may still use."""
        return self._allocations.get(uid)

    def assume(self, uid: str, allocation: Allocation, *, attempt: str = "", reservation: str = "") -> None:
        """Mark devices as taken by a bind of ours that is under way; replaces what was assumed or expected before.

        `attempt` is the token of the bind: only it can take the assumption back, however late an older one ends.
        Without a token the assumption also ends by itself, when the pod is seen bound or gone. Leases of a
        GpuReservation that the pod uses, given by its uid, count as the pod's own. Raises IllegalTransition, with
        nothing changed, if a device is not free for this pod.
        """
        self._check_assumable(uid, allocation, reservation)
        self._drop_assumed(uid)
        self._assumed[uid] = Assumption(allocation, attempt)
        self._hold(allocation.node, allocation.device_ids, allocation.uuids, Hold(HoldSource.ASSUMED, uid))

    def forget(self, uid: str, *, attempt: str = "") -> None:
        """Take back an assumption of this attempt; nothing happens where there is none, or a newer one."""
        assumption = self._assumed.get(uid)
        if assumption is not None and assumption.attempt == attempt:
            self._drop_assumed(uid)

    def end_attempt(self, uid: str, *, attempt: str) -> None:
        """Let the assumption of this attempt end by itself from now on: at once if the pod is gone or bound already."""
        assumption = self._assumed.get(uid)
        if assumption is None or assumption.attempt != attempt:
            return
        pod = self.pods.get(uid)
        if pod is None or pod.spec.node_name:
            self._drop_assumed(uid)
        else:
            self._assumed[uid] = Assumption(assumption.allocation, "")

    def assumed(self, uid: str) -> Allocation | None:
        """Return what a bind under way has assumed for the pod."""
        assumption = self._assumed.get(uid)
        return assumption.allocation if assumption is not None else None

    def _check_assumable(self, uid: str, allocation: Allocation, reservation: str) -> None:
        node, own = allocation.node, self._own_holds(uid) | (self._own_holds(reservation) if reservation else set())
        for device_id, uuid in zip(allocation.device_ids, allocation.uuids, strict=True):
            holds = self._holds(node, device_id, uuid)
            if holds or self.is_blocked(node, device_id):
                is_own = own >= set(self.of(node, device_id, uuid)) and not self.is_blocked(node, device_id)
                state, history = self.occupancy(node, device_id, uuid), self._history.of(node, device_id)
                step(f"{node}/{device_id}", state, Verb.ASSUME, is_own=is_own, history=history)

    def _drop_assumed(self, uid: str) -> None:
        assumption = self._assumed.pop(uid, None)
        if assumption is not None:
            held = assumption.allocation
            self._unhold(held.node, held.device_ids, held.uuids, Hold(HoldSource.ASSUMED, uid))

    def of(self, node: str, device_id: int, uuid: str) -> tuple[Hold, ...]:
        """Return why a device is not free, in a fixed order; empty for a free one."""
        foreign = {Hold(HoldSource.FOREIGN, str(use)) for use in self.foreign_uses(node, uuid)}
        holds = self._holds(node, device_id, uuid) | foreign
        return tuple(sorted(holds, key=lambda hold: (hold.source, hold.key)))

    def foreign_uses(self, node: str, uuid: str) -> tuple[ForeignUse, ...]:
        """Return who uses a device without holding it; see atoll.cluster.foreign."""
        users = self._foreign.users(node, uuid)
        return tuple(use for use in users if not use.pod_uid or not self._may_use(node, uuid, use.pod_uid))

    def is_use_unknown(self, node: str, uuid: str) -> bool:
        """Return whether the users of a device are unknown."""
        return self._foreign.is_unknown(node, uuid)

    def _may_use(self, node: str, uuid: str, uid: str) -> bool:
        pod = self.pods.get(uid)
        if pod is not None and pods.is_terminal(pod) and self._foreign.is_old_news(node, pod):
            return True
        return any(
            hold.key == uid or (hold.source is HoldSource.LEASE and self.leases[hold.key].holder.uid == uid)
            for hold in self._by_uuid.get((node, uuid), ())
        )

    def has_left(self, uid: str) -> bool:
        """Tell whether a holder of Leases was seen to end or to go."""
        return uid in self._left

    def own_mask(self, devices: NodeDevices, uid: str) -> int:
        """Return the mask of the devices of a node that the pod alone holds, by Leases or by its own bind."""
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

    def own_nodes(self, uid: str) -> set[str]:
        """Return the nodes on which Leases or a bind under way hold something for the pod."""
        nodes = {self.leases[name].node for name in self._lease_names.get(uid, ())}
        assumption = self._assumed.get(uid)
        return nodes if assumption is None else nodes | {assumption.allocation.node}

    def has_own(self, uid: str) -> bool:
        """Tell whether Leases or a bind under way hold anything for the pod."""
        return uid in self._lease_names or uid in self._assumed

    def pod_count(self, devices: NodeDevices) -> int:
        """Return how many pods hold devices of a node."""
        holds = [self._holds(devices.node, device.id, device.uuid) for device in devices.devices]
        return len(pods_of(holds, self.leases))

    def occupancy(self, node: str, device_id: int, uuid: str) -> Occupancy:
        """Return who has a device, by all that is known of it."""
        holds = self.of(node, device_id, uuid)
        is_lost = any(hold.source is HoldSource.LOST for hold in holds)
        records = [self.leases[hold.key] for hold in holds if hold.source == "lease"]
        return occupancy_of(
            assumed=any(hold.source == "assumed" for hold in holds),
            leased=bool(records) or is_lost or self.is_blocked(node, device_id),
            bound=any(hold.source == "pod" for hold in holds),
            holder_left=any(self.has_left(record.holder.uid) for record in records),
            doubted=is_lost or any(record.doubt for record in records),
        )

    def is_free(self, node: str, device: node_status.Device) -> bool:
        """Tell whether nothing holds a device or, for a MIG instance, its card, and no pod uses it without holding."""
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
        self._history.record(node, ids, BEGINNINGS[hold.source], hold.key)
        self._changed(node)

    def _unhold(self, node: str, ids: tuple[int, ...], uuids: tuple[str, ...], hold: Hold) -> None:
        for device_id in ids:
            discard(self._by_id, (node, device_id), hold)
        for uuid in uuids:
            discard(self._by_uuid, (node, uuid), hold)
        self._history.record(node, ids, ENDS[hold.source], hold.key)
        self._changed(node)
