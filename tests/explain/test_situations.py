"""Explain names the true cause and something that helps in each hand-made situation."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from atoll.api import names
from atoll.cluster import host_fit
from atoll.cluster.leases import Holder
from atoll.cluster.objects import Pod, PodCondition, PodStatus
from atoll.cluster.pod_fit import NEIGHBOURS
from atoll.explain.changes import PodCase
from atoll.explain.decision import index_snapshot
from atoll.explain.explanation import Explanation, PodState, explain
from atoll.explain.nodes import NodeBlocker
from atoll.explain.proposals import ProposalKind, check
from atoll.explain.wording import sentence
from atollctl.explain_text import lines
from tests.builders import make_claim, make_lease, make_pod, uuid_of
from tests.explain.situations import (
    LONG_AGO,
    NO_FABRIC,
    Situation,
    holder,
    situation,
    unsociable,
    waiting,
    with_cpu,
    with_host_port,
)
from tests.explain.test_reservations import BUSY as WAITING
from tests.explain.test_reservations import REFUSED as RESERVED
from topology.choice import Reason

ISLAND = {"policy": "island"}
TAINT = {"taints": [{"key": "team", "value": "a", "effect": "NoSchedule"}]}


def full(node: str = "n1", count: int = 8, **options: Any) -> Any:
    """One pod that holds a whole machine."""
    return holder(f"on-{node}", node, *range(count), **options)


def with_memory(asking: tuple[Pod, Any], memory: str) -> tuple[Pod, Any]:
    """Let the waiting pod's container ask for so much memory."""
    pod, claim = asking
    (container,) = pod.spec.containers
    resources = msgspec.structs.replace(
        container.resources, requests={**container.resources.requests, "memory": memory}
    )
    containers = (msgspec.structs.replace(container, resources=resources),)
    return msgspec.structs.replace(pod, spec=msgspec.structs.replace(pod.spec, containers=containers)), claim


@dataclass(frozen=True)
class ExpectedAnswer:
    """What explain must say: the state, words of its text, and kinds of which a proposal must be among the answers."""

    found: Situation
    state: PodState
    words: tuple[str, ...]
    helped_by: tuple[ProposalKind, ...] = ()
    not_by: tuple[ProposalKind, ...] = ()
    standings: dict[str, NodeBlocker] = field(default_factory=dict)


ADD = ProposalKind.ADD
HOST_USE = {"hostUses": [{"uuid": uuid_of("n1", 7), "pids": [4711]}]}
ALL_USED = {"hostUses": [{"uuid": uuid_of("n1", number), "pids": [4711]} for number in range(4)]}
POD_USE = {"pods": [{"uid": "stranger", "live": True, "uuids": [uuid_of("n1", 7)]}]}
BOOT, NEXT_BOOT = "11111111-2222-3333-4444-555555555555", "66666666-2222-3333-4444-555555555555"
SITUATIONS: dict[str, ExpectedAnswer] = {
    "all GPUs of the only node are held": ExpectedAnswer(
        situation({"n1": {}}, [full()], waiting(1)),
        PodState.BUSY,
        ("waits for GPUs that others hold", Reason.TOO_FEW_FREE, "no GPU free"),
        (ProposalKind.END, ADD),
        (ProposalKind.COUNT, ProposalKind.GPU, ProposalKind.OPEN),
    ),
    "three free, but on two islands, and one is needed": ExpectedAnswer(
        situation(
            {"n3": {"profile": "rtx8000x4-bridged"}},
            [holder("a", "n3", 1), holder("b", "n3", 3)],
            waiting(2, claim=ISLAND),
        ),
        PodState.BUSY,
        ("2 GPUs free, on 2 islands: 0 | 2", "needs them on one island", Reason.NO_ISLAND),
        (ProposalKind.RELAX, ProposalKind.COUNT, ProposalKind.END),
    ),
    "an island of three on a machine of pairs": ExpectedAnswer(
        situation({"n1": {"profile": "rtx8000x4-bridged"}}, [], waiting(3, claim=ISLAND)),
        PodState.NEVER,
        ("fits no machine of this cluster", "islands of 2 + 2"),
        (ProposalKind.RELAX, ProposalKind.COUNT, ADD),
        (ProposalKind.END,),
    ),
    "more GPUs than any machine has": ExpectedAnswer(
        situation({"n1": {}, "n2": {"profile": "l40s-4"}}, [full()], waiting(12)),
        PodState.NEVER,
        ("not even an empty one", names.REJECT_NEVER_FITS, "has 4 GPUs"),
        (ProposalKind.COUNT, ADD),
        (ProposalKind.END,),
    ),
    "a model that nobody has": ExpectedAnswer(
        situation({"n1": {}}, [], waiting(1, claim={"models": ["nvidia-b200"]})),
        PodState.NEVER,
        (names.REJECT_NO_MODEL, "asked: count 1, policy contiguous, model nvidia-b200"),
        (ProposalKind.RELAX, ADD),
        (ProposalKind.COUNT,),
    ),
    "a model that is there and held": ExpectedAnswer(
        situation({"n1": {}, "n2": {"profile": "t4-4"}}, [full()], waiting(1, claim={"models": ["nvidia-v100"]})),
        PodState.BUSY,
        ("1 no GPU of a claimed model", "1 too few free GPUs"),
        (ProposalKind.RELAX, ProposalKind.END, ADD),
        standings={"n1": NodeBlocker.BUSY, "n2": NodeBlocker.NEVER},
    ),
    "memory of cards that do not tell their size": ExpectedAnswer(
        situation(
            {"n1": {"devices": {number: {"memoryBytes": 0, "model": "nvidia-new"} for number in range(4)}}},
            [],
            waiting(1, claim={"memory": "40Gi"}),
        ),
        PodState.NEVER,
        (names.REJECT_MEMORY_UNKNOWN,),
        (ProposalKind.RELAX, ADD),
    ),
    "more memory than the cards have": ExpectedAnswer(
        situation({"n1": {"profile": "t4-4"}}, [], waiting(1, claim={"memory": "40Gi"})),
        PodState.NEVER,
        (names.REJECT_NO_MEMORY,),
        (ProposalKind.RELAX, ADD),
    ),
    "a newer compute capability": ExpectedAnswer(
        situation({"n1": {}}, [], waiting(1, claim={"computeCapability": "9.0"})),
        PodState.NEVER,
        (names.REJECT_NO_CAPABILITY,),
        (ProposalKind.RELAX, ADD),
    ),
    "MIG instances where no card is split": ExpectedAnswer(
        situation(
            {"n1": {"profile": "dgx-a100"}},
            [],
            waiting(1, claim={"migProfile": "3g.20gb"}, resource=names.mig_resource("3g.20gb")),
        ),
        PodState.NEVER,
        (names.REJECT_MIG,),
        (),
        (ProposalKind.END, ProposalKind.COUNT),
    ),
    "NVLink on a machine without": ExpectedAnswer(
        situation({"n1": {"profile": "l40s-4"}}, [], waiting(2, claim={"interconnect": "nvlink"})),
        PodState.NEVER,
        (Reason.NO_NVLINK_ISLAND,),
        (ProposalKind.RELAX, ProposalKind.COUNT, ADD),
    ),
    "PCIe alone where a switch joins all": ExpectedAnswer(
        situation({"n1": {"profile": "dgx-h100"}}, [], waiting(2, claim={"interconnect": "pcie"})),
        PodState.NEVER,
        (Reason.NO_PCIE_SET,),
        (ProposalKind.RELAX, ProposalKind.COUNT, ADD),
    ),
    "more bandwidth than the links carry": ExpectedAnswer(
        situation({"n1": {}}, [], waiting(4, claim={"minBandwidthGBps": 5000})),
        PodState.NEVER,
        (Reason.NO_BANDWIDTH, "5000 GB/s"),
        (ProposalKind.RELAX, ProposalKind.COUNT),
    ),
    "two conditions that fail together": ExpectedAnswer(
        situation({"n1": {"profile": "t4-4"}}, [], waiting(1, claim={"models": ["nvidia-b200"], "memory": "40Gi"})),
        PodState.NEVER,
        (names.REJECT_NO_MODEL, "any model, no memory"),
        (ProposalKind.RELAX,),
    ),
    "cordoned GPUs would be enough": ExpectedAnswer(
        situation({"n1": {"cordoned": (6, 7)}}, [holder("a", "n1", *range(6))], waiting(1)),
        PodState.BUSY,
        ("not given out: 6 cordoned, 7 cordoned", "uncordon GPU n1/6"),
        (ProposalKind.GPU, ProposalKind.END, ADD),
    ),
    "every GPU is cordoned": ExpectedAnswer(
        situation({"n1": {"cordoned": tuple(range(8))}}, [], waiting(1)),
        PodState.WITHHELD,
        ("cordoned or sick", "uncordon GPU n1/0"),
        (ProposalKind.GPU,),
        (ProposalKind.END,),
    ),
    "the only free GPU is sick": ExpectedAnswer(
        situation({"n1": {"sick": (7,)}}, [holder("a", "n1", *range(7))], waiting(1)),
        PodState.BUSY,
        ("7 quarantined", "get GPU n1/7 well"),
        (ProposalKind.REPAIR, ProposalKind.END),
    ),
    "a sick GPU breaks the only island that would do": ExpectedAnswer(
        situation(
            {"n1": {"profile": "rtx8000x4-bridged", "sick": (1,)}}, [holder("a", "n1", 3)], waiting(2, claim=ISLAND)
        ),
        PodState.BUSY,
        ("2 GPUs free, on 2 islands: 0 | 2", "get GPU n1/1 well"),
        (ProposalKind.REPAIR, ProposalKind.END, ProposalKind.RELAX),
    ),
    "a whole machine is wanted and one GPU is sick": ExpectedAnswer(
        situation({"n1": {"sick": (3,)}}, [], waiting(8)),
        PodState.WITHHELD,
        ("3 quarantined",),
        (ProposalKind.REPAIR, ProposalKind.COUNT, ADD),
        (ProposalKind.END,),
    ),
    "the agent is silent": ExpectedAnswer(
        situation({"n1": {"heard": LONG_AGO}}, [], waiting(1)),
        PodState.UNKNOWN,
        (names.REJECT_STALE_REPORT, "has not been heard"),
        (ADD,),
    ),
    "the machine was rebooted since its report": ExpectedAnswer(
        situation({"n1": {"boot": BOOT, "node": {"boot": NEXT_BOOT}}}, [], waiting(1)),
        PodState.UNKNOWN,
        (names.REJECT_PAST_BOOT, f"the report is of boot {BOOT}, the node says {NEXT_BOOT}"),
        (ADD,),
    ),
    "the node was made anew since its report": ExpectedAnswer(
        situation({"n1": {"node_uid": "uid-of-another"}}, [], waiting(1)),
        PodState.UNKNOWN,
        (names.REJECT_PAST_NODE, "the report is of Node uid-of-another, the node's uid is uid-of-n1"),
        (ADD,),
    ),
    "a pod runs there of which the API server knows nothing": ExpectedAnswer(
        situation(
            {"n1": {"status": {"pods": [{"uid": "bound-after-the-backup", "live": True, "kubelet": True}]}}},
            [],
            waiting(1),
            refused={"n1": names.REJECT_UNKNOWN_POD},
        ),
        PodState.UNKNOWN,
        (names.REJECT_UNKNOWN_POD, "pods of the uids bound-after-the-backup run there"),
        (ADD,),
    ),
    "the report was edited by hand and contradicts itself": ExpectedAnswer(
        situation({"n1": {"devices": {1: {"id": 0}}}}, [], waiting(1)),
        PodState.UNKNOWN,
        (names.REJECT_BAD_REPORT, "delete the GpuNodeStatus"),
        (ADD,),
    ),
    "the node never reported": ExpectedAnswer(
        situation({"n1": {"report": False}}, [], waiting(1)),
        PodState.UNKNOWN,
        (names.REJECT_NO_REPORT,),
        (ADD,),
    ),
    "there is no node at all": ExpectedAnswer(
        situation({}, [], waiting(1)), PodState.NEVER, ("Of 0 nodes: none",), (ADD,)
    ),
    "a taint keeps the pod off": ExpectedAnswer(
        situation({"n1": {"node": TAINT}}, [], waiting(1)),
        PodState.CLOSED,
        ("untolerated taint", "tolerate team=a:NoSchedule"),
        (ProposalKind.OPEN, ADD),
        (ProposalKind.END, ProposalKind.COUNT),
        {"n1": NodeBlocker.CLOSED},
    ),
    "the node is cordoned": ExpectedAnswer(
        situation({"n1": {"node": {"unschedulable": True}}}, [], waiting(1)),
        PodState.CLOSED,
        ("cordoned", "uncordon the node"),
        (ProposalKind.OPEN, ADD),
    ),
    "the node is not ready": ExpectedAnswer(
        situation({"n1": {"node": {"ready": "False"}}}, [], waiting(1)),
        PodState.CLOSED,
        ("not ready",),
        (ADD,),
        (ProposalKind.OPEN,),
    ),
    "a node selector matches nothing": ExpectedAnswer(
        situation({"n1": {}}, [], waiting(1, nodeSelector={"pool": "training"})),
        PodState.CLOSED,
        ("node selector", "label it pool=training"),
        (ProposalKind.OPEN, ADD),
    ),
    "node affinity matches nothing": ExpectedAnswer(
        situation(
            {"n1": {}},
            [],
            waiting(
                1,
                affinity={
                    "nodeAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": {
                            "nodeSelectorTerms": [
                                {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["b"]}]}
                            ]
                        }
                    }
                },
            ),
        ),
        PodState.CLOSED,
        ("node affinity",),
    ),
    "no cpu is left beside free GPUs": ExpectedAnswer(
        situation({"n1": {}}, [holder("a", "n1", 0, cpu="60")], waiting(1, cpu="8")),
        PodState.CLOSED,
        ("insufficient cpu", "team/a"),
        (ProposalKind.END, ADD),
        (ProposalKind.COUNT,),
    ),
    "a pod without GPUs has taken the cpu": ExpectedAnswer(
        situation(
            {"n1": {}},
            [],
            waiting(1, cpu="8"),
            others=[with_cpu(make_pod("web", gpus=None, node="n1", phase="Running"), "60")],
        ),
        PodState.CLOSED,
        ("insufficient cpu", "when team/web ends"),
        (ProposalKind.END, ADD),
    ),
    "more cpu than any node has": ExpectedAnswer(
        situation({"n1": {}}, [], waiting(1, cpu="100")),
        PodState.CLOSED,
        ("insufficient cpu",),
        (ADD,),
        (ProposalKind.END,),
    ),
    "no cpu and no GPU": ExpectedAnswer(
        situation({"n1": {}}, [full(cpu="60")], waiting(1, cpu="8")),
        PodState.CLOSED,
        ("too few free GPUs, insufficient cpu",),
        (ProposalKind.END, ADD),
    ),
    "a taint on the free node, the other is full": ExpectedAnswer(
        situation({"n1": {"node": TAINT}, "n2": {}}, [full("n2")], waiting(1)),
        PodState.BUSY,
        ("1 too few free GPUs, 1 untolerated taint",),
        (ProposalKind.OPEN, ProposalKind.END, ADD),
        standings={"n1": NodeBlocker.CLOSED, "n2": NodeBlocker.BUSY},
    ),
    "a pod that is ending makes room": ExpectedAnswer(
        situation({"n1": {}}, [full(deleted=True)], waiting(1)),
        PodState.BUSY,
        ("when team/on-n1 is proven to have ended",),
        (ProposalKind.ENDING,),
    ),
    "a pod is gone and its Leases are not": ExpectedAnswer(
        situation({"n1": {}}, [(make_pod("x", gpus=None), full()[1])], waiting(1)),
        PodState.BUSY,
        ("team/on-n1 (gone) is proven to have ended",),
        (ProposalKind.ENDING,),
    ),
    "GPUs are kept for another pod": ExpectedAnswer(
        situation(
            {"n1": {}},
            [holder("a", "n1", *range(7))],
            waiting(1),
            others=[make_pod("q", annotations={names.KEPT: "n1:7"}, priority=5)],
        ),
        PodState.BUSY,
        ("too few free GPUs",),
        (ProposalKind.END, ADD),
    ),
    "two small pods hold what one large wants": ExpectedAnswer(
        situation({"n1": {"profile": "l40s-4"}}, [holder("a", "n1", 0), holder("b", "n1", 1)], waiting(4)),
        PodState.BUSY,
        ("when team/a, team/b end",),
        (ProposalKind.END, ProposalKind.COUNT),
    ),
    "one of low priority and one of high": ExpectedAnswer(
        situation(
            {"n1": {"profile": "l40s-4"}},
            [holder("a", "n1", 0, 1, priority=9), holder("b", "n1", 2, 3, priority=1)],
            waiting(1),
        ),
        PodState.BUSY,
        ("1. when team/b ends", "2. when team/a ends"),
        (ProposalKind.END,),
    ),
    "a host port is taken": ExpectedAnswer(
        situation(
            {"n1": {}},
            [],
            (with_host_port(waiting(1)[0]), None),
            others=[with_host_port(make_pod("web", gpus=None, node="n1", phase="Running"))],
        ),
        PodState.CLOSED,
        ("host port in use", "when team/web ends"),
        (ProposalKind.END, ADD),
    ),
    "the NVLink fabric is not ready": ExpectedAnswer(
        situation({"n1": {"profile": "dgx-h100", "devices": dict.fromkeys(range(8), NO_FABRIC)}}, [], waiting(1)),
        PodState.WITHHELD,
        (names.REJECT_FABRIC,),
    ),
    "a process of the machine uses the last GPU": ExpectedAnswer(
        situation({"n1": {"status": HOST_USE}}, [holder("a", "n1", *range(7))], waiting(1)),
        PodState.BUSY,
        (Reason.TOO_FEW_FREE, "no GPU free", "when team/a end"),
        (ProposalKind.END, ADD),
        (ProposalKind.COUNT, ProposalKind.GPU),
    ),
    "processes of the machine use every GPU": ExpectedAnswer(
        situation({"n1": {"profile": "t4-4", "status": ALL_USED}}, [], waiting(1)),
        PodState.BUSY,
        (Reason.TOO_FEW_FREE,),
        (ADD,),
        (ProposalKind.END, ProposalKind.COUNT, ProposalKind.GPU, ProposalKind.REPAIR),
    ),
    "a pod that went around Atoll uses the last GPU": ExpectedAnswer(
        situation(
            {"n1": {"status": POD_USE}},
            [full(count=7)],
            waiting(1),
            others=[make_pod("stranger", uid="stranger", gpus=None, node="n1", phase="Running")],
        ),
        PodState.BUSY,
        (Reason.TOO_FEW_FREE, "when team/stranger end"),
        (ProposalKind.END, ADD),
    ),
    "the pod still holds GPUs of another node": ExpectedAnswer(
        situation(
            {"n1": {}, "n2": {}},
            [(holder("x", "n1", *range(8))[0], [make_lease("n1", 0, holder=Holder("team", "p", "uid-of-p"))])],
            waiting(1),
        ),
        PodState.BUSY,
        (names.REJECT_HOLDS_ELSEWHERE,),
    ),
    "large annotations leave no room for the allocation": ExpectedAnswer(
        situation({"n1": {}}, [], waiting(1, annotations={"example.com/notes": "x" * 300_000})),
        PodState.REFUSED,
        (names.REJECT_ANNOTATIONS, "take large annotations off the pod"),
    ),
    "more memory than any node has": ExpectedAnswer(
        situation({"n1": {}}, [], with_memory(waiting(1), "600Gi")), PodState.CLOSED, ("insufficient memory",), (ADD,)
    ),
    "every place for pods is taken": ExpectedAnswer(
        situation(
            {"n1": {}},
            [],
            waiting(1),
            others=[make_pod(f"w{n}", gpus=None, node="n1", phase="Running") for n in range(110)],
        ),
        PodState.CLOSED,
        ("insufficient pods",),
        (ProposalKind.END, ADD),
    ),
    "a neighbour does not want to share the host": ExpectedAnswer(
        situation({"n1": {}}, [], waiting(1, labels={"app": "x"}), others=[unsociable("web", "n1")]),
        PodState.CLOSED,
        (NEIGHBOURS, "when team/web end"),
        (ProposalKind.END, ADD),
    ),
    "a neighbour of the same zone, on a full node and dearer than those who hold GPUs": ExpectedAnswer(
        situation(
            {"n1": {"node": {"labels": {"zone": "a"}}}, "n2": {"node": {"labels": {"zone": "a"}}}},
            [*(holder(f"h{n}", "n1", n) for n in range(7)), full("n2")],
            waiting(1, labels={"app": "x"}),
            others=[unsociable("web", "n2", "zone", priority=7)],
        ),
        PodState.CLOSED,
        (NEIGHBOURS, "when team/web end"),
        (ProposalKind.END, ADD),
    ),
    "a host port is taken by a pod that is dearer than those who hold GPUs": ExpectedAnswer(
        situation(
            {"n1": {}},
            [holder(f"h{n}", "n1", n) for n in range(4)],
            (with_host_port(waiting(1)[0]), None),
            others=[with_host_port(make_pod("web", gpus=None, node="n1", phase="Running", priority=7))],
        ),
        PodState.CLOSED,
        ("host port in use", "when team/web end"),
        (ProposalKind.END, ADD),
    ),
    "the pod fits and is not yet bound": ExpectedAnswer(
        situation({"n1": {}}, [holder("a", "n1", 0)], waiting(2)), PodState.FITS, ("fits now, best on n1",)
    ),
    "the claim is missing": ExpectedAnswer(
        situation({"n1": {}}, [], (make_pod("p", annotations={names.CLAIM: "gone"}), None)),
        PodState.REFUSED,
        (names.REJECT_CLAIM_MISSING, "create the GpuClaim"),
    ),
    "the claim was made anew": ExpectedAnswer(
        situation({"n1": {}}, [], (make_pod("p", claim=make_claim("c", uid="old")), make_claim("c", uid="new"))),
        PodState.REFUSED,
        (names.REJECT_CLAIM_REPLACED, "create the pod anew"),
    ),
    "the containers ask for another count": ExpectedAnswer(
        situation({"n1": {}}, [], waiting(2, claim={}, gpus=1)),
        PodState.REFUSED,
        (names.REJECT_COUNT_MISMATCH,),
    ),
    "the pod belongs to a gang": ExpectedAnswer(
        situation({"n1": {}}, [], waiting(1, annotations={names.GANG: "g"})),
        PodState.REFUSED,
        (names.REJECT_GANG, "there is no GpuGang 'g' in namespace team; create it"),
    ),
    "the pod belongs to a gang that the controllers make": ExpectedAnswer(
        situation({"n1": {}}, [], waiting(1, annotations={names.GANG: "g", names.GANG_SIZE: "2"})),
        PodState.REFUSED,
        (names.REJECT_GANG, "`atoll explain gang/g -n team`"),
    ),
    "somebody's gate holds the pod": ExpectedAnswer(
        situation({"n1": {}}, [], waiting(1, schedulingGates=[{"name": "example.com/quota"}])),
        PodState.GATED,
        ("example.com/quota",),
    ),
    "the pod asks for no GPU": ExpectedAnswer(
        situation({"n1": {}}, [], (make_pod("p", gpus=None), None)), PodState.NO_GPUS, (names.CLAIM,)
    ),
    "the pod asks the device plugin": ExpectedAnswer(
        situation({"n1": {}}, [], (make_pod("p", gpus=1, resource="nvidia.com/gpu"), None)),
        PodState.NO_GPUS,
        ("nvidia.com/gpu is not Atoll's, ask for gpu.scheduling/gpu",),
    ),
}


def told_text(found: Situation, told: Explanation) -> str:
    """Return everything that a reader gets to see of the reasons and proposals."""
    scene = index_snapshot(found.snapshot)
    flowed = " ".join(" ".join(lines(told, scene, found.pod, show_all=True)).split())
    sentences = [f"{number}. {sentence(p, scene, found.pod)}" for number, p in enumerate(told.help.proposals, 1)]
    kinds: dict[ProposalKind, int] = {}
    for p in told.help.proposals:
        kinds[p.kind] = kinds.get(p.kind, 0) + 1
        sentences.append(f"{kinds[p.kind]}. {sentence(p, scene, found.pod)}")
    return " ".join((told.headline, flowed, *sentences))


@pytest.mark.parametrize("told", SITUATIONS.values(), ids=SITUATIONS.keys())
def test_explain_names_the_cause_and_something_that_helps(told: ExpectedAnswer) -> None:
    """State, reason and numbers are those of the situation; each proposal is true when it is applied."""
    answer = explain(index_snapshot(told.found.snapshot), told.found.pod)
    text = told_text(told.found, answer)
    kinds = {proposal.kind for proposal in answer.help.proposals}
    standings = {one.node: one.standing for group in answer.groups for one in group.nodes}

    assert answer.state is told.state, text
    for word in told.words:
        assert word in text, f"{word!r} is missing in: {text}"
    assert set(told.helped_by) <= kinds, text
    assert not kinds & set(told.not_by), text
    assert standings.items() >= told.standings.items()
    for proposal in answer.help.proposals:
        assert check(PodCase(told.found.snapshot, told.found.pod, told.found.claim), proposal.change).fits


def test_every_reason_has_a_situation() -> None:
    """Whatever filter may say of a node, and whatever kube-scheduler says that explain recomputes, is told above."""
    told = {word for one in SITUATIONS.values() for word in one.words} | RESERVED.keys() | WAITING.keys()
    told |= {names.REJECT_REFUSED, names.REJECT_RESTORED, names.REJECT_ELSEWHERE}  # told by the extender alone
    ours = {value for key, value in vars(names).items() if key.startswith("REJECT_")}
    ours |= {reason.value for reason in Reason} - {Reason.REQUIRED.value, Reason.TOO_FEW_GPUS.value}
    theirs = {host_fit.NOT_READY, host_fit.CORDONED, host_fit.TAINTED, host_fit.SELECTOR, host_fit.AFFINITY}
    theirs |= {host_fit.PORTS, NEIGHBOURS}

    assert {reason for reason in ours | theirs if not any(reason in word for word in told)} == set()


def test_headline_fits_into_an_event() -> None:
    """However many reasons there are, the one line stays short enough for an event's note."""
    nodes = {f"n{i}": {"node": {"taints": [{"key": f"k{i}", "effect": "NoSchedule"}]}} for i in range(40)}

    answer = explain(index_snapshot(situation(nodes).snapshot), situation(nodes).pod)

    assert len(answer.headline) <= 900


def test_waiting_time_is_that_of_the_snapshot() -> None:
    """How long a pod waits is told by the moment of the snapshot, not by the clock of whoever reads it."""
    found = situation({"n1": {}}, [full()])
    metadata = msgspec.structs.replace(found.pod.metadata, creation_timestamp="2026-01-31T11:30:00Z")
    pod = msgspec.structs.replace(found.pod, metadata=metadata)

    assert explain(index_snapshot(found.snapshot), pod).waits_seconds == 1800


def test_what_kube_scheduler_said_stands_beside_a_pod_that_fits() -> None:
    """A rule may be in the way that is not followed, such as that of a plugin: then its own last word is told."""
    said = "0/1 nodes are available: 1 node(s) are drained by hand."
    found = situation({"n1": {}}, [], waiting(1))
    refused = PodCondition("PodScheduled", "False", "Unschedulable", said)
    pod = msgspec.structs.replace(found.pod, status=PodStatus(conditions=(refused,)))

    told = explain(index_snapshot(found.snapshot), pod)

    assert told.state is PodState.FITS
    assert told.headline.endswith(f"kube-scheduler has yet to bind it. It last said: {said}")
