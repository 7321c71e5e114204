"""Topology requests of a gang, from the GpuGang or from pod annotations, determine the nodes of its members."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from atoll.api import names
from tests.controllers.gang_harness import TOPOLOGIES, GangHarness, cluster, settled, term

pytestmark = pytest.mark.asyncio

BLOCK, RACK = "example.com/block", "example.com/rack"
RACKS = {"a1": "a", "a2": "a", "b1": "b", "b2": "b", "b3": "b"}
NEAR = {"mode": "preferred", "level": RACK}
ONE = {"mode": "required", "level": RACK}
KUEUE = "kueue.x-k8s.io/podset-"
JOBSET = "jobset.sigs.k8s.io/replicatedjob-name"


def add_racks(made: GangHarness, *, left_out: str = "") -> None:
    """Add rack a of two machines and rack b of three, in one block."""
    for name, rack in RACKS.items():
        if name != left_out:
            made.add_node(name, labels={BLOCK: "x", RACK: rack})
    levels = [{"nodeLabel": level} for level in (BLOCK, RACK)]
    made.server.put(f"{TOPOLOGIES}/t", {"metadata": {"name": "t"}, "spec": {"levels": levels}})


def add_members(made: GangHarness, pod_set: str, count: int, *, gpus: int, **options: Any) -> None:
    """Create members of a pod set of the gang `g`."""
    annotations = {names.POD_SET: pod_set, **options.pop("annotations", {})}
    for number in range(count):
        made.add_member("g", f"{pod_set}-{number}", gpus=gpus, annotations=annotations, **options)  # type: ignore[arg-type]


def homes(made: GangHarness, pod_set: str) -> list[str]:
    """Return the nodes that the members of a pod set were let go to."""
    pods = [made.server.objects[path] for path in sorted(made.server.objects) if f"/pods/g-{pod_set}-" in path]
    return [pod["status"]["nominatedNodeName"] for pod in pods if "nominatedNodeName" in pod["status"]]


@pytest.mark.parametrize("is_whole", [False, True], ids=["of the pod set", "of the whole gang"])
@pytest.mark.parametrize(("balanced", "want"), [(False, [4, 2]), (True, [3, 3])], ids=["filled", "balanced"])
async def test_balanced_members_are_dealt_out_evenly(
    tmp_path: Path, balanced: bool, want: list[int], is_whole: bool
) -> None:
    """Six members of two GPUs in the preferred rack: four and two fill the hosts, balanced there are three on each."""
    async with cluster() as made:
        add_racks(made, left_out="b3")
        asked = {"topology": {**NEAR, "balanced": balanced}}
        pod_set = {"name": "workers", "count": 6, **({} if is_whole else asked)}
        made.add_gang("g", 6, podSets=[pod_set], **(asked if is_whole else {}))
        add_members(made, "workers", 6, gpus=2)
        async with term(made, tmp_path) as running:
            await settled(running, lambda: len(homes(made, "workers")) == 6)
            found = homes(made, "workers")

    assert sorted(Counter(found).values(), reverse=True) == want
    assert len({RACKS[node] for node in found}) == 1


@pytest.mark.parametrize("group", [None, "g"], ids=["each by itself", "one group"])
async def test_a_leader_lies_in_the_rack_of_its_workers_where_they_are_a_group(
    tmp_path: Path, group: str | None
) -> None:
    """Two workers fill rack a, or most of b. A leader by itself takes the other rack, in a group that of theirs."""
    named = {} if group is None else {"group": group}
    sets = [{"name": "leader", "count": 1, **named}, {"name": "workers", "count": 2, "topology": ONE, **named}]
    async with cluster() as made:
        add_racks(made)
        made.add_gang("g", 3, podSets=sets)
        add_members(made, "leader", 1, gpus=1)
        add_members(made, "workers", 2, gpus=8)
        async with term(made, tmp_path) as running:
            await settled(running, lambda: len(homes(made, "leader") + homes(made, "workers")) == 3)
            leader, workers = homes(made, "leader"), homes(made, "workers")

    assert len({RACKS[node] for node in workers}) == 1
    assert (RACKS[leader[0]] == RACKS[workers[0]]) is (group is not None)


def asked_by(pod_set: str, **annotations: str) -> dict[str, Any]:
    """Return what a JobSet writes on its pods: the gang's size, Kueue's annotations of their template, the label."""
    asked = {f"{KUEUE}{key.replace('_', '-')}": value for key, value in annotations.items()}
    return {"annotations": {names.GANG_SIZE: "3", **asked}, "labels": {JOBSET: pod_set}}


async def test_templates_of_a_jobset_keep_their_own_requests(tmp_path: Path) -> None:
    """The leader must have a rack, the workers would like one: they take the widest that there is, and all of them
    start though no rack holds every worker."""
    async with cluster() as made:
        add_racks(made)
        add_members(made, "leader", 1, gpus=8, **asked_by("leader", required_topology=RACK))
        add_members(made, "workers", 2, gpus=8, **asked_by("workers", preferred_topology=RACK))
        async with term(made, tmp_path) as running:
            await settled(running, lambda: len(homes(made, "leader") + homes(made, "workers")) == 3)
            workers = homes(made, "workers")
        sets = {one["name"]: one["topology"] for one in made.gang("g")["spec"]["podSets"]}

    assert sets == {"leader": {"mode": "required", "level": RACK}, "workers": {"mode": "preferred", "level": RACK}}
    assert len({RACKS[node] for node in workers}) == 1


async def test_what_is_assumed_of_templates_that_do_not_ask_is_an_event(tmp_path: Path) -> None:
    """The leader's template asks, the workers' does not: they start, and an event says that they may lie anywhere."""
    async with cluster() as made:
        add_racks(made)
        add_members(made, "leader", 1, gpus=8, **asked_by("leader", required_topology=RACK))
        add_members(made, "workers", 2, gpus=8, **asked_by("workers"))
        async with term(made, tmp_path) as running:
            await settled(running, lambda: len(homes(made, "leader") + homes(made, "workers")) == 3)
            told = running.notes.texts

    assert any("workers asks for none and may be placed anywhere" in note for note in told)


@pytest.mark.parametrize(
    ("annotations", "words"),
    [
        ({"required_topology": RACK}, "asks in Kueue's annotations for required example.com/rack"),
        ({"preferred_topology": BLOCK}, "asks in Kueue's annotations for preferred example.com/block"),
        ({"group_name": "x"}, "asks in Kueue's annotations for no topology, group x"),
        ({"slice_required_topology": RACK, "slice_size": "2"}, "slices of 2 at example.com/rack"),
        ({"required_topology": RACK, "preferred_topology": RACK}, "contradict each other"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
async def test_annotations_that_a_gpugang_does_not_say_too_are_refused(
    tmp_path: Path, annotations: dict[str, str], words: str
) -> None:
    """The GpuGang prefers a rack. Pods that ask for something else wait, and the condition names both wishes."""
    async with cluster() as made:
        add_racks(made)
        made.add_gang("g", 3, podSets=[{"name": "workers", "count": 3, "topology": NEAR}])
        add_members(made, "workers", 3, gpus=4, **asked_by("workers", **annotations))
        async with term(made, tmp_path) as running:
            await settled(running, lambda: words in str(made.gang("g").get("status")))

    assert made.held() == 0


@pytest.mark.parametrize("asked", [{"preferred_topology": RACK}, {}, {"unconstrained_topology": "true"}], ids=str)
async def test_annotations_that_a_gpugang_agrees_with_start(tmp_path: Path, asked: dict[str, str]) -> None:
    """The same wish, none, or one that every place fulfils."""
    async with cluster() as made:
        add_racks(made)
        made.add_gang("g", 3, podSets=[{"name": "workers", "count": 3, "topology": NEAR}])
        add_members(made, "workers", 3, gpus=4, **asked_by("workers", **asked))
        async with term(made, tmp_path) as running:
            await settled(running, lambda: len(homes(made, "workers")) == 3)


ZONE = "topology.kubernetes.io/zone"
VOLUMES = "/api/v1/persistentvolumes"
VOLUME_CLAIMS = "/api/v1/namespaces/team/persistentvolumeclaims"


def add_volume(made: GangHarness, name: str, **where: Any) -> list[dict[str, Any]]:
    """Create a bound claim and its volume, which a label or an affinity ties to a place; returns a pod's volumes."""
    made.server.put(
        f"{VOLUMES}/pv-{name}", {"metadata": {"name": f"pv-{name}", **where}, "spec": where.pop("spec", {})}
    )
    body = {"metadata": {"name": name, "namespace": "team"}, "spec": {"volumeName": f"pv-{name}"}}
    made.server.put(f"{VOLUME_CLAIMS}/{name}", body)
    return [{"name": "data", "persistentVolumeClaim": {"claimName": name}}]


def only_on(*hosts: str) -> dict[str, Any]:
    """Return the spec of a volume that some racks alone reach."""
    row = {"key": RACK, "operator": "In", "values": list(hosts)}
    return {"nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [row]}]}}}


@pytest.mark.parametrize("where", [{"spec": only_on("b")}, {"labels": {ZONE: "far"}}], ids=["affinity", "zone"])
async def test_members_go_where_their_bound_volume_is(tmp_path: Path, where: dict[str, Any]) -> None:
    """Rack a would be the tightest; the volume that all members share is in rack b alone."""
    async with cluster() as made:
        for name, rack in RACKS.items():
            made.add_node(name, labels={BLOCK: "x", RACK: rack, ZONE: "far" if rack == "b" else "near"})
        volumes = add_volume(made, "data", **where)
        made.add_gang("g", 2)
        for number in range(2):
            made.add_member("g", number, gpus=8, volumes=volumes)
        async with term(made, tmp_path) as running:
            await settled(running, lambda: not made.is_gated("g-0") and not made.is_gated("g-1"))
            found = {made.pod(f"g-{number}")["status"]["nominatedNodeName"] for number in range(2)}

    assert {RACKS[node] for node in found} == {"b"}


async def test_members_with_volumes_of_their_own_go_each_to_its_own(tmp_path: Path) -> None:
    """Like a StatefulSet's: one volume per member, in different racks; one pod set all the same."""
    racks = ("a", "b", "b")
    async with cluster() as made:
        add_racks(made)
        made.add_gang("g", 3)
        for number, rack in enumerate(racks):
            made.add_member("g", number, gpus=8, volumes=add_volume(made, f"own-{number}", spec=only_on(rack)))
        async with term(made, tmp_path) as running:
            await settled(running, lambda: not any(made.is_gated(f"g-{number}") for number in range(3)))
            found = [RACKS[made.pod(f"g-{number}")["status"]["nominatedNodeName"]] for number in range(3)]
            (assigned,) = made.gang("g")["status"]["assignment"]["podSets"]

    assert tuple(found) == racks
    assert (assigned["name"], assigned["count"]) == ("workers", 3)


@pytest.mark.parametrize(
    ("topology", "words"),
    [(ONE, "rack fits"), ({"slices": [{"level": RACK, "size": 2}]}, "volumes in different places, and slices")],
    ids=["one rack", "slices"],
)
async def test_volumes_in_two_racks_and_a_demand_for_one_wait_with_the_reason(
    tmp_path: Path, topology: dict[str, Any], words: str
) -> None:
    """A required rack is not given up for volumes, and slices are not dealt out across them."""
    async with cluster() as made:
        add_racks(made)
        made.add_gang("g", 2, podSets=[{"name": "workers", "count": 2, "topology": topology}])
        for number, rack in enumerate(("a", "b")):
            made.add_member("g", number, gpus=8, volumes=add_volume(made, f"own-{number}", spec=only_on(rack)))
        async with term(made, tmp_path) as running:
            await settled(running, lambda: words in str(made.gang("g").get("status")))

    assert made.held() == 0


@pytest.mark.parametrize("why", ["term", "port"])
async def test_members_that_keep_out_of_each_others_way_lie_on_two_hosts(tmp_path: Path, why: str) -> None:
    """Both would find room on one: they repel each other, or both want its port 80. Three of them never fit."""
    rule = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app": "g"}}}
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [rule]}}
    side = {"name": "side", "restartPolicy": "Always", "ports": [{"containerPort": 80, "hostPort": 80}]}
    apart: dict[str, Any] = {"affinity": affinity} if why == "term" else {"init_containers": [side]}
    async with cluster("n1", "n2") as made, term(made, tmp_path) as running:
        for gang, count in (("g", 2), ("three", 3)):
            made.add_gang(gang, count)
            for number in range(count):
                made.add_member(gang, number, gpus=2, labels={"app": "g"}, **apart)
        await settled(running, lambda: not made.is_gated("g-0") and not made.is_gated("g-1"))
        await settled(running, lambda: made.reason("three") in {"NeverFits", "WaitForRoom"})

        assert {made.pod(name)["status"]["nominatedNodeName"] for name in ("g-0", "g-1")} == {"n1", "n2"}
        assert made.leases_of("three-0") == []


async def test_a_claim_that_is_bound_later_counts_from_then_on(tmp_path: Path) -> None:
    """While no rack is left for the volume the gang waits; bound to another volume, it starts there."""
    async with cluster() as made:
        add_racks(made)
        volumes = add_volume(made, "data", spec=only_on("c"))
        made.add_gang("g", 1)
        made.add_member("g", 0, gpus=8, volumes=volumes)
        async with term(made, tmp_path) as running:
            await settled(running, lambda: "volume in another zone: 6" in str(made.gang("g").get("status")))
            add_volume(made, "data", spec=only_on("a"))
            await settled(running, lambda: not made.is_gated("g-0"), seconds=30)

    assert RACKS[made.pod("g-0")["status"]["nominatedNodeName"]] == "a"


async def test_a_gang_that_loses_members_beyond_its_limit_is_put_out_of_action(tmp_path: Path) -> None:
    """Ready, lost, found, lost again: evicted by recoveryLimitCount, and by backoffLimitCount deactivated at once."""
    limits = {"recoveryLimitCount": 1, "requeuingStrategy": {"backoffLimitCount": 0}}
    async with cluster() as made:
        made.add_gang("g", 2, waitForPodsReady=limits)
        for number in range(2):
            made.add_member("g", number)
        async with term(made, tmp_path) as running:
            await settled(running, lambda: not made.is_gated("g-0") and not made.is_gated("g-1"))
            made.run_all("g", 2)
            await settled(running, lambda: made.reason("g", names.CONDITION_PODS_READY) == "Started")
            made.make_ready("g-0", ready=False)
            await settled(running, lambda: made.reason("g", names.CONDITION_PODS_READY) == "WaitForRecovery")
            made.make_ready("g-0")
            await settled(running, lambda: made.reason("g", names.CONDITION_PODS_READY) == "Recovered")
            made.make_ready("g-0", ready=False)
            await settled(running, lambda: made.reason("g", names.CONDITION_ACTIVE) == "RequeuingLimitExceeded")
            await settled(running, lambda: made.gang("g")["spec"].get("active") is False)
            words = "lost ready members 2 times, more often than recoveryLimitCount 1 allows"
            await settled(running, lambda: any(words in text for text in running.notes.texts))


LEVELS = (BLOCK, RACK)


def add_two_blocks(made: GangHarness) -> None:
    """Add two blocks, each with a rack of one machine and one of two."""
    for number, (block, rack) in enumerate([("x", "a"), ("x", "b"), ("x", "b"), ("y", "c"), ("y", "d"), ("y", "d")]):
        made.add_node(f"{rack}{number}", labels={BLOCK: block, RACK: rack})
    levels = [{"nodeLabel": level} for level in LEVELS]
    made.server.put(f"{TOPOLOGIES}/t", {"metadata": {"name": "t"}, "spec": {"levels": levels}})


async def places_of(tmp_path: Path, sets: dict[str, tuple[int, int]], **spec: Any) -> dict[str, list[str]]:
    """Return the racks of a gang's members by pod set; `sets`: how many of how many GPUs."""
    async with cluster() as made:
        made.server.remove("/api/v1/nodes/n1")
        add_two_blocks(made)
        spec.setdefault("podSets", [{"name": name, "count": count} for name, (count, _) in sets.items()])
        made.add_gang("g", 1, **spec)
        for name, (count, gpus) in sets.items():
            add_members(made, name, count, gpus=gpus)
        total = sum(count for count, _ in sets.values())
        async with term(made, tmp_path) as running:
            await settled(running, lambda: sum(len(homes(made, name)) for name in sets) == total)
            return {name: [home[0] for home in homes(made, name)] for name in sets}


BLOCKS = {"a": "x", "b": "x", "c": "y", "d": "y"}
ONE_BLOCK = {"mode": "required", "level": BLOCK}
ANYWHERE = {"mode": "unconstrained"}


@pytest.mark.parametrize("workers", [None, ONE, NEAR, ANYWHERE], ids=["unsaid", "required", "preferred", "anywhere"])
@pytest.mark.parametrize("leader", [None, ONE, NEAR, ANYWHERE], ids=["unsaid", "required", "preferred", "anywhere"])
@pytest.mark.parametrize("whole", [None, ONE_BLOCK, {**ONE_BLOCK, "mode": "preferred"}], ids=["-", "block", "near"])
async def test_pod_sets_that_ask_differently_keep_their_rules_and_that_of_the_whole(
    tmp_path: Path, whole: Any, leader: Any, workers: Any
) -> None:
    """A leader of one GPU and two workers of eight: whatever each asks of a rack and the gang of a block is kept."""
    asked = {"leader": leader, "workers": workers}
    sets = [
        {"name": name, "count": 1 if name == "leader" else 2, **({"topology": topology} if topology else {})}
        for name, topology in asked.items()
    ]
    found = await places_of(
        tmp_path, {"leader": (1, 1), "workers": (2, 8)}, podSets=sets, **({"topology": whole} if whole else {})
    )

    assert (len(found["leader"]), len(found["workers"])) == (1, 2)
    if workers in (ONE, NEAR):
        assert len(set(found["workers"])) == 1
    if whole is not None:
        assert len({BLOCKS[rack] for racks in found.values() for rack in racks}) == 1


async def test_a_topology_of_the_whole_gang_holds_for_one_pod_set_too(tmp_path: Path) -> None:
    """Slices and balance of the whole are those of the only pod set."""
    slices = {**ONE_BLOCK, "slices": [{"level": RACK, "size": 2}]}
    found = await places_of(tmp_path, {"workers": (4, 4)}, topology=slices)
    ranks = found["workers"]
    assert (ranks[0], ranks[2]) == (ranks[1], ranks[3])
    assert len({BLOCKS[rack] for rack in ranks}) == 1


async def test_auto_takes_the_narrowest_domain_that_holds_all(tmp_path: Path) -> None:
    """Two whole machines lie in one of the racks of two."""
    found = await places_of(
        tmp_path,
        {"workers": (2, 8)},
        podSets=[{"name": "workers", "count": 2, "topology": {"mode": "auto"}}],
    )
    assert len(set(found["workers"])) == 1


async def test_the_named_topology_is_the_one_that_counts(tmp_path: Path) -> None:
    """Two Topologies cover different machines: the gang lies in the one that it names."""
    for named, racks in (("only-y", {"c", "d"}), ("only-x", {"a", "b"})):
        async with cluster() as made:
            made.server.remove("/api/v1/nodes/n1")
            add_two_blocks(made)
            made.server.remove(f"{TOPOLOGIES}/t")
            for block in ("x", "y"):
                spec = {"nodeSelector": {BLOCK: block}, "levels": [{"nodeLabel": RACK}]}
                made.server.put(f"{TOPOLOGIES}/only-{block}", {"metadata": {"name": f"only-{block}"}, "spec": spec})
            made.add_gang("g", 2, topologyName=named)
            add_members(made, "workers", 2, gpus=8)
            async with term(made, tmp_path) as running:
                await settled(running, lambda: len(homes(made, "workers")) == 2)
                assert {home[0] for home in homes(made, "workers")} <= racks


@pytest.mark.parametrize(
    ("spec", "started"),
    [
        ({"minMember": 3}, 3),
        ({"podSets": [{"name": "workers", "count": 4, "minCount": 3}], "minMember": 3}, 3),
        ({"podSets": [{"name": "workers", "count": 4, "minCount": 2}], "minMember": 2}, 3),
        ({"podSets": [{"name": "workers", "count": 4, "minCount": 4}], "minMember": 3}, 0),
        ({}, 0),
    ],
    ids=["minMember", "minCount", "as many as fit", "minCount of all", "all of them"],
)
async def test_as_many_members_start_as_are_enough_and_fit(tmp_path: Path, spec: Any, started: int) -> None:
    """Four members of eight GPUs, three machines."""
    async with cluster("m1", "m2", "m3") as made:
        made.add_gang("g", 4, **spec)
        for number in range(4):
            made.add_member("g", number, gpus=8)
        async with term(made, tmp_path) as running:
            await settled(running, lambda: made.reason("g") in {"Admitted", "NeverFits"})
            await settled(running, lambda: sum(not made.is_gated(f"g-{number}") for number in range(4)) == started)

    assert made.held() == 8 * started


RANKED: dict[str, tuple[dict[str, Any], list[dict[str, str]]]] = {
    "podIndexLabel": (
        {"podIndexLabel": "example.com/rank"},
        [{"example.com/rank": str(number)} for number in (0, 2, 1, 3)],
    ),
    "sub-groups": (
        {"subGroupIndexLabel": "example.com/part", "subGroupCount": 2},
        [
            {"example.com/part": str(part), "batch.kubernetes.io/job-completion-index": str(index)}
            for part, index in ((0, 0), (1, 0), (0, 1), (1, 1))
        ],
    ),
    "names": ({}, [{}, {}, {}, {}]),
}


@pytest.mark.parametrize("case", RANKED)
async def test_slices_follow_the_ranks_that_the_labels_say(tmp_path: Path, case: str) -> None:
    """Slices of two whole machines in two racks: members 0 and 2 share one by their labels, 0 and 1 by their names."""
    fields, labels = RANKED[case]
    asked = {**fields, "slices": [{"level": RACK, "size": 2}]}
    async with cluster() as made:
        made.server.remove("/api/v1/nodes/n1")
        add_two_blocks(made)
        made.add_gang("g", 4, podSets=[{"name": "workers", "count": 4, "topology": asked}])
        for number in range(4):
            made.add_member("g", number, gpus=8, labels=labels[number])
        async with term(made, tmp_path) as running:
            await settled(running, lambda: not any(made.is_gated(f"g-{number}") for number in range(4)))
            racks = [made.pod(f"g-{number}")["status"]["nominatedNodeName"][0] for number in range(4)]

    mate = 1 if case == "names" else 2
    assert racks[0] == racks[mate]
    assert len(set(racks)) == 2
