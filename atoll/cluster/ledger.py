"""The ledger: which GPU of which node is held, by whom, and on what evidence.

It takes reports, Leases, pods and heartbeats as they are watched, and the verbs of our own binds (assume, forget). It
answers with masks of free devices and the state of each device. It lives in memory and is rebuilt from the API server
at every start.

    free --assume--> assumed --Lease seen--> reserved --Binding seen--> bound --pod ended--> releasing --proof--> free
                        |                                                        |
                        +--forget--> free                                        +--no proof--> in doubt --proof--> free

The whole table is in `atoll.cluster.transitions`; the state of a device is what its holds amount to, see `occupancy`.

Three rooms make it up: `holds` (who holds what), `reports` (what nodes report, and when they were last heard) and
`cells` (what each node can give out now). This is their one face. Every verb is idempotent.
"""

from collections.abc import Mapping

from atoll.api.node_status import GpuNodeStatus
from atoll.cluster import pods
from atoll.cluster.allocations import Allocation
from atoll.cluster.cells import CellIndex, TentativePlacement
from atoll.cluster.foreign import ForeignUse
from atoll.cluster.holds import DeviceHolds, Hold
from atoll.cluster.leases import LeaseRecord
from atoll.cluster.lost_leases import LostLeases
from atoll.cluster.machines import Cell
from atoll.cluster.objects import Lease, Node, Pod
from atoll.cluster.reports import NodeReports, reason_of_the_past
from atoll.cluster.soft_reservations import SoftReservation, soft_reservation_of
from atoll.cluster.transitions import Availability, Occupancy
from topology.demand import PRIOR, Demand, Histogram
from topology.model import DEVICES_MAX


class Ledger:
    """Holds, reports and cells of every node. Not thread-safe; one event loop owns it."""

    def __init__(self) -> None:
        self._reports = NodeReports()
        self.nodes = self._reports.nodes
        self.uncounted = self._reports.uncounted
        self._holds = DeviceHolds(self._note_change)
        self.leases = self._holds.leases
        self.unreadable_leases = self._holds.unreadable_leases
        self.pods = self._holds.pods
        self.malformed_pods = self._holds.malformed_pods
        self._index = CellIndex(self._reports, self._holds)
        self.fleet = self._index.fleet
        self.sizes = Histogram()
        self._derived = (self.sizes, PRIOR)

    @property
    def lost(self) -> LostLeases:
        """Leases that nobody should have deleted; see atoll.cluster.lost_leases."""
        return self._holds.lost

    @property
    def revision(self) -> int:
        """A number that grows with every change that may change an answer."""
        return self._index.revision

    @property
    def demand(self) -> Demand:
        """The sizes that pods ask for, of the pods seen here so far: what fragmentation is weighed with."""
        if self._derived[0] is not self.sizes:
            self._derived = (self.sizes, self.sizes.demand())
        return self._derived[1]

    def _note_change(self, *nodes: str) -> None:
        self._index.note_change(*nodes)

    # Reports and heartbeats

    def take_report(self, status: GpuNodeStatus, node: Node | None) -> None:
        """Take the report of a Node, or stop counting it where it is of the past."""
        why = reason_of_the_past(status, node)
        if why:
            self.drop_report(status.metadata.name, why=why)
        else:
            self.put_report(status)

    def put_report(self, status: GpuNodeStatus) -> None:
        """Take a node's report; one that contradicts itself leaves the node without devices."""
        name = status.metadata.name
        self._holds.observe_report(name, status.status)
        self._reports.put(status)
        if name not in self.nodes:
            self._holds.observe_report(name, None)
        self._index.note_change(name)

    def drop_report(self, node: str, *, why: str = "") -> None:
        """Forget a node's report, or stop counting it for the reason `why`. Holds stay for a node that comes back."""
        self._reports.drop(node, why=why)
        self._holds.observe_report(node, None)
        if not why:
            self._holds.forget_history(node)
        self._index.note_change(node)

    def put_heartbeat(self, node: str, now_seconds: float, silence_seconds_max: float) -> None:
        """Note that the node's agent was heard at `now_seconds` (our own monotonic clock)."""
        self._reports.put_heartbeat(node, now_seconds, silence_seconds_max)
        self._index.note_heartbeat(node)

    def drop_heartbeat(self, node: str) -> None:
        """Forget the node's heartbeat, which was deleted."""
        self._reports.drop_heartbeat(node)
        self._index.note_change(node)

    def is_stale(self, node: str, now_seconds: float) -> bool:
        """Tell whether the agent was silent for too long, or was never heard: nothing new may be placed there."""
        return self._reports.is_stale(node, now_seconds)

    def availability(self, node: str, device_id: int, *, now_seconds: float) -> Availability:
        """Return what the report says of a device; unknown while the agent is silent."""
        return self._reports.availability(node, device_id, now_seconds=now_seconds)

    # Leases and pods

    def put_lease(self, lease: Lease) -> None:
        """Take a GPU Lease. One that cannot be read still blocks what its name may mean: see `unreadable_leases`."""
        self._holds.put_lease(lease)

    def drop_lease(self, name: str, *, version: int = 0) -> None:
        """Forget a Lease that no longer exists; `version` says since when, 0 where that is not known."""
        self._holds.drop_lease(name, version=version)

    def forget_versions(self) -> None:
        """Forget what is ordered by versions and by numbers of reports, which have gone back: the API server was
        restored. GPUs of pods that it has forgotten are guarded by `atoll.cluster.node_audit`."""
        self._holds.forget_versions()

    def leases_of(self, pod_uid: str) -> tuple[LeaseRecord, ...]:
        """Return the Leases whose holder is the pod, by node and device id."""
        return self._holds.leases_of(pod_uid)

    def put_pod(self, pod: Pod) -> None:
        """Take a GPU pod. It holds its devices while it is bound and not terminal."""
        uid = pod.metadata.uid
        if uid not in self.pods:
            self._note_size(pod)
        self._index.keep(uid, soft_reservation_of(pod))
        self._holds.put_pod(pod)
        if pod.spec.node_name and uid not in self.malformed_pods:
            self._index.drop_tentative(uid)

    def drop_pod(self, uid: str, *, final: Pod | None = None) -> None:
        """Forget a pod that no longer exists; `final` is its last object. Its Leases stay until its end is proven."""
        self._holds.drop_pod(uid, final=final)
        self._index.drop_tentative(uid)
        self._index.keep(uid, None)

    def _note_size(self, pod: Pod) -> None:
        count = pods.device_count(pod)
        if 0 < count <= DEVICES_MAX:
            self.sizes = self.sizes.observed(count)

    def allocation_of(self, uid: str) -> Allocation | None:
        """Return the GPUs that a bound pod may still use."""
        return self._holds.allocation_of(uid)

    # Our own binds, and what waiting pods keep

    def assume(self, uid: str, allocation: Allocation, *, attempt: str = "", reservation: str = "") -> None:
        """Mark devices as taken by a bind of ours that is under way; replaces what was assumed or nominated before.

        `attempt` is the token of the bind: only it can take the assumption back, however late an older one ends.
        Without a token the assumption also ends by itself, when the pod is seen bound or gone. `reservation`: uid of
        the GpuReservation whose Leases the pod takes over. Raises IllegalTransition, with nothing changed, if a
        device is not free for this pod.
        """
        self._holds.assume(uid, allocation, attempt=attempt, reservation=reservation)
        self._index.drop_tentative(uid)

    def forget(self, uid: str, *, attempt: str = "") -> None:
        """Take back an assumption of this attempt; nothing happens where there is none, or a newer one."""
        self._holds.forget(uid, attempt=attempt)

    def end_attempt(self, uid: str, *, attempt: str) -> None:
        """Let the assumption of this attempt end by itself from now on: at once if the pod is gone or bound already."""
        self._holds.end_attempt(uid, attempt=attempt)

    def assumed(self, uid: str) -> Allocation | None:
        """Return what a bind under way has assumed for the pod."""
        return self._holds.assumed(uid)

    def put_tentative(self, uid: str, placement: TentativePlacement) -> None:
        """Count devices as spoken for until the pod's bind arrives or `until_seconds` passes."""
        self._index.put_tentative(uid, placement)

    def drop_tentative(self, uid: str) -> None:
        """Drop the tentative placement of a pod."""
        self._index.drop_tentative(uid)

    def drop_all_tentative(self) -> None:
        """Drop every tentative placement: whoever made them does not bind any more."""
        self._index.drop_all_tentative()

    def keep(self, uid: str, kept: SoftReservation | None) -> None:
        """Keep devices for a waiting pod, or nothing any more; see atoll.cluster.soft_reservations."""
        self._index.keep(uid, kept)

    def kept(self, uid: str) -> SoftReservation | None:
        """Return what is kept for a waiting pod."""
        return self._index.kept(uid)

    # Questions

    def kept_mask(self, node: str, asking_uid: str, asking_priority: int | None) -> int:
        """Return the mask of the node's devices that are kept for others, so that the asking pod leaves them alone."""
        return self._index.kept_mask(node, asking_uid, asking_priority)

    def free(
        self,
        node: str,
        *,
        now_seconds: float,
        asking_uid: str = "",
        asking_priority: int | None = None,
        asking_reservation: str = "",
    ) -> int:
        """Return the mask of the node's free devices for the asking pod; see `CellIndex.free`."""
        return self._index.free(
            node,
            now_seconds=now_seconds,
            asking_uid=asking_uid,
            asking_priority=asking_priority,
            asking_reservation=asking_reservation,
        )

    def cells(
        self, *, now_seconds: float, asking_uid: str = "", asking_priority: int | None = None
    ) -> Mapping[str, Cell]:
        """Return the cell of every node with a fresh report: what `free` says of its usable devices, for all nodes."""
        return self._index.cells(now_seconds=now_seconds, asking_uid=asking_uid, asking_priority=asking_priority)

    def own_cells(
        self,
        *,
        now_seconds: float,
        asking_uid: str = "",
        asking_priority: int | None = None,
        asking_reservation: str = "",
    ) -> dict[str, Cell]:
        """Bring `fleet` up to date; return the cells of the nodes that look different to the asking pod."""
        return self._index.own_cells(
            now_seconds=now_seconds,
            asking_uid=asking_uid,
            asking_priority=asking_priority,
            asking_reservation=asking_reservation,
        )

    def renew(self, now_seconds: float, *, nodes_max: int) -> bool:
        """Bring some of the changed nodes up to date in `fleet`; tell whether others are left."""
        return self._index.renew(now_seconds, nodes_max=nodes_max)

    def holds(self, node: str, device_id: int, uuid: str) -> tuple[Hold, ...]:
        """Return why a device is not free, in a fixed order; empty for a free one."""
        return self._holds.of(node, device_id, uuid)

    def occupancy(self, node: str, device_id: int, uuid: str) -> Occupancy:
        """Return who has a device, by all that is known of it."""
        return self._holds.occupancy(node, device_id, uuid)

    def foreign_uses(self, node: str, uuid: str) -> tuple[ForeignUse, ...]:
        """Return who uses a device without holding it; see atoll.cluster.foreign."""
        return self._holds.foreign_uses(node, uuid)

    def is_use_unknown(self, node: str, uuid: str) -> bool:
        """Return whether the users of a device are unknown: foreign use is neither reported nor ruled out."""
        return self._holds.is_use_unknown(node, uuid)

    def has_left(self, uid: str) -> bool:
        """Tell whether a holder of Leases was seen to end or to go."""
        return self._holds.has_left(uid)

    def is_blocked(self, node: str, device_id: int) -> bool:
        """Tell whether a Lease that cannot be read may mean the device: only its name can tell."""
        return self._holds.is_blocked(node, device_id)
