"""Decides what becomes of a pod at CREATE: a patch with warnings, or a denial that says what to change.

Pure: no clock, no network. Applied to its own result it changes nothing, in whatever round of reinvocation.

Phases: (1) remove what only Atoll may write; (2) leave pods alone that ask for no GPUs; (3) resolve the request; (4)
refuse what could not be kept; (5) add gate, count, scheduler, class and variables. What the user wrote stays.
"""

import posixpath
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from itertools import islice
from typing import Any, Final

from atoll.api import names
from atoll.api.claims import Vendor
from atoll.cluster.allocations import ANNOTATIONS_BYTES_MAX, annotations_bytes
from atoll.kube.patches import add_op, pointer, remove_op
from webhook.autoscalers import keep_node
from webhook.counts import count_gpus
from webhook.device_claims import FOREIGN_RESOURCE_PREFIXES
from webhook.gangs import inject_gate
from webhook.pods import AdmittedPod, placed_containers
from webhook.requests import ClaimLookup, Defaults, ResolvedRequest, concerns_atoll, resolve_request
from webhook.review import WARNINGS_MAX, Denial, Mutation, User
from webhook.variables import inject_variables, refuse_variables, rendezvous_variables, variables_for, variables_off

CONTAINERS_MAX: Final = 256
"""Containers and init containers of a pod that asks for GPUs: far above real pods, it bounds the patch."""
ENTRIES_MAX: Final = 4096
"""Variables, mounts and resources of all its containers together."""
OTHER_ANNOTATIONS_BYTES_MAX: Final = ANNOTATIONS_BYTES_MAX // 2
"""What a pod that asks for GPUs may bring along, so that bind finds room for the allocation."""
NODES_GROUP: Final = "system:nodes"
DEVICE_MOUNT: Final = "/var/run/nvidia-container-devices"
"""NVIDIA's runtime can be set up to read the wanted GPUs from mounts below this folder instead of the variable."""


KNOWN_ANNOTATIONS: Final = (*names.USER_ANNOTATIONS, *names.MODEL_ANNOTATIONS)
KEY_LENGTH_MAX: Final = 128
"""Of an unknown key, what is compared with the known ones."""


def mutate(
    pod: AdmittedPod,
    *,
    namespace: str,
    user: User,
    claim: ClaimLookup | None,
    defaults: Defaults,
    pod_group: str = "",
) -> Mutation | Denial:
    """Decide about the pod; `claim` is the lookup of the claim that it names, None when it names none; `pod_group` is
    the PodGroup of policy gang that it belongs to."""
    if is_mirror(pod, user=user) or not concerns_atoll(pod):
        stripped = _strip(pod, claim_uid="")
        told = Mutation(operations=stripped.operations, warnings=(*stripped.warnings, *_unknown(pod)))
        return _refuse_unclaimed_class(pod, user=user) or told
    demand = resolve_request(pod, namespace=namespace, claim=claim, defaults=defaults, pod_group=pod_group)
    if isinstance(demand, Denial):
        return demand
    completed = complete(pod, demand=demand, defaults=defaults)
    if isinstance(completed, Denial):
        return completed
    stripped = _strip(pod, claim_uid=demand.claim_uid)
    return Mutation(
        operations=(*stripped.operations, *completed.operations), warnings=(*stripped.warnings, *completed.warnings)
    )


def complete(pod: AdmittedPod, *, demand: ResolvedRequest, defaults: Defaults) -> Mutation | Denial:
    """Refuse what could not be kept, and add what is missing; for a pod, and for the template of pods alike."""
    for rule in RULES if demand.resource else RULES_WITHOUT_GPUS:
        denial = rule(pod, demand)
        if denial is not None:
            return denial
    counts = count_gpus(pod, demand=demand) if demand.resource else ()
    if isinstance(counts, Denial):
        return counts
    return Mutation(
        operations=(
            *_shape(pod, demand=demand, defaults=defaults),
            *keep_node(pod, gang=demand.gang, choice=defaults.keep_nodes),
            *inject_gate(pod, gang=demand.gang),
            *counts,
            *_inject(pod, demand=demand),
        ),
        warnings=(*_unknown(pod), *_warn(pod, demand=demand, defaults=defaults)),
    )


def is_mirror(pod: AdmittedPod, *, user: User) -> bool:
    """Tell whether the pod mirrors a static pod that already runs: only a kubelet may say so."""
    return names.MIRROR in pod.annotations and NODES_GROUP in user.groups


def _strip(pod: AdmittedPod, *, claim_uid: str) -> Mutation:
    """Remove Atoll's own annotations, which at CREATE can only be copied or forged, and set the claim's uid."""
    forged = sorted(
        key
        for key, value in pod.annotations.items()
        if names.is_own_annotation(key) and not (key == names.CLAIM_UID and value == claim_uid)
    )
    removed = [remove_op(pointer("metadata", "annotations", key)) for key in forged]
    added = []
    if claim_uid and pod.annotations.get(names.CLAIM_UID) != claim_uid:
        added = [add_op(pointer("metadata", "annotations", names.CLAIM_UID), claim_uid)]
    warnings = (f"only Atoll writes these annotations, they were removed: {', '.join(forged)}",) if forged else ()
    return Mutation(operations=(*removed, *added), warnings=warnings)


def _unknown(pod: AdmittedPod) -> Iterator[str]:
    """Warn of annotations under Atoll's prefix that mean nothing: most are misspelt, and ask for nothing then."""
    unknown = (
        key
        for key in sorted(pod.annotations)
        if key.startswith(f"{names.GROUP}/") and key not in KNOWN_ANNOTATIONS and not names.is_own_annotation(key)
    )
    for key in islice(unknown, WARNINGS_MAX):  # each search for a near one takes a fifth of a millisecond
        near = get_close_matches(key[:KEY_LENGTH_MAX], names.USER_ANNOTATIONS, n=1)
        known = f"did you mean {near[0]}?" if near else f"pods may carry {', '.join(names.USER_ANNOTATIONS)}"
        yield f"annotation {key[:80]} means nothing to Atoll and asks for no GPU; {known}"


def _shape(pod: AdmittedPod, *, demand: ResolvedRequest, defaults: Defaults) -> Iterator[dict[str, Any]]:
    if pod.spec.scheduler_name != names.SCHEDULER_NAME:
        yield add_op(pointer("spec", "schedulerName"), names.SCHEDULER_NAME)
    is_nvidia = demand.resource and demand.vendor is Vendor.NVIDIA
    if defaults.inject_runtime_class and is_nvidia and not pod.spec.runtime_class_name:
        yield add_op(pointer("spec", "runtimeClassName"), names.RUNTIME_CLASS)


def _inject(pod: AdmittedPod, *, demand: ResolvedRequest) -> Iterator[dict[str, Any]]:
    of_gang = rendezvous_variables(pod)
    for placed in placed_containers(pod):
        of_gpus = variables_for(placed.container.name, demand=demand) | variables_off(demand) if demand.resource else {}
        yield from inject_variables(placed, {**of_gpus, **of_gang})


def _warn(pod: AdmittedPod, *, demand: ResolvedRequest, defaults: Defaults) -> Iterator[str]:
    runtime_class = pod.spec.runtime_class_name
    if not demand.resource:
        yield (
            f"the pod is a member of gang {demand.gang!r} without GPUs; if it needs some, name a GpuClaim in the "
            f"annotation {names.CLAIM}, or ask for {names.GPU_RESOURCE}"
        )
        return
    if (
        defaults.inject_runtime_class
        and demand.vendor is Vendor.NVIDIA
        and runtime_class not in {None, "", names.RUNTIME_CLASS}
    ):
        yield (
            f"runtimeClassName {runtime_class!r} is kept instead of {names.RUNTIME_CLASS}; "
            f"the containers see their GPUs only if its handler reads {names.NVIDIA_VISIBLE_DEVICES}"
        )
    if demand.is_mig and demand.count is not None and demand.count > 1:
        yield "one CUDA process uses only one MIG instance; several help a pod that runs several processes"


def _refuse_unclaimed_class(pod: AdmittedPod, *, user: User) -> Denial | None:
    return None if is_mirror(pod, user=user) else _refuse_class(pod, None)


def _refuse_class(pod: AdmittedPod, _demand: ResolvedRequest | None) -> Denial | None:
    if pod.spec.runtime_class_name != names.RUNTIME_CLASS:
        return None
    return Denial(
        f"runtimeClassName {names.RUNTIME_CLASS} is for pods that ask Atoll for GPUs; "
        f"remove it, or name a GpuClaim in the annotation {names.CLAIM}"
    )


def _refuse_scheduler(pod: AdmittedPod, _demand: ResolvedRequest) -> Denial | None:
    if pod.spec.scheduler_name in {"", names.DEFAULT_SCHEDULER_NAME, names.SCHEDULER_NAME}:
        return None
    return Denial(
        f"spec.schedulerName is {pod.spec.scheduler_name[:80]!r}, but only {names.SCHEDULER_NAME} gives Atoll's GPUs; "
        "remove schedulerName"
    )


def _refuse_node_name(pod: AdmittedPod, _demand: ResolvedRequest) -> Denial | None:
    if not pod.spec.node_name:
        return None
    return Denial(
        f"spec.nodeName is set to {pod.spec.node_name[:80]!r}, which goes past the scheduler that gives GPUs; "
        "remove it, and use nodeSelector or node affinity to choose a node"
    )


def _refuse_size(pod: AdmittedPod, _demand: ResolvedRequest) -> Denial | None:
    containers = len(pod.spec.containers) + len(pod.spec.init_containers)
    if not pod.spec.containers:
        return Denial("the pod has no container that could use a GPU; add one", 400)
    if containers > CONTAINERS_MAX:
        return Denial(
            f"the pod has {containers} containers, a pod with GPUs may have {CONTAINERS_MAX}; use several pods", 400
        )
    entries = sum(one.entries_count for one in (*pod.spec.containers, *pod.spec.init_containers))
    if entries > ENTRIES_MAX:
        return Denial(
            f"the containers have {entries} variables, mounts and resources together, and those of a pod with GPUs may "
            f"have {ENTRIES_MAX}; move variables to a ConfigMap",
            400,
        )
    if pod.spec.ephemeral_containers:
        return Denial("ephemeral containers cannot be part of a new pod; add them with kubectl debug once it runs", 400)
    return None


def _refuse_annotations(pod: AdmittedPod, _demand: ResolvedRequest) -> Denial | None:
    size_bytes = annotations_bytes(pod.annotations)
    if size_bytes <= OTHER_ANNOTATIONS_BYTES_MAX:
        return None
    return Denial(
        f"the pod's annotations have {size_bytes} bytes, and those of a pod with GPUs may have "
        f"{OTHER_ANNOTATIONS_BYTES_MAX}: the rest is for its GPUs; move large values to a ConfigMap",
        400,
    )


def _refuse_foreign_resources(pod: AdmittedPod, _demand: ResolvedRequest) -> Denial | None:
    for placed in placed_containers(pod):
        for name in sorted(placed.container.resource_names()):
            if name.startswith(FOREIGN_RESOURCE_PREFIXES):
                return Denial(
                    f"container {placed.container.name!r} also asks for {name[:120]}, which a device plugin hands out "
                    "without knowing Atoll's choice; remove it"
                )
    return None


def _refuse_runtime_class(pod: AdmittedPod, demand: ResolvedRequest) -> Denial | None:
    if demand.vendor is Vendor.NVIDIA or pod.spec.runtime_class_name != names.RUNTIME_CLASS:
        return None
    return Denial(
        f"runtimeClassName {names.RUNTIME_CLASS} is for NVIDIA GPUs, the claim is for {demand.vendor.value}; remove it"
    )


def _refuse_mounts(pod: AdmittedPod, _demand: ResolvedRequest) -> Denial | None:
    for placed in placed_containers(pod):
        for mount in placed.container.volume_mounts:
            if _clean_path(mount.mount_path).startswith(DEVICE_MOUNT):
                return Denial(
                    f"container {placed.container.name!r} mounts {mount.mount_path[:120]!r}, "
                    "which lets NVIDIA's runtime show it other GPUs than its own; remove the mount"
                )
    return None


def _refuse_device_annotations(pod: AdmittedPod, _demand: ResolvedRequest) -> Denial | None:
    key = next((key for key in pod.annotations if key.startswith(names.CDI_PREFIX)), None)
    if key is None:
        return None
    return Denial(
        f"annotation {key[:120]} asks the container runtime for devices past Atoll's choice; remove it from the pod"
    )


def _clean_path(path: str) -> str:
    return posixpath.normpath("/" + path.lstrip("/"))


def _refuse_variables(pod: AdmittedPod, demand: ResolvedRequest) -> Denial | None:
    for placed in placed_containers(pod):
        denial = refuse_variables(placed.container, demand=demand)
        if denial is not None:
            return denial
    return None


Rule = Callable[[AdmittedPod, ResolvedRequest], Denial | None]
RULES: Final[tuple[Rule, ...]] = (
    _refuse_size,
    _refuse_annotations,
    _refuse_scheduler,
    _refuse_node_name,
    _refuse_foreign_resources,
    _refuse_runtime_class,
    _refuse_mounts,
    _refuse_device_annotations,
    _refuse_variables,
)
"""Asked in this order; the first refusal is the answer."""
RULES_WITHOUT_GPUS: Final[tuple[Rule, ...]] = (
    _refuse_size,
    _refuse_scheduler,
    _refuse_node_name,
    _refuse_class,
    _refuse_mounts,
    _refuse_device_annotations,
)
"""Asked instead of a member of a gang that needs no GPUs."""
