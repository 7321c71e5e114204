"""Overview of the cluster: nodes with their islands, holders, health, and waiting pods.

`atoll top` and the page show it. Waiting pods have the reasons of `atoll.explain.explanation`, without proposals; pods
with equal requests are decided once, up to a limit. Pure.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from atoll.api import names
from atoll.api.base import Condition
from atoll.api.node_status import GpuNodeStatus
from atoll.cluster import host_fit, pods
from atoll.cluster.gangs import conditions
from atoll.cluster.gangs.membership import gang_key, key_of
from atoll.cluster.health import judge as judge_health
from atoll.cluster.holds import HoldSource
from atoll.cluster.objects import Node, Pod
from atoll.cluster.transitions import Availability
from atoll.explain.decision import IndexedSnapshot
from atoll.explain.explanation import explain_without_help
from atoll.explain.snapshot import NOW_SECONDS
from topology.islands import islands

QUESTIONS_MAX: Final = 32
"""Limit of different requests of waiting pods that are decided; the others are counted."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `state`: free, held, in foreign use, or why it is withheld; `holders`: pods by name."""

    id: int
    model: str
    state: str
    reason: str
    holders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class IslandLine:
    """One island and its GPUs."""

    name: str
    kind: str
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True, slots=True)
class NodeLine:
    """One node with GPUs. `silence`: why its report does not count, in the extender's words; `closed`: why
    kube-scheduler places no pod there. Both are empty for a healthy node."""

    node: str
    models: str
    silence: str
    closed: str
    islands: tuple[IslandLine, ...]

    @property
    def is_silent(self) -> bool:
        """True if its GPUs have no usable report."""
        return bool(self.silence)

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """All GPUs of the node."""
        return tuple(gpu for island in self.islands for gpu in island.gpus)

    def count(self, state: str) -> int:
        """Number of GPUs in a state."""
        return sum(gpu.state == state for gpu in self.gpus)


@dataclass(frozen=True, slots=True)
class WaitingLine:
    """One waiting pod: its number of GPUs, its age, and what it waits for."""

    pod: str
    asked: int
    waits_seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class Overview:
    """The whole answer. `taken_at`: a UTC time."""

    taken_at: str
    nodes: tuple[NodeLine, ...]
    waiting: tuple[WaitingLine, ...]

    def count(self, state: str = "") -> int:
        """Number of GPUs of the cluster in a state; all by default."""
        return sum(node.count(state) if state else len(node.gpus) for node in self.nodes)


FREE: Final = "free"
HELD: Final = "held"
FOREIGN: Final = "foreign"
USE_UNKNOWN: Final = "who uses it cannot be read"


def overview(scene: IndexedSnapshot, *, namespace: str = "") -> Overview:
    """Return the overview; with a namespace, only its waiting pods and holders."""
    waiting = (pod for pod in scene.snapshot.pods if not namespace or pod.metadata.namespace == namespace)
    nodes = node_lines(scene, namespace=namespace)
    return Overview(scene.snapshot.taken_at, nodes, tuple(_waiting(scene, waiting)))


def node_lines(scene: IndexedSnapshot, *, namespace: str = "") -> tuple[NodeLine, ...]:
    """Return the nodes with their islands, by name; with a namespace, its holders alone are named."""
    holders = _holders(scene, namespace)
    return tuple(
        _node(scene, report, holders.get(report.metadata.name, {}))
        for report in sorted(scene.snapshot.reports, key=lambda one: one.metadata.name)
        if report.status is not None and report.metadata.name in scene.nodes
    )


def _holders(scene: IndexedSnapshot, namespace: str) -> dict[str, dict[int, list[str]]]:
    """Return the holders by node and device id."""
    found: dict[str, dict[int, list[str]]] = {}

    def note(node: str, device_id: int, space: str, name: str) -> None:
        told = f"{space}/{name}" if not namespace or space == namespace else "another namespace"
        entries = found.setdefault(node, {}).setdefault(device_id, [])
        if told not in entries:
            entries.append(told)

    for uid, pod in scene.ledger.pods.items():
        allocation = scene.ledger.allocation_of(uid)
        for device_id in allocation.device_ids if allocation is not None else ():
            note(allocation.node if allocation is not None else "", device_id, *_named(pod))
    for record in scene.ledger.leases.values():
        note(record.node, record.device_id, record.holder.namespace, record.holder.name)
    return found


def _named(pod: Pod) -> tuple[str, str]:
    return pod.metadata.namespace, pod.metadata.name


def _node(scene: IndexedSnapshot, report: GpuNodeStatus, holders: dict[int, list[str]]) -> NodeLine:
    name, ledger = report.metadata.name, scene.ledger
    devices = ledger.nodes.get(name)
    assert report.status is not None
    models = ", ".join(dict.fromkeys(device.model for device in report.status.devices))
    closed = _closed(scene.nodes[name])
    if devices is None:
        return NodeLine(name, models, ledger.uncounted.get(name) or names.REJECT_NO_REPORT, closed, ())
    silence = names.REJECT_STALE_REPORT if ledger.is_stale(name, NOW_SECONDS) else ""
    standings, free = judge_health(report).standings, ledger.free(name, now_seconds=NOW_SECONDS)
    found = []
    for island in islands(devices.machine):
        gpus = []
        for position in island.positions:
            device = devices.devices[position]
            standing = standings[device.uuid]
            held = tuple(sorted(holders.get(device.id, ())))
            state = HELD if held else "silent" if silence else FREE if free >> position & 1 else ""
            if standing.state is not Availability.HEALTHY and not held:
                state = str(standing.state)
            state = state or (FOREIGN if _is_foreign(scene, name, device.id, device.uuid) else "withheld")
            blindness = USE_UNKNOWN if ledger.is_use_unknown(name, device.uuid) else ""
            reason = "; ".join(filter(None, (standing.reason, blindness)))
            gpus.append(Gpu(device.id, device.model, state, reason, held))
        found.append(IslandLine(island.name, island.kind, tuple(gpus)))
    return NodeLine(name, models, silence, closed, tuple(found))


def _closed(node: Node) -> str:
    if not host_fit.is_ready(node):
        return host_fit.NOT_READY
    return host_fit.CORDONED if node.spec.unschedulable else ""


def _is_foreign(scene: IndexedSnapshot, node: str, device_id: int, uuid: str) -> bool:
    ledger = scene.ledger
    has_hold = any(hold.source is HoldSource.FOREIGN for hold in ledger.holds(node, device_id, uuid))
    return has_hold or any(True for _ in ledger.foreign_uses(node, uuid))


def _waiting(scene: IndexedSnapshot, found: Iterable[Pod]) -> Iterable[WaitingLine]:
    """Yield the waiting pods, the longest first."""
    gangs = {key_of(gang): gang for gang in scene.snapshot.gangs}
    known: dict[object, str] = {}
    waiting = [pod for pod in found if pods.is_gpu_pod(pod) and pods.is_unplaced(pod)]
    for pod in sorted(waiting, key=lambda one: (one.metadata.creation_timestamp or "", *_named(one))):
        key = gang_key(pod)
        gang = gangs.get(key) if key is not None else None
        if key is not None:
            reason = f"gang {key[1]}: " + _condition_of(gang.status.conditions if gang and gang.status else ())
        else:
            question = (pod.metadata.namespace, pods.claim_name(pod), pod.spec, pod.metadata.labels)
            told = repr(question)
            if told not in known and len(known) < QUESTIONS_MAX:
                known[told] = explain_without_help(scene, pod).headline
            reason = known.get(told, "not looked at here; ask atoll explain")
        age = scene.snapshot.age_seconds(pod.metadata.creation_timestamp)
        yield WaitingLine("/".join(_named(pod)), pods.device_count(pod), age, reason)


def _condition_of(entries: tuple[Condition, ...]) -> str:
    found = conditions.find(entries, names.CONDITION_ADMITTED)
    return f"{found.reason}: {found.message}" if found is not None else "not yet looked at by the controllers"
