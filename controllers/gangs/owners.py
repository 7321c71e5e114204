"""Finds the owners of members, and suspends and resumes the topmost one that has a switch for it.

Deleting pods one by one would count as failures of a Job; a suspended Job loses nothing. The gang's uid is written on
the owner in the same patch as the switch, as a label, and nothing without it is ever resumed. The label also finds what
was suspended for a gang that is gone, with the list in its status.

Kueue would resume an owner that it manages at once. For those the switch is that of Kueue's Workload: Kueue suspends
the owner and returns its quota, and admits it anew when the switch is turned on again.
"""

import contextlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import structlog

from atoll.api import names
from atoll.api.gangs import OWNERS_MAX, SuspendedOwner
from atoll.api.kept import KUEUE_WORKLOAD
from atoll.cluster.gangs.membership import GangMember
from atoll.cluster.objects import OwnerReference
from atoll.kube import paths
from atoll.kube.errors import Conflict, Forbidden, MalformedAnswer, NotFound
from atoll.kube.patches import merge_patch
from controllers.context import Context
from controllers.gangs.answers import GangSuspensions, KueueWorkload, ServedGroups, SwitchedOwner, decode

log = structlog.get_logger(__name__)

HOPS_MAX: Final = 6
KNOWN_MAX: Final = 4096
API_VERSION: Final = re.compile(r"[a-z0-9.-]+/v[0-9]+((alpha|beta)[0-9]+)?", re.ASCII)
"""Owner references are the user's: what stands behind the group's slash may be anything, and becomes part of a path."""


@dataclass(frozen=True, slots=True)
class Suspendable:
    """A kind with a switch: its plural, where in spec the switch stands, and what it says when it is off."""

    plural: str
    section: str = ""
    switch: str = "suspend"
    off: bool = True


_RUN_POLICY = "runPolicy"
RAY_JOB: Final = ("ray.io", "RayJob")
_KUEUE: Final = "kueue.x-k8s.io/v1beta2"
_WORKLOAD: Final = "Workload"
KINDS: Final[dict[tuple[str, str], Suspendable]] = {
    ("batch", "Job"): Suspendable("jobs"),
    ("jobset.x-k8s.io", "JobSet"): Suspendable("jobsets"),
    ("trainer.kubeflow.org", "TrainJob"): Suspendable("trainjobs"),
    ("kubeflow.org", "MPIJob"): Suspendable("mpijobs", _RUN_POLICY),
    ("kubeflow.org", "PyTorchJob"): Suspendable("pytorchjobs", _RUN_POLICY),
    ("kubeflow.org", "TFJob"): Suspendable("tfjobs", _RUN_POLICY),
    ("kubeflow.org", "XGBoostJob"): Suspendable("xgboostjobs", _RUN_POLICY),
    ("kubeflow.org", "PaddleJob"): Suspendable("paddlejobs", _RUN_POLICY),
    ("kubeflow.org", "JAXJob"): Suspendable("jaxjobs", _RUN_POLICY),
    ("ray.io", "RayCluster"): Suspendable("rayclusters"),
    ("ray.io", "RayJob"): Suspendable("rayjobs"),
    ("workload.codeflare.dev", "AppWrapper"): Suspendable("appwrappers"),
    ("kueue.x-k8s.io", _WORKLOAD): Suspendable("workloads", switch="active", off=False),
}
WITHOUT_SWITCH: Final[dict[tuple[str, str], str]] = {
    ("apps", "StatefulSet"): "statefulsets",
    ("leaderworkerset.x-k8s.io", "LeaderWorkerSet"): "leaderworkersets",
}
"""Plurals of kinds that are only read, to find the owner above them."""


async def root_owners(
    context: Context, namespace: str, members: Iterable[GangMember]
) -> tuple[tuple[SuspendedOwner, ...], tuple[GangMember, ...]]:
    """Return the topmost owners that can be suspended, and the members that have none. Raises KubeError.

    In place of an owner that Kueue has admitted its Workload is returned.
    """
    roots: dict[str, tuple[SuspendedOwner, ...]] = {}
    bare = []
    for member in members:
        reference = next((owner for owner in member.pod.metadata.owner_references if owner.controller), None)
        if reference is None:
            bare.append(member)
            continue
        if reference.uid not in roots:
            workload = member.pod.metadata.annotations.get(KUEUE_WORKLOAD, "")
            roots[reference.uid] = await _roots(context, namespace, as_owner(reference), workload=workload)
        if not roots[reference.uid]:
            bare.append(member)
    found = {root.uid: root for found in roots.values() for root in found}
    return tuple(found.values())[:OWNERS_MAX], tuple(bare)


async def _roots(
    context: Context, namespace: str, owner: SuspendedOwner, *, workload: str
) -> tuple[SuspendedOwner, ...]:
    """Return the topmost of the readable owners that has a switch, or its Workloads; nothing when none has."""
    above = await owners_above(context, namespace, owner)
    root: SuspendedOwner | None = None
    for one in above:
        if _kind(one) in KINDS and await _may_be_suspended(context, namespace, one):
            root = one
    if root is None or not workload:
        return (root,) if root is not None else ()
    return await _workloads(context, namespace, workload, root)


async def _may_be_suspended(context: Context, namespace: str, owner: SuspendedOwner) -> bool:
    """Tell whether an owner of a kind with a switch bears its use: KubeRay fails a RayJob for good that is suspended
    without shutdownAfterJobFinishes; its RayCluster may be."""
    if _kind(owner) != RAY_JOB:
        return True
    body = await _read(context, namespace, owner)
    return body is not None and body.spec is not None and body.spec.shutdown_after_job_finishes is True


async def owners_above(context: Context, namespace: str, owner: SuspendedOwner) -> tuple[SuspendedOwner, ...]:
    """Return the owner and the controllers above it, up to the first that cannot be read. Raises KubeError."""
    found: list[SuspendedOwner] = []
    above: SuspendedOwner | None = owner
    while above is not None and len(found) < HOPS_MAX:
        body = await _read(context, namespace, above)
        if body is None:
            break
        found.append(above)
        controllers = (one for one in body.metadata.owner_references or () if one.controller)
        above = next(map(as_owner, controllers), None)
    return tuple(found)


class OwnerLister:
    """Owners of pods with the controllers above them. They are remembered: an object keeps its controller. References
    are the user's, so what is remembered of one says nothing of another with the same uid."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._known: dict[tuple[str, OwnerReference], tuple[SuspendedOwner, ...]] = {}

    async def above(self, namespace: str, reference: OwnerReference) -> tuple[SuspendedOwner, ...]:
        """Return the owner and the controllers above it; the owner alone if its kind is not known to Atoll; nothing if
        it is gone. Raises KubeError."""
        found = self._known.get((namespace, reference))
        if found is not None:
            return found
        owner = as_owner(reference)
        found = (owner,) if path_of(namespace, owner) is None else await owners_above(self._context, namespace, owner)
        if found:
            if len(self._known) >= KNOWN_MAX:
                del self._known[next(iter(self._known))]
            self._known[namespace, reference] = found
        return found


def as_owner(reference: OwnerReference) -> SuspendedOwner:
    """Return the owner that a pod refers to; not validated, because the reference is the user's: only what the API
    server then knows by it is used."""
    return SuspendedOwner.model_construct(
        api_version=reference.api_version, kind=reference.kind, name=reference.name, uid=reference.uid
    )


async def _workloads(context: Context, namespace: str, name: str, owner: SuspendedOwner) -> tuple[SuspendedOwner, ...]:
    """Return the Workload under which Kueue has admitted an owner, or the owner where there is none of it.

    Pods of an elastic Job name its first slice; the later ones, which have taken its place, are found by their owner.
    """
    path = paths.kueue_workloads(namespace, name)
    try:
        named = await _named(context, path)
        found = (named,) if named and not named.is_finished else await _slices(context, namespace, owner)
    except (NotFound, Forbidden, MalformedAnswer) as error:
        log.warning("Could not read the Workload of a gang's owner", workload=f"{namespace}/{name}", err=str(error))
        return (owner,)
    live = (
        one.metadata
        for one in found
        if not one.is_finished and any(above.uid == owner.uid for above in one.metadata.owner_references or ())
    )
    workloads = (SuspendedOwner(api_version=_KUEUE, kind=_WORKLOAD, name=one.name or name, uid=one.uid) for one in live)
    return tuple(islice(workloads, OWNERS_MAX)) or (owner,)


async def _named(context: Context, path: str) -> KueueWorkload | None:
    try:
        return decode(await context.api.get(path), KueueWorkload, path)
    except NotFound:  # Kueue may delete slices that are finished
        return None


async def _slices(context: Context, namespace: str, owner: SuspendedOwner) -> Sequence[KueueWorkload]:
    path = paths.kueue_workloads(namespace)
    params = {"labelSelector": f"kueue.x-k8s.io/job-uid={owner.uid}"}
    listing = await context.api.list(path, lambda raw: decode(raw, KueueWorkload, path), params=params)
    return listing.items


async def suspend(context: Context, namespace: str, owner: SuspendedOwner, gang_uid: str) -> None:
    """Suspend an owner for a gang, unless it is gone or suspended already. Raises KubeError."""
    body = await _read(context, namespace, owner)
    if body is None or _is_suspended(body, owner):
        return
    await _switch(context, namespace, owner, body, suspended=True, mark=gang_uid)
    log.info("Suspended the owner of a gang", owner=f"{owner.kind} {namespace}/{owner.name}")


async def resume(context: Context, namespace: str, owner: SuspendedOwner, gang_uid: str) -> bool:
    """Resume an owner that was suspended for this gang; False where it is not. A suspension of ours that has not
    arrived yet fails then, because the owner has another version. Raises KubeError."""
    body = await _read(context, namespace, owner)
    if body is None:
        return False
    mark = (body.metadata.labels or {}).get(names.GANG_SUSPENDED)
    if mark != gang_uid:
        if not mark:
            await _patch(context, namespace, owner, body, mark="" if mark is None else None)
        return False
    await _switch(context, namespace, owner, body, suspended=False, mark=None)
    log.info("Resumed the owner of a gang", owner=f"{owner.kind} {namespace}/{owner.name}")
    return True


async def resume_forgotten(context: Context) -> None:
    """Resume every owner that says it was suspended for a gang which does not list it, or is gone. Raises KubeError."""
    path = paths.API_GROUPS
    served = decode(await context.api.get(path), ServedGroups, path)
    versions = {group.name: [one.group_version for one in group.versions] for group in served.groups}
    for kind in KINDS:
        for version in versions.get(kind[0], ()):
            if await _resume_kind(context, kind, version):
                break


async def _resume_kind(context: Context, kind: tuple[str, str], version: str) -> bool:
    """Resume the forgotten owners of a kind; False where it is not served in this version. Raises KubeError."""
    path = paths.group(version, KINDS[kind].plural)
    try:
        found = await context.api.list(
            path, lambda raw: decode(raw, SwitchedOwner, path), params={"labelSelector": names.GANG_SUSPENDED}
        )
    except NotFound:
        return False
    except (Forbidden, MalformedAnswer) as error:
        log.warning("Could not look for suspended owners of gangs", kind=kind[1], err=str(error))
        return True
    for body in found.items:
        owner = SuspendedOwner.model_construct(
            api_version=version, kind=kind[1], name=body.metadata.name, uid=body.metadata.uid
        )
        with contextlib.suppress(Conflict):
            await _resume_forgotten(context, owner, body)
    return True


async def _resume_forgotten(context: Context, owner: SuspendedOwner, body: SwitchedOwner) -> None:
    """Resume one owner as it was seen, unless its gang lists it. Raises KubeError."""
    namespace, mark = body.metadata.namespace, (body.metadata.labels or {}).get(names.GANG_SUSPENDED, "")
    if not mark or not namespace or await _is_listed(context, namespace, owner.uid, mark):
        return
    await _switch(context, namespace, owner, body, suspended=False, mark=None)
    log.info("Resumed what was suspended for a gang that is gone", owner=f"{owner.kind} {namespace}/{owner.name}")


async def _is_listed(context: Context, namespace: str, owner_uid: str, gang_uid: str) -> bool:
    """Tell whether a gang lists an owner as suspended, as the API server says. Raises KubeError."""
    path = paths.gpugangs(namespace)
    gangs = await context.api.list(path, lambda raw: decode(raw, GangSuspensions, path))
    return any(
        gang.metadata.uid == gang_uid and any(one.uid == owner_uid for one in gang.status.suspended_owners)
        for gang in gangs.items
    )


async def _read(context: Context, namespace: str, owner: SuspendedOwner) -> SwitchedOwner | None:
    """Read an owner of a known kind; None for other kinds, one that makes no sense, and where it is gone or another
    one by now."""
    path = path_of(namespace, owner)
    if path is None:
        return None
    try:
        body = decode(await context.api.get(path), SwitchedOwner, path)
    except NotFound:
        return None
    except (Forbidden, MalformedAnswer) as error:
        log.warning("Could not read the owner of a gang", err=str(error))
        return None
    return body if body.metadata.uid == owner.uid else None


async def _switch(
    context: Context, namespace: str, owner: SuspendedOwner, body: SwitchedOwner, *, suspended: bool, mark: str | None
) -> None:
    kind = KINDS[_kind(owner)]
    value: dict[str, Any] = {kind.switch: kind.off is suspended}
    await _patch(context, namespace, owner, body, mark=mark, spec={kind.section: value} if kind.section else value)


async def _patch(
    context: Context,
    namespace: str,
    owner: SuspendedOwner,
    body: SwitchedOwner,
    *,
    mark: str | None,
    spec: dict[str, Any] | None = None,
) -> None:
    patch = merge_patch(
        uid=owner.uid,
        resource_version=body.metadata.resource_version,
        labels={names.GANG_SUSPENDED: mark},
    )
    patch |= {} if spec is None else {"spec": spec}
    path = path_of(namespace, owner)
    assert path is not None
    try:
        await context.api.patch(path, patch)
    except NotFound:
        return
    except Conflict as error:
        log.info("Owner of a gang changed meanwhile", err=str(error))
        raise


def _is_suspended(body: SwitchedOwner, owner: SuspendedOwner) -> bool:
    kind = KINDS[_kind(owner)]
    section = body.spec.run_policy if body.spec is not None and kind.section else body.spec
    return getattr(section, kind.switch, None) is kind.off


def path_of(namespace: str, owner: SuspendedOwner) -> str | None:
    """Return the path of an owner of a known kind; None for other kinds."""
    if (owner.api_version, owner.kind) == ("v1", "Pod"):
        return paths.pods(namespace, owner.name)
    kind = KINDS.get(_kind(owner))
    plural = kind.plural if kind is not None else WITHOUT_SWITCH.get(_kind(owner))
    if plural is None or not API_VERSION.fullmatch(owner.api_version):
        return None
    return paths.group(owner.api_version, plural, namespace=namespace, name=owner.name)


def _kind(owner: SuspendedOwner) -> tuple[str, str]:
    return owner.api_version.partition("/")[0], owner.kind
