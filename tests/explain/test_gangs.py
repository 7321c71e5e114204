"""`atoll explain gang/NAME`: the controllers' own messages, domain by domain, and proposals that work."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from atoll.cluster.health import Availability, judge
from atoll.cluster.storage import PersistentVolume, PersistentVolumeClaim
from atoll.explain.anonymize import anonymize
from atoll.explain.changes import ClusterChange, relaxations_of_gang
from atoll.explain.codec import decode_snapshot, encode_snapshot
from atoll.explain.decision import index_snapshot
from atoll.explain.gang_decision import decide_gang, index_gangs
from atoll.explain.gang_explanation import GangExplanation, GangState, explain_gang
from atoll.explain.gang_proposals import check_gang
from atoll.explain.proposals import ProposalKind
from atollctl.__main__ import app
from atollctl.explain_text import gang_lines
from tests.explain.gang_situations import RACK, GangSituation, gang_situation, rack
from tests.explain.situations import NO_FABRIC, holder, unsociable

HOST = "kubernetes.io/hostname"
REQUIRED = {"mode": "required", "level": RACK}
SPLIT = {"mig": {"enabled": True}}
TWO_RACKS = {"a1": rack("a"), "a2": rack("a"), "b1": rack("b"), "b2": rack("b")}


def full(node: str, **options: Any) -> Any:
    """Return a pod that holds all four cards of a node."""
    return holder(f"on-{node}", node, *range(4), **options)


@dataclass(frozen=True)
class GangTold:
    """What must be said of a situation."""

    found: GangSituation
    state: GangState
    words: tuple[str, ...] = ()
    helped_by: tuple[ProposalKind, ...] = ()
    not_by: tuple[ProposalKind, ...] = ()


SITUATIONS: dict[str, GangTold] = {
    "it fits": GangTold(gang_situation(TWO_RACKS, topology=REQUIRED), GangState.FITS, ("2 members fit now", "g-0: a")),
    "others hold half of every rack": GangTold(
        gang_situation(TWO_RACKS, [full("a1"), full("b1")], topology=REQUIRED),
        GangState.BUSY,
        ("rack a fits 1 of 2 pods; 2 hosts; excluded: resource gpu.scheduling/gpu: 1", "when team/on-", "preferred"),
        (ProposalKind.RELAX, ProposalKind.COUNT, ProposalKind.END, ProposalKind.ADD),
        (ProposalKind.OPEN, ProposalKind.GPU, ProposalKind.REPAIR, ProposalKind.ENDING),
    ),
    "no machine is large enough, and each has labels of its own": GangTold(
        gang_situation({f"a{n}": rack("a", node={"labels": {"serial": f"s{n}"}}) for n in range(20)}, gpus=8),
        GangState.NEVER,
        ("add 2 nodes",),
        (ProposalKind.ADD,),
        (ProposalKind.END, ProposalKind.COUNT, ProposalKind.OPEN),
    ),
    "all of it is held": GangTold(
        gang_situation({"a1": rack("a"), "a2": rack("a")}, [full("a1"), full("a2")]),
        GangState.BUSY,
        ("all hosts fit 0 of 2 pods", "when team/on-a1, team/on-a2 end", "add 2 nodes"),
        (ProposalKind.END, ProposalKind.ADD),
        (ProposalKind.COUNT, ProposalKind.RELAX),
    ),
    "pods that are ending make room": GangTold(
        gang_situation({"a1": rack("a"), "a2": rack("a")}, [full("a1", deleted=True)]),
        GangState.BUSY,
        ("when team/on-a1 is proven to have ended",),
        (ProposalKind.ENDING, ProposalKind.COUNT, ProposalKind.ADD),
    ),
    "cards are cordoned": GangTold(
        gang_situation({"a1": rack("a"), "a2": rack("a", cordoned=(3,))}),
        GangState.UNKNOWN,
        ("uncordon GPU a2/3",),
        (ProposalKind.GPU, ProposalKind.COUNT, ProposalKind.ADD),
        (ProposalKind.END, ProposalKind.REPAIR),
    ),
    "a card is sick": GangTold(
        gang_situation({"a1": rack("a"), "a2": rack("a", sick=(1,))}),
        GangState.UNKNOWN,
        ("get GPU a2/1 well",),
        (ProposalKind.REPAIR,),
        (ProposalKind.GPU,),
    ),
    "a node is cordoned": GangTold(
        gang_situation({"a1": rack("a"), "a2": rack("a", node={"unschedulable": True})}),
        GangState.UNKNOWN,
        ("cordoned: 1", "open 1 node"),
        (ProposalKind.OPEN, ProposalKind.ADD),
    ),
    "more members than the machines could hold": GangTold(
        gang_situation({"a1": rack("a")}, count=3),
        GangState.NEVER,
        ("accept 1 of workers", "add 2 nodes"),
        (ProposalKind.COUNT, ProposalKind.ADD),
        (ProposalKind.END,),
    ),
    "the members want cards that nobody has": GangTold(
        gang_situation(TWO_RACKS, claim={"models": ["nvidia-b200"]}),
        GangState.NEVER,
        ("no GPU of a claimed model: 4", "any model"),
        (ProposalKind.RELAX,),
        (ProposalKind.END, ProposalKind.COUNT),
    ),
    "three cards of every machine are split by MIG": GangTold(
        gang_situation({"a1": rack("a", devices=dict.fromkeys(range(3), SPLIT)), "a2": rack("a", devices={0: SPLIT})}),
        GangState.NEVER,
        ("node has too few GPUs that match the claim: 2",),
    ),
    "the NVLink fabric is not ready": GangTold(
        gang_situation({"a1": rack("a"), "a2": rack("a", devices=dict.fromkeys(range(4), NO_FABRIC))}),
        GangState.UNKNOWN,
        ("waits for the report of 1 node: a2", "NVLink fabric of the node is not ready: 1"),
    ),
    "members are missing": GangTold(gang_situation(TWO_RACKS, there=1), GangState.MEMBERS, ("1 of 2 members",)),
    "it is put out of action": GangTold(gang_situation(TWO_RACKS, active=False), GangState.INACTIVE, ("spec.active",)),
    "its level is unknown": GangTold(
        gang_situation(TWO_RACKS, topology={"mode": "required", "level": "example.com/room"}),
        GangState.INACTIVE,
        ("has no level",),
    ),
    "a slice wants one rack": GangTold(
        gang_situation(
            TWO_RACKS, [full("a1"), full("b1")], count=2, topology={"slices": [{"size": 2, "level": RACK}]}
        ),
        GangState.BUSY,
        ("fits 0 of 1 slices", "no slices"),
        (ProposalKind.RELAX,),
    ),
    "a pod without GPUs has taken the cpu": GangTold(
        gang_situation({"a1": rack("a"), "a2": rack("a")}, [holder("web", "a1", cpu="60")], cpu="8"),
        GangState.BUSY,
        ("excluded: resource cpu: 1", "when team/web end"),
        (ProposalKind.END, ProposalKind.COUNT, ProposalKind.ADD),
    ),
    "a pod without GPUs does not want to share its host": GangTold(
        gang_situation(
            {"a1": rack("a"), "a2": rack("a")},
            [(unsociable("web", "a1", priority=3), []), holder("small", "a2", cpu="1")],
            member={"labels": {"app": "x"}},
        ),
        GangState.BUSY,
        ("excluded: pod affinity: 1", "when team/web end"),
        (ProposalKind.END, ProposalKind.COUNT, ProposalKind.ADD),
    ),
    "GPUs of a member that is gone are in doubt": GangTold(
        gang_situation({"a1": rack("a"), "a2": rack("a")}, [(holder("x", "b9")[0], full("a1")[1])]),
        GangState.BUSY,
        ("(gone) is proven to have ended",),
        (ProposalKind.ENDING,),
    ),
}  # fmt: skip


def explained(found: GangSituation) -> GangExplanation:
    """Explain the situation's gang."""
    return explain_gang(index_gangs(index_snapshot(found.snapshot)), found.gang)


@pytest.mark.parametrize("told", SITUATIONS.values(), ids=SITUATIONS.keys())
def test_explain_names_the_cause_and_something_that_helps(told: GangTold) -> None:
    """State, reasons and numbers are those of the situation; each proposal is true when it is applied."""
    answer = explained(told.found)
    text = " ".join(" ".join(gang_lines(answer, index_snapshot(told.found.snapshot), show_all=True)).split())
    kinds = {proposal.kind for proposal in answer.help.proposals}

    assert answer.state is told.state, text
    for word in told.words:
        assert word in text, f"{word!r} is missing in: {text}"
    assert set(told.helped_by) <= kinds, text
    assert not kinds & set(told.not_by), text
    for proposal in answer.help.proposals:
        after = check_gang(told.found.snapshot, told.found.gang, proposal.change)
        assert after.fits
        assert len(after.assignments) == proposal.members


def cluster(seed: int) -> GangSituation:
    """Return two or three small nodes in two racks, most of whose cards are held or withheld, and a gang."""
    rng = random.Random(seed)
    nodes: dict[str, Any] = {}
    holders = []
    for number in range(rng.randint(2, 3)):
        held: dict[int, list[int]] = {}
        withheld: dict[str, list[int]] = {"cordoned": [], "sick": []}
        for device_id in range(4):
            fate = rng.random()
            if fate < 0.4:
                held.setdefault(rng.randrange(2), []).append(device_id)
            elif fate < 0.5:
                withheld[rng.choice(["cordoned", "sick"])].append(device_id)
        node = rng.choice([{}] * 4 + [{"unschedulable": True}])
        nodes[f"n{number}"] = rack("ab"[number % 2], node=node, **withheld)
        for who, ids in held.items():
            options = {"deleted": rng.random() < 0.3, "priority": rng.randrange(3)}
            holders.append(holder(f"h{number}{who}", f"n{number}", *ids, **options))
    plain = rng.choice(
        [[], [], [holder("web", "n0", cpu="60", priority=3)], [(unsociable("web", "n0", rng.choice([RACK, HOST])), [])]]
    )
    topology = rng.choice([None, REQUIRED, {"mode": "preferred", "level": RACK}])
    claim = rng.choice([None, {}, {"models": ["nvidia-b200"]}])
    return gang_situation(
        nodes,
        [*holders, *plain],
        count=rng.randint(2, 3),
        gpus=rng.choice([1, 2, 4]),
        topology=topology,
        claim=claim,
        cpu=rng.choice(["", "8"]),
        member={"labels": {"app": "x"}},
    )


def subsets(items: Any) -> Iterator[tuple[Any, ...]]:
    """Yield every set of one or more."""
    items = sorted(items)
    return chain.from_iterable(combinations(items, size) for size in range(1, len(items) + 1))


def changes_of(kind: ProposalKind, found: GangSituation) -> Iterator[ClusterChange]:
    """Yield every change of a kind that there is."""
    snapshot = found.snapshot
    running = [pod for pod in snapshot.pods if pod.spec.node_name]
    ending = [pod.metadata.uid for pod in running if pod.metadata.deletion_timestamp is not None]
    states = {
        ProposalKind.GPU: (Availability.CORDONED,),
        ProposalKind.REPAIR: (Availability.QUARANTINED, Availability.UNKNOWN),
    }
    cards = [
        (report.metadata.name, uuid)
        for report in snapshot.reports
        for uuid, standing in judge(report).standings.items()
        if standing.state in states.get(kind, ())
    ]
    if kind is ProposalKind.ENDING:
        yield from (ClusterChange(ended=uids) for uids in subsets(ending))
    elif kind is ProposalKind.END:
        # Pods that are ending hold their cards on, as the proposals of this kind take it.
        yield from (ClusterChange(ended=u) for u in subsets({p.metadata.uid for p in running} - set(ending)))
    elif kind is ProposalKind.RELAX:
        yield from (ClusterChange(relaxed=names) for names in subsets(relaxations_of_gang(snapshot, found.gang)))
    elif kind is ProposalKind.COUNT:
        yield from (ClusterChange(members=(("workers", n),)) for n in range(1, found.gang.spec.size))
    elif kind is ProposalKind.OPEN:
        closed = [node.metadata.name for node in snapshot.nodes if node.spec.unschedulable]
        yield from (ClusterChange(opened=names) for names in subsets(closed))
    elif kind is ProposalKind.GPU:
        yield from (ClusterChange(uncordoned=one) for one in subsets(cards))
    elif kind is ProposalKind.REPAIR:
        yield from (ClusterChange(healed=one) for one in subsets(cards))


def sizes(change: ClusterChange) -> int:
    """Return how many things a change takes."""
    return sum(map(len, (change.uncordoned, change.healed, change.ended, change.opened, change.relaxed)))


def check_seed(seed: int) -> None:
    """Check every proposal and every kind that is said not to help."""
    found = cluster(seed)
    answer = explained(found)
    for proposal in answer.help.proposals:
        assert check_gang(found.snapshot, found.gang, proposal.change).fits, (seed, proposal.kind)
        if proposal.kind in (ProposalKind.GPU, ProposalKind.REPAIR, ProposalKind.END, ProposalKind.OPEN):
            field = {"gpu": "uncordoned", "repair": "healed", "end": "ended", "open": "opened"}[proposal.kind]
            whole = getattr(proposal.change, field)
            for spared in whole:
                rest = ClusterChange(**{field: tuple(one for one in whole if one != spared)})
                assert not check_gang(found.snapshot, found.gang, rest).fits, (seed, "could be spared", spared)
    for kind in answer.help.helpless:
        for change in changes_of(kind, found):
            assert not check_gang(found.snapshot, found.gang, change).fits, (seed, kind, sizes(change))


@given(st.integers(0, 1 << 32))
@settings(max_examples=25, deadline=None)
def test_proposals_come_true_and_what_is_said_not_to_help_does_not(seed: int) -> None:
    """Each proposal makes the gang fit, and takes nothing that could be spared; of a kind that is said not to help, no
    set of changes does, by trying all of them."""
    check_seed(seed)


@pytest.mark.long
@pytest.mark.parametrize("block", range(20))
def test_proposals_come_true_over_many_clusters(block: int) -> None:
    """The same over a thousand seeds."""
    for seed in range(block * 50, block * 50 + 50):
        check_seed(seed)


@pytest.mark.parametrize("told", SITUATIONS.values(), ids=SITUATIONS.keys())
def test_domains_hold_what_they_say(told: GangTold) -> None:
    """The gang cut down to what a rack says it fits has a place there, and one member more has none."""
    answer = explained(told.found)
    snapshot = told.found.snapshot
    for fit in answer.domains:
        if fit.level != RACK or fit.unit != "pod":
            continue
        elsewhere = {n.metadata.name for n in snapshot.nodes if n.metadata.labels[RACK] != fit.path[0]}
        nodes = tuple(n for n in snapshot.nodes if n.metadata.name not in elsewhere)
        inside = replace(snapshot, nodes=nodes)
        for count in range(1, fit.of + 1):
            change = ClusterChange(members=(("workers", count),), relaxed=("topology mode: preferred",))
            assert check_gang(inside, told.found.gang, change).fits == (count <= fit.fits)


def test_command_explains_a_gang(tmp_path: Path) -> None:
    """Text for people, JSON for programs; status 1 while it waits, 0 when it fits, 2 for a gang that is not there."""
    path = tmp_path / "cluster.json"
    path.write_bytes(encode_snapshot(SITUATIONS["others hold half of every rack"].found.snapshot))
    base = ["-n", "team", "--snapshot", str(path)]

    text = CliRunner().invoke(app, ["explain", "gang/g", *base])
    data = CliRunner().invoke(app, ["explain", "gpugang/g", *base, "-o", "json"])
    nobody = CliRunner().invoke(app, ["explain", "gang/x", *base])

    assert (text.exit_code, data.exit_code, nobody.exit_code) == (1, 1, 2), text.output + nobody.output
    assert "rack a fits 1 of 2 pods" in text.output
    answer = msgspec.json.decode(data.output)
    assert answer["state"] == "busy"
    assert {one["kind"] for one in answer["proposals"]} >= {"relax", "count", "end", "add"}
    assert "there is no GpuGang 'x'" in nobody.output


def test_headline_is_the_condition() -> None:
    """What explain says in one line is the message that the controllers write into the condition Admitted."""
    found = SITUATIONS["others hold half of every rack"].found
    decision = decide_gang(index_gangs(index_snapshot(found.snapshot)), found.gang)

    assert explained(found).headline == decision.message
    assert decision.reason == "WaitForRoom"


def test_a_volume_in_another_rack_is_told_and_what_is_asked_stands_beside() -> None:
    """The volume is reachable from no rack; the pod sets' wishes and the reason survive a saved and anonymized file."""
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
    found = gang_situation(
        TWO_RACKS, topology={**REQUIRED, "mode": "preferred", "balanced": True}, member={"volumes": volumes}
    )
    row = {"key": RACK, "operator": "In", "values": ["c"]}
    affinity = {"required": {"nodeSelectorTerms": [{"matchExpressions": [row]}]}}
    snapshot = replace(
        found.snapshot,
        volumes=(msgspec.convert({"metadata": {"name": "pv"}, "spec": {"nodeAffinity": affinity}}, PersistentVolume),),
        volume_claims=(
            msgspec.convert(
                {"metadata": {"name": "data", "namespace": "team"}, "spec": {"volumeName": "pv"}}, PersistentVolumeClaim
            ),
        ),
    )
    for seen in (snapshot, decode_snapshot(encode_snapshot(snapshot)), anonymize(snapshot)):
        gangs = index_gangs(index_snapshot(seen))
        told = explain_gang(gangs, seen.gangs[0])
        text = "\n".join(gang_lines(told, gangs.scene))
        assert told.state is GangState.NEVER
        assert "volume in another zone: 4" in text
        assert ": preferred " in text
        assert ", balanced" in text
