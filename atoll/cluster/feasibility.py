"""Does a request fit, will it, may it, or never: the four answers for pods and gangs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from atoll.cluster import host_fit
from atoll.cluster.ledger import Ledger
from atoll.cluster.machines import NodeDevices, cell_of, is_mig_parent
from atoll.cluster.objects import Node, Pod
from atoll.cluster.requests import Rejection, Request, Verdict
from atoll.cluster.selection import offer, plain
from topology.device_requests import gpus

FACTS_SHOWN: Final = 3


def all_positions(devices: NodeDevices) -> int:
    """Return the mask of everything that could be given out if it were free and well."""
    return sum(1 << i for i, device in enumerate(devices.devices) if not is_mig_parent(device))


def could_serve(devices: NodeDevices, request: Request, *, only_well: bool = False) -> bool:
    """Tell whether the machine could serve the request with nobody on it; `only_well`: without what is withheld."""
    mask = devices.usable if only_well else all_positions(devices)
    return not isinstance(offer(cell_of(devices.shape, mask), plain(request)), Rejection)


def machine_verdict(devices: NodeDevices, request: Request) -> Verdict:
    """Return why a machine cannot serve the request now: others hold its GPUs, some are withheld, or it never can."""
    answer = offer(cell_of(devices.shape, all_positions(devices)), plain(request))
    if isinstance(answer, Rejection):
        return Verdict.UNKNOWN if answer.verdict is Verdict.UNKNOWN else Verdict.NEVER
    return Verdict.BUSY if could_serve(devices, request, only_well=True) else Verdict.UNKNOWN


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Facts about a node that has or may have GPUs. `devices`: None without a valid report; `free`: None if the agent
    is silent."""

    node: Node
    devices: NodeDevices | None
    free: int | None = None


def node_verdict(pod: Pod, request: Request, facts: NodeFacts) -> Verdict:
    """Return the verdict of one node for one pod.

    A node that is cordoned or not ready may serve the pod later; a node that the pod's selector, affinity or another
    taint excludes never can.
    """
    node, devices = facts.node, facts.devices
    if host_fit.node_reason(pod, host_fit.opened(node)):
        return Verdict.NEVER
    if devices is None:
        return Verdict.UNKNOWN
    verdict = machine_verdict(devices, request)
    if verdict is not Verdict.BUSY:
        return verdict
    if facts.free is None or host_fit.node_reason(pod, node):
        return Verdict.UNKNOWN
    answer = offer(cell_of(devices.shape, facts.free & devices.usable), plain(request))
    return Verdict.BUSY if isinstance(answer, Rejection) else Verdict.FITS


def unseen_nodes(nodes: Mapping[str, Node], ledger: Ledger, now_seconds: float) -> tuple[NodeFacts, ...]:
    """Return the nodes that have or may have GPUs but no fresh, valid report, by name."""
    found = []
    for name in sorted(nodes):
        devices = ledger.nodes.get(name)
        if devices is None and not (name in ledger.uncounted or host_fit.may_have_gpus(nodes[name])):
            continue
        if devices is None or ledger.is_stale(name, now_seconds):
            found.append(NodeFacts(nodes[name], devices))
    return tuple(found)


def pod_verdict(pod: Pod, request: Request, nodes: Iterable[NodeFacts]) -> tuple[Verdict, tuple[str, ...]]:
    """Return the best verdict of all nodes for one pod and, if facts are missing, the `missing_fact` of each node.

    Stops at the first node that fits or is busy: no caller needs the difference.
    """
    facts: list[str] = []
    for one in nodes:
        verdict = node_verdict(pod, request, one)
        if verdict in (Verdict.FITS, Verdict.BUSY):
            return verdict, ()
        if verdict is Verdict.UNKNOWN:
            facts.append(missing_fact(one, request))
    return (Verdict.UNKNOWN, tuple(facts)) if facts else (Verdict.NEVER, ())


def missing_fact(facts: NodeFacts, request: Request | None = None) -> str:
    """Return what must change so that the whole machine counts, for the request if there is one, as the end of "fits
    when"; empty if nothing."""
    node, devices, name = facts.node, facts.devices, facts.node.metadata.name
    if not host_fit.is_ready(node):
        return f"{name} is Ready"
    if host_fit.opened(node) != node:
        return f"{name} is uncordoned" if node.spec.unschedulable else f"{name} loses the taints of its state"
    if devices is None or facts.free is None:
        return f"the agent of {name} reports" + (" again" if devices is not None else "")
    answer = offer(cell_of(devices.shape, all_positions(devices)), plain(request)) if request is not None else None
    if isinstance(answer, Rejection) and answer.verdict is Verdict.UNKNOWN:
        return f"{name} no longer reports: {answer.reason}"
    missing = (all_positions(devices) & ~devices.usable).bit_count()
    return f"{name} gives out the {gpus(missing)} that it withholds" if missing else ""


def listed(facts: Sequence[str], word: str) -> str:
    """Join the first `FACTS_SHOWN` facts with a word, and count the rest."""
    more = len(facts) - FACTS_SHOWN
    return f" {word} ".join(facts[:FACTS_SHOWN]) + (f" {word} {more} more" if more > 0 else "")
