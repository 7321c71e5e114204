"""Evidence of a machine's pods, on which GPUs in doubt are released.

Combines a reading of the cgroups, one of the kubelet's own pod list, the API's pods and the last report into the pods
of the next report, and says how far these can be trusted. Pure; agent.cgroups and agent.kubelet take the readings. The
rules, each on the safe side:

* live = a process runs in the pod's cgroup (its pause container counts, so a restarting container changes nothing).
* An empty cgroup is live too, because the sandbox may be about to start, until two readings in a row find it empty
  while the kubelet answers and does not list the pod: a kubelet that does not know a pod starts nothing in it, and one
  that does not answer may still start it.
* The cgroup reading counts only if it is plausible: if pods should run, it must show at least one. A wrong cgroup root
  or another process namespace shows empty folders, and must not look like an empty machine.
* What could not be read keeps its last known value and says so (`live_read`, `kubelet_read` False): never absent.
* A GPU whose processes could not be read, or one of whose processes does not show its cgroup, counts as used by its
  last users.
* A pod that never concerned GPUs is left out, unless one of its processes uses one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from agent.cgroups import CgroupReading
from atoll.api import names
from atoll.api.node_status import DEVICES_MAX, PODS_MAX, HostUse, PodEvidence
from atoll.cluster.objects import Pod
from atoll.cluster.pods import container_statuses, is_gpu_pod, is_terminal
from atoll.cluster.release import has_ended

GONE_MAX = 4096
"""Limit of remembered pods that are gone from the API, while cgroups cannot be read."""
UUIDS_MAX = 64
HOST_PIDS_MAX = 8
UUIDS_TOTAL_MAX = 4096
"""Limit of in-use GPUs over all pods of a report; with very many pods each names fewer."""


@dataclass(frozen=True, slots=True)
class KubeletReading:
    """The kubelet's pod list: every pod that it may run, those with a running container, and those that it has from
    files of the machine. The kubelet itself writes where a pod is from."""

    listed: frozenset[str]
    running: frozenset[str]
    static: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PodInventory:
    """This node's pods by the API, as of `position` in the watch, and the memory of those that are gone.

    with_gpus: pods that concern Atoll. plain: pods that never did. running: pods with a running container, by the API.
    unproven: GPU pods with a terminal phase, whose containers may still run. claimed: uids that only the annotations
    of mirror pods name.
    """

    position: str = ""
    present: frozenset[str] = frozenset()
    with_gpus: frozenset[str] = frozenset()
    plain: frozenset[str] = frozenset()
    running: frozenset[str] = frozenset()
    unproven: frozenset[str] = frozenset()
    claimed: frozenset[str] = frozenset()

    def with_pod(self, pod: Pod) -> "PodInventory":
        """Remember what a pod is, in case it is gone before the next look."""
        uids = _uids(pod)
        with_gpus = self.with_gpus | uids if is_gpu_pod(pod) else self.with_gpus
        return replace(self, with_gpus=with_gpus, plain=(self.plain | uids) - with_gpus)

    def with_reported(self, uids: Iterable[str]) -> "PodInventory":
        """Take over the pods in the report of a former process: it had a reason to name them, whatever another pod's
        annotation says."""
        with_gpus = self.with_gpus | (frozenset(uids) - (self.plain - self.claimed))
        return replace(self, with_gpus=with_gpus, plain=self.plain - with_gpus)

    def with_pods(self, pods: Iterable[Pod], *, position: str) -> "PodInventory":
        """The inventory after the watch moved on; a pod never changes from a GPU pod to a plain one."""
        listed = [(pod, _uids(pod)) for pod in pods]
        with_gpus = self.with_gpus.union(*(uids for pod, uids in listed if is_gpu_pod(pod)))
        present = frozenset().union(*(uids for _, uids in listed))
        return PodInventory(
            position=position,
            present=present,
            with_gpus=with_gpus,
            plain=(self.plain | present) - with_gpus,
            running=frozenset().union(*(uids for pod, uids in listed if _runs(pod))),
            unproven=frozenset().union(*(uids for pod, uids in listed if is_terminal(pod) and not has_ended(pod))),
            claimed=present - {pod.metadata.uid for pod, _ in listed},
        )

    def forget_gone(self, evidence: "EvidenceReading") -> "PodInventory":
        """Forget pods that neither the API nor the look shows any more. Where cgroups could not be read, only once they
        are very many. A forgotten pod that is seen again is reported, like any other that nobody knows."""
        known = self.present | evidence.seen
        if not evidence.live_read and len((self.with_gpus | self.plain) - known) <= GONE_MAX:
            return self
        return replace(self, with_gpus=self.with_gpus & known, plain=self.plain & known)


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Users of the GPUs, as far as processes show them.

    pods: pod uid to uuids. host: processes outside pods by uuid. unread: uuids that are not fully known.
    """

    pods: Mapping[str, frozenset[str]] = field(default_factory=dict)
    host: Mapping[str, frozenset[int]] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()

    def with_missing(self, known: Iterable[str], told: Iterable[str]) -> "GpuUse":
        """Count GPUs on record that this look did not show as unread."""
        return replace(self, unread=self.unread | (frozenset(known) - frozenset(told)))


def with_allocations(
    use: GpuUse, handed: Mapping[tuple[str, str], frozenset[str]], pods: Iterable[Pod], known: Mapping[str, str]
) -> GpuUse:
    """Count GPUs that the kubelet's device plugins gave to pods as used by those pods.

    plugin_allocations: device ids by namespace and name, because the kubelet gives no uid. known: the uuids of our GPUs
    by their names in device plugins; other ids are other devices.
    """
    users = dict(use.pods)
    for pod in pods:
        ids = handed.get((pod.metadata.namespace, pod.metadata.name), frozenset())
        found = frozenset(known[one] for one in ids if one in known)
        if found and not is_terminal(pod):
            users[pod.metadata.uid] = users.get(pod.metadata.uid, frozenset()) | found
    return replace(use, pods=users)


@dataclass(frozen=True, slots=True)
class EvidenceReading:
    """The evidence of one look. seen: every pod that is live, listed, or uses a GPU, plain ones included. empty: pods
    with an empty cgroup that the kubelet does not list. leavers: GPU pods that should be gone and are not: gone from
    the API but live or listed, or in a terminal phase but live."""

    pods: tuple[PodEvidence, ...]
    live_read: bool
    kubelet_read: bool
    seen: frozenset[str] = frozenset()
    empty: frozenset[str] = frozenset()
    terminating: frozenset[str] = frozenset()
    processes_read: bool = True
    host_uses: tuple[HostUse, ...] = ()
    uses_unread: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """True if absence from this look means that a pod is gone."""
        return self.live_read and self.kubelet_read


def collect_evidence(
    inventory: PodInventory,
    *,
    cgroups: CgroupReading | None,
    kubelet: KubeletReading | None,
    use: GpuUse,
    last_pods: Iterable[PodEvidence] = (),
    last_empty: frozenset[str] = frozenset(),
    last_host: Iterable[HostUse] = (),
) -> EvidenceReading:
    """Judge one look. last_*: results of the look before."""
    last = tuple(last_pods)
    gpu_users = _users(use, last)
    expected = inventory.running - kubelet.listed | kubelet.running if kubelet else inventory.running
    live_read = cgroups is not None and _is_plausible(cgroups, expected=expected)
    last_live = frozenset(pod.uid for pod in last if pod.live)
    live = _live(cgroups, kubelet, last_empty) if cgroups and live_read else last_live
    listed = kubelet.listed if kubelet else frozenset(pod.uid for pod in last if pod.kubelet)
    static = kubelet.static if kubelet else frozenset(pod.uid for pod in last if pod.static)
    users = frozenset(gpu_users)
    told = ((live | listed) - inventory.plain) | users
    order = sorted(told, key=lambda uid: (uid not in inventory.with_gpus, uid))
    uuids_max = min(UUIDS_MAX, UUIDS_TOTAL_MAX // max(1, min(len(order), PODS_MAX)))
    pods = tuple(
        PodEvidence(
            uid=uid,
            live=uid in live,
            kubelet=uid in listed,
            static=uid in static,
            uuids=tuple(sorted(gpu_users.get(uid, ())))[:uuids_max],
        )
        for uid in order[:PODS_MAX]
    )
    fits = len(order) <= PODS_MAX
    return EvidenceReading(
        pods=pods,
        live_read=live_read and fits,
        kubelet_read=kubelet is not None and fits,
        seen=live | listed | users,
        empty=cgroups.empty - kubelet.listed if cgroups and kubelet else frozenset(),
        terminating=((told - inventory.present - static) | (inventory.unproven & live)) & inventory.with_gpus,
        processes_read=not use.unread,
        uses_unread=tuple(sorted(use.unread))[:DEVICES_MAX],
        host_uses=_host_uses(use, tuple(last_host)),
    )


def gpu_use(
    pids_by_uuid: Mapping[str, Iterable[int]], owners: Mapping[int, str | None], *, unread: frozenset[str]
) -> GpuUse:
    """Users of each GPU. owners: pod uid by process, None outside pods; a process missing here has ended. unread: GPUs
    whose processes could not be read."""
    pods: dict[str, set[str]] = {}
    host: dict[str, set[int]] = {}
    for uuid, pids in pids_by_uuid.items():
        for pid in pids:
            uid = owners.get(pid, "")
            if uid is None:
                host.setdefault(uuid, set()).add(pid)
            elif uid:
                pods.setdefault(uid, set()).add(uuid)
    return GpuUse(
        pods={uid: frozenset(uuids) for uid, uuids in pods.items()},
        host={uuid: frozenset(pids) for uuid, pids in host.items()},
        unread=unread,
    )


def _users(use: GpuUse, last: Iterable[PodEvidence]) -> dict[str, frozenset[str]]:
    """GPUs by pod; a GPU that could not be read counts for its last users."""
    users = dict(use.pods)
    for pod in last:
        kept = use.unread.intersection(pod.uuids)
        if kept:
            users[pod.uid] = users.get(pod.uid, frozenset()) | kept
    return users


def _host_uses(use: GpuUse, last: Iterable[HostUse]) -> tuple[HostUse, ...]:
    found = {
        uuid: HostUse(uuid=uuid, count=len(pids), pids=tuple(sorted(pids))[:HOST_PIDS_MAX])
        for uuid, pids in use.host.items()
    }
    found = {one.uuid: one for one in last if one.uuid in use.unread} | found
    return tuple(found[uuid] for uuid in sorted(found))[:DEVICES_MAX]


def _live(cgroups: CgroupReading, kubelet: KubeletReading | None, last_empty: frozenset[str]) -> frozenset[str]:
    abandoned = (cgroups.empty - kubelet.listed) & last_empty if kubelet else frozenset()
    return cgroups.populated | (cgroups.empty - abandoned)


def _is_plausible(cgroups: CgroupReading, *, expected: frozenset[str]) -> bool:
    return not expected or not expected.isdisjoint(cgroups.populated)


def _uids(pod: Pod) -> frozenset[str]:
    """Return the pod's uid and, for a mirror pod, the uid that the kubelet uses for the static pod. Anybody may
    annotate any pod with a uid, but nobody can turn a pod into a mirror later."""
    annotations = pod.metadata.annotations
    static = annotations.get(names.STATIC_POD_UID) if names.MIRROR in annotations else None
    return frozenset({pod.metadata.uid, static} if static else {pod.metadata.uid})


def _runs(pod: Pod) -> bool:
    return any(status.state.running is not None for status in container_statuses(pod))
