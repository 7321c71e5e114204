"""Creates the GpuGang of pods that only give their gang's name and size, and deletes it after them.

Without a size nobody knows when the gang is complete: its pods wait, and an event says so. The gang is owned by the
topmost controllers of its pods, such as the JobSet of several Jobs, and ends with them; without, with the last pod.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from atoll.api import names
from atoll.api.gangs import GpuGang, GpuGangStatus, SuspendedOwner
from atoll.api.times import seconds_of
from atoll.cluster.gangs.kueue_topology import KueueTopologyRequest, kueue_request_of, words
from atoll.cluster.gangs.lifecycle import has_begun
from atoll.cluster.gangs.membership import ONLY_SET, GangKey, has_gate, key_of, role_of, set_names
from atoll.cluster.gangs.pod_groups import POD_GROUP
from atoll.cluster.gangs.sizes import SizeConflict, size_conflict, size_of
from atoll.cluster.objects import OwnerReference, Pod
from atoll.kube import paths
from atoll.kube.errors import AlreadyExists, Conflict, Forbidden, Invalid, NotFound
from atoll.kube.patches import delete_options
from controllers.context import Context, pod_reference
from controllers.gangs.cache import GangCache
from controllers.gangs.owners import OwnerLister, as_owner
from controllers.gangs.pod_groups import GROUP_SECONDS, PodGroupGangs, waiting_group

PODS = "pods"
"""Value of the mark on a gang that was made for pods without an owner."""
AGAIN_SECONDS = 0.5
REFUSED_SECONDS = 30.0
NOTE_LENGTH_MAX = 900
TOLD_MAX = 8
TOP_OWNERS_MAX = 16
"""A gang that is made for pods of more owners has none, and ends with its pods."""
READ_OWNERS_MAX = 64
"""Of more owners none is read: the pods of a JobSet with more Jobs have a gang that ends with them."""
RETURN_SECONDS = 600.0
"""How long after its pause a gang without pods is kept: its owner may be slow to make them."""
NO_WISHES: Mapping[str, KueueTopologyRequest] = MappingProxyType({})


class GangMaker:
    """Creates and deletes GpuGangs for pods that have none."""

    def __init__(self, context: Context, cache: GangCache, groups: PodGroupGangs) -> None:
        self._context = context
        self._cache = cache
        self._owners = OwnerLister(context)
        self._groups = groups

    async def make(self, key: GangKey) -> float | None:
        """Create the gang that the pods describe, if they describe one. Raises KubeError."""
        members = [pod for pod in self._cache.pods_of(key) if pod.metadata.deletion_timestamp is None]
        if not members or self.tell_conflict(key, size_conflict(members)):
            return None
        if waiting_group(members) == key[1]:
            made = await self._groups.body(key, members)
            if not isinstance(made, str):
                return await self._create(key, members, made)
            self._record_event(members, f"there is no GpuGang {key[1]!r} yet: {made}"[:NOTE_LENGTH_MAX])
            return GROUP_SECONDS
        size = size_of(members)
        if size is None:
            note = (
                f"there is no GpuGang {key[1]!r}, and the pods do not say how many they are: create it, or set the "
                f"annotation {names.GANG_SIZE} on every one of them, to the same number"
            )
            self._record_event(members, note)
            return None
        wishes = kueue_requests_of(members)
        if isinstance(wishes, str):
            note = f"there is no GpuGang {key[1]!r} yet, and none can be created: {wishes}"
            self._record_event(members, note[:NOTE_LENGTH_MAX])
            return None
        pod_sets = pod_sets_of(members, size)
        if pod_sets is None:
            note = (
                f"there is no GpuGang {key[1]!r} yet: it is made when all of its {size} pods are there, {len(members)} "
                "by now, and either all name a pod set or none does"
            )
            self._record_event(members, note)
            return None
        body = gang_body(key, pod_sets, await self._top_owners(members), wishes)
        again_seconds = await self._create(key, members, body)
        assumed = assumption(wishes)
        if assumed and again_seconds is None:
            self._record_event(members, f"GpuGang {key[1]!r} is created: {assumed}"[:NOTE_LENGTH_MAX])
        return again_seconds

    async def _create(self, key: GangKey, members: Sequence[Pod], body: Mapping[str, Any]) -> float | None:
        """Create a gang; return when to try again if it was not created. Raises KubeError."""
        try:
            await self._context.api.create(paths.gpugangs(key[0]), body)
        except AlreadyExists:
            return AGAIN_SECONDS
        except (Forbidden, Invalid) as error:
            note = f"the GpuGang {key[1]!r} that the pods describe cannot be made; create one yourself: {error}"
            self._record_event(members, note[:NOTE_LENGTH_MAX])
            return REFUSED_SECONDS
        return None

    def tell_conflict(self, key: GangKey, conflict: SizeConflict | None) -> bool:
        """Record the conflict on both pods and on others that wait; return whether there is one."""
        if conflict is None:
            return False
        others = [pod for pod in self._cache.pods_of(key) if has_gate(pod) and pod not in conflict.pods]
        self._record_event([*conflict.pods, *others], f"no pod of gang {key[1]!r} starts: {conflict}"[:NOTE_LENGTH_MAX])
        return True

    async def is_outlived(self, gang: GpuGang) -> bool:
        """Delete a gang that was created for pods that are gone, for another owner, or with a size that no pod names
        any more while none has started; return whether it was deleted."""
        made_for = gang.metadata.annotations.get(names.GANG_MADE_FOR)
        if made_for is None or made_for.startswith(POD_GROUP):
            return False  # that of a PodGroup ends with it
        members = self._cache.pods_of(key_of(gang))
        is_empty = made_for == PODS and not members and not self._may_come_back(gang.status or GpuGangStatus())
        if not (
            is_empty
            or self._is_of_another_size(gang, members)
            or await self._is_of_others(gang, [pod for pod in members if pod.metadata.deletion_timestamp is None])
        ):
            return False
        options = delete_options(uid=gang.metadata.uid)
        try:
            await self._context.api.delete(paths.gpugangs(gang.metadata.namespace, gang.metadata.name), options)
        except (NotFound, Conflict):
            return True
        return True

    async def _top_owners(self, members: Sequence[Pod]) -> list[SuspendedOwner]:
        """Return the topmost owners of the pods; none if a pod is bare, or there are too many. Raises KubeError."""
        found: dict[str, SuspendedOwner] = {}
        for reference in owners_of(members):
            above = await self._owners.above(members[0].metadata.namespace, reference)
            top = above[-1] if above else as_owner(reference)
            found[top.uid] = top
        return list(found.values()) if len(found) <= TOP_OWNERS_MAX else []

    async def _is_of_others(self, gang: GpuGang, members: Sequence[Pod]) -> bool:
        """Return whether every pod belongs to an owner that the gang was not created for, and the gang has not admitted
        any of them. Raises KubeError."""
        made_for = gang.metadata.annotations[names.GANG_MADE_FOR]
        references = owners_of(members)
        admission = gang.status.admission if gang.status is not None else ""
        if made_for == PODS or not references:
            return False
        if admission and any(pod.metadata.annotations.get(names.ADMISSION) == admission for pod in members):
            return False
        known = set(made_for.split(","))
        for reference in references:
            above = await self._owners.above(members[0].metadata.namespace, reference)
            if not above or not known.isdisjoint((reference.uid, *(one.uid for one in above))):
                return False
        return True

    def _is_of_another_size(self, gang: GpuGang, members: Sequence[Pod]) -> bool:
        """Return whether all pods name another size than the gang was created with, nobody has edited it since, and no
        pod has a place."""
        size = size_of(pod for pod in members if pod.metadata.deletion_timestamp is None)
        made = gang.spec.pod_sets[0]
        if size is None or made.name != ONLY_SET or made.count == size or gang.metadata.generation > 1:
            return False
        view = self._cache.view(gang)
        return not (view.is_admitted or has_begun(view))

    def _may_come_back(self, status: GpuGangStatus) -> bool:
        """Tell whether the gang waits out a pause, or its owner was resumed a while ago and makes new pods."""
        requeue_at = seconds_of(status.requeue_state.requeue_at or "") if status.requeue_state is not None else None
        is_expected = requeue_at is not None and requeue_at + RETURN_SECONDS > self._cache.now_seconds()
        return bool(status.suspended_owners) or is_expected

    def _record_event(self, members: Sequence[Pod], note: str) -> None:
        for pod in members[:TOLD_MAX]:
            self._context.events.record(
                pod_reference(pod), reason=names.REASON_GANG_WAITING, note=note, action="Wait", type="Warning"
            )


def owners_of(members: Sequence[Pod]) -> tuple[OwnerReference, ...]:
    """Return the controllers of the pods, each once; none if a pod is bare, or there are too many to read."""
    found: dict[str, OwnerReference] = {}
    for pod in members:
        owner = next((owner for owner in pod.metadata.owner_references if owner.controller), None)
        if owner is None:
            return ()
        found[owner.uid] = owner
    return tuple(found.values()) if len(found) <= READ_OWNERS_MAX else ()


def pod_sets_of(members: Sequence[Pod], size: int) -> list[dict[str, Any]] | None:
    """Return the pod sets: one, where no member names any; else those that they name, known once all are there. Whether
    a LeaderWorkerSet has one or two is also known only then."""
    counts = Counter(set_names(members))
    is_known = len(members) >= size and "" not in counts
    if set(counts) == {""} and (len(members) >= size or not all(role_of(pod) for pod in members)):
        return [{"name": ONLY_SET, "count": size}]
    return [{"name": name, "count": count} for name, count in sorted(counts.items())] if is_known else None


def gang_body(
    key: GangKey,
    pod_sets: list[dict[str, Any]],
    owners: Sequence[SuspendedOwner],
    wishes: Mapping[str, KueueTopologyRequest] = NO_WISHES,
) -> dict[str, Any]:
    """Return the GpuGang for pods that name their gang's size, with the topology request of each pod set."""
    metadata: dict[str, Any] = {
        "name": key[1],
        "namespace": key[0],
        "annotations": {names.GANG_MADE_FOR: ",".join(owner.uid for owner in owners) or PODS},
    }
    if owners:
        metadata["ownerReferences"] = [owner.model_dump(by_alias=True) for owner in owners]
    asking = [{**one, **wishes.get(one["name"], KueueTopologyRequest()).fields()} for one in pod_sets]
    return {"apiVersion": names.API_VERSION, "kind": "GpuGang", "metadata": metadata, "spec": {"podSets": asking}}


def kueue_requests_of(members: Iterable[Pod]) -> dict[str, KueueTopologyRequest] | str:
    """Return the topology request in the annotations of each pod set, or what is wrong with them."""
    first: dict[str, tuple[Pod, KueueTopologyRequest]] = {}
    found = sorted(members, key=lambda one: one.metadata.name)
    for pod, named in zip(found, set_names(found), strict=True):
        wish = kueue_request_of(pod)
        if isinstance(wish, str):
            return f"pod {pod.metadata.name}: {wish}"
        name = named or ONLY_SET
        known, wished = first.setdefault(name, (pod, wish))
        if wished != wish:
            return (
                f"pods {known.metadata.name} and {pod.metadata.name} of pod set {name} ask in Kueue's annotations "
                f"for {words(wished)} and for {words(wish)}; set the same annotations on both, or use two pod sets"
            )
    return {name: wish for name, (_, wish) in first.items()}


def assumption(wishes: Mapping[str, KueueTopologyRequest]) -> str:
    """Return the assumption if some pod sets ask for a topology and others do not; else empty."""
    asking = {name: wish for name, wish in wishes.items() if wish.topology is not None}
    led = {wish.group for wish in asking.values() if wish.group}
    silent = sorted(name for name in wishes.keys() - asking.keys() if wishes[name].group not in led)
    if not asking or not silent:
        return ""
    told = ", ".join(f"{name} asks for {words(wish)}" for name, wish in sorted(asking.items()))
    return (
        f"pod set {told}; {', '.join(silent)} asks for none and may be placed anywhere: if that is not meant, annotate "
        "its pods too, or create a GpuGang"
    )
