"""The difference between a file of queues and a cluster: what is written, what is left alone, and when it ends."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.api import job_names
from atoll.jobs.queue_changes import QueuePlan, QueueVerb, key_of, plan_queues
from atoll.jobs.queue_objects import Object, objects_of_queues
from atoll.jobs.settings import RenderSettings
from tests.fakes.api_server import merge
from tests.jobs.test_queue_file import EXAMPLE, parsed

ME = "me"
WANTED = objects_of_queues(parsed(EXAMPLE.read_text()), RenderSettings(), service_id=ME)
QUEUE = ("ClusterQueue", "tenant-globex-queue")


def carried_out(plan: QueuePlan, there: list[Object]) -> list[Object]:
    """Return the cluster after the writes, as an API server carries them out."""
    found = {key_of(one): one for one in there}
    for write in plan.writes:
        if write.verb is QueueVerb.REMOVE:
            del found[write.key]
        else:
            found[write.key] = merge(found.get(write.key, {}), copy.deepcopy(dict(write.body)))
    return list(found.values())


def cluster() -> list[Object]:
    """Return a cluster that agrees with the example, with defaults as servers add them."""
    found = carried_out(plan_queues(WANTED, [], service_id=ME), [])
    for one in found:
        one["metadata"]["uid"] = str(key_of(one))
        if one["kind"] == "ClusterQueue":
            one["spec"]["flavorFungibility"] = {"whenCanBorrow": "MayStopSearch"}
            one["status"] = {"pendingWorkloads": 3}
    return found


def one_of(there: list[Object], kind: str, name: str) -> Object:
    """Return an object of the cluster."""
    return next(one for one in there if (one["kind"], one["metadata"]["name"]) == (kind, name))


def told(plan: QueuePlan) -> list[str]:
    """Return the writes in words."""
    return [str(write) for write in plan.writes]


def test_an_empty_cluster_gets_everything_before_what_needs_it() -> None:
    """Namespaces and flavors come before queues, ClusterQueues before their LocalQueues; then nothing is left to do."""
    plan = plan_queues(WANTED, [], service_id=ME)
    kinds = [write.key.kind for write in plan.writes]

    assert len(plan.writes) == len(WANTED)
    assert kinds.index("Namespace") < kinds.index("ResourceFlavor") < kinds.index("ClusterQueue")
    assert "null" not in json.dumps([write.body for write in plan.writes])
    assert plan_queues(WANTED, cluster(), service_id=ME) == QueuePlan(())


def drifted(kind: str, name: str, **changes: Any) -> list[Object]:
    """Return a cluster in which somebody changed one object."""
    there = cluster()
    one_of(there, kind, name)["spec"] |= changes
    return there


@pytest.mark.parametrize(
    ("there", "written"),
    [
        (drifted(*QUEUE, cohortName="other"), {"spec": {"cohortName": "production"}}),
        (drifted(*QUEUE, stopPolicy="Hold"), {"spec": {"stopPolicy": "None"}}),
        (drifted("ResourceFlavor", "gpu-t4", nodeLabels={"nvidia.com/gpu.product": "Tesla-T4", "zone": "a"}),
         {"spec": {"nodeLabels": {"zone": None}}}),
        (drifted("ResourceFlavor", "gpu-t4", nodeTaints=[{"key": "a", "effect": "NoSchedule"}]),
         {"spec": {"nodeTaints": None}}),
        (drifted("NetworkPolicy", "atoll-tenant", podSelector={"matchLabels": {"a": "b"}}),
         {"spec": {"podSelector": {"matchLabels": None}}}),
        (drifted("NetworkPolicy", "atoll-tenant", egress=[{}]), {"spec": {"egress": None}}),
    ],
    ids=["cohort", "stopped", "one more label", "one more taint", "fewer pods", "one more rule"],
)  # fmt: skip
def test_drift_is_written_back(there: list[Object], written: dict[str, Any]) -> None:
    """Only what differs is written, to exactly the object that was seen; then nothing is left to do."""
    plan = plan_queues(WANTED, there, service_id=ME)

    assert [(write.verb, dict(write.body), write.uid) for write in plan.writes] == [
        (QueueVerb.CHANGE, written, str(plan.writes[0].key))
    ]
    assert plan_queues(WANTED, carried_out(plan, there), service_id=ME) == QueuePlan(())


@pytest.mark.parametrize("ingress", [None, [], [{}], [{"from": [{"podSelector": {}}]}]])
def test_a_policy_that_lets_others_in_is_written_back(ingress: list[Object] | None) -> None:
    """Also one that is narrower: the file says who gets in, exactly."""
    there = drifted("NetworkPolicy", "atoll-tenant", ingress=ingress)
    plan = plan_queues(WANTED, there, service_id=ME)

    assert told(plan) == ["change NetworkPolicy tenant-globex/atoll-tenant"]
    assert plan_queues(WANTED, carried_out(plan, there), service_id=ME) == QueuePlan(())


def test_a_quota_changed_by_hand_comes_back_and_equal_quantities_do_not_count() -> None:
    """2048Gi is 2Ti; 17 GPUs are not 16; a limit that the file does not have goes."""
    there = cluster()
    rows = one_of(there, *QUEUE)["spec"]["resourceGroups"][0]["flavors"][0]["resources"]
    rows[1]["nominalQuota"] = "2048Gi"
    same = plan_queues(WANTED, there, service_id=ME)
    rows[3]["nominalQuota"] = 17
    changed = plan_queues(WANTED, there, service_id=ME)
    rows[3]["nominalQuota"] = 16
    rows[3]["lendingLimit"] = "1"
    limited = plan_queues(WANTED, there, service_id=ME)

    assert same == QueuePlan(())
    assert told(changed) == told(limited) == ["change ClusterQueue tenant-globex-queue"]
    assert plan_queues(WANTED, carried_out(limited, there), service_id=ME) == QueuePlan(())


def test_what_the_file_no_longer_names_goes_and_strangers_stay() -> None:
    """Our queues and flavors are removed, queues first; namespaces, PriorityClasses and other people's objects stay."""
    there = cluster()
    foreign = copy.deepcopy(one_of(there, *QUEUE)) | {"metadata": {"name": "theirs", "uid": "x"}}
    leaving = copy.deepcopy(one_of(there, *QUEUE))
    leaving["metadata"] |= {"name": "leaving", "deletionTimestamp": "2026-01-31T12:00:00Z"}
    kept = [one for one in WANTED if one["metadata"]["name"] not in ("gpu-t4", "acme-small", "tenant-acme-dev")]
    plan = plan_queues(kept, [*there, foreign, leaving], service_id=ME)

    assert told(plan) == [
        "remove LocalQueue tenant-acme-dev/acme-small",
        "remove LocalQueue tenant-acme-prod/acme-small",
        "remove LocalQueue tenant-acme/acme-small",
        "remove ClusterQueue acme-small",
        "remove ResourceFlavor gpu-t4",
    ]


def test_objects_of_others_are_left_alone_unless_they_agree() -> None:
    """A class made by hand with our values will do; a queue made by hand with other values is named, and stays."""
    there = cluster()
    for one in there:
        one["metadata"]["labels"].pop(job_names.SERVICE_ID, None)
    agrees = plan_queues(WANTED, there, service_id=ME)
    one_of(there, *QUEUE)["spec"]["cohortName"] = "theirs"
    differs = plan_queues(WANTED, there, service_id=ME)

    assert agrees == QueuePlan(())
    assert differs.writes == ()
    assert [one.partition(":")[0] for one in differs.obstacles] == [
        "ClusterQueue tenant-globex-queue exists and does not belong to this service"
    ]


def test_a_namespace_that_exists_gets_its_labels() -> None:
    """Whoever made it: a tenant's namespace in the file shows the GPUs of its claims to the quota."""
    there = cluster()
    one_of(there, "Namespace", "tenant-acme")["metadata"]["labels"] = {"mine": "yes"}
    plan = plan_queues(WANTED, there, service_id=ME)

    assert told(plan) == ["change Namespace tenant-acme"]
    labels = one_of(carried_out(plan, there), "Namespace", "tenant-acme")["metadata"]["labels"]
    assert labels == {"mine": "yes", job_names.TENANT_ID: "acme", "gpu.scheduling/complete-jobs": "true"}


def test_an_object_on_its_way_out_is_waited_for() -> None:
    """A queue that is being deleted is not written to; it is said that it comes back."""
    there = cluster()
    one_of(there, *QUEUE)["metadata"]["deletionTimestamp"] = "2026-01-31T12:00:00Z"
    plan = plan_queues(WANTED, there, service_id=ME)

    assert plan.writes == ()
    assert "is being deleted" in plan.obstacles[0]


@given(data=st.data())
def test_one_round_of_writes_is_enough(data: st.DataObject) -> None:
    """Whatever was lost, changed or added, the writes of one look leave nothing to do."""
    there = cluster()
    lost = data.draw(st.sets(st.integers(0, len(there) - 1), max_size=8))
    there = [one for number, one in enumerate(there) if number not in lost]
    for number in data.draw(st.sets(st.integers(0, len(there) - 1), max_size=8)):
        one = there[number]
        if "spec" not in one or one["metadata"]["labels"].get(job_names.SERVICE_ID) != ME:
            continue
        field = data.draw(st.sampled_from(sorted(one["spec"]) or ["x"]))
        one["spec"][field] = data.draw(st.sampled_from([None, "odd", 3, [], {}, {"a": "b"}]))
    after = carried_out(plan_queues(WANTED, there, service_id=ME), there)

    assert plan_queues(WANTED, after, service_id=ME).writes == ()
