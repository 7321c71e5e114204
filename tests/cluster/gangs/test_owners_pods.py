"""Pods of Job, JobSet, LeaderWorkerSet, MPIJob and PyTorchJob: their pod sets, ranks and created gangs.

Labels, annotations, names and owners are those that the controllers of these kinds write; the user adds gang and size.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from atoll.api import names
from atoll.api.gangs import GpuGangSpec
from atoll.cluster.gangs.membership import members_of
from atoll.cluster.gangs.readiness import placeable, quorum
from atoll.cluster.objects import OwnerReference, Pod, SchedulingGate
from controllers.gangs.creation import owners_of, pod_sets_of, size_of
from tests.builders import make_pod

LWS = "leaderworkerset.sigs.k8s.io"
JOBSET = "jobset.sigs.k8s.io"
KUBEFLOW = "training.kubeflow.org"
BATCH = "batch.kubernetes.io"


def pod(name: str, owner: tuple[str, str, str], labels: dict[str, str], **annotations: str) -> Pod:
    """Return a member; `owner` is (kind, API version, name)."""
    kind, version, owner_name = owner
    made = make_pod(name, annotations={names.GANG: "g", names.GANG_SIZE: "8", **annotations})
    reference = OwnerReference(kind, owner_name, f"uid-of-{owner_name}", controller=True, api_version=version)
    return msgspec.structs.replace(
        made, metadata=msgspec.structs.replace(made.metadata, labels=labels, owner_references=(reference,))
    )


def job_pod(job: str, index: int, **more: str) -> Pod:
    """A pod of an indexed Job: the index is a label and an annotation."""
    labels = {
        f"{BATCH}/job-name": job,
        f"{BATCH}/controller-uid": f"uid-of-{job}",
        "job-name": job,
        "controller-uid": f"uid-of-{job}",
        f"{BATCH}/job-completion-index": str(index),
        **{key.replace("__", "/").replace("_", "-"): value for key, value in more.items()},
    }
    index_note = {f"{BATCH}/job-completion-index": str(index)}
    return pod(f"{job}-{index}-x7k2p", ("Job", "batch/v1", job), labels, **index_note)


def jobset_pod(replicated: str, replicas: int, job: int, index: int) -> Pod:
    """A pod of a JobSet's replicated Job."""
    name = f"js-{replicated}-{job}"
    made = job_pod(name, index)
    labels = {
        **made.metadata.labels,
        f"{JOBSET}/jobset-name": "js",
        f"{JOBSET}/replicatedjob-name": replicated,
        f"{JOBSET}/replicatedjob-replicas": str(replicas),
        f"{JOBSET}/job-index": str(job),
        f"{JOBSET}/job-global-index": str(job),
        f"{JOBSET}/job-key": f"key-of-{name}",
        f"{JOBSET}/restart-attempt": "0",
    }
    return msgspec.structs.replace(made, metadata=msgspec.structs.replace(made.metadata, labels=labels))


def lws_pod(group: int, worker: int, size: int) -> Pod:
    """A pod of a LeaderWorkerSet: the leader, or a worker of the set that belongs to the leader."""
    leader = f"lws-{group}"
    labels = {
        f"{LWS}/name": "lws",
        f"{LWS}/group-index": str(group),
        f"{LWS}/worker-index": str(worker),
        f"{LWS}/group-key": f"key-of-{leader}",
        f"{LWS}/template-revision-hash": "7d9f",
        "apps.kubernetes.io/pod-index": str(worker or group),
        "statefulset.kubernetes.io/pod-name": leader if worker == 0 else f"{leader}-{worker}",
    }
    notes = {f"{LWS}/size": str(size)} | ({f"{LWS}/leader-name": leader} if worker else {})
    owner = ("StatefulSet", "apps/v1", leader if worker else "lws")
    return pod(leader if worker == 0 else f"{leader}-{worker}", owner, labels, **notes)


def claiming(one: Pod) -> Pod:
    """The pod with a claim."""
    annotations = {**one.metadata.annotations, names.CLAIM: "four"}
    return msgspec.structs.replace(one, metadata=msgspec.structs.replace(one.metadata, annotations=annotations))


def pytorch_pod(role: str, index: int) -> Pod:
    """A pod of a PyTorchJob; the master has its role twice."""
    labels = {
        f"{KUBEFLOW}/job-name": "pt",
        f"{KUBEFLOW}/operator-name": "pytorchjob-controller",
        f"{KUBEFLOW}/replica-type": role,
        f"{KUBEFLOW}/replica-index": str(index),
        **({f"{KUBEFLOW}/job-role": "master"} if role == "master" else {}),
    }
    return pod(f"pt-{role}-{index}", ("PyTorchJob", "kubeflow.org/v1", "pt"), labels)


def mpi_worker(index: int) -> Pod:
    """A worker of an MPIJob of the MPI operator, which names roles and no types."""
    labels = {
        f"{KUBEFLOW}/job-name": "mpi",
        f"{KUBEFLOW}/operator-name": "mpi-operator",
        f"{KUBEFLOW}/job-role": "worker",
        f"{KUBEFLOW}/replica-index": str(index),
    }
    return pod(f"mpi-worker-{index}", ("MPIJob", "kubeflow.org/v2beta1", "mpi"), labels)


def mpi_launcher() -> Pod:
    """The launcher of an MPIJob: a Job of its own."""
    labels = {
        f"{BATCH}/job-name": "mpi-launcher",
        f"{KUBEFLOW}/job-name": "mpi",
        f"{KUBEFLOW}/operator-name": "mpi-operator",
        f"{KUBEFLOW}/job-role": "launcher",
    }
    return pod("mpi-launcher-9fz4c", ("Job", "batch/v1", "mpi-launcher"), labels)


def ray_pod(group: str, index: int | None = None) -> Pod:
    """A pod of a RayCluster: the head, or a worker of a group; names end at random."""
    labels = {
        "ray.io/cluster": "ray",
        "ray.io/node-type": "head" if index is None else "worker",
        "ray.io/group": group,
        **({} if index is None else {"ray.io/worker-group-replica-index": str(index)}),
    }
    name = "ray-head" if index is None else f"ray-{group}-{9 - index}"
    return pod(name, ("RayCluster", "ray.io/v1", "ray"), labels)


def placed(pods: list[Pod], *sets: tuple[str, int]) -> list[tuple[str, str, int]]:
    """Return (name, pod set, rank) in order of rank, for a gang with these pod sets."""
    spec = GpuGangSpec.model_validate({"podSets": [{"name": name, "count": count} for name, count in sets]})
    return [(one.pod.metadata.name.removesuffix("-x7k2p"), one.pod_set, one.rank) for one in members_of(pods, spec, {})]


def test_a_job_ranks_its_pods_by_completion_index() -> None:
    """Twelve pods: ten comes after nine, whatever the names sort like."""
    found = placed([job_pod("j", index) for index in reversed(range(12))], ("workers", 12))

    assert found == [(f"j-{index}", "workers", index) for index in range(12)]


def test_a_jobset_gives_leader_and_workers_their_sets_and_its_jobs_their_turns() -> None:
    """Two Jobs of three workers: the ranks of the second Job follow those of the first."""
    pods = [jobset_pod("worker", 2, job, index) for job in (1, 0) for index in (2, 0, 1)]
    found = placed([*pods, jobset_pod("driver", 1, 0, 0)], ("driver", 1), ("worker", 6))

    assert found[0] == ("js-driver-0-0", "driver", 0)
    assert found[1:] == [(f"js-worker-{rank // 3}-{rank % 3}", "worker", rank) for rank in range(6)]


def test_a_leaderworkerset_ranks_group_by_group_the_leader_first() -> None:
    """All groups in one gang: a slice of the group's size is one group, also where there are more than ten."""
    pods = [lws_pod(group, worker, 12) for group in (1, 0) for worker in reversed(range(12))]
    found = placed(pods, ("pods", 24))

    assert [name for name, _, _ in found] == [pod.metadata.name for pod in sorted(pods, key=_lws_order)]
    assert [rank for _, _, rank in found] == list(range(24))


def _lws_order(pod: Pod) -> tuple[int, int]:
    return int(pod.metadata.labels[f"{LWS}/group-index"]), int(pod.metadata.labels[f"{LWS}/worker-index"])


def test_a_leaderworkerset_may_have_leaders_and_workers_apart() -> None:
    """Worker 0 of each group is in the leaders' set; both sets are ranked by groups."""
    pods = [lws_pod(group, worker, 3) for group in (1, 0) for worker in (2, 1, 0)]

    assert placed(pods, ("leader", 2), ("worker", 4)) == [
        ("lws-0", "leader", 0),
        ("lws-1", "leader", 1),
        ("lws-0-1", "worker", 0),
        ("lws-0-2", "worker", 1),
        ("lws-1-1", "worker", 2),
        ("lws-1-2", "worker", 3),
    ]


def test_a_gang_of_one_leaderworkerset_group_is_ranked_within_it() -> None:
    """A gang for each group, as inference wants it: the second group's ranks are shifted, and in order."""
    found = placed([lws_pod(1, worker, 3) for worker in (2, 0, 1)], ("pods", 3))

    assert [name for name, _, _ in found] == ["lws-1", "lws-1-1", "lws-1-2"]


def test_a_pytorchjob_has_master_and_workers() -> None:
    """By replica type and index; the master's role beside it changes nothing."""
    pods = [pytorch_pod("worker", 1), pytorch_pod("worker", 0), pytorch_pod("master", 0)]

    assert placed(pods, ("master", 1), ("worker", 2)) == [
        ("pt-master-0", "master", 0),
        ("pt-worker-0", "worker", 0),
        ("pt-worker-1", "worker", 1),
    ]


def test_an_mpijob_has_launcher_and_workers_by_role() -> None:
    """The MPI operator writes job-role where the training operator writes replica-type."""
    found = placed([mpi_worker(1), mpi_launcher(), mpi_worker(0)], ("launcher", 1), ("worker", 2))

    assert found == [
        ("mpi-launcher-9fz4c", "launcher", 0),
        ("mpi-worker-0", "worker", 0),
        ("mpi-worker-1", "worker", 1),
    ]


def test_a_raycluster_has_its_head_and_its_groups() -> None:
    """Groups are pod sets, ranked by the replica's index, whatever the names sort like."""
    found = placed([ray_pod("gpus", 1), ray_pod("headgroup"), ray_pod("gpus", 0)], ("headgroup", 1), ("gpus", 2))

    assert found == [("ray-gpus-9", "gpus", 0), ("ray-gpus-8", "gpus", 1), ("ray-head", "headgroup", 0)]


@pytest.mark.parametrize(
    ("pods", "sets", "owners"),
    [
        pytest.param([job_pod("j", n) for n in range(8)], {"pods": 8}, ["uid-of-j"], id="Job"),
        pytest.param(
            [jobset_pod("driver", 1, 0, 0), *(jobset_pod("worker", 1, 0, n) for n in range(7))],
            {"driver": 1, "worker": 7},
            ["uid-of-js-driver-0", "uid-of-js-worker-0"],
            id="JobSet: each replicated Job owns its own",
        ),
        pytest.param(
            [lws_pod(0, n, 8) for n in range(8)],
            {"pods": 8},
            ["uid-of-lws", "uid-of-lws-0"],
            id="LeaderWorkerSet: two StatefulSets",
        ),
        pytest.param(
            [lws_pod(0, 0, 8), *(claiming(lws_pod(0, n, 8)) for n in range(1, 8))],
            {"leader": 1, "worker": 7},
            ["uid-of-lws", "uid-of-lws-0"],
            id="LeaderWorkerSet: a leader without GPUs",
        ),
        pytest.param(
            [pytorch_pod("master", 0), *(pytorch_pod("worker", n) for n in range(7))],
            {"master": 1, "worker": 7},
            ["uid-of-pt"],
            id="PyTorchJob",
        ),
        pytest.param(
            [ray_pod("headgroup"), *(ray_pod("gpus", n) for n in range(7))],
            {"gpus": 7, "headgroup": 1},
            ["uid-of-ray"],
            id="RayCluster",
        ),
        pytest.param(
            [mpi_worker(n) for n in range(8)], {"worker": 8}, ["uid-of-mpi"], id="MPIJob without its launcher"
        ),
    ],
)
def test_gangs_are_made_of_what_controllers_write(pods: list[Pod], sets: dict[str, int], owners: list[str]) -> None:
    """Gang and size on the template are enough: the sets have their counts, and the gang ends with the owners."""
    size = size_of(pods)
    assert size == 8
    assert pod_sets_of(pods, size) == [{"name": name, "count": count} for name, count in sets.items()]
    assert [owner.uid for owner in owners_of(pods)] == owners


def test_the_sets_of_a_leaderworkerset_are_known_when_its_workers_are_there() -> None:
    """The leader comes first, and alone says nothing of what the workers ask for."""
    assert pod_sets_of([lws_pod(0, 0, 8)], 8) is None


@pytest.mark.parametrize(
    ("sets", "first", "later"),
    [
        pytest.param(
            [{"name": "leader", "count": 1}, {"name": "worker", "count": 3}],
            [lws_pod(0, 0, 4)],
            [lws_pod(0, worker, 4) for worker in (1, 2, 3)],
            id="a LeaderWorkerSet that makes workers when the leader is ready",
        ),
        pytest.param(
            [{"name": "driver", "count": 1}, {"name": "workers", "count": 2}],
            [jobset_pod("driver", 1, 0, 0)],
            [jobset_pod("workers", 1, 0, index) for index in (0, 1)],
            id="a JobSet that starts its Jobs in order",
        ),
    ],
)
def test_owners_that_make_members_late_need_only_the_first(
    sets: list[dict[str, Any]], first: list[Pod], later: list[Pod]
) -> None:
    """With minMember the first ones are enough to start with, and the later ones have their places in the sets."""
    body = {"podSets": sets}
    whole = GpuGangSpec.model_validate(body)
    lenient = GpuGangSpec.model_validate({**body, "minMember": 1})
    gate = SchedulingGate(names.GANG_GATE)
    gated = [
        msgspec.structs.replace(one, spec=msgspec.structs.replace(one.spec, scheduling_gates=(gate,)))
        for one in (*first, *later)
    ]
    present = members_of(gated[: len(first)], lenient, {})
    everyone = members_of(gated, lenient, {})

    assert not quorum(whole, present).is_enough
    assert quorum(lenient, present).is_enough
    assert quorum(whole, everyone).is_enough
    assert {member.pod_set for member in everyone} == {one["name"] for one in sets}
    assert placeable(lenient, everyone) == (everyone, ())
