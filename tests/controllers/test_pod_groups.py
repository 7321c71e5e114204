"""The GpuGang of a PodGroup: created for it, following it, and refusing a contradiction."""

from pathlib import Path
from typing import Any

from atoll.api import names
from tests.controllers.gang_harness import GANGS, JOBS, TOPOLOGIES, GangHarness, Term, cluster, settled, term
from tests.controllers.harness import strip_version
from tests.controllers.test_gangs import JOB, OWNED

GROUPS = "/apis/scheduling.k8s.io/v1beta1/namespaces/team/podgroups"
RACK = "example.com/rack"
MEMBER = {"schedulingGroup": {"podGroupName": "g"}}


def put_group(made: GangHarness, min_count: int, **spec: Any) -> None:
    """Create the PodGroup, or change it."""
    policy = {"schedulingPolicy": {"gang": {"minCount": min_count}}}
    made.server.put(f"{GROUPS}/g", {"metadata": {"name": "g", "uid": "uid-of-group"}, "spec": {**policy, **spec}})


def counts(made: GangHarness) -> tuple[int, int]:
    """Return quorum and number of members of the gang."""
    spec = made.gang("g")["spec"]
    return spec["minMember"], spec["podSets"][0]["count"]


async def run_group(made: GangHarness, running: Term, count: int, **spec: Any) -> None:
    """Let a group of minCount 2 with so many members run."""
    put_group(made, 2, **spec)
    for number in range(count):
        made.add_member("g", number, **MEMBER)
    await settled(running, lambda: not any(made.is_gated(f"g-{number}") for number in range(count)))
    made.run_all("g", count)


async def test_a_gang_is_made_for_a_group_and_follows_it(tmp_path: Path) -> None:
    """It is made when minCount pods exist, starts with fewer when minCount falls, and takes in pods that come later."""
    async with cluster("n1", "n2") as made, term(made, tmp_path) as running:
        put_group(made, 3)
        for number in range(2):
            made.add_member("g", number, **MEMBER)
        await settled(running, lambda: (names.REASON_GANG_WAITING, "g-0") in running.notes.recorded)
        assert f"{GANGS}/g" not in made.server.objects
        made.add_member("g", 2, gpus=8, **MEMBER)
        await settled(running, lambda: made.reason("g") == "WaitForQuorum")
        assert counts(made) == (3, 3)
        assert [one["uid"] for one in made.gang("g")["metadata"]["ownerReferences"]] == ["uid-of-group"]
        made.delete("g-2")
        await settled(running, lambda: made.reason("g", names.CONDITION_QUORUM) == "WaitForMembers")

        put_group(made, 2)
        await settled(running, lambda: not made.is_gated("g-0") and not made.is_gated("g-1"), seconds=16)
        made.run_all("g", 2)
        for number in (3, 4):
            made.add_member("g", number, **MEMBER)
        await settled(running, lambda: not made.is_gated("g-3") and not made.is_gated("g-4"))
        assert counts(made) == (2, 4)


async def test_the_gang_of_a_group_is_its_own_whoever_owns_the_pods(tmp_path: Path) -> None:
    """It ends with the PodGroup, not with the Job, and is not made anew for it."""
    async with cluster() as made, term(made, tmp_path) as running:
        made.server.put(f"{JOBS}/job", JOB)
        for number in range(2):
            made.add_member("g", number, gpus=8, **MEMBER)
            made.change_pod(f"g-{number}", metadata={"ownerReferences": OWNED})
        put_group(made, 2)
        await settled(running, lambda: f"{GANGS}/g" in made.server.objects, seconds=16)
        uid = made.gang("g")["metadata"]["uid"]
        await settled(running, lambda: made.reason("g") == "NeverFits")

        assert made.gang("g")["metadata"]["uid"] == uid


async def test_pods_of_a_group_that_is_no_gang_are_told(tmp_path: Path) -> None:
    """The PodGroup was deleted, or another one has taken its name since the pods were made."""
    async with cluster() as made, term(made, tmp_path) as running:
        made.add_member("g", 0, **MEMBER)
        await settled(running, lambda: (names.REASON_GANG_WAITING, "g-0") in running.notes.recorded)
        assert f"{GANGS}/g" not in made.server.objects


async def test_pods_of_a_group_of_which_only_some_name_a_pod_set_are_told(tmp_path: Path) -> None:
    """Nobody knows how many the others' pod set has: all name one, or none does."""
    async with cluster() as made, term(made, tmp_path) as running:
        put_group(made, 2)
        made.add_member("g", 0, annotations={names.POD_SET: "workers"}, **MEMBER)
        made.add_member("g", 1, **MEMBER)
        told = f"either all pods of the PodGroup name a pod set ({names.POD_SET}), or none does"
        await settled(running, lambda: told in " ".join(running.notes.notes_on(names.REASON_GANG_WAITING, "g-1")))
        assert f"{GANGS}/g" not in made.server.objects


async def test_a_written_gang_that_contradicts_its_group_waits(tmp_path: Path) -> None:
    """Its quorum is lower than minCount: kube-scheduler would leave members waiting that hold GPUs."""
    async with cluster("n1", "n2") as made, term(made, tmp_path) as running:
        put_group(made, 3)
        made.add_gang("g", 3, minMember=2)
        for number in range(3):
            made.add_member("g", number, **MEMBER)
        await settled(running, lambda: "set minMember to 3" in str(made.gang("g").get("status")))
        assert made.held() == 0
        put_group(made, 2)
        await settled(running, lambda: not any(made.is_gated(f"g-{number}") for number in range(3)), seconds=16)


async def test_the_gang_of_a_group_keeps_its_domain_until_it_starts(tmp_path: Path) -> None:
    """Nobody can change a PodGroup's domain. Who lifts it in the GpuGang that was made for it finds it set again."""
    domain = {"schedulingConstraints": {"topology": [{"key": RACK}]}}
    async with cluster("n1", labels={RACK: "r1"}) as made, term(made, tmp_path) as running:
        made.server.put(f"{TOPOLOGIES}/t", {"metadata": {"name": "t"}, "spec": {"levels": [{"nodeLabel": RACK}]}})
        put_group(made, 2, **domain)
        for number in range(2):
            made.add_member("g", number, gpus=8, **MEMBER)
        await settled(running, lambda: made.reason("g") == "NeverFits")
        wanted = made.gang("g")["spec"]["topology"]
        gang = made.gang("g")
        metadata = {key: value for key, value in gang["metadata"].items() if key != "resourceVersion"}
        lifted = {**gang["spec"], "topology": {"mode": "preferred", "level": RACK}}
        made.server.put(f"{GANGS}/g", {**gang, "metadata": metadata, "spec": lifted})
        await settled(running, lambda: made.gang("g")["spec"]["topology"] == wanted)

    assert wanted == {"mode": "required", "level": RACK}


async def test_a_member_that_failed_counts_for_nobody(tmp_path: Path) -> None:
    """A Job keeps its failed pod beside the successor: the gang needs and counts no more members than before."""
    async with cluster("n1", "n2") as made, term(made, tmp_path) as running:
        await run_group(made, running, 2, disruptionMode={"all": {}})
        made.end("g-1", "Failed")
        made.add_member("g", 2, **MEMBER)
        await settled(running, lambda: not made.is_gated("g-2"))
        assert counts(made) == (2, 2)


async def test_members_that_are_done_and_come_no_more_count_for_nobody(tmp_path: Path) -> None:
    """Two pods of a group that starts and ends whole come after three that have succeeded: the next start needs two."""
    async with cluster("n1", "n2") as made, term(made, tmp_path) as running:
        await run_group(made, running, 3, disruptionMode={"all": {}})
        await settled(running, lambda: made.reason("g", names.CONDITION_PODS_READY) == "Started")
        for number in range(3):
            made.end(f"g-{number}")
        for number in (3, 4):
            made.add_member("g", number, **MEMBER)
        await settled(running, lambda: not made.is_gated("g-3") and not made.is_gated("g-4"))
        assert counts(made) == (2, 2)


async def test_a_raised_min_count_counts_for_the_next_start(tmp_path: Path) -> None:
    """A running gang keeps its quorum, takes in a late pod, and stays ready."""
    async with cluster("n1", "n2") as made, term(made, tmp_path) as running:
        await run_group(made, running, 2)
        await settled(running, lambda: made.reason("g", names.CONDITION_PODS_READY) == "Started")
        put_group(made, 4)
        made.add_member("g", 2, **MEMBER)
        await settled(running, lambda: not made.is_gated("g-2"))
        assert made.gang("g")["spec"]["minMember"] == 2
        assert made.reason("g", names.CONDITION_PODS_READY) == "Started"


async def test_a_domain_that_was_lifted_while_the_gang_runs_stays_lifted(tmp_path: Path) -> None:
    """That of the PodGroup is for the next start; a late pod is counted all the same."""
    domain = {"schedulingConstraints": {"topology": [{"key": RACK}]}}
    lifted = {"mode": "preferred", "level": RACK}
    async with cluster("n1", "n2", labels={RACK: "r1"}) as made, term(made, tmp_path) as running:
        made.server.put(f"{TOPOLOGIES}/t", {"metadata": {"name": "t"}, "spec": {"levels": [{"nodeLabel": RACK}]}})
        await run_group(made, running, 2, **domain)
        await settled(running, lambda: made.reason("g", names.CONDITION_PODS_READY) == "Started")
        gang = strip_version(made.gang("g"))
        made.server.put(f"{GANGS}/g", {**gang, "spec": {**gang["spec"], "topology": lifted}})
        made.add_member("g", 2, **MEMBER)
        await settled(running, lambda: not made.is_gated("g-2"))

        assert counts(made) == (2, 3)
        assert made.gang("g")["spec"]["topology"] == lifted


async def test_members_of_a_group_that_have_to_be_near_each_other_are_let_go_together(tmp_path: Path) -> None:
    """kube-scheduler binds a PodGroup as one: it would wait for all of them, and they for it."""
    near = {"topologyKey": RACK, "labelSelector": {"matchLabels": {"app": "w"}}}
    affinity = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [near]}}
    async with cluster("n1", labels={RACK: "r1"}) as made, term(made, tmp_path) as running:
        put_group(made, 2)
        made.add_member("g", 0, annotations={names.POD_SET: "leader"}, affinity=affinity, **MEMBER)
        made.add_member("g", 1, annotations={names.POD_SET: "workers"}, labels={"app": "w"}, **MEMBER)
        await settled(running, lambda: not made.is_gated("g-0") and not made.is_gated("g-1"))


async def test_a_late_pod_of_no_pod_set_of_the_gang_is_told(tmp_path: Path) -> None:
    """The gang runs and counts it nowhere, so nobody will let it go."""
    async with cluster("n1", "n2") as made, term(made, tmp_path) as running:
        await run_group(made, running, 2)
        made.add_member("g", 2, annotations={names.POD_SET: "extra"}, **MEMBER)
        await settled(running, lambda: (names.REASON_GANG_WAITING, "g-2") in running.notes.recorded)
        told = running.notes.notes_on(names.REASON_GANG_WAITING, "g-2")[-1]
        assert f"names no pod set of GpuGang 'g', which has pods; set {names.POD_SET}" in told
        assert made.is_gated("g-2")


async def test_a_member_outside_of_the_group_keeps_the_gang_waiting(tmp_path: Path) -> None:
    """kube-scheduler does not count it, so Atoll does not start the gang with it."""
    async with cluster("n1", "n2") as made, term(made, tmp_path) as running:
        put_group(made, 2)
        made.add_member("g", 0, **MEMBER)
        made.add_member("g", 1)
        await settled(running, lambda: "is not of PodGroup 'g'" in " ".join(running.notes.texts))
        assert f"{GANGS}/g" not in made.server.objects
        made.add_gang("g", 2)
        await settled(running, lambda: "is not of PodGroup 'g'" in str(made.gang("g").get("status")))
        assert made.held() == 0
        words = "GpuGang 'g' does not start: pod g-1 names the gang"
        await settled(running, lambda: words in running.notes.notes_on(names.REASON_GANG_WAITING, "g-1")[-1])


async def test_a_stranger_to_a_running_group_is_told_and_counts_for_nobody(tmp_path: Path) -> None:
    """It gets no place of a member that is lost, nor room for another: those are for pods of the group."""
    async with cluster("n1", "n2") as made, term(made, tmp_path) as running:
        await run_group(made, running, 2)
        await settled(running, lambda: made.reason("g", names.CONDITION_PODS_READY) == "Started")
        made.delete("g-1")
        made.add_member("g", 7)
        await settled(running, lambda: (names.REASON_GANG_WAITING, "g-7") in running.notes.recorded)
        assert "is not of PodGroup 'g'" in running.notes.notes_on(names.REASON_GANG_WAITING, "g-7")[-1]
        for number in (2, 3):
            made.add_member("g", number, **MEMBER)
        await settled(running, lambda: not made.is_gated("g-2") and not made.is_gated("g-3"))
        await settled(running, lambda: made.gang("g")["status"]["members"] == 3)
        assert counts(made) == (2, 3)
        assert made.is_gated("g-7")
        assert made.leases_of("g-7") == []
