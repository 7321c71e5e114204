"""Gangs with members that need no GPUs, such as the launcher of an MPI job."""

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from atoll.api import names
from controllers.gangs.cache import GangCache, GangRules
from controllers.gangs.lifecycle import BEHIND_SECONDS
from tests.controllers.gang_harness import TOPOLOGIES, GangHarness, cluster, settled, term
from tests.controllers.harness import PODS, HurriedClock
from tests.controllers.test_gangs import DEATHS
from tests.fakes.api_server import answering
from tests.fakes.clock import until

pytestmark = pytest.mark.asyncio

RACK = "example.com/rack"
PINNED = "requiredDuringSchedulingIgnoredDuringExecution"
IN_A_RACK = {"mode": "required", "level": RACK}
SETS = [{"name": "launcher", "count": 1}, {"name": "workers", "count": 2}]


def add_launcher(made: GangHarness, name: str = "g", number: int = 0, *, cpu: str = "1", **spec: Any) -> None:
    """Create a launcher that needs so many cpus and no GPU."""
    needs = {"name": "init", "resources": {"requests": {"cpu": cpu}}}
    made.add_member(name, number, gpus=None, annotations={names.POD_SET: "launcher"}, init_containers=[needs], **spec)


def add_cpu_node(made: GangHarness) -> None:
    """Add a node without GPUs, with room for one launcher of 65 cpus."""
    status = {"allocatable": {"cpu": "96", "memory": "64Gi", "pods": "110"}}
    made.server.put("/api/v1/nodes/cpu", {"metadata": {"name": "cpu", "uid": "uid-of-cpu"}, "status": status})


def add_workers(made: GangHarness, name: str = "g") -> None:
    """Create two workers with four GPUs each: members 1 and 2."""
    for number in (1, 2):
        made.add_member(name, number, annotations={names.POD_SET: "workers"})


def node_of(made: GangHarness, name: str) -> str:
    """Return the node to which a member is pinned; empty for a gated one."""
    spec = made.pod(name)["spec"]
    if made.is_gated(name):
        return ""
    (one,) = spec["affinity"]["nodeAffinity"][PINNED]["nodeSelectorTerms"]
    return str(one["matchFields"][0]["values"][0])


def started(made: GangHarness, name: str = "g", count: int = 3) -> list[bool]:
    """Tell of every member whether its gate is open."""
    return [not made.is_gated(f"{name}-{number}") for number in range(count)]


async def test_a_launcher_without_gpus_starts_with_its_workers_and_holds_no_lease(tmp_path: Path) -> None:
    """The gang waits for all three; then all are pinned and let go, and only the workers hold GPUs."""
    async with cluster("n1") as made, term(made, tmp_path) as running:
        made.add_gang("g", 0, podSets=SETS)
        add_workers(made)
        await settled(running, lambda: made.reason("g") == "WaitForQuorum")
        assert made.held() == 0
        add_launcher(made)
        await settled(running, lambda: all(started(made)))

        assert node_of(made, "g-0") == "n1"
        assert made.pod("g-0")["status"]["nominatedNodeName"] == "n1"
        assert made.pod("g-0")["metadata"]["annotations"][names.ADMISSION] == made.gang("g")["status"]["admission"]
        assert [len(made.leases_of(f"g-{number}")) for number in range(3)] == [0, 4, 4]
        assert made.gang("g")["status"]["members"] == 3


async def test_a_gang_of_members_without_gpus_starts_together(tmp_path: Path) -> None:
    """No GPU anywhere in it: the gate and the places are the same."""
    async with cluster("n1") as made, term(made, tmp_path) as running:
        made.add_gang("g", 0, podSets=[{"name": "launcher", "count": 3}])
        add_launcher(made, number=0)
        add_launcher(made, number=1)
        await settled(running, lambda: made.reason("g") == "WaitForQuorum")
        add_launcher(made, number=2)
        await settled(running, lambda: all(started(made)))

        assert made.held() == 0


async def test_workers_hold_nothing_while_their_launcher_finds_no_cpu(tmp_path: Path) -> None:
    """The launcher's cpu is weighed in the same decision; it starts once there is room."""
    async with cluster("n1") as made, term(made, tmp_path) as running:
        made.add_gang("g", 0, podSets=SETS)
        add_launcher(made, cpu="65")
        add_workers(made)
        await settled(running, lambda: made.reason("g") == "NeverFits")
        assert made.held() == 0
        assert not any(started(made))
        add_cpu_node(made)
        await settled(running, lambda: all(started(made)))

        assert [node_of(made, f"g-{number}") for number in range(3)] == ["cpu", "n1", "n1"]


async def test_a_launcher_counts_on_its_node_before_its_nomination_is_seen(tmp_path: Path) -> None:
    """Another gang that is tried at once finds the cpu taken; a launcher that was not let go counts nowhere."""
    async with cluster("n1") as made, term(made, tmp_path) as running:
        add_launcher(made, cpu="60")
        await settled(running, lambda: "uid-of-g-0" in running.mirror.pods.by_uid)
        cache = GangCache(running.mirror, HurriedClock(), GangRules())

        def free_cpus() -> int:
            return cache.snapshot().free["n1"]["cpu"] // 1000

        assert free_cpus() == 64
        cache.assume_home("uid-of-g-0", "n1")
        assert free_cpus() == 4
        cache.forget_home("uid-of-g-0")
        assert free_cpus() == 64


async def test_a_pod_that_is_resized_in_place_counts_with_what_it_needs_now(tmp_path: Path) -> None:
    """What a pod needs is computed once per version of its spec."""
    async with cluster("n1") as made, term(made, tmp_path) as running:
        add_launcher(made, cpu="60", node="n1")
        await settled(running, lambda: "uid-of-g-0" in running.mirror.pods.by_uid)
        cache = GangCache(running.mirror, HurriedClock(), GangRules())
        before, seen = cache.snapshot().free["n1"]["cpu"], running.mirror.pods.by_uid["uid-of-g-0"]
        add_launcher(made, cpu="10", node="n1")
        await settled(running, lambda: running.mirror.pods.by_uid["uid-of-g-0"] is not seen)

        assert (before, cache.snapshot().free["n1"]["cpu"]) == (4_000, 54_000)


async def test_a_launcher_counts_on_its_node_until_its_gate_is_seen_open(tmp_path: Path) -> None:
    """Its nomination is seen first, while it is gated: another gang that is tried then does not get the same cpu."""
    async with cluster("n1") as made, term(made, tmp_path) as running:
        admission = running.reconciler("gang-admission")

        def is_next(name: str) -> bool:
            gang = running.mirror.gangs.store.get(("team", name)) if running.mirror.gangs is not None else None
            return ("team", name) in admission._cache.candidates and gang is not None and gang.status is not None

        async def hold_up(request: web.Request) -> web.Response:
            add_alone(made, "y")
            await until(lambda: is_next("y") and running.mirror.pods.by_uid["uid-of-x-0"].status.nominated_node_name)
            made.server.sends_events = False
            return made.server.respond("PATCH", request.path, {}, await request.json())

        made.server.fail(hold_up, containing=f"PATCH {PODS}/x-0?")
        add_alone(made, "x")
        await settled(running, lambda: made.reason("y") in {"Admitted", "WaitForRoom"})

        assert made.reason("y") == "WaitForRoom"


async def test_a_gang_without_gpus_keeps_its_admission_until_its_open_gates_are_seen(tmp_path: Path) -> None:
    """Its own loop looks at it before the watch shows its members: they hold nothing, and have been let go."""
    key = ("team", "x")
    async with cluster("n1") as made, term(made, tmp_path) as running:
        lifecycle = running.reconciler("gangs")

        async def hold_up(request: web.Request) -> web.Response:
            await until(
                lambda: (gang := lifecycle._cache.gang(key)) is not None and lifecycle._cache.view(gang).is_admitted
            )
            made.server.sends_events = False
            return made.server.respond("PATCH", request.path, {}, await request.json())

        made.server.fail(hold_up, containing=f"PATCH {PODS}/x-0?")
        add_alone(made, "x")
        await until(lambda: not made.is_gated("x-0") and key not in lifecycle._cache.busy)

        assert await lifecycle.reconcile(key) == BEHIND_SECONDS
        assert made.reason("x") == "Admitted"


@pytest.mark.parametrize("code", [409, 500])
@pytest.mark.parametrize("write", ["/status?", "?"], ids=["its nomination", "its open gate"])
async def test_a_launcher_that_was_not_let_go_does_not_wait_for_its_own_cpu(
    tmp_path: Path, write: str, code: int
) -> None:
    """Its pod has changed meanwhile, or the API server failed: it counts on no node, and is placed again."""
    async with cluster("n1") as made, term(made, tmp_path) as running:
        made.server.fail(answering(code, "Conflict" if code == 409 else ""), containing=f"PATCH {PODS}/g-0{write}")
        add_alone(made, "g")
        await settled(running, lambda: all(started(made, count=1)))


def add_alone(made: GangHarness, name: str) -> None:
    """Create a gang of a launcher alone, that needs more than half of a node's cpus."""
    made.add_gang(name, 0, podSets=SETS[:1])
    add_launcher(made, name, cpu="40")


@pytest.mark.parametrize("goes", [False, True], ids=["all stay", "a worker goes while others are nominated"])
async def test_a_launcher_counts_on_its_node_from_its_admission_on_unless_it_is_not_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, goes: bool
) -> None:
    """Until the watch shows it there nobody else gets its cpu; one that stays gated keeps none."""
    forgotten: list[str] = []
    monkeypatch.setattr(GangCache, "forget_home", lambda _, uid: forgotten.append(uid))
    async with cluster("n1") as made, term(made, tmp_path) as running:

        async def hold_up(request: web.Request) -> web.Response:
            made.delete("g-2")
            await until(lambda: "uid-of-g-2" not in running.mirror.pods.by_uid)
            return made.server.respond("PATCH", request.path, {}, await request.json())

        if goes:
            made.server.fail(hold_up, containing=f"PATCH {PODS}/g-1/status")
        made.add_gang("g", 0, podSets=SETS)
        add_launcher(made)
        add_workers(made)
        await settled(running, lambda: forgotten if goes else all(started(made)))

    assert forgotten == ["uid-of-g-0"] * goes


@pytest.mark.parametrize(
    ("launcher", "workers", "spec", "place"),
    [
        pytest.param({}, {}, {}, "cpu", id="nothing keeps the launcher near: it may leave the topology"),
        pytest.param({"group": "a"}, {"group": "a"}, {}, "", id="a group keeps it in the rack of its workers"),
        pytest.param({}, {}, {"topology": IN_A_RACK}, "", id="so does the topology of the whole gang"),
    ],
)
async def test_a_launcher_leaves_the_topology_only_if_nothing_keeps_it(
    tmp_path: Path, launcher: dict[str, Any], workers: dict[str, Any], spec: dict[str, Any], place: str
) -> None:
    """The workers require a rack; the only node with enough cpu for the launcher is in none."""
    async with cluster("n1", labels={RACK: "r1"}) as made, term(made, tmp_path) as running:
        made.server.put(f"{TOPOLOGIES}/t", {"metadata": {"name": "t"}, "spec": {"levels": [{"nodeLabel": RACK}]}})
        add_cpu_node(made)
        sets = [{**SETS[0], **launcher}, {**SETS[1], "topology": IN_A_RACK, **workers}]
        made.add_gang("g", 0, **{"podSets": sets, **spec})
        add_launcher(made, cpu="65")
        add_workers(made)
        await settled(running, lambda: made.reason("g") in {"Admitted", "NeverFits"})
        await settled(running, lambda: node_of(made, "g-0") == place)

        await settled(running, lambda: all(started(made)) == bool(place))
        assert made.held() == (8 if place else 0)


async def test_a_launcher_that_fails_is_replaced_alone(tmp_path: Path) -> None:
    """Its workers run on and keep their GPUs; the next launcher is let go without a new admission."""
    async with cluster("n1") as made, term(made, tmp_path) as running:
        made.add_gang("g", 0, podSets=SETS)
        add_launcher(made)
        add_workers(made)
        await settled(running, lambda: all(started(made)))
        for number in (1, 2):
            made.bind(f"g-{number}")
        made.change_pod("g-0", spec={"nodeName": "n1"})
        for number in range(3):
            made.make_ready(f"g-{number}")
        await settled(running, lambda: made.reason("g", names.CONDITION_PODS_READY) == "Started")
        made.end("g-0", "Failed")
        await settled(running, lambda: made.reason("g", names.CONDITION_PODS_READY) != "Started")
        made.delete("g-0")
        add_launcher(made, number=3)
        await settled(running, lambda: node_of(made, "g-3") == "n1")

        assert made.gang("g")["status"]["admissions"] == 1
        assert [len(made.leases_of(f"g-{number}")) for number in (1, 2)] == [4, 4]


@pytest.mark.parametrize(("dies_at", "is_after"), DEATHS)
async def test_a_leader_that_dies_at_any_write_still_starts_the_launcher(
    tmp_path: Path, dies_at: int, is_after: bool
) -> None:
    """No worker is let go without its GPUs, and the next leader lets all go under one admission that holds."""
    async with cluster("n1") as made:
        made.add_gang("g", 0, podSets=SETS)
        add_launcher(made)
        add_workers(made)
        async with term(made, tmp_path, dies_at=dies_at, is_after=is_after) as first:
            await settled(first, lambda: first.api.dead.is_set() or all(started(made)))
        assert all(made.is_gated(f"g-{number}") or len(made.leases_of(f"g-{number}")) == 4 for number in (1, 2))
        async with term(made, tmp_path) as second:
            await settled(second, lambda: all(started(made)) and made.reason("g") == "Admitted")

    assert [len(made.leases_of(f"g-{number}")) for number in range(3)] == [0, 4, 4]


def near(app: str) -> dict[str, Any]:
    """Return an affinity to the pods of an app in the same rack."""
    term = {"topologyKey": RACK, "labelSelector": {"matchLabels": {"app": app}}}
    return {"podAffinity": {PINNED: [term]}}


def was_let_go_after(made: GangHarness, late: str, *early: str) -> bool:
    """Tell whether the last write on a member came after those on others."""
    version = {name: int(made.pod(name)["metadata"]["resourceVersion"]) for name in (late, *early)}
    return all(version[late] > version[name] for name in early)


async def test_a_launcher_that_has_to_be_near_its_workers_is_let_go_after_them(tmp_path: Path) -> None:
    """kube-scheduler refuses it before; without such a rule it goes first."""
    async with cluster("n1", labels={RACK: "r1"}) as made, term(made, tmp_path) as running:
        for name, affinity in (("g", near("w")), ("h", {})):
            made.add_gang(name, 0, podSets=SETS)
            add_launcher(made, name, affinity=affinity)
            for number in (1, 2):
                made.add_member(name, number, gpus=1, annotations={names.POD_SET: "workers"}, labels={"app": "w"})
        await settled(running, lambda: all((*started(made, "g"), *started(made, "h"))))

        assert was_let_go_after(made, "g-0", "g-1", "g-2")
        assert not was_let_go_after(made, "h-0", "h-1", "h-2")


@pytest.mark.parametrize(("dies_at", "is_after"), DEATHS)
async def test_members_wait_for_those_whom_they_have_to_be_near_though_a_leader_dies(
    tmp_path: Path, dies_at: int, is_after: bool
) -> None:
    """They are let go when those are bound: kube-scheduler may take the older pod first."""
    async with cluster("n1", labels={RACK: "r1"}) as made:
        made.add_gang("g", 0, podSets=[{"name": "first", "count": 1}, {"name": "second", "count": 1}])
        made.add_member("g", 0, annotations={names.POD_SET: "first"}, affinity=near("w"))
        made.add_member("g", 1, annotations={names.POD_SET: "second"}, labels={"app": "w"})
        async with term(made, tmp_path, dies_at=dies_at, is_after=is_after) as first:
            await settled(first, lambda: first.api.dead.is_set() or not made.is_gated("g-1"))
        async with term(made, tmp_path) as second:
            await settled(second, lambda: not made.is_gated("g-1") and made.gang("g")["status"]["phase"] == "Starting")
            assert started(made, count=2) == [False, True]
            assert made.held() == 8
            made.bind("g-1")
            await settled(second, lambda: all(started(made, count=2)))
