"""The answer of one node to a pod, down to GPUs and islands.

A NodeAnswer has the blocker, the scheduler's reason, and the islands with free, held and withheld GPUs. The reasons are
those of `atoll.explain.decision`. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from atoll.api import names
from atoll.cluster.feasibility import machine_verdict, node_verdict
from atoll.cluster.health import judge as judge_health
from atoll.cluster.machines import Cell, NodeDevices
from atoll.cluster.objects import Pod
from atoll.cluster.requests import Rejection, Request, Verdict
from atoll.cluster.selection import device_groups
from atoll.cluster.unknown_pods import unknown_pods
from atoll.explain.decision import IndexedSnapshot, PodDecision, judge
from atoll.explain.snapshot import NOW_SECONDS
from topology.device_requests import gpus
from topology.islands import islands

GPUS_COUNTED: Final = "kube-scheduler counts too few free GPUs"
LISTED_MAX: Final = 16
"""Limit of ids in one text."""


class NodeBlocker(StrEnum):
    """What keeps a pod off a node, by the necessary change."""

    FITS = "fits"
    CLOSED = "closed"
    """The GPUs are there; kube-scheduler refuses the node for a reason of its own."""
    BUSY = "busy"
    """The machine could serve the pod if the GPUs that others hold were free."""
    WITHHELD = "withheld"
    """The machine could serve the pod if cordoned or unhealthy GPUs were usable."""
    SILENT = "silent"
    """The node's GPUs have no fresh report, and might serve the pod."""
    NEVER = "never"
    """The machine cannot serve the pod even if it is empty and healthy."""


BLOCKERS: Final = {
    Verdict.BUSY: NodeBlocker.BUSY,
    Verdict.UNKNOWN: NodeBlocker.WITHHELD,
    Verdict.NEVER: NodeBlocker.NEVER,
}


@dataclass(frozen=True, slots=True)
class IslandState:
    """One island by device ids. `free`: usable for this pod. `unfit`: not accepted by the claim."""

    name: str
    kind: str
    free: tuple[int, ...]
    held: tuple[int, ...]
    withheld: tuple[int, ...]
    unfit: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    """One node. `reason`: a constant phrase; `others`: kube-scheduler's own reasons; `detail`: the numbers."""

    node: str
    standing: NodeBlocker
    reason: str
    others: tuple[str, ...]
    detail: str
    islands: tuple[IslandState, ...]


def answers(scene: IndexedSnapshot, pod: Pod, request: Request, decision: PodDecision) -> tuple[NodeAnswer, ...]:
    """Return every node's answer, by name."""
    cells = scene.ledger.cells(now_seconds=NOW_SECONDS, asking_uid=pod.metadata.uid, asking_priority=pod.spec.priority)
    fitting = frozenset(decision.verdicts.feasible)
    reasons = {**_reasons(scene, pod, request, cells, decision), **dict.fromkeys(fitting, "")}
    return tuple(_answer(scene, name, reasons[name], pod, request, cells, decision) for name in sorted(scene.nodes))


def _reasons(
    scene: IndexedSnapshot, pod: Pod, request: Request, cells: Mapping[str, Cell], decision: PodDecision
) -> dict[str, str]:
    """Return the extender's reason per node; empty if the GPUs fit. Nodes of one cell are judged once."""
    is_tied = bool(scene.ledger.leases_of(pod.metadata.uid))
    known: dict[Cell, str] = {}
    found: dict[str, str] = {}
    for name in scene.nodes:
        if name in decision.verdicts.rejected:
            found[name] = decision.verdicts.rejected[name]
            continue
        cell = cells.get(name)
        reason = known.get(cell) if cell is not None and not is_tied else None
        if reason is None:
            reason = judge(scene, pod, request, [name]).rejected.get(name, "")
        if cell is not None:
            known[cell] = reason
        found[name] = reason
    return found


def _answer(
    scene: IndexedSnapshot,
    name: str,
    reason: str,
    pod: Pod,
    request: Request,
    cells: Mapping[str, Cell],
    decision: PodDecision,
) -> NodeAnswer:
    others = decision.closed.get(name, ())
    devices = scene.ledger.nodes.get(name)
    if devices is None or name not in cells:
        unseen = reason or names.REJECT_NO_REPORT
        facts = scene.unseen.get(name)
        is_open = facts is not None and node_verdict(pod, request, facts) is Verdict.UNKNOWN
        standing = NodeBlocker.SILENT if is_open else NodeBlocker.NEVER
        return NodeAnswer(name, standing, unseen, others, _silence(scene, name, unseen), ())
    if not reason:
        is_fit = name in decision.verdicts.feasible
        told = "" if is_fit else ", ".join(others) or GPUS_COUNTED
        standing = NodeBlocker.FITS if is_fit else NodeBlocker.CLOSED if others else NodeBlocker.BUSY
        parts = _islands(devices, cells[name], request)
        return NodeAnswer(name, standing, told, others, _free_text(parts), parts)
    standing = BLOCKERS[machine_verdict(devices, request)]
    parts = _islands(devices, cells[name], request)
    detail = (
        f"{_free_text(parts)}; {describe_request(request)}"
        if standing is not NodeBlocker.NEVER
        else _machine_text(devices)
    )
    return NodeAnswer(name, standing, reason, others, detail + _withheld_text(scene, devices, parts), parts)


def describe_request(request: Request) -> str:
    """Return the request in words: count 3, policy island, model nvidia-h100, needs one island."""
    ask = request.ask
    parts = [f"count {ask.count}", f"policy {ask.policy}"]
    if ask.interconnect != "any":
        parts.append(f"interconnect {ask.interconnect}")
    if ask.min_bandwidth_gbps:
        parts.append(f"{ask.min_bandwidth_gbps:g} GB/s")
    parts += [f"model {' or '.join(request.models)}"] if request.models else []
    parts += [f"MIG profile {request.mig_profile}"] if request.mig_profile else []
    needs = ", needs them on one island" if ask.policy == "island" and ask.count > 1 else ""
    return "asked: " + ", ".join(parts) + needs


def _islands(devices: NodeDevices, cell: Cell, request: Request) -> tuple[IslandState, ...]:
    groups_of_models = device_groups(devices.shape, request)
    fitting = 0
    for group in () if isinstance(groups_of_models, Rejection) else groups_of_models:
        fitting |= group.mask
    found = []
    for island in islands(devices.machine):
        groups: tuple[list[int], list[int], list[int], list[int]] = ([], [], [], [])
        for position in island.positions:
            bit = 1 << position
            kind = 3 if not fitting & bit else 2 if not devices.usable & bit else 0 if cell.free & bit else 1
            groups[kind].append(devices.devices[position].id)
        found.append(IslandState(island.name, island.kind, *(tuple(sorted(group)) for group in groups)))
    return tuple(found)


def _free_text(parts: Sequence[IslandState]) -> str:
    """Return `3 GPUs free, but on two islands: 0,1 | 6`."""
    free = [part.free for part in parts if part.free]
    total = sum(map(len, free))
    if total == 0:
        return "no GPU free"
    told = f"{gpus(total)} free"
    if len(free) == 1:
        return f"{told}: {_ids(free[0])}"
    return f"{told}, on {len(free)} islands: " + " | ".join(_ids(ids) for ids in free)


def _machine_text(devices: NodeDevices) -> str:
    models = sorted({f"{card.model} {card.memory_bytes >> 30 or 'unknown'} GiB" for card in devices.shape.cards})
    sizes = " + ".join(str(len(island.positions)) for island in islands(devices.machine))
    return (
        f"the whole machine has {len(devices.devices)} GPUs ({', '.join(models) or 'none'}), islands of {sizes or '0'}"
    )


def _withheld_text(scene: IndexedSnapshot, devices: NodeDevices, parts: Sequence[IslandState]) -> str:
    withheld = sorted(device_id for part in parts for device_id in part.withheld)
    if not withheld:
        return ""
    status = next(one for one in scene.snapshot.reports if one.metadata.name == devices.node)
    standings = judge_health(status).standings
    told = []
    for device_id in withheld[:LISTED_MAX]:
        standing = standings[devices.devices[devices.position_by_id[device_id]].uuid]
        told.append(f"{device_id} {standing.state}" + (f" ({standing.reason})" if standing.reason else ""))
    return "; not given out: " + ", ".join(told)


def _silence(scene: IndexedSnapshot, name: str, reason: str) -> str:
    """Return what is known of a node without a usable report, and what it waits for."""
    if name in scene.ledger.nodes:
        return "the node's agent has not been heard for too long; look at its pod"
    if name not in scene.unseen:
        return "no label or resource of the node says that it has GPUs, and no agent has reported it"
    report = next((one.status for one in scene.snapshot.reports if one.metadata.name == name), None)
    if report is None:
        return "no agent has reported this node; it may not run there"
    if reason == names.REJECT_PAST_BOOT:
        boots = f"the report is of boot {report.boot_id}, the node says {scene.nodes[name].status.node_info.boot_id}"
        return f"{boots}; its agent has not looked at the machine since"
    if reason == names.REJECT_PAST_NODE:
        uids = f"the report is of Node {report.node_uid}, the node's uid is {scene.nodes[name].metadata.uid}"
        return f"{uids}; its agent has not looked at the machine since"
    if reason == names.REJECT_UNKNOWN_POD:
        status = next(one for one in scene.snapshot.reports if one.metadata.name == name)
        found = unknown_pods(status, {pod.metadata.uid: pod for pod in scene.snapshot.pods}, scene.ledger)
        shown = ", ".join(sorted(found)[:LISTED_MAX])
        way_out = "where its agent may not ask the kubelet, end their processes and remove their cgroups, or reboot it"
        return f"pods of the uids {shown} run there and may use its GPUs; its kubelet must end them first; {way_out}"
    if reason == names.REJECT_RESTORED:
        return "etcd was restored, and its agent has not reported since"
    return "its devices or links contradict each other; delete the GpuNodeStatus, and its agent creates it again"


def _ids(ids: Sequence[int]) -> str:
    more = f",... ({len(ids)})" if len(ids) > LISTED_MAX else ""
    return ",".join(map(str, ids[:LISTED_MAX])) + more
