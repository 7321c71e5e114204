"""Gangs on real nodes: all members start or none holds a GPU; a gang that is not ready in time is requeued."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from atoll.api import names
from devcluster.installation import Installation
from tests.e2e.world import HOLD, STAY, RealCluster

pytestmark = pytest.mark.e2e

H100 = {"models": ["nvidia-h100"]}
GANGS = "/apis/gpu.scheduling/v1/namespaces/{}/gpugangs"
JOBS = "/apis/batch/v1/namespaces/{}/jobs"
QUICK = {"backoffBaseSeconds": 2, "backoffMaxSeconds": 4}


class Yard:
    """Gangs of one namespace."""

    def __init__(self, world: RealCluster) -> None:
        self.world = world
        self.api = world.cluster.api
        self.gangs = GANGS.format(world.namespace)

    def gang(self, name: str, *, count: int, **spec: Any) -> None:
        """Create a GpuGang with one pod set `workers`."""
        body = {
            "apiVersion": names.API_VERSION,
            "kind": "GpuGang",
            "metadata": {"name": name},
            "spec": {"podSets": [{"name": "workers", "count": count}], **spec},
        }
        self.api.request("POST", self.gangs, body)

    def claim(self, gang: str, gpus: int) -> None:
        """Create the GpuClaim `member`, which names the gang."""
        spec = {"gangRef": gang, "devices": {"count": gpus, **H100}}
        body = {"apiVersion": names.API_VERSION, "kind": "GpuClaim", "metadata": {"name": "member"}, "spec": spec}
        path = f"/apis/gpu.scheduling/v1/namespaces/{self.world.namespace}/gpuclaims"
        self.api.request("POST", path, body)

    def member_body(self, gang: str, name: str, claim: str | None, **options: Any) -> dict[str, Any]:
        """Return a pod of a gang."""
        body = self.world.pod_body(name, claim, **options)
        body["metadata"]["annotations"][names.GANG] = gang
        return body

    def member(self, gang: str, number: int, claim: str, **options: Any) -> dict[str, Any]:
        """Create a pod of a gang."""
        return self.world.create(self.member_body(gang, f"{gang}-{number}", claim, **options))

    def status(self, name: str) -> dict[str, Any]:
        """Return the gang's status."""
        found: dict[str, Any] = self.api.get(f"{self.gangs}/{name}").get("status", {})
        return found

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        """Return a condition of the gang, empty while there is none."""
        conditions = self.status(name).get("conditions", [])
        return next((condition for condition in conditions if condition["type"] == kind), {})

    def reason(self, name: str, kind: str = names.CONDITION_ADMITTED) -> str:
        """Return the reason of a condition."""
        return str(self.condition(name, kind).get("reason", ""))

    def wait_reason(self, name: str, *reasons: str, kind: str = names.CONDITION_ADMITTED) -> None:
        """Wait until a condition has one of the reasons."""
        self.world.wait(
            lambda: self.reason(name, kind) in reasons, f"gang {name} to say {' or '.join(reasons)} in {kind}"
        )

    def wait_evicted(self, name: str, words: str) -> None:
        """Wait for the event of an eviction that says so: the condition is over as soon as the gang may come back."""
        self.world.wait(
            lambda: any(
                event["reason"] == names.REASON_GANG_EVICTED and words in event["note"]
                for event in self.world.events(name)
            ),
            f"gang {name} to be evicted with the words {words!r}",
        )

    def phases(self, gang: str) -> list[str]:
        """Return the phases of a gang's pods."""
        found = [pod for pod in self.world.pods() if pod["metadata"].get("annotations", {}).get(names.GANG) == gang]
        return sorted(pod["status"]["phase"] for pod in found)

    def leases(self, gang: str) -> int:
        """Return how many GPUs the gang holds."""
        prefix = f"{self.world.namespace}/{gang}/"
        return sum(
            lease["metadata"]["annotations"].get(names.LEASE_GANG, "").startswith(prefix)
            for lease in self.world.leases()
        )

    def wait_running(self, gang: str, count: int) -> None:
        """Wait until so many members run."""
        self.world.wait(lambda: self.phases(gang).count("Running") == count, f"{count} members of {gang} to run")


@pytest.fixture
def yard(world: RealCluster) -> Iterator[Yard]:
    """Gangs of a namespace of its own; its Jobs end with the test."""
    yield Yard(world)
    path = JOBS.format(world.namespace)
    for job in world.cluster.api.get(path)["items"]:
        world.cluster.api.request("DELETE", f"{path}/{job['metadata']['name']}?propagationPolicy=Background")


@pytest.fixture(scope="module")
def refused(installation: Installation) -> Iterator[Yard]:
    """A gang on a machine that no other test asks for. kube-scheduler refuses one of its pinned members: both write to
    one iSCSI disk, which is not weighed. For 40 s that may be a view that lags behind; meanwhile other tests run."""
    with RealCluster.of_one_test(installation) as world:
        yard = Yard(world)
        world.claim("two", 2, models=["nvidia-l40s"])
        yard.gang("x", count=2)
        disk = {"targetPortal": "10.0.0.1:3260", "iqn": "iqn.2001-04.com.example:one.disk", "lun": 0}
        for number in range(2):
            body = yard.member_body("x", f"x-{number}", "two")
            body["spec"]["volumes"].append({"name": "data", "iscsi": disk})
            world.create(body)
        yard.wait_reason("x", "Admitted")
        yield yard


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 51))]
)  # fmt: skip
def test_of_two_gangs_that_fit_alone_one_runs_and_the_other_holds_nothing(yard: Yard, seed: int) -> None:
    """Members come interleaved. One gang runs whole, the other holds no Lease, and starts when the first ends."""
    yard.world.claim("two", 2, **H100)
    for gang in ("x", "y"):
        yard.gang(gang, count=4)
    members = [(gang, number) for gang in ("x", "y") for number in range(4)]
    random.Random(seed).shuffle(members)
    for gang, number in members:
        yard.member(gang, number, "two")

    yard.world.wait(
        lambda: sorted((yard.reason("x"), yard.reason("y"))) == ["Admitted", "WaitForRoom"], f"one to win (seed {seed})"
    )
    winner, loser = ("x", "y") if yard.reason("x") == "Admitted" else ("y", "x")
    yard.wait_running(winner, 4)
    assert yard.leases(winner) == 8
    assert yard.leases(loser) == 0
    assert yard.phases(loser) == ["Pending"] * 4
    seen = [yard.world.seen(f"{winner}-{number}") for number in range(4)]
    assert len({uuid for one in seen for uuid in one.nvidia}) == 8
    for number in range(4):
        yard.world.delete(f"{winner}-{number}")
    yard.wait_running(loser, 4)


def job_body(yard: Yard, name: str, claim: str, *, count: int, script: str, **container: Any) -> dict[str, Any]:
    """Return an indexed Job whose pods are the members of the gang that the claim names. It may not fail once."""
    body = yard.world.pod_body("x", claim, script=script, restartPolicy="Never")
    body["spec"]["containers"][0].update(container)
    template = {"metadata": {"annotations": body["metadata"]["annotations"]}, "spec": body["spec"]}
    spec = {"completions": count, "parallelism": count, "completionMode": "Indexed", "backoffLimit": 0}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {**spec, "template": template},
    }


MEET = f"""{HOLD}
me=/locks/$HOSTNAME.{{subdomain}}
hostname -i > $me.new && mv $me.new $me
if [ "$ATOLL_GANG_RANK" = 0 ]; then
  mkdir -p /www/cgi-bin
  printf '#!/bin/sh\necho "$QUERY_STRING" >> /www/joined\necho; echo; sort -u /www/joined | wc -l\n' > /www/cgi-bin/join
  chmod +x /www/cgi-bin/join && httpd -p 29500 -h /www
fi
until [ -s /locks/$ATOLL_GANG_LEADER ]; do sleep 0.2; done
leader=$(cat /locks/$ATOLL_GANG_LEADER)
until [ "$(wget -q -O - http://$leader:29500/cgi-bin/join?$ATOLL_GANG_RANK | tail -1)" = "$ATOLL_GANG_SIZE" ]; do
  sleep 0.2
done
echo "MET rank $ATOLL_GANG_RANK of $ATOLL_GANG_SIZE hosts $ATOLL_GANG_HOSTS"
"""
"""A rendezvous as torchrun's: rank 0 serves a store, and everybody waits until all ranks are in it. A file per address
stands in for the cluster's DNS, which the development cluster lacks."""


def test_members_meet_by_what_their_variables_say(yard: Yard) -> None:
    """Four processes with nothing but their variables find rank 0 and each other, and agree on the order."""
    world = yard.world
    yard.gang("ring", count=4)
    yard.claim("ring", 2)
    script = MEET.replace("{subdomain}", world.namespace) + STAY
    body = job_body(yard, "ring", "member", count=4, script=script)
    template = body["spec"]["template"]
    template["metadata"]["annotations"][names.RENDEZVOUS] = "true"
    template["spec"]["subdomain"] = world.namespace
    world.cluster.api.request("POST", JOBS.format(world.namespace), body)
    yard.wait_running("ring", 4)
    pods = [pod["metadata"]["name"] for pod in world.pods()]
    world.wait(lambda: all("MET" in world.logs(pod) for pod in pods), "all four to meet")

    hosts = ",".join(f"ring-{rank}.{world.namespace}" for rank in range(4))
    met = sorted(line for pod in pods for line in world.logs(pod).splitlines() if line.startswith("MET"))
    assert met == [f"MET rank {rank} of 4 hosts {hosts}" for rank in range(4)]


def test_a_job_that_is_not_ready_in_time_is_requeued_without_losing_tries(yard: Yard) -> None:
    """Evicted by suspension, GPUs free, resumed after the pause, ready the second time; nothing has failed."""
    world = yard.world
    flag = f"/locks/ready-{world.namespace}"
    yard.gang(
        "train", count=2, waitForPodsReady={"enable": True, "timeout": "10s", "requeuingStrategy": QUICK}
    )  # fmt: skip
    yard.claim("train", 4)
    probe = {"exec": {"command": ["test", "-f", flag]}, "periodSeconds": 1}
    path = JOBS.format(world.namespace)
    body = job_body(yard, "train", "member", count=2, script=HOLD + STAY, readinessProbe=probe)
    world.cluster.api.request("POST", path, body)

    yard.wait_running("train", 2)
    yard.wait_evicted("train", "not ready in time")
    world.wait(lambda: yard.leases("train") == 0, "the evicted gang to hold nothing")
    (world.locks / f"ready-{world.namespace}").touch()
    yard.wait_reason("train", "Started", kind=names.CONDITION_PODS_READY)
    job = world.cluster.api.get(f"{path}/train")
    assert job["status"].get("failed", 0) == 0
    assert job["spec"]["suspend"] is False
    assert names.GANG_SUSPENDED not in job["metadata"].get("labels", {})
    assert yard.status("train")["requeueState"]["count"] >= 1


def test_a_member_that_goes_is_replaced_on_its_own(yard: Yard) -> None:
    """One pod of a gang is deleted: its successor gets GPUs, the others run on. A suspended Job frees all."""
    world = yard.world
    yard.gang("train", count=2)
    yard.claim("train", 2)
    path = JOBS.format(world.namespace)
    body = job_body(yard, "train", "member", count=2, script=HOLD + STAY.replace("exit 0", "exit 1"))
    body["spec"]["backoffLimit"] = 6
    world.cluster.api.request("POST", path, body)
    yard.wait_reason("train", "Started", kind=names.CONDITION_PODS_READY)
    first, second = sorted(pod["metadata"]["name"] for pod in world.pods())

    world.delete(first)
    yard.wait_reason("train", "Recovered", kind=names.CONDITION_PODS_READY)
    assert second in {pod["metadata"]["name"] for pod in world.pods()}
    assert yard.leases("train") == 4
    assert yard.status("train")["admissions"] == 1
    for suspended in ("true", "false"):
        patch = f'{{"spec":{{"suspend":{suspended}}}}}'
        assert world.kubectl("patch", "job", "train", "--type=merge", "-p", patch).returncode == 0
        held = 0 if suspended == "true" else 4
        world.wait(lambda held=held: yard.leases("train") == held, f"{held} GPUs to be held")
    yard.wait_reason("train", "Started", kind=names.CONDITION_PODS_READY)


def is_any_let_go(yard: Yard) -> bool:
    """Tell whether a pod of the namespace has no gate."""
    return any(not pod["spec"].get("schedulingGates") for pod in yard.world.pods())


STEPS: dict[str, Callable[[Yard], bool]] = {
    "some Leases": lambda yard: len(yard.world.leases()) >= 5,
    "the first Lease": lambda yard: len(yard.world.leases()) >= 1,
    "every Lease": lambda yard: len(yard.world.leases()) >= 8,
    "the condition": lambda yard: yard.reason("x") == "Admitted",
    "the first gate": is_any_let_go,
    "the first member that runs": lambda yard: "Running" in yard.phases("x"),
}
"""How far an admission has come when the controllers are killed."""


@pytest.mark.parametrize(
    "step", [name if name == "some Leases" else pytest.param(name, marks=pytest.mark.long) for name in STEPS]
)
def test_controllers_that_are_killed_during_an_admission_finish_or_undo_it(yard: Yard, step: str) -> None:
    """Killed at this step: no member runs without its GPUs, and the next leader starts the whole gang."""
    world = yard.world
    world.claim("two", 2, **H100)
    yard.gang("x", count=4)
    for number in range(3):
        yard.member("x", number, "two")
    yard.wait_reason("x", "WaitForQuorum")
    yard.member("x", 3, "two")
    world.wait(lambda: STEPS[step](yard), step)
    world.installation.kill("controllers")
    for pod in world.pods():
        is_gated = bool(pod["spec"].get("schedulingGates"))
        assert is_gated or len(world.leases(pod["metadata"]["uid"])) == 2
    world.installation.start("controllers")

    yard.wait_running("x", 4)
    yard.wait_reason("x", "Admitted")
    assert yard.leases("x") == 8


def test_a_node_that_comes_back_starts_a_waiting_gang(yard: Yard) -> None:
    """The only machine of the model is cordoned: the gang holds nothing. Uncordoned, it starts."""
    world = yard.world
    world.claim("four", 4, **H100)
    world.kubectl("cordon", "hopper")
    try:
        yard.gang("x", count=2)
        for number in range(2):
            yard.member("x", number, "four")
        yard.wait_reason("x", "NeverFits", "WaitForNodes", "WaitForRoom")
        assert world.leases() == []
    finally:
        world.kubectl("uncordon", "hopper")
    yard.wait_running("x", 2)


def test_a_deactivated_gang_gives_everything_back(yard: Yard) -> None:
    """A gang that was made for pods with a size runs; spec.active false stops it whole."""
    world = yard.world
    world.claim("two", 2, **H100)
    for number in range(2):
        body = yard.member_body("x", f"x-{number}", "two")
        body["metadata"]["annotations"][names.GANG_SIZE] = "2"
        world.create(body)
    yard.wait_running("x", 2)
    patch = '{"spec":{"active":false}}'
    assert world.kubectl("patch", "gpugang", "x", "--type=merge", "-p", patch).returncode == 0
    world.wait(lambda: world.leases() == [], "nothing to be held")
    world.wait(lambda: world.pods() == [], "the pods to be gone")


def jobset_labels(replicated: str, index: int) -> dict[str, str]:
    """Return the labels by which a JobSet's pods tell their replicated Job and their place in it."""
    return {
        "jobset.sigs.k8s.io/replicatedjob-name": replicated,
        "jobset.sigs.k8s.io/replicatedjob-replicas": "1",
        "jobset.sigs.k8s.io/job-index": "0",
        "batch.kubernetes.io/job-completion-index": str(index),
    }


def test_a_leader_and_its_workers_start_together_each_by_its_own_request(yard: Yard) -> None:
    """Two pod sets with claims of their own, labelled as a JobSet's pods: the workers on one machine, nobody before the
    leader is there."""
    world = yard.world
    topology = f"machines-{world.namespace}"
    body = {
        "apiVersion": names.API_VERSION,
        "kind": "Topology",
        "metadata": {"name": topology},
        "spec": {"levels": [{"nodeLabel": "kubernetes.io/hostname"}]},
    }
    path = "/apis/gpu.scheduling/v1/topologies"
    world.cluster.api.request("POST", path, body)
    try:
        world.claim("one", 1)
        world.claim("two", 2)
        near = {"mode": "required", "level": "kubernetes.io/hostname"}
        sets = [{"name": "leader", "count": 1}, {"name": "workers", "count": 3, "topology": near}]
        yard.gang("x", count=0, podSets=sets, topologyName=topology)
        for number in range(3):
            worker = yard.member_body("x", f"worker-{number}", "two")
            worker["metadata"]["labels"] = jobset_labels("workers", number)
            world.create(worker)
        yard.wait_reason("x", "WaitForQuorum")
        assert world.leases() == []
        leader = yard.member_body("x", "leader", "one")
        leader["metadata"]["labels"] = jobset_labels("leader", 0)
        world.create(leader)

        yard.wait_running("x", 4)
        nodes = {world.get(f"worker-{number}")["spec"]["nodeName"] for number in range(3)}
        assert len(nodes) == 1
        assigned = {one["name"]: one for one in yard.status("x")["assignment"]["podSets"]}
        assert assigned["workers"]["domains"] == [{"values": [nodes.pop()], "count": 3}]
        found = world.wait(lambda: world.cluster.api.get(f"{path}/{topology}").get("status"), "the topology's status")
        assert found["nodes"] == len(world.cluster.nodes)
    finally:
        world.cluster.api.request("DELETE", f"{path}/{topology}")


def test_a_launcher_without_gpus_waits_starts_and_is_replaced_with_its_workers(yard: Yard) -> None:
    """It asks for cpu alone: gated until the workers fit, on a node that holds it, with no GPU and no Lease. When it
    fails, the next one starts beside the workers, which keep their GPUs."""
    world = yard.world
    world.claim("four", 4)
    yard.gang("x", count=0, podSets=[{"name": "launcher", "count": 1}, {"name": "workers", "count": 2}])

    def launch(name: str) -> None:
        body = yard.member_body("x", name, None, script=STAY, restartPolicy="Never")
        body["metadata"]["annotations"][names.POD_SET] = "launcher"
        body["spec"]["containers"][0].setdefault("resources", {})["requests"] = {"cpu": "100m"}
        world.create(body)

    launch("launcher-0")
    worker = yard.member_body("x", "worker-0", "four")
    worker["metadata"]["annotations"][names.POD_SET] = "workers"
    world.create(worker)
    yard.wait_reason("x", "WaitForQuorum")
    assert world.leases() == []
    worker["metadata"]["name"] = "worker-1"
    world.create(worker)
    yard.wait_running("x", 3)
    launcher, held = world.get("launcher-0"), world.leases()
    assert names.ALLOCATED not in launcher["metadata"]["annotations"]
    assert not any(one["name"].endswith("VISIBLE_DEVICES") for one in launcher["spec"]["containers"][0].get("env", []))
    assert len(held) == 8

    world.delete("launcher-0", force=True)
    launch("launcher-1")
    yard.wait_running("x", 3)
    assert world.leases() == held
    assert yard.status("x")["admissions"] == 1


def admissions(yard: Yard, gang: str) -> dict[str, str]:
    """Return the admission that each pod of a gang bears, by name."""
    found = [pod["metadata"] for pod in yard.world.pods()]
    return {
        one["name"]: one["annotations"].get(names.ADMISSION, "")
        for one in found
        if one.get("annotations", {}).get(names.GANG) == gang
    }


def test_a_gang_that_is_created_anew_under_unready_members_is_taken_over_and_evicted_in_time(yard: Yard) -> None:
    """The GpuGang is deleted and made again while its members run and are not ready: the admission goes on under its
    id, and its time begins anew; then the Job is suspended as ever."""
    world = yard.world
    rules = {"enable": True, "timeout": "8s", "requeuingStrategy": {"backoffBaseSeconds": 600}}
    yard.gang("train", count=2, waitForPodsReady={**rules, "timeout": "600s"})
    probe = {"exec": {"command": ["test", "-f", "/locks/never"]}, "periodSeconds": 1}
    start_job(yard, "train", count=2, gpus=2, readinessProbe=probe)
    yard.wait_running("train", 2)
    admission = yard.status("train")["admission"]
    assert set(admissions(yard, "train").values()) == {admission}

    assert world.kubectl("delete", "gpugang", "train").returncode == 0
    yard.gang("train", count=2, waitForPodsReady=rules)
    world.wait(lambda: yard.status("train").get("assignment", {}).get("time"), "the gang to be taken over")
    assert yard.status("train")["admission"] == admission
    assert yard.leases("train") == 4
    yard.wait_evicted("train", "not ready in time")
    world.wait(lambda: is_suspended(yard, "train"), "the Job to be suspended")
    world.wait(lambda: world.leases() == [], "nothing to be held")


def test_successes_outlive_their_pods_and_admissions_do_not_speak_for_each_other(yard: Yard) -> None:
    """Members end well and are deleted one by one: nobody is evicted, and the gang ends as finished. Two runs later a
    pod of the run before still terminates when a member crashes: the gang waits for a successor of that one."""
    world = yard.world
    world.claim("two", 2, **H100)
    rules = {"enable": True, "timeout": "600s", "recoveryTimeout": "6s", "requeuingStrategy": QUICK}
    yard.gang("x", count=3, minMember=3, waitForPodsReady=rules)
    until = "while ! test -f /locks/{0}-$HOSTNAME; do sleep 0.2; done; exit {1}"

    def start(run: str, code: int) -> list[str]:
        members = [f"{run}-{number}" for number in range(3)]
        for name in members:
            script = HOLD + until.format(world.namespace, code)
            world.create(yard.member_body("x", name, "two", script=script, restartPolicy="Never"))
        yard.wait_running("x", 3)
        yard.wait_reason("x", "Started", kind=names.CONDITION_PODS_READY)
        return members

    def end(name: str, phase: str) -> None:
        (world.locks / f"{world.namespace}-{name}").touch()
        world.wait(lambda: world.get(name)["status"]["phase"] == phase, f"{name} to be {phase}")

    first = start("first", 0)
    ids = set(admissions(yard, "x").values())
    for number, name in enumerate(first, start=1):
        end(name, "Succeeded")
        world.wait(lambda n=number: sum(one["count"] for one in yard.status("x")["succeeded"]) == n, f"{name} to count")
        world.delete(name)
        world.wait(lambda n=number: yard.status("x")["members"] == 3 - n, f"{name} to be gone")
        assert yard.status("x")["ready"] == 3
    world.wait(lambda: yard.status("x")["phase"] == "Finished", "the gang to end as finished")
    assert yard.reason("x", names.CONDITION_EVICTED) == "NotEvicted"

    body = yard.member_body("x", "late", "two", restartPolicy="Never")
    body["metadata"]["finalizers"] = ["tests.example.com/hold"]
    world.create(body)
    yard.wait_reason("x", "WaitForQuorum")
    second = [yard.member("x", number, "two")["metadata"]["name"] for number in range(2)]
    yard.wait_running("x", 3)
    ids |= set(admissions(yard, "x").values())
    for name in (*second, "late"):
        world.delete(name)
    try:
        world.wait(lambda: world.leases() == [], "the second run to hold nothing")
        third = start("third", 1)
        own = {admissions(yard, "x")[name] for name in third}
        end(third[0], "Failed")
        yard.wait_reason("x", "WaitForRecovery", kind=names.CONDITION_PODS_READY)
        assert admissions(yard, "x")["late"] in ids - own
        assert len(ids | own) == 3
        assert "" not in ids | own
        yard.wait_evicted("x", "not recovered in time")
    finally:
        world.kubectl("patch", "pod", "late", "--type=merge", "-p", '{"metadata":{"finalizers":null}}')


CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"
HIGH = "tests-high-gang"


def is_suspended(yard: Yard, job: str) -> bool:
    """Tell whether a Job is suspended."""
    found = yard.world.cluster.api.get(f"{JOBS.format(yard.world.namespace)}/{job}")
    return bool(found["spec"].get("suspend"))


def start_job(yard: Yard, gang: str, *, count: int, gpus: int, **container: Any) -> None:
    """Create a gang, its claim and its Job, all of whose members ask for H100s."""
    yard.claim(gang, gpus)
    body = job_body(yard, gang, "member", count=count, script=HOLD + STAY, **container)
    yard.world.cluster.api.request("POST", JOBS.format(yard.world.namespace), body)


def test_a_gang_below_goes_whole_for_one_above_it_and_comes_back(yard: Yard) -> None:
    """Half of its GPUs are wanted: its Job is suspended, loses no try, and runs again when the other has ended, before
    a gang that came after it: only who was not ready in time loses its place."""
    world = yard.world
    if world.maybe(f"{CLASSES}/{HIGH}") is None:
        world.cluster.api.request("POST", CLASSES, {"metadata": {"name": HIGH}, "value": 1000})
    rules = {"enable": True, "timeout": "300s", "requeuingStrategy": {**QUICK, "timestamp": "Eviction"}}
    yard.gang("low", count=2, waitForPodsReady=rules)
    start_job(yard, "low", count=2, gpus=4)
    yard.wait_running("low", 2)

    world.claim("four", 4, **H100)
    yard.gang("later", count=2)
    for number in range(2):
        yard.member("later", number, "four")
    yard.wait_reason("later", "WaitForRoom")
    yard.gang("high", count=1)
    yard.member("high", 0, "four", priorityClassName=HIGH)
    yard.wait_running("high", 1)

    yard.wait_evicted("low", f"gives way to gang {world.namespace}/high")
    world.wait(lambda: yard.leases("low") == 0, "the gang below to hold nothing")
    assert yard.leases("high") == 4
    world.wait(lambda: not is_suspended(yard, "low"), "its Job to be resumed")
    yard.wait_reason("low", "WaitForRoom")
    world.delete("high-0")
    yard.wait_running("low", 2)
    assert yard.leases("later") == 0
    job = world.cluster.api.get(f"{JOBS.format(world.namespace)}/low")
    assert job["status"].get("failed", 0) == 0


def test_a_gang_that_does_not_recover_in_time_is_evicted_and_comes_back(yard: Yard) -> None:
    """Ready once, then a member is not ready for longer than recoveryTimeout: evicted, resumed, ready again."""
    world = yard.world
    flag = world.locks / f"ready-{world.namespace}"
    flag.touch()
    rules = {"enable": True, "timeout": "300s", "recoveryTimeout": "3s", "requeuingStrategy": QUICK}
    yard.gang("train", count=2, waitForPodsReady=rules)
    probe = {"exec": {"command": ["test", "-f", f"/locks/{flag.name}"]}, "periodSeconds": 1, "failureThreshold": 1}
    start_job(yard, "train", count=2, gpus=4, readinessProbe=probe)
    yard.wait_reason("train", "Started", kind=names.CONDITION_PODS_READY)

    flag.unlink()
    yard.wait_evicted("train", "not recovered in time")
    flag.touch()
    world.wait(lambda: yard.status("train").get("admissions", 0) >= 2, "a second admission")
    yard.wait_reason("train", "Started", kind=names.CONDITION_PODS_READY)


def test_a_gang_that_is_deactivated_and_activated_again_starts_with_a_clean_record(yard: Yard) -> None:
    """spec.active false suspends the Job and frees all; true resumes it, and the count of evictions begins anew."""
    world = yard.world
    yard.gang("train", count=2)
    start_job(yard, "train", count=2, gpus=4)
    yard.wait_running("train", 2)
    for active in ("false", "true"):
        patch = f'{{"spec":{{"active":{active}}}}}'
        assert world.kubectl("patch", "gpugang", "train", "--type=merge", "-p", patch).returncode == 0
        if active == "false":
            world.wait(lambda: yard.leases("train") == 0, "nothing to be held")
            world.wait(lambda: is_suspended(yard, "train"), "the Job to be suspended")
            yard.wait_reason("train", "Deactivated", kind=names.CONDITION_ACTIVE)
    yard.wait_running("train", 2)
    assert "requeueState" not in yard.status("train")


@contextmanager
def controllers_with(world: RealCluster, *options: str) -> Iterator[None]:
    """Run the controllers with further options."""
    parts, usual = world.installation.parts, world.installation.parts["controllers"]
    try:
        world.installation.stop("controllers")
        parts["controllers"] = replace(usual, arguments=(*usual.arguments, *options))
        world.installation.start("controllers")
        yield
    finally:
        world.installation.stop("controllers")
        parts["controllers"] = usual
        world.installation.start("controllers")


def test_a_member_that_kube_scheduler_refuses_ends_the_admission(refused: Yard) -> None:
    """One pinned member waits for a disk that another uses: the whole gang gives its GPUs back."""
    refused.wait_reason("x", "SchedulerRefused", kind=names.CONDITION_EVICTED)
    refused.world.wait(lambda: refused.world.leases() == [], "nothing to be held")
    assert refused.condition("x", names.CONDITION_ADMITTED)["status"] == "False"


@pytest.mark.long
def test_block_admission_lets_nobody_pass_until_the_first_is_ready(yard: Yard) -> None:
    """Two gangs fit side by side: the second is admitted only once all members of the first are ready."""
    world = yard.world
    flag = f"ready-{world.namespace}"
    probe = {"exec": {"command": ["test", "-f", f"/locks/{flag}"]}, "periodSeconds": 1}
    options = ("enable", "block-admission", "recovery-timeout-seconds=600")
    with controllers_with(world, *(f"--wait-for-pods-ready-{option}" for option in options)):
        world.claim("two", 2, **H100)
        for gang in ("x", "y"):
            yard.gang(gang, count=2)
            for number in range(2):
                body = yard.member_body(gang, f"{gang}-{number}", "two")
                body["spec"]["containers"][0]["readinessProbe"] = probe
                world.create(body)
        world.wait(
            lambda: sorted((yard.reason("x"), yard.reason("y"))) == ["Admitted", "WaitForOtherGangs"], "one to be first"
        )
        first, second = ("x", "y") if yard.reason("x") == "Admitted" else ("y", "x")
        yard.wait_running(first, 2)
        assert yard.leases(second) == 0
        assert yard.reason(second) == "WaitForOtherGangs"
        (world.locks / flag).touch()
        yard.wait_running(second, 2)
