"""Looks beyond the nodes that kube-scheduler offers: in filter for better GPUs, in preempt before anybody is evicted.

kube-scheduler filters a sample of the nodes and asks about that alone. What lies outside of it is in the ledger, so
filter compares (`atoll.cluster.elsewhere`), and refuses the sample with a reason by which the controllers send the pod
to the other node (`atoll.cluster.hints`). A pod that would fit in the sample is refused at most once in its life, and
only while hints arrive: where they are switched off, or nobody writes them, it takes what the sample has.

Nobody is evicted while a node is free that admits the pod. A node on which kube-scheduler refused the pod although it
was sent there does not count any more: something that is not known here keeps the pod out. After a few of those, or a
long time, the pod gets its victims.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from atoll.cluster import host_fit
from atoll.cluster.elsewhere import nodes_elsewhere
from atoll.cluster.hints import has_unknown_needs, is_sample, may_be_sent, may_wait_for_better
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import Node, Pod
from atoll.cluster.selection import Candidate
from atoll.cluster.verdicts import FilterInput
from atoll.cluster.wakeups import is_nominated_by_us, parse_woken
from atoll.kube.cache import Change
from atoll.kube.clock import Clock
from atoll.kube.mirror import WatchedKind
from extender.residents import Residents

LOOKED_AT_MAX: Final = 64
"""Nodes with better GPUs whose taints, labels and free resources are looked at in filter."""
PODS_MAX: Final = 10_000
MISSED_MAX: Final = 3
"""Refused pods in a row that came back without a hint: then nobody seems to write any."""
DISTRUST_SECONDS: Final = 60.0
SPARE_SECONDS: Final = 300.0
"""How long a pod gets no victims while a node is free for it, where no hint shows that the node is none."""
SPARE_UNKNOWN_SECONDS: Final = 30.0
"""The same for a pod whose volumes, spreading or neighbours may keep it off a node that seems free."""
FAILED_MAX: Final = 3
"""Nodes on which the pod was refused although it was sent there; then it gets victims."""


class HintTrust:
    """Whether hints arrive, by the pods that were refused for them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._refused: OrderedDict[str, bool] = OrderedDict()
        self._missed = 0
        self._paused_until = float("-inf")

    def may_refuse(self, uid: str) -> bool:
        """Tell whether the pod may be refused for a hint: it never was, and hints arrive."""
        return uid not in self._refused and self._clock.monotonic_seconds() >= self._paused_until

    def refused(self, uid: str) -> None:
        """Remember that the pod was refused and waits for its hint."""
        self._refused[uid] = True
        if len(self._refused) > PODS_MAX:
            self._refused.popitem(last=False)

    def came_back(self, pod: Pod) -> None:
        """Learn from the next attempt of a pod that was refused."""
        uid = pod.metadata.uid
        if not self._refused.get(uid):
            return
        self._refused[uid] = False
        if pod.status.nominated_node_name or parse_woken(pod).nominated_node:
            self._missed = 0
            return
        self._missed += 1
        if self._missed >= MISSED_MAX:
            self._missed = 0
            self._paused_until = self._clock.monotonic_seconds() + DISTRUST_SECONDS


@dataclass(slots=True)
class SparedPreemptor:
    """Since when a pod gets no victims, and the nodes on which it was refused although it was sent there."""

    since_seconds: float
    failed: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class FreeNodes:
    """What decides whether a pod fits somewhere: nodes that have its GPUs, and what is on all nodes. A copy, so that it
    can be searched beside the event loop."""

    pod: Pod
    names: Sequence[str]
    nodes: Mapping[str, Node]
    pods_by_node: Mapping[str, Sequence[Pod]]

    def admits(self) -> bool:
        """Tell whether one of them also takes the pod, by all that `host_fit` knows."""
        needed = host_fit.needs(self.pod)
        open_nodes = [
            name
            for name in self.names
            if name in self.nodes
            and not host_fit.node_reason(self.pod, self.nodes[name])
            and has_room(needed, self.nodes[name], self.pods_by_node.get(name, ()))
        ]
        if not open_nodes:
            return False
        refused = host_fit.excluded_nodes(self.pod, tuple(self.nodes.values()), self.pods_by_node)
        return any(name not in refused for name in open_nodes)


class BeyondSample:
    """What lies beyond the sample, for one extender. `nodes`: the Node objects, by ("", name)."""

    def __init__(self, ledger: Ledger, nodes: Mapping[tuple[str, str], Node], clock: Clock, *, hints: bool) -> None:
        self._ledger = ledger
        self._nodes = nodes
        self._clock = clock
        self._hints = hints
        self._residents = Residents()
        self._trust = HintTrust(clock)
        self._spared: OrderedDict[str, SparedPreemptor] = OrderedDict()

    def observe(self, kind: WatchedKind, change: Change[Any]) -> None:
        """Take a change that the ledger has taken before."""
        self._residents.observe(kind, change)

    def better(self, pod: Pod, offered: int, question: FilterInput, sampled: Candidate | None) -> Candidate | None:
        """Return what a node that was not offered would give, if the pod is to be sent there; else None. `offered`:
        number of nodes that were; `sampled`: the best of them."""
        uid = pod.metadata.uid
        self._trust.came_back(pod)
        if not self._hints or not is_sample(offered, len(self._nodes)) or not may_be_sent(pod):
            return None
        if sampled is not None and not (may_wait_for_better(pod) and self._trust.may_refuse(uid)):
            return None
        failed = self._spared[uid].failed if uid in self._spared else ()
        found = islice(nodes_elsewhere(question, self._ledger, sampled), LOOKED_AT_MAX)
        best = next((one for one in found if one.node not in failed and self._admits(pod, one.node)), None)
        if best is not None and sampled is not None:
            self._trust.refused(uid)
        return best

    def _admits(self, pod: Pod, name: str) -> bool:
        node = self._nodes.get(("", name))
        if node is None or host_fit.node_reason(pod, node):
            return False
        there = self._residents.on(name)
        return has_room(host_fit.needs(pod), node, there) and not host_fit.ports_clash(pod, there)

    def may_spare(self, pod: Pod) -> bool:
        """Tell whether to look for a free node before the pod gets victims: kube-scheduler may have left some out."""
        return is_sample(len(self._nodes) - 1, len(self._nodes)) and pod.spec.preemption_policy != "Never"

    def free_nodes(self, pod: Pod, feasible: Sequence[str]) -> FreeNodes:
        """Return what to search for a node that is free for the pod. `feasible`: nodes that have its GPUs."""
        if is_nominated_by_us(pod) and pod.status.nominated_node_name in feasible:
            self._seen(pod).failed.add(pod.status.nominated_node_name)
        failed = self._spared[pod.metadata.uid].failed if pod.metadata.uid in self._spared else ()
        names = [name for name in feasible if name not in failed]
        nodes = {name: node for (_, name), node in self._nodes.items()}
        return FreeNodes(pod, names, nodes, self._residents.by_node() if names else {})

    def spares(self, pod: Pod, *, fits: bool) -> bool:
        """Tell whether the pod gets no victims: it fits as things are, and nothing says that this is wrong."""
        now = self._clock.monotonic_seconds()
        seen = self._seen(pod)
        if not fits:
            seen.since_seconds = now
            return False
        longest = SPARE_UNKNOWN_SECONDS if has_unknown_needs(pod) else SPARE_SECONDS
        return len(seen.failed) < FAILED_MAX and now - seen.since_seconds < longest

    def _seen(self, pod: Pod) -> SparedPreemptor:
        found = self._spared.setdefault(pod.metadata.uid, SparedPreemptor(self._clock.monotonic_seconds()))
        if len(self._spared) > PODS_MAX:
            self._spared.popitem(last=False)
        return found


def has_room(needed: Mapping[str, int], node: Node, pods: Iterable[Pod]) -> bool:
    """Tell whether what a pod needs of counted resources is left beside the pods of a node."""
    left = host_fit.free(node, pods)
    return all(left.get(resource, 0) >= amount for resource, amount in needed.items())
