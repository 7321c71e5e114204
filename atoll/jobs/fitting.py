"""Whether a job's pods fit a cluster now, and when they would, by the search that places them.

In: a snapshot of the cluster and a job's objects. Quota is not checked here: Kueue holds a job that exceeds it.
"""

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from atoll.api import names
from atoll.api.claims import GpuClaim
from atoll.api.gangs import GpuGang
from atoll.cluster.objects import Pod, decode_pod
from atoll.explain.changes import without_pods
from atoll.explain.codec import with_objects
from atoll.explain.decision import index_snapshot
from atoll.explain.simulation import PodOutcome, Simulation, simulate
from atoll.explain.snapshot import NOW_SECONDS, ClusterSnapshot
from atoll.jobs.rendering import Rendered
from atoll.jobs.words import PRIORITY_VALUES
from atoll.ml.capabilities import WorkerCapability, capability_of
from topology.islands import islands

ENDS_MAX: Final = 256
"""Ends of running jobs that are considered."""
LOOKS_MAX: Final = 10_000
"""Looks at nodes that a search may take, about 5 s: each pod that is placed on its own, and each expected end that is
tried, looks at all of them."""


@dataclass(frozen=True, slots=True)
class ExpectedEnd:
    """When the pods of a running job are expected to be gone, seconds from now."""

    seconds: float
    pods: frozenset[str]


@dataclass(frozen=True, slots=True)
class JobFit:
    """`fits`: every pod that Atoll places has its GPUs now, with nobody preempted. `reason`: why not, or which pods
    were placed. `wait_seconds`: until it is expected to fit; 0 now, None if no expected end makes room."""

    fits: bool
    reason: str = ""
    wait_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class GpuCapacity:
    """GPUs of one type: how many there are and are free, and how many islands have so many free ones."""

    gpu_type: str
    total: int
    free: int
    islands: dict[int, int]


def fit_of(found: ClusterSnapshot, rendered: Rendered, *, namespace: str, ends: Sequence[ExpectedEnd] = ()) -> JobFit:
    """Return whether a job fits a cluster. `ends`: of running jobs, for when it would."""
    if rendered.needs.gpus is None and not rendered.needs.is_gang:
        return JobFit(fits=True, reason="asks for no GPU", wait_seconds=0.0)
    if rendered.helm is not None:
        return JobFit(fits=True, reason="the pods of its chart are not known", wait_seconds=0.0)
    nodes_count = max(1, len(found.nodes))
    if nodes_count > LOOKS_MAX:
        return JobFit(fits=True, reason="the cluster is too large to place the job's pods ahead", wait_seconds=0.0)
    pods = _pods(rendered, namespace, found.taken_at)
    some = pods if rendered.needs.is_gang else pods[: LOOKS_MAX // nodes_count]
    outcomes = _placed(found, rendered, some, namespace).outcomes
    missing = [one for one in outcomes if one.allocation is None]
    if missing:
        wait_seconds = _wait(found, rendered, some, namespace, ends)
        return JobFit(fits=False, reason=_why(missing[0]), wait_seconds=wait_seconds)
    unplaced = f"only the first {len(some)} of its {len(pods)} pods were placed" if len(some) < len(pods) else ""
    return JobFit(fits=True, reason=unplaced, wait_seconds=0.0)


def _wait(
    found: ClusterSnapshot, rendered: Rendered, pods: Sequence[Pod], namespace: str, ends: Sequence[ExpectedEnd]
) -> float | None:
    """Return the first expected end after which the job fits. Each end only adds room, so halving finds it; a search
    that may look only a few times has few ends to halve."""
    looks = max(1, len(found.nodes)) * (1 if rendered.needs.is_gang else len(pods))
    halvings = min(LOOKS_MAX // looks, ENDS_MAX.bit_length())
    ordered = sorted(ends, key=lambda end: end.seconds)[: min(2**halvings - 1, ENDS_MAX)]

    def fits_after(count: int) -> bool:
        gone = {uid for end in ordered[:count] for uid in end.pods}
        return all(one.allocation is not None for one in _placed(found, rendered, pods, namespace, gone=gone).outcomes)

    number = bisect_left(range(len(ordered) + 1), 1, lo=1, key=fits_after)  # now it does not fit
    return ordered[number - 1].seconds if number <= len(ordered) else None


def _placed(
    found: ClusterSnapshot, rendered: Rendered, pods: Sequence[Pod], namespace: str, *, gone: Collection[str] = ()
) -> Simulation:
    claims = [GpuClaim.model_validate(_stored(one, namespace)) for one in rendered.objects if one["kind"] == "GpuClaim"]
    gangs = [GpuGang.model_validate(_stored(one, namespace)) for one in rendered.objects if one["kind"] == "GpuGang"]
    left = without_pods(found, gone) if gone else found
    return simulate(
        with_objects(left, claims=claims),
        pods,
        gangs,
        preempts=False,
        until_missing=True,
    )


def _stored(one: dict[str, Any], namespace: str) -> dict[str, Any]:
    metadata = one["metadata"] | {"namespace": namespace, "uid": _uid(one["metadata"]["name"])}
    return one | {"metadata": metadata}


def _uid(name: str) -> str:
    return f"uid-of-simulated-{name}"


def pods_at_once(rendered: Rendered) -> int:
    """Return how many pods run at once; 1 for a chart, whose pods are not known."""
    spec: Mapping[str, Any] = next((one["spec"] for one in rendered.objects if "template" in one["spec"]), {})
    return int(spec.get("parallelism", spec.get("replicas", 1)))


def _pods(rendered: Rendered, namespace: str, now: str) -> list[Pod]:
    """Return the pods that run at once."""
    workload = next(one for one in rendered.objects if "template" in one["spec"])
    spec, name = workload["spec"], workload["metadata"]["name"]
    template = spec["template"]
    found = []
    for number in range(pods_at_once(rendered)):
        own = {"name": f"{name}-{number}", "namespace": namespace, "uid": _uid(f"{name}-{number}")}
        marks = dict(template["metadata"].get("annotations", {}))
        if rendered.needs.gpus is not None:
            marks[names.CLAIM_UID] = _uid(name)
        metadata = template["metadata"] | own | {"creationTimestamp": now, "annotations": marks}
        priority = {"priority": PRIORITY_VALUES[rendered.needs.priority]}
        body = {"metadata": metadata, "spec": template["spec"] | priority}
        found.append(decode_pod(msgspec.json.encode(body)))
    return found


def _why(one: PodOutcome) -> str:
    return one.explanation.headline if one.explanation is not None else one.note


def workers_of(found: ClusterSnapshot) -> tuple[WorkerCapability, ...]:
    """Return what the nodes offer, with the models that their pods tell of."""
    reports, told = {one.metadata.name: one for one in found.reports}, dict[str, list[Mapping[str, str]]]()
    for pod in found.pods:
        told.setdefault(pod.spec.node_name, []).append(pod.metadata.annotations)
    return tuple(
        capability_of(node, reports.get(node.metadata.name), told.get(node.metadata.name, ())) for node in found.nodes
    )


def capacity_of(found: ClusterSnapshot) -> tuple[GpuCapacity, ...]:
    """Return the GPUs of a cluster by type, from the reports of its machines."""
    cells = index_snapshot(found).ledger.cells(now_seconds=NOW_SECONDS)
    reports = {one.metadata.name: one for one in found.reports}
    by_type: dict[str, GpuCapacity] = {}
    for node in found.nodes:
        name = node.metadata.name
        report, cell = reports.get(name), cells.get(name)
        gpus = capability_of(node, report).gpus if report is not None else ()
        if cell is None or not gpus:
            continue
        kind = gpus[0].type
        before = by_type.get(kind, GpuCapacity(kind, 0, 0, {}))
        counts = dict(before.islands)
        for island in islands(cell.shape.machine):
            free = (cell.free & island.mask).bit_count()
            counts[free] = counts.get(free, 0) + (1 if free else 0)
        by_type[kind] = replace(
            before,
            total=before.total + sum(one.count for one in gpus),
            free=before.free + cell.free.bit_count(),
            islands={size: count for size, count in counts.items() if count},
        )
    return tuple(by_type[kind] for kind in sorted(by_type))
