"""The gang loops over an API server in memory: whole admissions, crashes at every write, evictions, replacements."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from atoll.api import names
from atoll.cluster.gangs.lifecycle import GangView
from atoll.cluster.gangs.placing import find_places
from atoll.cluster.leases import Holder
from controllers.settings import WaitForPodsReadySettings
from tests.builders import lease_json, pod_json, report_json
from tests.controllers.gang_harness import GANGS, JOBS, TOPOLOGIES, GangHarness, Term, cluster, settled, term
from tests.controllers.harness import LEASES, PODS, REPORTS, strip_version
from tests.fakes.api_server import answering
from tests.fakes.clock import until

pytestmark = pytest.mark.asyncio

RACK = "example.com/rack"
BLOCK, HOST = "example.com/block", "kubernetes.io/hostname"
PINNED = "requiredDuringSchedulingIgnoredDuringExecution"


def add_gang(made: GangHarness, name: str = "g", count: int = 2, **spec: Any) -> None:
    """Create a gang and all of its members, four GPUs each."""
    made.add_gang(name, count, **spec)
    for number in range(count):
        made.add_member(name, number)


def is_let_go(made: GangHarness, name: str, count: int = 2) -> bool:
    """Tell whether every member may start and holds its four GPUs."""
    return all(
        not made.is_gated(f"{name}-{number}") and len(made.leases_of(f"{name}-{number}")) == 4
        for number in range(count)
    )


async def test_a_gang_is_admitted_whole(tmp_path: Path) -> None:
    """All Leases, then the condition, then each member nominated, pinned and let go."""
    async with cluster() as made, term(made, tmp_path) as running:
        add_gang(made)
        await settled(running, lambda: is_let_go(made, "g"))
        writes = [path for method, path in running.api.writes]

    assert made.reason("g") == "Admitted"
    assert (names.REASON_GANG_ADMITTED, "g") in running.notes.recorded
    pod = made.pod("g-0")
    assert pod["status"]["nominatedNodeName"] == "n1"
    (one,) = pod["spec"]["affinity"]["nodeAffinity"][PINNED]["nodeSelectorTerms"]
    assert one["matchFields"] == [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]
    leases = [number for number, path in enumerate(writes) if path.endswith("/leases")]
    opened = [number for number, path in enumerate(writes) if path.endswith(("/pods/g-0", "/pods/g-1"))]
    assert max(leases) < min(opened)


async def test_a_gang_that_does_not_fit_holds_nothing(tmp_path: Path) -> None:
    """Two gangs that fit alone: one gets all, the other waits for room with no Lease, and gets its turn."""
    async with cluster() as made, term(made, tmp_path) as running:
        add_gang(made, "x")
        add_gang(made, "y")
        await settled(running, lambda: sorted((made.reason("x"), made.reason("y"))) == ["Admitted", "WaitForRoom"])
        assert made.held() == 8
        winner, loser = ("x", "y") if made.reason("x") == "Admitted" else ("y", "x")
        assert made.leases_of(f"{loser}-0") == []
        for number in range(2):
            made.delete(f"{winner}-{number}")
        await settled(running, lambda: is_let_go(made, loser))


async def test_members_behind_their_gates_are_told_for_what_and_behind_whom_they_wait(tmp_path: Path) -> None:
    """An event says why the gang waits and which number it has, once: the same within a minute is not said again."""
    async with cluster() as made, term(made, tmp_path) as running:
        add_gang(made, "x")
        await settled(running, lambda: is_let_go(made, "x"))
        add_gang(made, "y")
        await settled(running, lambda: running.notes.notes_on(names.REASON_GANG_WAITING, "y-1"))
        add_gang(made, "z")
        await settled(running, lambda: running.notes.notes_on(names.REASON_GANG_WAITING, "z-1"))
        for _ in range(5):
            running.resync()
            await settled(running, lambda: made.reason("z") == "WaitForRoom")

        notes = running.notes
        told = {name: notes.notes_on(names.REASON_GANG_WAITING, name) for name in ("y", "y-0", "y-1", "z-0", "z-1")}
        assert {name: len(texts) for name, texts in told.items()} == dict.fromkeys(told, 1)
        assert told["y-0"][0].startswith("number 1 of 1 gangs that wait: ")
        assert told["z-1"][0].startswith("number 2 of 2 gangs that wait: ")
        assert made.is_gated("z-1")


async def test_a_gang_that_never_fits_says_so(tmp_path: Path) -> None:
    """Three members of four GPUs on a machine of eight: not busy, impossible."""
    async with cluster() as made, term(made, tmp_path) as running:
        add_gang(made, count=3)
        await settled(running, lambda: made.reason("g") == "NeverFits")

    assert made.held() == 0


async def test_a_node_that_is_added_starts_a_waiting_gang(tmp_path: Path) -> None:
    """The second machine makes room; nothing else happens."""
    async with cluster() as made, term(made, tmp_path) as running:
        add_gang(made, count=3)
        await settled(running, lambda: made.reason("g") == "NeverFits")
        made.add_node("n2")
        await settled(running, lambda: is_let_go(made, "g", 3))


DEATHS = [
    pytest.param(
        dies_at,
        is_after,
        id=f"{'after' if is_after else 'before'} write {dies_at}",
        marks=() if is_after == bool(dies_at % 2) else pytest.mark.long,
    )
    for dies_at in range(1, 17)
    for is_after in (False, True)
]
"""Every write of an admission: the ordinary run takes each in turn before and after it, the long one all."""


@pytest.mark.parametrize(("dies_at", "is_after"), DEATHS)
async def test_a_leader_that_dies_at_any_write_leaves_nothing_half_done(
    tmp_path: Path, dies_at: int, is_after: bool
) -> None:
    """Whatever the last write was: no member is ever let go without its GPUs, and the next leader finishes."""
    async with cluster() as made:
        add_gang(made)
        async with term(made, tmp_path, dies_at=dies_at, is_after=is_after) as first:
            await settled(first, lambda: first.api.dead.is_set() or is_let_go(made, "g"))
        for number in range(2):
            assert made.is_gated(f"g-{number}") or len(made.leases_of(f"g-{number}")) == 4
        async with term(made, tmp_path) as second:
            await settled(second, lambda: is_let_go(made, "g") and made.reason("g") == "Admitted")

    assert made.held() == 8


async def test_a_node_that_goes_bad_before_the_gates_open_undoes_the_admission(tmp_path: Path) -> None:
    """Admitted, the leader dies, the machine is cordoned: nobody is pinned to it, and nothing stays held."""
    async with cluster() as made:
        add_gang(made)
        async with term(made, tmp_path, dies_at=11) as first:
            await settled(first, first.api.dead.is_set)
        assert made.reason("g") == "Admitted"
        assert made.held() == 8
        node = made.server.objects["/api/v1/nodes/n1"]
        made.server.put("/api/v1/nodes/n1", {**node, "spec": {"unschedulable": True}})
        async with term(made, tmp_path) as second:
            await settled(
                second, lambda: made.held() == 0 and made.reason("g") in {"WaitForRoom", "WaitForNodes", "NeverFits"}
            )
        assert made.is_gated("g-0")
        assert made.is_gated("g-1")


@pytest.mark.parametrize("annotations", [{}, {names.LEASE_DEVICE_ID: "odd"}], ids=["a pod's", "unreadable"])
async def test_a_gpu_that_is_taken_meanwhile_undoes_the_whole_admission(
    tmp_path: Path, annotations: dict[str, str]
) -> None:
    """One Lease is somebody else's before the mirror shows it: none of the gang's stays, and that one does."""
    async with cluster() as made, term(made, tmp_path) as running:
        add_gang(made)
        thief = Holder("team", "thief", "uid-of-thief")
        made.server.objects[f"{LEASES}/gpu-n1-7"] = lease_json("n1", 7, holder=thief, annotations=annotations)
        await settled(running, lambda: made.reason("g") == "AdmissionUndone")
        await settled(running, lambda: made.held() == 1)
        assert made.is_gated("g-0")
        assert made.is_gated("g-1")


@pytest.mark.parametrize("what", ["taken", "ill", "gone", "replaced", "node-gone"])
async def test_what_changes_while_places_are_searched_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The search keeps no event waiting: another pod's Lease, or a report in which a GPU is ill or gone and the next
    ones have moved up or another card stands, comes meanwhile: places are searched again."""
    new_card = {"uuids": {0: "GPU-new"}}
    reports = {"ill": {"sick": (0,)}, "gone": {"ids": range(1, 8)}, "replaced": new_card}
    loop, asked = asyncio.get_running_loop(), []
    async with cluster("n1", "n2") as made, term(made, tmp_path) as running:

        async def change() -> None:
            if what == "node-gone":
                made.server.remove(f"{REPORTS}/n1")
                await until(lambda: "n1" not in running.mirror.ledger.nodes)
            elif what in reports:
                known = running.mirror.ledger.nodes["n1"]
                made.server.put(f"{REPORTS}/n1", strip_version(report_json("n1", **reports[what])))
                await until(lambda: running.mirror.ledger.nodes["n1"] is not known)
            else:
                await take()

        async def take() -> None:
            made.server.put(f"{PODS}/thief", strip_version(pod_json("thief", gpus=1)))
            holder = Holder("team", "thief", made.pod("thief")["metadata"]["uid"])
            lease = strip_version(lease_json("n1", 0, holder=holder))
            made.server.put(f"{LEASES}/{lease['metadata']['name']}", lease)
            made.bind("thief")
            await until(lambda: running.mirror.ledger.leases)

        def search(*question: Any) -> Any:
            answer = find_places(*question)
            if not asked:
                asyncio.run_coroutine_threadsafe(change(), loop).result(8)
            asked.append(answer)
            return answer

        monkeypatch.setattr("controllers.gangs.admission.find_places", search)
        made.add_gang("g", 1)
        made.add_member("g", 0, gpus=8)
        await settled(running, lambda: not made.is_gated("g-0"))

        first, last = (answer.placement.assignments[0].members[0].host for answer in asked)
        assert (first, last) == ("n1", "n1" if what == "replaced" else "n2")
        assert len(made.leases_of("g-0")) == 8
        assert made.held() == (9 if what == "taken" else 8)


async def test_a_gang_of_which_one_gpu_is_taken_while_places_are_searched_keeps_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one of its second member: what was marked for the first one is free again when it is tried next."""
    loop, marked = asyncio.get_running_loop(), []
    async with cluster() as made, term(made, tmp_path) as running:

        async def take() -> None:
            thief = Holder("team", "thief", "uid-of-thief")
            made.server.put(f"{LEASES}/gpu-n1-7", strip_version(lease_json("n1", 7, holder=thief)))
            await until(lambda: running.mirror.ledger.leases)

        def search(*question: Any) -> Any:
            marked.append(running.mirror.ledger.assumed("uid-of-g-0"))
            answer = find_places(*question)
            if len(marked) == 1:
                asyncio.run_coroutine_threadsafe(take(), loop).result(8)
            return answer

        monkeypatch.setattr("controllers.gangs.admission.find_places", search)
        add_gang(made)
        await settled(running, lambda: len(marked) > 1)

        assert set(marked) == {None}
        assert made.held() == 1


async def test_nothing_is_reserved_for_a_member_that_goes_while_places_are_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its deletion was seen already, so nobody would take back what is assumed for it, if the roll-back fails."""
    loop, asked = asyncio.get_running_loop(), []
    async with cluster() as made, term(made, tmp_path) as running:

        async def go() -> None:
            made.delete("g-0")
            await until(lambda: "uid-of-g-0" not in running.mirror.pods.by_uid)

        def search(*question: Any) -> Any:
            if not asked:
                asyncio.run_coroutine_threadsafe(go(), loop).result(8)
            asked.append(find_places(*question))
            return asked[-1]

        monkeypatch.setattr("controllers.gangs.admission.find_places", search)
        made.server.fail(answering(500), times=100, containing=f"PATCH {PODS}/g-0")
        made.add_gang("g", 1)
        made.add_member("g", 0, gpus=8)
        await settled(running, lambda: asked and made.reason("g") == "WaitForQuorum")
        assert running.mirror.ledger.assumed("uid-of-g-0") is None
        assert made.server.count(f"POST {LEASES}") == 0
        made.add_member("g", 1, gpus=8)
        await settled(running, lambda: not made.is_gated("g-1"))


async def test_a_gang_is_made_for_pods_that_say_how_many_they_are(tmp_path: Path) -> None:
    """gang and gang-size alone are enough; the made gang ends with its pods."""
    size = {names.GANG_SIZE: "2"}
    async with cluster() as made, term(made, tmp_path) as running:
        for number in range(2):
            made.add_member("g", number, annotations=size)
        await settled(running, lambda: is_let_go(made, "g"))
        assert made.gang("g")["metadata"]["annotations"] == {names.GANG_MADE_FOR: "pods"}
        for number in range(2):
            made.delete(f"g-{number}")
        await settled(running, lambda: f"{GANGS}/g" not in made.server.objects)


async def test_members_that_ask_get_their_ranks_with_the_open_gates(tmp_path: Path) -> None:
    """Rank, size and leader come in the write that opens the gate; a successor gets the rank that is free."""
    ask = {names.RENDEZVOUS: "true"}
    async with cluster() as made, term(made, tmp_path) as running:
        made.add_gang("g", 2)
        for number in range(2):
            made.add_member("g", number, annotations=ask)
        await settled(running, lambda: is_let_go(made, "g"))
        assert [rendezvous_of(made, f"g-{number}") for number in range(2)] == [("0", "2", "g-0"), ("1", "2", "g-0")]
        made.run_all("g", 2)
        made.end("g-1", "Failed")
        made.delete("g-1")
        made.add_member("g", 2, annotations=ask)
        await settled(running, lambda: not made.is_gated("g-2"))
        assert rendezvous_of(made, "g-2") == ("1", "2", "g-0")


def rendezvous_of(made: GangHarness, name: str) -> tuple[str, ...]:
    """Return rank, size and leader as a pod carries them."""
    annotations = made.pod(name)["metadata"]["annotations"]
    return tuple(annotations[key] for key in (names.RANK, names.WORLD_SIZE, names.LEADER))


async def test_pods_of_an_unknown_gang_are_told_what_is_missing(tmp_path: Path) -> None:
    """Neither a GpuGang nor a size: the pods wait, and an event says what to do."""
    async with cluster() as made, term(made, tmp_path) as running:
        made.add_member("g", 0)
        await settled(running, lambda: (names.REASON_GANG_WAITING, "g-0") in running.notes.recorded)
        assert made.is_gated("g-0")


JOB = {"kind": "Job", "apiVersion": "batch/v1", "metadata": {"name": "job", "uid": "job-uid"}, "spec": {}}
OWNED = [{"kind": "Job", "apiVersion": "batch/v1", "name": "job", "uid": "job-uid", "controller": True}]
QUICK = {"enable": True, "timeout": "2s", "requeuingStrategy": {"backoffBaseSeconds": 1}}


def add_owned(made: GangHarness, numbers: range, gang: str = "g") -> None:
    """Create members of the Job."""
    for number in numbers:
        name = made.add_member(gang, number)
        made.change_pod(name, metadata={"ownerReferences": OWNED})


async def test_a_gang_that_is_not_ready_in_time_suspends_its_job_and_resumes_it(tmp_path: Path) -> None:
    """Evicted: the Job is suspended with our mark, GPUs come free; after the pause it is resumed and admitted."""
    async with cluster() as made, term(made, tmp_path) as running:
        made.server.put(f"{JOBS}/job", JOB)
        made.add_gang("g", 2, waitForPodsReady=QUICK)
        add_owned(made, range(2))
        await settled(running, lambda: is_let_go(made, "g"))
        job = f"{JOBS}/job"
        await settled(running, lambda: made.server.objects[job]["spec"].get("suspend"), seconds=20)
        assert made.reason("g", names.CONDITION_EVICTED) == "PodsReadyTimeout"
        assert names.GANG_SUSPENDED in made.server.objects[job]["metadata"]["labels"]
        await running.reconciler("gangs").reconcile(("team", "g"))
        assert not any(path.endswith("/eviction") for _, path in running.api.writes), "the Job ends its pods itself"
        assert len(running.notes.notes_on(names.REASON_GANG_EVICTED, "g")) == 1
        for number in range(2):
            made.delete(f"g-{number}")
        await settled(running, lambda: made.held() == 0)
        await settled(running, lambda: made.server.objects[job]["spec"]["suspend"] is False, seconds=20)
        assert names.GANG_SUSPENDED not in made.server.objects[job]["metadata"]["labels"]
        add_owned(made, range(2, 4))
        await settled(running, lambda: not made.is_gated("g-2") and not made.is_gated("g-3"))

    assert made.gang("g")["status"]["requeueState"]["count"] == 1


HOSTNAME = "kubernetes.io/hostname"


def add_placed(made: GangHarness, hosts: tuple[str, ...], annotations: dict[str, str]) -> None:
    """Create a gang of four whose members each name a host, four GPUs each."""
    for name in ("n2", "n3"):
        made.add_node(name, labels={HOSTNAME: name})
    made.add_gang("g", 4)
    for number, host in enumerate(hosts):
        made.add_member("g", number, annotations=annotations, nodeSelector={HOSTNAME: host})


async def test_members_stay_where_kueues_topology_puts_each_of_them(tmp_path: Path) -> None:
    """One pod set, different hosts: Kueue's choice stands; all get GPUs there at once, counted as one set."""
    hosts = ("n3", "n2", "n3", "n2")
    async with cluster() as made:
        add_placed(made, hosts, {"kueue.x-k8s.io/podset-unconstrained-topology": "true"})
        async with term(made, tmp_path) as running:
            await settled(running, lambda: is_let_go(made, "g", 4))
            held = [made.leases_of(f"g-{number}")[0]["metadata"]["annotations"] for number in range(4)]
            assert [one[names.LEASE_NODE] for one in held] == list(hosts)
            assert made.held() == 16
            (assigned,) = made.gang("g")["status"]["assignment"]["podSets"]

    assert (assigned["name"], assigned["count"]) == ("workers", 4)
    assert {tuple(one["values"]): one["count"] for one in assigned["domains"]} == {("n2",): 2, ("n3",): 2}


async def test_members_that_kueue_put_where_they_do_not_fit_wait_whole(tmp_path: Path) -> None:
    """Three members of four GPUs each on one host of eight: nobody is moved, and nobody holds a GPU."""
    async with cluster() as made:
        add_placed(made, ("n2", "n2", "n2", "n3"), {"kueue.x-k8s.io/podset-required-topology": RACK})
        async with term(made, tmp_path) as running:
            await settled(running, lambda: made.reason("g") in {"NeverFits", "WaitForNodes", "WaitForRoom"})

    assert made.held() == 0


async def test_members_of_one_pod_set_that_ask_for_different_hosts_by_themselves_are_told(tmp_path: Path) -> None:
    """Without Kueue it is a mistake: what a pod set requires could not be kept."""
    async with cluster() as made:
        add_placed(made, ("n2", "n3", "n2", "n3"), {})
        async with term(made, tmp_path) as running:
            await settled(running, lambda: "ask for different things" in str(made.gang("g").get("status")))

    assert made.held() == 0


WORKLOAD = "/apis/kueue.x-k8s.io/v1beta2/namespaces/team/workloads/job-job-1"


def add_under_kueue(made: GangHarness, spec: dict[str, Any], *, owner_uid: str = "job-uid") -> None:
    """Create a Job that Kueue has admitted, and its members."""
    made.server.put(f"{JOBS}/job", JOB)
    metadata = {"name": "job-job-1", "uid": "w", "ownerReferences": [{**OWNED[0], "uid": owner_uid}]}
    made.server.put(WORKLOAD, {"metadata": metadata, "spec": spec})
    made.add_gang("g", 2, waitForPodsReady=QUICK)
    for number in range(2):
        name = made.add_member("g", number, annotations={"kueue.x-k8s.io/workload": "job-job-1"})
        made.change_pod(name, metadata={"ownerReferences": OWNED})


@pytest.mark.parametrize(
    ("owner_uid", "switched", "left"),
    [
        pytest.param("job-uid", WORKLOAD, f"{JOBS}/job", id="its-own"),
        pytest.param("else", f"{JOBS}/job", WORKLOAD, id="of-another-owner"),
    ],
)
async def test_an_evicted_gang_under_kueue_turns_the_switch_of_its_workload(
    tmp_path: Path, owner_uid: str, switched: str, left: str
) -> None:
    """Kueue would resume the Job at once; a Workload of another owner is none of the gang's business."""
    off, on = ({"active": False}, {"active": True}) if switched == WORKLOAD else ({"suspend": True}, {"suspend": False})
    async with cluster() as made, term(made, tmp_path) as running:
        add_under_kueue(made, {}, owner_uid=owner_uid)
        await settled(running, lambda: is_let_go(made, "g"))
        await settled(running, lambda: made.server.objects[switched]["spec"] == off, seconds=20)
        assert names.GANG_SUSPENDED in made.server.objects[switched]["metadata"]["labels"]
        for number in range(2):
            made.delete(f"g-{number}")
        await settled(running, lambda: made.server.objects[switched]["spec"] == on, seconds=20)

    assert names.GANG_SUSPENDED not in made.server.objects[switched]["metadata"]["labels"]
    assert made.server.objects[left]["spec"] == {}


@pytest.mark.parametrize("is_kept", [True, False], ids=["finished", "deleted"])
async def test_an_elastic_owner_is_stopped_by_the_workload_that_replaced_the_one_on_its_pods(
    tmp_path: Path, *, is_kept: bool
) -> None:
    """Kueue admits a larger slice when a Job grows, and ends the one that the pods name: its switch moves nothing."""
    later = WORKLOAD.replace("job-job-1", "job-job-2")
    labels = {"labels": {"kueue.x-k8s.io/job-uid": "job-uid"}}
    owned = {"ownerReferences": [OWNED[0]], **labels}
    finished = {"conditions": [{"type": "Finished", "status": "True"}]}
    async with cluster() as made, term(made, tmp_path) as running:
        add_under_kueue(made, {})
        first = made.server.objects[WORKLOAD]
        made.server.put(WORKLOAD, {**strip_version(first), "status": finished})
        if not is_kept:
            made.server.remove(WORKLOAD)
        made.server.put(later, {"metadata": {"name": "job-job-2", "uid": "v", **owned}, "spec": {}})
        other = later.replace("job-job-2", "other")
        made.server.put(other, {"metadata": {"name": "other", "uid": "x", "ownerReferences": [], **labels}, "spec": {}})
        await settled(running, lambda: is_let_go(made, "g"))
        await settled(running, lambda: made.server.objects[later]["spec"] == {"active": False}, seconds=20)
        assert made.server.objects[other]["spec"] == made.server.objects.get(WORKLOAD, {"spec": {}})["spec"] == {}
        for number in range(2):
            made.delete(f"g-{number}")
        await settled(running, lambda: made.server.objects[later]["spec"] == {"active": True}, seconds=20)


async def test_a_pod_beyond_the_counts_of_a_running_gang_is_told(tmp_path: Path) -> None:
    """Its owner grew beyond the GpuGang: it waits behind its gate, and an event says until when."""
    async with cluster() as made, term(made, tmp_path) as running:
        made.add_gang("g", 1)
        made.add_member("g", 0)
        await settled(running, lambda: not made.is_gated("g-0"))
        made.run_all("g", 1)
        made.add_member("g", 1)
        await settled(running, lambda: (names.REASON_GANG_WAITING, "g-1") in running.notes.recorded)
        assert made.is_gated("g-1")


async def test_a_workload_that_somebody_else_put_out_of_action_stays_so(tmp_path: Path) -> None:
    """An administrator has stopped it, or Kueue has: Atoll resumes only what it stopped itself."""
    async with cluster() as made, term(made, tmp_path) as running:
        add_under_kueue(made, {"active": False})
        await settled(running, lambda: made.reason("g", names.CONDITION_EVICTED) == "PodsReadyTimeout", seconds=20)
        for number in range(2):
            made.delete(f"g-{number}")
        await settled(running, lambda: made.reason("g") == "WaitForQuorum", seconds=20)

    assert made.server.objects[WORKLOAD]["spec"] == {"active": False}
    assert made.server.objects[f"{JOBS}/job"]["spec"] == {}


async def test_a_gang_that_is_deleted_in_its_pause_leaves_no_job_suspended(tmp_path: Path) -> None:
    """Nobody would resume it later: its end resumes what was suspended for it."""
    slow = {**QUICK, "requeuingStrategy": {"backoffBaseSeconds": 3600}}
    async with cluster() as made, term(made, tmp_path) as running:
        made.server.put(f"{JOBS}/job", JOB)
        made.add_gang("g", 2, waitForPodsReady=slow)
        add_owned(made, range(2))
        await settled(running, lambda: is_let_go(made, "g"))
        job = f"{JOBS}/job"
        await settled(running, lambda: made.server.objects[job]["spec"].get("suspend"), seconds=20)
        for number in range(2):
            made.delete(f"g-{number}")
        await settled(running, lambda: made.reason("g") == "WaitForRequeue")
        made.server.remove(f"{GANGS}/g")
        await settled(running, lambda: made.server.objects[job]["spec"]["suspend"] is False)


async def test_an_owner_that_its_user_suspended_is_not_resumed(tmp_path: Path) -> None:
    """Only what carries our mark is ever resumed."""
    async with cluster() as made, term(made, tmp_path) as running:
        made.server.put(f"{JOBS}/job", {**JOB, "spec": {"suspend": True}})
        made.add_gang("g", 2, waitForPodsReady=QUICK)
        add_owned(made, range(2))
        await settled(running, lambda: is_let_go(made, "g"))
        await settled(running, lambda: made.reason("g", names.CONDITION_EVICTED) == "PodsReadyTimeout", seconds=20)
        for number in range(2):
            made.delete(f"g-{number}")
        await settled(running, lambda: made.reason("g") == "WaitForQuorum", seconds=20)

    assert made.server.objects[f"{JOBS}/job"]["spec"]["suspend"] is True


async def test_deactivation_gives_everything_back_and_activation_starts_again(tmp_path: Path) -> None:
    """spec.active false evicts bare pods; true admits new ones."""
    async with cluster() as made, term(made, tmp_path) as running:
        add_gang(made)
        await settled(running, lambda: is_let_go(made, "g"))
        gang = made.gang("g")
        made.server.put(f"{GANGS}/g", {**gang, "spec": {**gang["spec"], "active": False}})
        await settled(running, lambda: made.held() == 0 and made.reason("g") == "Inactive")
        assert "assignment" not in made.gang("g")["status"]
        gang = made.gang("g")
        made.server.put(f"{GANGS}/g", {**gang, "spec": {**gang["spec"], "active": True}})
        for number in range(2):
            made.add_member("g", number)
        await settled(running, lambda: is_let_go(made, "g"))


async def test_block_admission_needs_an_end() -> None:
    """A gang that lacks a member would keep all others waiting for ever."""
    with pytest.raises(ValidationError, match="needs recovery_timeout_seconds, for example 600"):
        WaitForPodsReadySettings(block_admission=True)


async def test_block_admission_lets_one_gang_start_at_a_time(tmp_path: Path) -> None:
    """Nothing is admitted while one gang is not ready; once it is, the next one goes."""
    settings = {"wait_for_pods_ready": {"enable": True, "block_admission": True, "recovery_timeout_seconds": 600}}
    async with cluster("n1", "n2") as made, term(made, tmp_path, settings=settings) as running:
        add_gang(made, "x")
        add_gang(made, "y")
        wanted = ["Admitted", "WaitForOtherGangs"]
        await settled(running, lambda: sorted((made.reason("x"), made.reason("y"))) == wanted)
        first, second = ("x", "y") if made.reason("x") == "Admitted" else ("y", "x")
        await settled(running, lambda: is_let_go(made, first))
        assert made.held() == 8
        made.run_all(first, 2)
        await settled(running, lambda: is_let_go(made, second), seconds=16)


async def lose_member(made: GangHarness, running: Term) -> str:
    """Let a gang of two whole machines run, cordon the node of its second member, end that and create its successor;
    return the node."""
    made.add_gang("g", 2)
    for number in range(2):
        made.add_member("g", number, gpus=8)
    await settled(running, lambda: made.reason("g") == "Admitted")
    made.run_all("g", 2)
    await settled(running, lambda: made.reason("g", names.CONDITION_PODS_READY) == "Started")
    lost: str = made.pod("g-1")["spec"]["nodeName"]
    found = made.server.objects[f"/api/v1/nodes/{lost}"]
    made.server.put(f"/api/v1/nodes/{lost}", strip_version({**found, "spec": {"unschedulable": True}}))
    made.end("g-1", "Failed")
    await settled(running, lambda: made.leases_of("g-1") == [])
    made.add_member("g", 2, gpus=8)
    return lost


async def test_the_assignment_shows_where_members_are_after_a_replacement(tmp_path: Path) -> None:
    """The node of a failed member is cordoned: its successor goes elsewhere, and the status follows."""
    async with cluster("n1", "n2", "n3") as made, term(made, tmp_path) as running:
        lost = await lose_member(made, running)
        await settled(running, lambda: not made.is_gated("g-2"))

        def hosts() -> set[str]:
            (part,) = made.gang("g")["status"]["assignment"]["podSets"]
            return {domain["values"][-1] for domain in part["domains"]}

        await settled(running, lambda: lost not in hosts())
        assert hosts() == {"n1", "n2", "n3"} - {lost}


async def test_a_gang_that_lacks_a_member_says_why_its_successor_waits(tmp_path: Path) -> None:
    """The node of a failed member is cordoned and there is no other one: both the gang and the pod are told."""
    async with cluster("n1", "n2") as made, term(made, tmp_path) as running:
        lost = await lose_member(made, running)
        await settled(running, lambda: (names.REASON_GANG_WAITING, "g-2") in running.notes.recorded)

        (said,) = running.notes.notes_on(names.REASON_GANG_WAITING, "g-2")
        assert said.startswith(f"fits when {lost} is uncordoned; now 1 of 1 members that it lacks find no place")
        assert made.reason("g") == "Admitted"


async def test_a_failed_member_is_replaced_in_its_rack(tmp_path: Path) -> None:
    """Two racks, one member fails: its successor goes into the rack of the others, although another one is emptier."""
    async with cluster() as made:
        for name, rack in (("n1", "a"), ("n2", "a"), ("n3", "b"), ("n4", "b")):
            made.add_node(name, labels={RACK: rack})
        made.server.put(f"{TOPOLOGIES}/t", {"metadata": {"name": "t"}, "spec": {"levels": [{"nodeLabel": RACK}]}})
        async with term(made, tmp_path) as running:
            add_gang(made, count=3, topology={"mode": "required", "level": RACK})
            await settled(running, lambda: is_let_go(made, "g", 3))
            made.run_all("g", 3)
            nodes = {made.pod(f"g-{number}")["spec"]["nodeName"] for number in range(3)}
            assert nodes in ({"n1", "n2"}, {"n3", "n4"})
            await settled(running, lambda: made.reason("g", names.CONDITION_PODS_READY) == "Started")
            made.end("g-2", "Failed")
            await settled(running, lambda: made.leases_of("g-2") == [])
            made.add_member("g", 3)
            await settled(running, lambda: not made.is_gated("g-3"))

            assert made.pod("g-3")["status"]["nominatedNodeName"] in nodes
            made.bind("g-3")
            made.make_ready("g-3")
            await settled(running, lambda: made.reason("g", names.CONDITION_PODS_READY) == "Recovered")


async def test_a_misspelt_level_is_told_and_never_dropped(tmp_path: Path) -> None:
    """The gang is inactive with the level's name; once the topology has it, it is placed."""
    async with cluster("n1", labels={RACK: "a"}) as made, term(made, tmp_path) as running:
        spec = {"levels": [{"nodeLabel": "example.com/rak"}]}
        made.server.put(f"{TOPOLOGIES}/t", {"metadata": {"name": "t"}, "spec": spec})
        add_gang(made, topology={"mode": "required", "level": RACK})
        await settled(running, lambda: made.reason("g", names.CONDITION_ACTIVE) == "LevelMissing")
        assert made.held() == 0
        spec = {"levels": [{"nodeLabel": RACK}]}
        made.server.put(f"{TOPOLOGIES}/t", {**made.server.objects[f"{TOPOLOGIES}/t"], "spec": spec})
        await settled(running, lambda: is_let_go(made, "g"))


@pytest.mark.parametrize(
    ("levels", "outside", "reason", "said"),
    [
        ([RACK], 1, "LevelsFound", "1 of 2 nodes have all levels"),
        ([RACK, "example.com/blok"], 2, "LevelMissing", "no node has a value for example.com/blok"),
        ([HOST], 0, "HostnamesShared", "nodes share one kubernetes.io/hostname: n1 and n2"),
    ],
)
async def test_a_topology_says_how_many_nodes_it_counts(
    tmp_path: Path, levels: list[str], outside: int, reason: str, said: str
) -> None:
    """Two nodes of one hostname, one of which has a rack."""
    async with cluster() as made, term(made, tmp_path) as running:
        made.add_node("n1", labels={RACK: "a", HOST: "m"})
        made.add_node("n2", labels={HOST: "m"})
        spec = {"levels": [{"nodeLabel": level} for level in levels]}
        made.server.put(f"{TOPOLOGIES}/t", {"metadata": {"name": "t"}, "spec": spec})

        def status() -> dict[str, Any]:
            return dict(made.server.objects[f"{TOPOLOGIES}/t"].get("status", {}))

        await settled(running, lambda: status().get("nodes") == 2)
        (condition,) = status()["conditions"]
        assert (condition["reason"], condition["message"]) == (reason, said)
        assert status().get("outside", 0) == outside


async def test_strict_order_keeps_later_gangs_waiting(tmp_path: Path) -> None:
    """A gang that waits for room holds a smaller one behind it under strict order alone; a hopeless one never does."""

    async def reason_of_small(order: str) -> str:
        async with cluster() as made, term(made, tmp_path, settings={"gang_order": order}) as running:
            made.add_gang("big", 2)
            made.add_gang("holder", 1)
            made.add_member("holder", 0)
            await settled(running, lambda: made.reason("holder") == "Admitted")
            for number in range(2):
                made.add_member("big", number, priority=10)
            await settled(running, lambda: made.reason("big") == "WaitForRoom")
            made.add_gang("small", 1)
            made.add_member("small", 0)
            wanted = ("Admitted", "WaitForOtherGangs")
            await settled(running, lambda: made.reason("small") in wanted)
            return made.reason("small")

    async with cluster() as made, term(made, tmp_path, settings={"gang_order": "strict"}) as running:
        add_gang(made, "hopeless", 5)
        await settled(running, lambda: made.reason("hopeless") == "NeverFits")
        add_gang(made, "small", 1)
        await settled(running, lambda: made.reason("small") == "Admitted")
    assert await reason_of_small("best-effort") == "Admitted"
    assert await reason_of_small("strict") == "WaitForOtherGangs"


async def test_new_room_goes_to_the_gang_that_came_first_though_it_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was tried in vain a moment ago. A gang behind it, which is tried at once, does not pass it."""
    tried: list[str] = []

    def find(view: GangView, *arguments: Any) -> Any:
        tried.append(view.gang.metadata.name)
        return find_places(view, *arguments)

    monkeypatch.setattr("controllers.gangs.admission.find_places", find)
    async with cluster() as made, term(made, tmp_path) as running:
        made.add_gang("holder", 1)
        made.add_member("holder", 0)
        await settled(running, lambda: is_let_go(made, "holder", 1))
        made.add_gang("first", 2)
        for number in range(2):
            made.add_member("first", number, priority=10)
        await settled(running, lambda: tried.count("first") == 3)

        made.add_gang("later", 2)
        for number in range(2):
            made.add_member("later", number)
        made.delete("holder-0")

        await settled(running, lambda: "Admitted" in (made.reason("first"), made.reason("later")))
        assert made.reason("first") == "Admitted"


async def test_a_gang_of_64_lies_in_one_block_and_each_slice_in_one_rack(tmp_path: Path) -> None:
    """64 members of four GPUs over blocks of eight racks of four machines: one block holds them all."""
    async with cluster() as made:
        made.server.remove("/api/v1/nodes/n1")
        for number in range(64):
            labels = {BLOCK: f"b{number // 32}", RACK: f"r{number % 32 // 4}", HOST: f"m{number:02}"}
            made.add_node(f"m{number:02}", labels=labels)
        levels = [{"nodeLabel": level} for level in (BLOCK, RACK, HOST)]
        made.server.put(f"{TOPOLOGIES}/t", {"metadata": {"name": "t"}, "spec": {"levels": levels}})
        async with term(made, tmp_path) as running:
            slices = [{"size": 8, "level": RACK}]
            sets = [{"name": "workers", "count": 64,
                     "topology": {"mode": "required", "level": BLOCK, "slices": slices}}]  # fmt: skip
            made.add_gang("g", 64, podSets=sets)
            for number in range(64):
                index = {"batch.kubernetes.io/job-completion-index": str(number)}
                made.add_member("g", number, annotations=index)
            await settled(running, lambda: is_let_go(made, "g", 64), seconds=40)

    homes = [int(made.pod(f"g-{number}")["status"]["nominatedNodeName"][1:]) for number in range(64)]
    assert len({home // 32 for home in homes}) == 1
    assert [len({home // 4 for home in homes[first : first + 8]}) for first in range(0, 64, 8)] == [1] * 8
    (assigned,) = made.gang("g")["status"]["assignment"]["podSets"]
    assert assigned["levels"] == [HOST]
    assert assigned["domainCount"] == 32


async def test_gangs_stay_in_one_clique_and_take_spare_trays_last(tmp_path: Path) -> None:
    """Two NVLink cliques of four trays, one spare each: a gang of three trays fills a clique up to its spare."""
    async with cluster() as made:
        made.server.remove("/api/v1/nodes/n1")
        labels = [f"tray-{number}" for number in range(8)]
        for number, name in enumerate(labels):
            made.add_node(name, labels={"nvidia.com/gpu.clique": f"c{number // 4}"})
        spec = {
            "levels": [{"nodeLabel": "nvidia.com/gpu.clique"}],
            "spares": {"level": "nvidia.com/gpu.clique", "count": 1},
        }
        made.server.put(f"{TOPOLOGIES}/t", {"metadata": {"name": "t"}, "spec": spec})
        async with term(made, tmp_path) as running:
            whole = {"mode": "required", "level": "nvidia.com/gpu.clique"}
            for gang in ("x", "y", "z"):
                made.add_gang(gang, 3, topology=whole)
                for number in range(3):
                    made.add_member(gang, number, gpus=8)
            admitted = ["x", "y", "z"]
            await settled(running, lambda: sum(made.reason(gang) == "Admitted" for gang in admitted) == 2)
            winners = [gang for gang in admitted if made.reason(gang) == "Admitted"]
            await settled(running, lambda: not any(made.is_gated(f"{gang}-{n}") for gang in winners for n in range(3)))

    homes = {gang: {made.pod(f"{gang}-{n}")["status"]["nominatedNodeName"] for n in range(3)} for gang in winners}
    assert {"tray-3", "tray-7"}.isdisjoint(set().union(*homes.values()))
    assert all(len({labels.index(tray) // 4 for tray in trays}) == 1 for trays in homes.values())


async def test_gangs_that_come_together_never_share_a_gpu(tmp_path: Path) -> None:
    """Twelve gangs of different sizes on two machines: whoever is let go holds its GPUs, and all have their turn."""
    async with cluster("n1", "n2") as made, term(made, tmp_path) as running:
        sizes = {f"g{number}": 1 + number % 3 for number in range(12)}
        for name, size in sizes.items():
            add_gang(made, name, size)
        done: set[str] = set()
        while len(done) < len(sizes):
            running_now = [name for name, size in sizes.items() if name not in done and is_let_go(made, name, size)]
            assert sum(sizes[name] for name in running_now) <= 4
            for name in running_now:
                for number in range(sizes[name]):
                    made.delete(f"{name}-{number}")
                done.add(name)
            if not running_now:
                left = [name for name in sizes if name not in done]
                await settled(running, lambda left=left: any(is_let_go(made, one, sizes[one]) for one in left))

    assert done == set(sizes)
