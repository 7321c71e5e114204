"""Tenants' queues in the real Kueue, applied from one file by the job service's command line.

The cluster has no nodes: Kueue admits by quota alone, and pods wait. Each test has tenants and a cohort of its own.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from atoll.api import names
from devcluster import DevCluster
from devcluster.kueue import Kueue
from tests.e2e.running_service import RunningService, wait
from tests.jobs.test_queue_file import EXAMPLE

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1200)]

REPOSITORY = Path(__file__).parents[2]
OPERATOR = "atoll-system"
RULES = {"rules": [{"group": f"system:serviceaccounts:{OPERATOR}", "role": "operator"}]}
FLAVORS = [
    {"name": "h100", "node_labels": {"example.com/gpu": "h100"}},
    {"name": "a100", "node_labels": {"example.com/gpu": "a100"}},
    {"name": "spot", "node_labels": {"example.com/gpu": "spot"}, "spot": True},
    {"name": "slices", "node_labels": {"nvidia.com/mig.config": "all-3g.40gb"}},
]
FAIR = {"fairSharing": {"preemptionStrategies": ["LessThanOrEqualToFinalShare", "LessThanInitialShare"]}}


class QueueRoom:
    """The service and the cluster as an operator uses them."""

    def __init__(self, service: RunningService) -> None:
        self.service = service
        self.kubectl = service.cluster.kubectl

    def atoll(self, *words: str) -> str:
        """Run `atoll ...` as the operator."""
        return self.service.atoll(*words, by=OPERATOR)

    def apply(self, tenants: Mapping[str, list[dict[str, Any]]], **fields: Any) -> str:
        """Apply a file with these queues of tenants, all in one cohort unless they say otherwise; wait for Kueue."""
        queues = {name: [{"cohort": "all"} | queue for queue in found] for name, found in tenants.items()}
        file = {
            "flavors": FLAVORS,
            "cohorts": [{"name": "all"}],
            "tenants": [{"name": name, "queues": found} for name, found in queues.items()],
        } | fields
        path = self.service.folder / "queues.yaml"
        path.write_text(json.dumps(file))
        told = self.atoll("queue", "apply", "-f", str(path))
        wanted = sum(len(found) for found in queues.values())
        wait(lambda: not json.loads(self.atoll("queue", "list", "-o", "json"))["message"], "the file to be compared")
        wait(lambda: sum(one["is_active"] is True for one in self.queues().values()) == wanted, "active queues")
        return told

    def queues(self) -> dict[str, dict[str, Any]]:
        """Return the queues by name, as the service lists them."""
        found = json.loads(self.atoll("queue", "list", "-o", "json"))["items"]
        return {one["name"]: one for one in found}

    def used(self, queue: str) -> tuple[int, int]:
        """Return the GPUs that a queue uses, and how many of them it borrowed."""
        gpus = [one for one in self.queues()[queue]["amounts"] if one["resource"] == names.GPU_RESOURCE]
        return sum(int(one["used"]) for one in gpus), sum(int(one["borrowed"]) for one in gpus)

    def submit(self, name: str, tenant: str, gpus: int, *, priority: str = "normal", **fields: Any) -> str:
        """Submit a batch of pods with one GPU each; return the job's name."""
        job = {
            "name": name,
            "job_type": "batch",
            "tenant_id": tenant,
            "parallelism": gpus,
            "completions": gpus,
            "ext_ml_gpu_count": 1,
            "container": {"image": "localhost/busybox:1", "command": ["sleep", "1000"]},
            "policy": {"priority_class": priority, "preemption_grace_period": 1} | fields.pop("policy", {}),
        } | fields
        file = self.service.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(job))
        self.atoll("job", "submit", "-f", str(file))
        return name

    def show(self, name: str) -> dict[str, Any]:
        """Return a job."""
        found: dict[str, Any] = json.loads(self.atoll("job", "show", name, "-o", "json"))
        return found

    def status(self, name: str) -> str:
        """Return the state of a job."""
        return str(self.show(name)["status"])

    def wait(self, *wanted: str, status: str = "admitted") -> None:
        """Wait until jobs are in a state."""
        for name in wanted:
            wait(lambda name=name: self.status(name) == status, f"{name} to be {status}: {self.show(name)['message']}")

    def wait_message(self, name: str, told: str) -> None:
        """Wait until a job says something."""
        wait(lambda: told in self.show(name)["message"], f"{name} to say {told}")

    def admitted(self, *wanted: str) -> list[str]:
        """Return which of the jobs have quota now."""
        return [name for name in wanted if self.status(name) == "admitted"]

    def history(self, name: str) -> list[str]:
        """Return what happened to a job, with the words for it."""
        page = self.atoll("job", "show", name)
        return page.split("MESSAGE\n", 1)[1].splitlines()

    def get(self, kind: str, name: str, namespace: str = "") -> dict[str, Any]:
        """Return an object; empty if it is not there."""
        done = self.kubectl("get", kind, name, "-o", "json", *(["-n", namespace] if namespace else []))
        found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
        return found

    def patch(self, kind: str, name: str, spec: dict[str, Any], namespace: str = "") -> None:
        """Change an object by hand."""
        where = ["-n", namespace] if namespace else []
        self.kubectl("patch", kind, name, *where, "--type=merge", "-p", json.dumps({"spec": spec}), check=True)

    def leave(self) -> None:
        """Remove what a test left."""
        self.kubectl("delete", "jobs,pods", "-A", "--all", "--grace-period=0", "--force", "--wait=false")
        wait(
            lambda: not json.loads(self.kubectl("get", "workloads", "-A", "-o", "json").stdout)["items"], "no Workload"
        )


@pytest.fixture(scope="module")
def bare() -> Iterator[DevCluster]:
    """A control plane with Atoll's kinds, without nodes and at first without Kueue."""
    with DevCluster.start(f"queues-{os.getpid()}", scheduler=False) as cluster:
        cluster.kubectl("apply", "-f", str(REPOSITORY / "deploy/crds"), check=True)
        cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s", check=True)
        cluster.kubectl("create", "namespace", OPERATOR, check=True)
        account = ("get", "serviceaccount", "default", "-n", OPERATOR)
        wait(lambda: cluster.kubectl(*account).returncode == 0, "the default account")
        yield cluster


@pytest.fixture(scope="module")
def service(bare: DevCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A service with an empty database."""
    service = RunningService(bare, tmp_path_factory.mktemp("service"), rules=RULES, namespaces=(OPERATOR,))
    service.start()
    yield service
    service.kill()


@pytest.fixture(scope="module")
def kueue(bare: DevCluster) -> Kueue:
    """The real Kueue, in the classical profile."""
    found = Kueue(bare)
    found.install()
    return found


@pytest.fixture
def room(service: RunningService, kueue: Kueue) -> Iterator[QueueRoom]:
    """The room of one test."""
    found = QueueRoom(service)
    yield found
    found.leave()


@pytest.fixture
def fair_room(service: RunningService, kueue: Kueue) -> Iterator[QueueRoom]:
    """The room of one test, in the profile of fair sharing."""
    kueue.stop()
    kueue.install(settings=FAIR)
    found = QueueRoom(service)
    yield found
    found.leave()
    kueue.stop()
    kueue.install()


def of(flavor: str, gpus: int | Mapping[str, int], **fields: Any) -> dict[str, Any]:
    """Return a queue with one flavor."""
    return {"flavors": [{"flavor": flavor, "quota": {"gpu": gpus}}]} | fields


# Before Kueue is installed


def test_without_kueue_jobs_pass_and_it_is_said(service: RunningService) -> None:
    """No Kueue: namespaces and priorities are made, jobs start at once, and every answer says that no quota applies."""
    room = QueueRoom(service)
    if room.kubectl("get", "crd", "clusterqueues.kueue.x-k8s.io").returncode == 0:
        pytest.skip("another test has installed Kueue")
    told = room.atoll("queue", "apply", "-f", str(EXAMPLE))
    wait(lambda: room.get("namespace", "tenant-acme-dev"), "the namespaces")
    wait(lambda: room.get("serviceaccount", "default", "tenant-acme"), "the default account")
    room.submit("free", "acme", 99)
    room.wait("free")

    assert "Namespace tenant-acme-dev: is created" in told
    assert "ClusterQueue" not in told
    assert "no Kueue" in json.loads(room.atoll("queue", "list", "-o", "json"))["message"]
    assert any("without quota: the cluster has no Kueue" in line for line in room.history("free"))
    assert room.get("priorityclass", "critical")["value"] == 1000
    room.atoll("job", "cancel", "free", "--wait")


# With Kueue


def test_the_file_becomes_every_object_and_is_kept(room: QueueRoom) -> None:
    """KQ-1, KQ-2, KQ-3, KQ-9, KQ-10, C-13: the example becomes Kueue's objects; whatever is changed or deleted by hand
    comes back; a second apply finds nothing to change."""
    room.atoll("queue", "apply", "-f", str(EXAMPLE))
    wait(lambda: room.queues().get("tenant-globex-queue", {}).get("is_active"), "an active queue")
    wait(lambda: room.get("localqueue", "acme-small", "tenant-acme-dev"), "the last queue")
    again = room.atoll("queue", "apply", "-f", str(EXAMPLE))
    other = room.service.folder / "other.yaml"
    other.write_text(EXAMPLE.read_text().replace("name: acme-small", "name: acme-tiny"))
    dry = room.atoll("queue", "apply", "-f", str(other), "--dry-run")
    classes = json.loads(room.kubectl("get", "workloadpriorityclasses", "-o", "json").stdout)["items"]
    h100 = room.get("resourceflavor", "gpu-h100-80gb")

    assert "ClusterQueue acme-tiny: is created (dry run)" in dry
    assert "ClusterQueue acme-small: is removed (dry run)" in dry
    assert not room.get("clusterqueue", "acme-tiny")
    assert again == "nothing to change\n"
    assert {one["metadata"]["name"]: one["value"] for one in classes} == {
        "critical": 1000,
        "high": 100,
        "normal": 10,
        "low": 1,
    }
    assert h100["apiVersion"] == "kueue.x-k8s.io/v1beta2"
    assert h100["spec"]["nodeLabels"]["nvidia.com/gpu.product"] == "NVIDIA-H100-80GB-HBM3"
    assert room.get("cohort", "production")
    shown = room.atoll("queue", "show", "tenant-globex-queue")
    assert "gpu-a100-80gb" in shown
    assert "32" in shown

    policy = lambda space: room.get("networkpolicy", "atoll-tenant", space).get("spec", {})  # noqa: E731
    wanted = policy("tenant-acme")
    assert wanted["policyTypes"] == ["Ingress"]
    assert len(wanted["ingress"]) == 1
    assert len(wanted["ingress"][0]["from"]) == 1
    room.patch("networkpolicy", "atoll-tenant", {"ingress": [{}]}, "tenant-acme")
    room.patch("networkpolicy", "atoll-tenant", {"podSelector": {"matchLabels": {"a": "b"}}}, "tenant-globex")
    room.kubectl("delete", "networkpolicy", "atoll-tenant", "-n", "tenant-acme-dev", check=True)
    for space in ("tenant-acme", "tenant-acme-dev"):
        wait(lambda space=space: policy(space) == wanted, f"the NetworkPolicy of {space} to be corrected")
    wait(lambda: policy("tenant-globex")["podSelector"] == {}, "the NetworkPolicy to be for all pods")

    room.patch("clusterqueue", "tenant-globex-queue", {"stopPolicy": "Hold", "cohortName": "elsewhere"})
    room.patch("resourceflavor", "gpu-t4", {"nodeLabels": {"zone": "a"}})
    room.kubectl("delete", "localqueue", "acme-small", "-n", "tenant-acme-dev", check=True)
    wait(lambda: room.get("localqueue", "acme-small", "tenant-acme-dev"), "the queue to be made again")
    kept = ("production", "None")
    specs = lambda: room.get("clusterqueue", "tenant-globex-queue")["spec"]  # noqa: E731
    wait(lambda: (specs()["cohortName"], specs()["stopPolicy"]) == kept, "the queue to be corrected")
    wait(lambda: "zone" not in room.get("resourceflavor", "gpu-t4")["spec"]["nodeLabels"], "the flavor")


def test_what_the_file_drops_goes_and_what_is_not_ours_stays(room: QueueRoom) -> None:
    """A queue that is no longer in the file is removed; one made by hand of a wanted name is left alone, and named."""
    room.apply({"old": [of("h100", 4)], "new": [of("h100", 4)]})
    theirs = {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "ClusterQueue",
        "metadata": {"name": "theirs"},
        "spec": {},
    }
    room.kubectl("apply", "-f", "-", input=json.dumps(theirs), check=True)
    path = room.service.folder / "clash.yaml"
    file = {"flavors": FLAVORS, "tenants": [{"name": "new", "queues": [of("h100", 4), of("h100", 1, name="theirs")]}]}
    path.write_text(json.dumps(file))
    told = room.service.atoll("queue", "apply", "-f", str(path), by=OPERATOR, status=1)
    wait(lambda: not room.get("clusterqueue", "tenant-old-queue"), "the old queue to go")

    assert "ClusterQueue theirs exists and does not belong to this service" in told
    assert room.get("namespace", "tenant-old")
    wait(lambda: "ClusterQueue theirs exists" in room.atoll("queue", "list", "-o", "json"), "the obstacle in the list")
    room.kubectl("delete", "clusterqueue", "theirs", check=True)


def test_a_flavors_labels_and_order_reach_the_pods(room: QueueRoom) -> None:
    """KQ-2, KQ-7: flavors are tried in their order; what is full is passed over; the pods get the flavor's labels."""
    quotas = [{"flavor": "h100", "quota": {"gpu": 4}}, {"flavor": "a100", "quota": {"gpu": 8}}]
    room.apply({"order": [{"flavors": quotas}]})
    room.submit("first", "order", 4)
    room.wait("first")
    room.submit("second", "order", 4)
    room.wait("second")
    labels = {
        name: room.get("job", name, "tenant-order")["spec"]["template"]["spec"]["nodeSelector"]["example.com/gpu"]
        for name in ("first", "second")
    }

    assert labels == {"first": "h100", "second": "a100"}
    assert any("Kueue reserved quota of a100" in line for line in room.history("second"))


def test_a_queue_borrows_what_others_leave(room: QueueRoom) -> None:
    """KQ-5: A has 40 and uses 30, B has 20 and wants 35. A job of 35 waits and says what is missing; jobs of 5 run
    until 30 are used, 10 of them borrowed."""
    room.apply({"a": [of("h100", 40)], "b": [of("h100", 20)]})
    room.submit("thirty", "a", 30)
    room.wait("thirty")
    room.submit("whole", "b", 35)
    room.wait_message("whole", "5 more needed")
    room.atoll("job", "cancel", "whole", "--wait")
    parts = [room.submit(f"part-{number}", "b", 5) for number in range(7)]
    wait(lambda: len(room.admitted(*parts)) == 6, "six parts to be admitted")
    room.wait_message(parts[6], "more needed")

    assert room.status(parts[6]) == "queued"
    wait(lambda: room.used("tenant-b-queue") == (30, 10), "Kueue to count")


def test_limits_cap_what_is_borrowed_and_lent(room: QueueRoom) -> None:
    """KQ-5: with a borrow limit of 5, B gets 25; with a lend limit of 3, A keeps what it does not lend."""
    room.apply({"a": [of("h100", 40)], "b": [of("h100", {"nominal": 20, "borrow": 5})]})
    room.submit("too-much", "b", 26)
    room.wait_message("too-much", "maximum capacity (25)")
    room.submit("just", "b", 25)
    room.wait("just")
    room.leave()
    room.apply({"a": [of("h100", {"nominal": 40, "lend": 3})], "b": [of("h100", 20)]})
    room.submit("lent", "b", 23)
    room.wait("lent")
    room.submit("kept", "b", 1)
    room.wait_message("kept", "more needed")


def test_lent_quota_comes_back_at_once(room: QueueRoom) -> None:
    """KQ-4, KQ-5, KQ-8: A takes its own quota back; B's borrower is preempted, says by whom, counts it as no failure,
    is queued again and returns when A leaves."""
    room.apply({"a": [of("h100", 10)], "b": [of("h100", 5)]})
    room.submit("borrower", "b", 12)
    room.wait("borrower")
    room.submit("owner", "a", 10)
    room.wait("owner")
    room.wait("borrower", status="queued")
    shown, told = room.show("borrower"), "\n".join(room.history("borrower"))

    assert (shown["preemption_count"], shown["retry_count"]) == (1, 0)
    assert "preempt" in told
    assert "Preempted to accommodate a workload" in told
    assert room.get("job", "borrower", "tenant-b")["spec"]["suspend"] is True
    room.atoll("job", "cancel", "owner", "--wait")
    room.wait("borrower")


def test_priority_rules_within_a_queue(room: QueueRoom) -> None:
    """KQ-6: a higher priority takes the place of a lower one, never of an equal one; among equals the first comes
    first."""
    room.apply({"one": [of("h100", 8)]})
    room.submit("low", "one", 8, priority="low")
    room.wait("low")
    room.submit("high", "one", 8, priority="high")
    room.wait("high")
    room.wait("low", status="queued")
    room.submit("older", "one", 8)
    room.wait_message("older", "more needed")
    room.submit("newer", "one", 8)
    room.wait_message("newer", "more needed")
    room.atoll("job", "cancel", "high", "--wait")
    room.wait("older")

    assert room.status("newer") == "queued"
    room.submit("equal", "one", 8)
    room.wait_message("equal", "more needed")
    assert room.status("older") == "admitted"


def test_critical_jobs_are_never_preempted(room: QueueRoom) -> None:
    """C-14: a critical job goes to its tenant's critical queue by itself; nobody takes that quota, and it takes back
    what it lent; a further one waits, and borrows nothing."""
    room.apply({"a": [of("h100", 6), of("h100", 6, critical=True)], "b": [of("h100", 6)]})
    room.submit("flood", "b", 18, priority="high")
    room.wait("flood")
    room.submit("vital", "a", 6, priority="critical")
    room.wait("vital")
    room.wait("flood", status="queued")
    room.submit("greedy", "a", 6, priority="high")
    room.submit("eager", "b", 6, priority="high")
    room.wait("greedy", "eager")
    room.submit("more", "a", 1, priority="critical")
    room.wait_message("more", "more needed")

    assert room.show("vital")["queue_name"] == "tenant-a-critical"
    assert room.show("greedy")["queue_name"] == "tenant-a-queue"
    assert room.status("vital") == "admitted"
    assert room.show("vital")["preemption_count"] == 0


def test_high_preempts_normal_borrowers_of_other_queues_but_no_high_ones(room: QueueRoom) -> None:
    """C-14, KQ-6: a high job that must borrow itself takes the place of a normal borrower, not of a high one."""
    room.apply({"a": [of("h100", 4)], "b": [of("h100", 4)], "c": [of("h100", 4)]})
    room.submit("normal-borrower", "a", 8)
    room.wait("normal-borrower")
    room.submit("high-one", "b", 8, priority="high")
    room.wait("high-one")
    room.wait("normal-borrower", status="queued")
    room.submit("high-two", "a", 8, priority="high")
    room.wait_message("high-two", "more needed")

    assert room.status("high-one") == "admitted"


def test_spot_is_first_for_those_who_may(room: QueueRoom) -> None:
    """A spot-eligible job gets the spot flavor though it is listed last; another job never does, even if it waits."""
    quotas = [{"flavor": "h100", "quota": {"gpu": 4}}, {"flavor": "spot", "quota": {"gpu": 4}}]
    room.apply({"one": [{"flavors": quotas}]})
    room.submit("eligible", "one", 4, intent={"spot_eligible": True})
    room.wait("eligible")
    room.submit("steady", "one", 4)
    room.wait("steady")
    room.atoll("job", "cancel", "eligible", "--wait")
    room.submit("waits", "one", 4)
    room.wait_message("waits", "more needed")
    room.submit("spot-too", "one", 4, intent={"spot_eligible": True})
    room.wait("spot-too")

    assert any("Kueue reserved quota of spot" in line for line in room.history("eligible"))
    assert any("Kueue reserved quota of h100" in line for line in room.history("steady"))
    assert room.status("waits") == "queued"


def test_slices_have_a_quota_of_their_own(room: QueueRoom) -> None:
    """A Job asks for MIG slices by kubectl: the quota of that profile counts, and its labels reach the pods."""
    quota = {"gpu": 0, "mig-3g.40gb": 3}
    room.apply({"one": [{"flavors": [{"flavor": "slices", "quota": quota}]}]})
    for name, slices in (("fits", 2), ("waits", 2)):
        counts = {names.MIG_RESOURCE_PREFIX + "3g.40gb": str(slices), names.GPU_RESOURCE: "0"}
        container = {
            "name": "main",
            "image": "localhost/busybox:1",
            "resources": {"requests": counts, "limits": counts},
        }
        labels = {"kueue.x-k8s.io/queue-name": "tenant-one-queue"}
        body = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name, "namespace": "tenant-one", "labels": labels},
            "spec": {"template": {"spec": {"restartPolicy": "Never", "containers": [container]}}},
        }
        room.kubectl("apply", "-f", "-", input=json.dumps(body), check=True)
        wait(lambda: room.get("job", "fits", "tenant-one")["spec"]["suspend"] is False, "the first to be admitted")
    selector = room.get("job", "fits", "tenant-one")["spec"]["template"]["spec"]["nodeSelector"]
    wait(lambda: room.queues()["tenant-one-queue"]["pending"] == 1, "the second to wait")
    used = {one["resource"]: one["used"] for one in room.queues()["tenant-one-queue"]["amounts"]}

    assert selector == {"nvidia.com/mig.config": "all-3g.40gb"}
    assert used[names.MIG_RESOURCE_PREFIX + "3g.40gb"] == "2"


def test_a_stopped_queue_holds_new_jobs_or_drains(room: QueueRoom) -> None:
    """stop: hold keeps what runs and admits nothing; stop: drain evicts, which is no preemption; without it all goes
    on."""
    room.apply({"one": [of("h100", 8)]})
    room.submit("runs", "one", 4)
    room.wait("runs")
    file = room.service.folder / "queues.yaml"
    running = file.read_text()
    for stop in ("hold", "drain"):
        told = json.loads(running)
        told["tenants"][0]["queues"][0]["stop"] = stop
        file.write_text(json.dumps(told))
        room.atoll("queue", "apply", "-f", str(file))
        wait(lambda: room.queues()["tenant-one-queue"]["is_active"] is False, "the queue to stop")
        if stop == "hold":
            room.submit("new", "one", 4)
            room.wait_message("new", "waits for quota")
            assert room.status("runs") == "admitted"
    room.wait("runs", status="queued")
    assert "stopped" in room.atoll("queue", "list")
    assert room.show("runs")["preemption_count"] == 0
    file.write_text(running)
    room.atoll("queue", "apply", "-f", str(file))
    room.wait("runs", "new")


def test_a_name_that_is_no_queue_of_the_tenant_is_refused(room: QueueRoom) -> None:
    """Kueue would let the job wait for ever; the service names the tenant's queues."""
    room.apply({"one": [of("h100", 8), of("a100", 8, name="one-more")], "two": [of("h100", 8)]})
    room.submit("named", "one", 1, policy={"queue_name": "one-more"})
    room.wait("named")
    file = room.service.folder / "named.yaml"
    file.write_text(file.read_text().replace("one-more", "tenant-two-queue"))
    told = room.service.atoll("job", "submit", "-f", str(file), by=OPERATOR, status=1)

    assert "is no queue of tenant one" in told
    assert "tenant-one-queue, one-more" in told


# With Kueue's fair sharing


@pytest.mark.parametrize(("weight", "shares"), [(2, (8, 4)), (1, (6, 6))])
def test_borrowed_quota_is_divided_by_weight(fair_room: QueueRoom, weight: int, shares: tuple[int, int]) -> None:
    """C-15, KQ-5: a pool of 12 in the cohort. A holds it all; when B asks too, jobs are evicted until the shares are
    those of the weights."""
    room = fair_room
    pool = [{"flavor": "h100", "quota": {"gpu": 12, "cpu": 1000000, "memory": "1000000Gi"}}]
    queues = {"a": [of("h100", 0, weight=weight)], "b": [of("h100", 0, weight=1)]}
    room.apply(queues, fair_sharing=True, cohorts=[{"name": "all", "flavors": pool}])
    jobs = [room.submit(f"a-{number}", "a", 1) for number in range(12)]
    room.wait(*jobs)
    for number in range(12):
        room.submit(f"b-{number}", "b", 1)

    def used() -> tuple[int, int]:
        return room.used("tenant-a-queue")[0], room.used("tenant-b-queue")[0]

    wait(lambda: used() == shares, f"shares of {shares}")
    assert room.queues()["tenant-b-queue"]["weighted_share"] is not None
