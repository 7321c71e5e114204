"""Which GpuGang is made for pods that only say how many they are."""

from typing import Any

import msgspec
import pytest

from atoll.api import names
from atoll.api.gangs import GpuGang
from atoll.cluster.gangs.sizes import size_of
from atoll.cluster.objects import OwnerReference, Pod
from controllers.gangs.creation import gang_body, owner_of, pod_sets_of, topology_of
from tests.builders import make_pod

JOBSET = "jobset.sigs.k8s.io/replicatedjob-name"
KUBEFLOW = "training.kubeflow.org/replica-type"
OWNER = OwnerReference("Job", "j", "u", controller=True, api_version="batch/v1")


def pod(name: str = "p", *, labels: Any = None, owners: tuple[OwnerReference, ...] = (), **annotations: str) -> Pod:
    """Return a member; keywords are annotations without their prefix."""
    made = make_pod(name, annotations={f"gpu.scheduling/{key.replace('_', '-')}": v for key, v in annotations.items()})
    metadata = msgspec.structs.replace(made.metadata, labels=labels or {}, owner_references=owners)
    return msgspec.structs.replace(made, metadata=metadata)


@pytest.mark.parametrize(
    ("sizes", "size"), [(["4", "4"], 4), (["4", "5"], None), (["4", None], None), (["x"], None), ([None], None)]
)
def test_a_size_counts_if_all_say_the_same(sizes: list[str | None], size: int | None) -> None:
    """One member that disagrees, or says nothing, leaves the gang unmade: nobody guesses."""
    pods = [pod(**({} if text is None else {"gang_size": text})) for text in sizes]

    assert size_of(pods) == size


@pytest.mark.parametrize(
    ("pods", "sets"),
    [
        ([pod()], [{"name": "pods", "count": 3}]),
        ([pod(pod_set="a"), pod(pod_set="b")], None),
        (
            [pod(pod_set="a"), pod(pod_set="b"), pod(pod_set="b")],
            [{"name": "a", "count": 1}, {"name": "b", "count": 2}],
        ),
        ([pod(labels={JOBSET: "w"})] * 3, [{"name": "w", "count": 3}]),
        ([pod(labels={KUBEFLOW: "Worker"})] * 3, [{"name": "worker", "count": 3}]),
        ([pod(pod_set="a"), pod(), pod()], None),
    ],
    ids=["none named", "not all there", "all there", "JobSet", "Kubeflow", "some named"],
)
def test_pod_sets_are_those_that_the_members_name(pods: list[Pod], sets: Any) -> None:
    """Without names one set at once; with names only when all members are there, so that each set has its count."""
    assert pod_sets_of(pods, 3) == sets


def test_the_gang_ends_with_its_owner() -> None:
    """One controller of all members owns the gang; several, or a bare pod among them, own nothing."""
    owned = [pod(owners=(OWNER,)), pod(owners=(OWNER,))]
    other = msgspec.structs.replace(OWNER, uid="v")

    assert owner_of(owned) == OWNER
    assert owner_of([*owned, pod()]) is None
    assert owner_of([*owned, pod(owners=(other,))]) is None
    body = gang_body(("team", "g"), [{"name": "pods", "count": 2}], OWNER, None)
    assert body["metadata"]["ownerReferences"][0]["uid"] == "u"
    assert GpuGang.model_validate(body).metadata.annotations[names.GANG_MADE_FOR] == "u"


def test_kueues_annotations_are_taken_over_where_kueue_does_not_manage_the_pods() -> None:
    """A required rack stays a required rack; pods that Kueue places itself keep its choice."""
    rack = "example.com/rack"
    plain = make_pod(annotations={"kueue.x-k8s.io/podset-required-topology": rack})
    metadata = msgspec.structs.replace(plain.metadata, labels={"kueue.x-k8s.io/managed": "true"})
    managed = msgspec.structs.replace(plain, metadata=metadata)

    assert topology_of([plain, plain]) == {"mode": "required", "level": rack}
    assert topology_of([managed]) is None
    assert topology_of([plain, pod()]) is None
