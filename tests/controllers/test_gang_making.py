"""Creation of a GpuGang for pods that only state the gang's size."""

from typing import Any

import msgspec
import pytest

from atoll.api import names
from atoll.api.gangs import GpuGang
from atoll.cluster.gangs.kueue_topology import KueueTopologyRequest
from atoll.cluster.gangs.sizes import size_of
from atoll.cluster.objects import OwnerReference, Pod
from controllers.gangs.creation import assumption, gang_body, kueue_requests_of, owners_of, pod_sets_of
from controllers.gangs.owners import as_owner
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


def test_the_gang_ends_with_its_owners() -> None:
    """The controllers of all members own the gang; a bare pod among them, and nobody does."""
    owned = [pod(owners=(OWNER,)), pod(owners=(OWNER,))]
    other = msgspec.structs.replace(OWNER, uid="v")

    assert owners_of(owned) == (OWNER,)
    assert owners_of([*owned, pod()]) == ()
    assert owners_of([*owned, pod(owners=(other,))]) == (OWNER, other)
    body = gang_body(("team", "g"), [{"name": "pods", "count": 2}], [as_owner(OWNER), as_owner(other)])
    assert [one["uid"] for one in body["metadata"]["ownerReferences"]] == ["u", "v"]
    assert GpuGang.model_validate(body).metadata.annotations[names.GANG_MADE_FOR] == "u,v"


RACK, BLOCK = "example.com/rack", "example.com/block"


def asking(name: str, pod_set: str, **annotations: str) -> Pod:
    """Return a JobSet's pod; keywords are Kueue's annotations of pod sets, without their prefix."""
    made = make_pod(
        name, annotations={f"kueue.x-k8s.io/podset-{k.replace('_', '-')}": v for k, v in annotations.items()}
    )
    labels = {JOBSET: pod_set} if pod_set else {}
    return msgspec.structs.replace(made, metadata=msgspec.structs.replace(made.metadata, labels=labels))


MADE: dict[str, tuple[list[Pod], Any]] = {
    "one kind": (
        [asking("a", "", required_topology=RACK)] * 2,
        [{"name": "pods", "topology": {"mode": "required", "level": RACK}}],
    ),
    "a required leader and preferring workers": (
        [asking("l", "leader", required_topology=RACK), asking("w", "workers", preferred_topology=RACK)],
        [
            {"name": "leader", "topology": {"mode": "required", "level": RACK}},
            {"name": "workers", "topology": {"mode": "preferred", "level": RACK}},
        ],
    ),
    "a leader that asks, workers that do not": (
        [asking("l", "leader", required_topology=RACK), asking("w", "workers")],
        [{"name": "leader", "topology": {"mode": "required", "level": RACK}}, {"name": "workers"}],
    ),
    "anywhere, said so": (
        [asking("a", "", unconstrained_topology="true")],
        [{"name": "pods", "topology": {"mode": "unconstrained"}}],
    ),
    "slices": (
        [asking("a", "", required_topology=BLOCK, slice_required_topology=RACK, slice_size="2")],
        [
            {
                "name": "pods",
                "topology": {"mode": "required", "level": BLOCK, "slices": [{"size": 2, "level": RACK}]},
            }
        ],
    ),
    "a leader and its workers as one": (
        [
            asking("l", "leader", required_topology=RACK, group_name="g"),
            asking("w", "workers", required_topology=RACK, group_name="g"),
        ],
        [
            {"name": "leader", "topology": {"mode": "required", "level": RACK}, "group": "g"},
            {"name": "workers", "topology": {"mode": "required", "level": RACK}, "group": "g"},
        ],
    ),
}


@pytest.mark.parametrize("case", MADE)
def test_each_pod_set_keeps_what_its_kueue_annotations_ask(case: str) -> None:
    """One wish per pod set; none is spread over the others, and none is lost because others do not ask."""
    members, want = MADE[case]
    wishes = kueue_requests_of(members)
    assert not isinstance(wishes, str)
    sets = pod_sets_of(members, len(members))
    assert sets is not None
    body = gang_body(("team", "g"), sets, [], wishes)

    made = [{key: value for key, value in one.items() if key != "count"} for one in body["spec"]["podSets"]]
    assert made == want
    GpuGang.model_validate(body)


UNCLEAR: dict[str, tuple[list[Pod], str]] = {
    "pods of one set differ": (
        [asking("a", "w", required_topology=RACK), asking("b", "w", preferred_topology=RACK)],
        "pods a and b of pod set w ask",
    ),
    "one pod of a set asks, the other does not": (
        [asking("a", ""), asking("b", "", required_topology=RACK)],
        "for no topology and for required example.com/rack",
    ),
    "two modes": ([asking("a", "", required_topology=RACK, preferred_topology=RACK)], "contradict each other"),
    "slices without a size": ([asking("a", "", slice_required_topology=RACK)], "belong together"),
    "a size that is no number": (
        [asking("a", "", slice_required_topology=RACK, slice_size="two")],
        "cannot be read",
    ),
    "a level that is no label": ([asking("a", "", required_topology="no level!")], "cannot be read"),
}


@pytest.mark.parametrize("case", UNCLEAR)
def test_annotations_that_cannot_be_kept_make_no_gang_and_are_told(case: str) -> None:
    """Nobody guesses which of two wishes was meant."""
    members, told = UNCLEAR[case]
    wishes = kueue_requests_of(members)
    assert isinstance(wishes, str)
    assert told in wishes


def test_what_is_assumed_of_pod_sets_that_do_not_ask_is_told() -> None:
    """A leader's rack is not the workers' rack, and nobody has to find that out by looking; of a group it is."""
    leader, workers = asking("l", "leader", required_topology=RACK), asking("w", "workers")
    wishes = kueue_requests_of([leader, workers])
    grouped = kueue_requests_of(
        [asking("l", "leader", group_name="g"), asking("w", "w", group_name="g", required_topology=RACK)]
    )
    assert not isinstance(wishes, str)
    assert not isinstance(grouped, str)

    assert "leader asks for required example.com/rack; workers asks for none" in assumption(wishes)
    assert assumption(grouped) == ""
    assert assumption(dict.fromkeys(("a", "b"), wishes["leader"])) == ""
    assert assumption({"a": wishes["workers"]}) == ""


@pytest.mark.parametrize("mark", ["kueue.x-k8s.io/managed", "kueue.x-k8s.io/podset"])
def test_pods_that_kueue_manages_keep_its_choice(mark: str) -> None:
    """What Kueue places itself is not asked of Atoll as well."""
    plain = asking("a", "", required_topology=RACK)
    managed = msgspec.structs.replace(plain, metadata=msgspec.structs.replace(plain.metadata, labels={mark: "true"}))

    assert kueue_requests_of([managed]) == {"pods": KueueTopologyRequest()}
