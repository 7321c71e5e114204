"""Keeps the GpuGang of a PodGroup of policy gang: creates it, and lets it grow and shrink with the group.

The gang belongs to the PodGroup and ends with it. A GpuGang of that name that a user wrote stays as it is; if it
contradicts the group, the gang waits and says so. The PodGroup is read only while a member waits behind its gate.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from atoll.api import names
from atoll.api.gangs import GpuGang
from atoll.cluster.gangs.conditions import is_true
from atoll.cluster.gangs.membership import (
    ONLY_SET,
    GangKey,
    MemberStage,
    controller_uid,
    has_gate,
    set_names,
    stage_of,
)
from atoll.cluster.gangs.node_domains import NodeDomains
from atoll.cluster.gangs.pod_groups import POD_GROUP, PodGroup, conflict, gang_spec, group_of, outsider, refusal
from atoll.cluster.objects import Pod
from atoll.kube import paths
from atoll.kube.errors import NotFound
from atoll.kube.patches import merge_patch
from controllers.context import Context
from controllers.gangs.answers import decode
from controllers.gangs.cache import GangCache

GROUP_API: Final = "scheduling.k8s.io/v1beta1"
GROUP_SECONDS: Final = 10.0
"""A PodGroup is read, not watched: this often while its gang cannot be made."""


def pod_set_counts(members: Sequence[Pod]) -> dict[str, int] | None:
    """Return how many pods each pod set has; one set where no pod names any, None if only some do."""
    counts = Counter(set_names(members))
    if set(counts) == {""}:
        return {ONLY_SET: counts[""]}
    return None if "" in counts else dict(counts)


def waiting_group(members: Sequence[Pod]) -> str:
    """Return the PodGroup of the pods that wait behind Atoll's gate; empty for none."""
    return max((group_of(pod) for pod in members if has_gate(pod)), default="")


def _counting(members: Sequence[Pod]) -> list[Pod]:
    """Return the pods that count for the next start: not those that failed or are being deleted, which have successors,
    and those that have succeeded only where their owner has pods that wait, as in the quorum."""
    owners = {owner for pod in members if stage_of(pod) is MemberStage.GATED and (owner := controller_uid(pod))}
    live = [pod for pod in members if stage_of(pod) not in {MemberStage.FAILED, MemberStage.ENDING}]
    return [pod for pod in live if stage_of(pod) is not MemberStage.SUCCEEDED or controller_uid(pod) in owners]


class PodGroupGangs:
    """The GpuGangs of PodGroups."""

    def __init__(self, context: Context, cache: GangCache) -> None:
        self._context = context
        self._cache = cache

    async def body(self, key: GangKey, members: Sequence[Pod]) -> dict[str, Any] | str:
        """Return the gang to create for the members' PodGroup, or why there is none. Raises KubeError."""
        group = await self._read(key)
        if group is None or not group.min_count:
            return f"there is no PodGroup {key[1]!r} of policy gang; create it, or a GpuGang of this name"
        members = _counting(members)
        refused = refusal(group, priority=members[0].spec.priority) or outsider(members, key[1])
        if refused:
            return refused
        if len(members) < group.min_count:
            return (
                f"the PodGroup needs {group.min_count} pods, and has {len(members)} by now; those of its pods that "
                f"ask for no GPUs count if their annotation {names.GANG} names it too"
            )
        counts = pod_set_counts(members)
        if counts is None:
            return f"either all pods of the PodGroup name a pod set ({names.POD_SET}), or none does"
        owner = {"apiVersion": GROUP_API, "kind": "PodGroup", "name": key[1], "uid": group.metadata.uid}
        metadata = {
            "name": key[1],
            "namespace": key[0],
            "annotations": {names.GANG_MADE_FOR: POD_GROUP + group.metadata.uid},
            "ownerReferences": [owner],
        }
        spec = gang_spec(group, counts)
        return {"apiVersion": names.API_VERSION, "kind": "GpuGang", "metadata": metadata, "spec": spec}

    async def follow(self, gang: GpuGang, members: Sequence[Pod]) -> bool:
        """Let the gang follow its PodGroup; return whether it was changed. Raises KubeError.

        An admitted gang only takes in more pods of the group; its quorum, domain, and lower counts, are for the next
        start.
        """
        key = (gang.metadata.namespace, gang.metadata.name)
        group = await self._read(key) if waiting_group(members) == key[1] else None
        if group is None or not group.min_count:
            self._cache.group_conflicts.pop(key, None)
            return False
        members = _counting(members)
        is_made = gang.metadata.annotations.get(names.GANG_MADE_FOR) == POD_GROUP + group.metadata.uid
        domains = self._cache.node_domains(gang)
        contradiction = conflict(group, gang, domains.levels if isinstance(domains, NodeDomains) else ())
        self._cache.group_conflicts[key] = outsider(members, key[1]) or ("" if is_made else contradiction)
        if not is_made:
            return False
        known = {pod_set.name: pod_set.count for pod_set in gang.spec.pod_sets}
        is_admitted = gang.status is not None and is_true(gang.status.conditions, names.CONDITION_ADMITTED)
        if is_admitted:
            members = [pod for pod in members if group_of(pod) == key[1]]
        counts = pod_set_counts(members) or known
        if is_admitted:
            counts = {name: max(known.get(name, 0), counts.get(name, 0)) for name in known | counts}
        spec = gang_spec(group, counts)
        if is_admitted:
            spec |= {"minMember": gang.spec.min_member}
            spec.pop("topology", None)
        wanted = {one["name"]: one["count"] for one in spec["podSets"]}
        is_same = (spec["minMember"], wanted) == (gang.spec.min_member, known)
        if is_same and (is_admitted or not contradiction):
            return False
        body = merge_patch(uid=gang.metadata.uid, resource_version=gang.metadata.resource_version, spec=spec)
        await self._context.api.patch(paths.gpugangs(*key), body)
        return True

    async def _read(self, key: GangKey) -> PodGroup | None:
        path = paths.podgroups(*key)
        try:
            return decode(await self._context.api.get(path), PodGroup, path)
        except NotFound:
            return None
