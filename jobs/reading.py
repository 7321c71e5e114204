"""Decoders: from the API server's bytes of Jobs, Deployments, pods and Workloads to atoll.jobs.facts.

The only place that knows the paths of these objects' fields.
"""

from typing import Final

import msgspec

from atoll.api import names
from atoll.api.depth import at_any_depth
from atoll.jobs.facts import DISRUPTIONS, PodFacts, QuotaFacts, WorkloadFacts
from atoll.jobs.last_checkpoint import LastCheckpoint, checkpoint_in
from atoll.jobs.queue_objects import MULTIKUEUE
from atoll.kube.errors import truncate

KUEUE_GATES: Final = ("kueue.x-k8s.io/admission", "kueue.x-k8s.io/topology")
DISRUPTED: Final = "DisruptionTarget"
DETAIL_LENGTH_MAX: Final = 256


class _Condition(msgspec.Struct, frozen=True):
    type: str = ""
    status: str = ""
    reason: str | None = None
    message: str | None = None


class _Meta(msgspec.Struct, rename="camel", frozen=True):
    name: str = ""
    uid: str = ""
    annotations: dict[str, str] | None = None
    deletion_timestamp: str | None = None


class _Template(msgspec.Struct, frozen=True):
    metadata: _Meta = _Meta()


class _WorkloadSpec(msgspec.Struct, rename="camel", frozen=True):
    managed_by: str | None = None
    suspend: bool | None = None
    parallelism: int | None = None
    completions: int | None = None
    replicas: int | None = None
    backoff_limit: int | None = None
    template: _Template = _Template()


class _WorkloadStatus(msgspec.Struct, rename="camel", frozen=True):
    conditions: list[_Condition] | None = None
    available_replicas: int | None = None
    succeeded: int | None = None
    ready: int | None = None


class _Workload(msgspec.Struct, frozen=True):
    metadata: _Meta
    spec: _WorkloadSpec
    status: _WorkloadStatus = _WorkloadStatus()


class _Gate(msgspec.Struct, frozen=True):
    name: str = ""


class _PodSpec(msgspec.Struct, rename="camel", frozen=True):
    scheduling_gates: list[_Gate] | None = None


class _Ended(msgspec.Struct, rename="camel", frozen=True):
    reason: str | None = None
    message: str | None = None
    exit_code: int = 0


class _Waits(msgspec.Struct, frozen=True):
    reason: str | None = None
    message: str | None = None


class _ContainerState(msgspec.Struct, frozen=True):
    waiting: _Waits | None = None
    terminated: _Ended | None = None


class _Container(msgspec.Struct, rename="camel", frozen=True):
    state: _ContainerState | None = None
    last_state: _ContainerState | None = None


class _PodStatus(msgspec.Struct, rename="camel", frozen=True):
    phase: str = "Pending"
    reason: str | None = None
    message: str | None = None
    conditions: list[_Condition] | None = None
    container_statuses: list[_Container] | None = None
    init_container_statuses: list[_Container] | None = None


class _Pod(msgspec.Struct, frozen=True):
    metadata: _Meta
    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()


class _PodSetAssignment(msgspec.Struct, frozen=True):
    flavors: dict[str, str] | None = None


class _KueueAdmission(msgspec.Struct, rename="camel", frozen=True):
    pod_set_assignments: list[_PodSetAssignment] | None = None


class _KueueStatus(msgspec.Struct, rename="camel", frozen=True):
    cluster_name: str | None = None
    conditions: list[_Condition] | None = None
    admission: _KueueAdmission | None = None


class _KueueWorkload(msgspec.Struct, frozen=True):
    status: _KueueStatus = _KueueStatus()


class _Event(msgspec.Struct, frozen=True):
    note: str = ""


_decode_workload = at_any_depth(msgspec.json.Decoder(_Workload).decode)
_pods = msgspec.json.Decoder(_Pod)
_events = msgspec.json.Decoder(_Event)
_kueue_workloads = msgspec.json.Decoder(_KueueWorkload)


def decode_workload(kind: str, raw: bytes) -> WorkloadFacts:
    """Return the facts of a Job or Deployment. Raises msgspec.MsgspecError."""
    one = _decode_workload(raw)
    spec, status = one.spec, one.status
    if kind == "Deployment":
        wanted = 1 if spec.replicas is None else spec.replicas
        refused = _held(status.conditions, "ReplicaFailure")
        return WorkloadFacts(
            kind,
            one.metadata.uid,
            _is_leaving(one.metadata),
            wanted=wanted,
            ready=status.available_replicas or 0,
            runs_whole=True,
            refused=_cut(refused.message) if refused is not None else "",
        )
    failed = _held(status.conditions, "Failed")
    left = max(0, (spec.completions or 1) - (status.succeeded or 0))
    return WorkloadFacts(
        kind,
        one.metadata.uid,
        _is_leaving(one.metadata),
        is_suspended=bool(spec.suspend),
        is_complete=_held(status.conditions, "Complete") is not None,
        failed=(failed.reason or "Failed") if failed is not None else "",
        failed_detail=_cut(failed.message) if failed is not None else "",
        wanted=max(1, min(spec.parallelism or 1, left)),
        ready=(status.ready or 0) if spec.managed_by == MULTIKUEUE else None,
        runs_whole=names.GANG in (spec.template.metadata.annotations or {}),
        backoff_limit=spec.backoff_limit or 0,
    )


def decode_note(raw: bytes) -> str:
    """Return what an event tells. Raises msgspec.MsgspecError."""
    return _cut(_events.decode(raw).note)


def decode_pod(raw: bytes) -> PodFacts:
    """Return the facts of a pod. Raises msgspec.MsgspecError."""
    one = _pods.decode(raw)
    gates = {gate.name for gate in one.spec.scheduling_gates or ()}
    reason, detail = _pod_reason(one.status)
    return PodFacts(
        one.metadata.name,
        one.status.phase,
        is_leaving=_is_leaving(one.metadata),
        is_gated=bool(gates.intersection(KUEUE_GATES)),
        reason=reason,
        detail=detail,
        checkpoint=_checkpoint(one.status.container_statuses or []),
    )


def decode_quota(raw: bytes) -> QuotaFacts:
    """Return what a Workload of Kueue says about its quota. Raises msgspec.MsgspecError."""
    status = _kueue_workloads.decode(raw).status
    evicted = _held(status.conditions, "Evicted")
    if evicted is not None:
        return QuotaFacts(evicted=evicted.reason or "Evicted", detail=_cut(evicted.message))
    refused = _held(status.conditions, "QuotaReserved", status="False")
    sets = (status.admission.pod_set_assignments or ()) if status.admission is not None else ()
    flavors = sorted({flavor for one in sets for flavor in (one.flavors or {}).values()})
    return QuotaFacts(
        detail=_cut(refused.message) if refused is not None else "",
        flavors=tuple(flavors),
        cluster=status.cluster_name or "",
    )


def _pod_reason(status: _PodStatus) -> tuple[str, str]:
    """Return why a pod ended or waits; a disruption comes first, then the reason of pod, container or scheduling."""
    disrupted = _held(status.conditions, DISRUPTED)
    if disrupted is not None:
        reason = disrupted.reason or ""
        return DISRUPTIONS.get(reason, reason), _cut(disrupted.message)
    if status.reason:
        return status.reason, _cut(status.message)
    for container in (*(status.init_container_statuses or ()), *(status.container_statuses or ())):
        state = container.state or _ContainerState()
        if state.terminated is not None and state.terminated.exit_code != 0:
            code = f"(exit code {state.terminated.exit_code})"
            return state.terminated.reason or "Error", f"{code} {_cut(state.terminated.message)}".strip()
        if state.waiting is not None and state.waiting.reason:
            return state.waiting.reason, _cut(state.waiting.message)
    for condition in status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "False" and condition.reason:
            return condition.reason, _cut(condition.message)
    return "", ""


def _checkpoint(containers: list[_Container]) -> LastCheckpoint | None:
    """Return the newest checkpoint that containers told when they ended, be it before a restart."""
    states = (state for one in containers for state in (one.last_state, one.state) if state is not None)
    told = (checkpoint_in(one.terminated.message or "") for one in states if one.terminated is not None)
    return max((one for one in told if one is not None), key=lambda one: one.created_at, default=None)


def _held(conditions: list[_Condition] | None, kind: str, *, status: str = "True") -> _Condition | None:
    return next((one for one in conditions or () if one.type == kind and one.status == status), None)


def _is_leaving(metadata: _Meta) -> bool:
    return metadata.deletion_timestamp is not None


def _cut(text: str | None) -> str:
    return truncate(text or "", length_max=DETAIL_LENGTH_MAX)
