"""Pods of one gang that state different sizes: both get an event, and no member starts."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from atoll.api import names
from atoll.cluster.gangs.sizes import size_conflict
from tests.builders import make_pod
from tests.controllers.gang_harness import GANGS, GangHarness, cluster, settled, term
from tests.controllers.harness import strip_version


def add(made: GangHarness, *sizes: str | None) -> None:
    """Create members that say so."""
    for number, size in enumerate(sizes):
        made.add_member("g", number, gpus=2, annotations={names.GANG_SIZE: size} if size is not None else {})


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("first", "later", "told"),
    [
        pytest.param(("2",), ("4",), (("g-0", "2"), ("g-1", "4")), id="the second contradicts the first"),
        pytest.param(("2", "4"), (), (("g-0", "2"), ("g-1", "4")), id="both at once"),
        pytest.param(("4",), ("4", "4", "2"), (("g-0", "4"), ("g-3", "2")), id="the last of four"),
        pytest.param(("2",), ("many",), (("g-0", "2"), ("g-1", "many")), id="one says no number"),
    ],
)
async def test_two_pods_that_contradict_each_other_are_told_and_nobody_starts(
    tmp_path: Path, first: Sequence[str], later: Sequence[str], told: tuple[tuple[str, str], tuple[str, str]]
) -> None:
    """An event on both names both with what they say; neither half a gang starts nor a whole one of the wrong size."""
    async with cluster() as made, term(made, tmp_path) as running:
        add(made, *first)
        if later:
            await settled(running, lambda: f"{GANGS}/g" in made.server.objects)
            add(made, *first, *later)
        (one, size), (other, another) = told

        def notes(name: str) -> list[str]:
            found = running.notes.notes_on(names.REASON_GANG_WAITING, name)
            said = f"pod {one} says that it has {size} pods, and pod {other} says that it has {another} pods"
            return [note for note in found if said in note]

        await settled(running, lambda: notes(one) and notes(other))
        running.resync()
        await settled(running, lambda: len(notes(one)) > 1)

        assert made.held() == 0
        assert all(made.is_gated(f"g-{number}") for number in range(len(first) + len(later)))


@pytest.mark.asyncio
async def test_a_gang_whose_pods_agree_again_starts_with_the_size_that_they_say(tmp_path: Path) -> None:
    """Made for a pod of two; all are created anew as four: the gang is made anew, and no two of them start alone."""
    async with cluster() as made, term(made, tmp_path) as running:
        add(made, "2", "4")
        await settled(running, lambda: any("g-1" in note for note in running.notes.texts))
        made.delete("g-0")
        made.delete("g-1")
        add(made, "4", "4", "4")
        await settled(running, lambda: made.reason("g") == "WaitForQuorum")
        assert made.held() == 0
        made.add_member("g", 3, gpus=2, annotations={names.GANG_SIZE: "4"})
        await settled(running, lambda: not any(made.is_gated(f"g-{number}") for number in range(4)))

        assert made.gang("g")["spec"]["podSets"] == [{"name": "pods", "count": 4}]


@pytest.mark.asyncio
async def test_a_made_gang_of_named_pod_sets_is_no_gang_of_another_size(tmp_path: Path) -> None:
    """Its pods name the size of all pod sets together; each set counts fewer."""
    async with cluster() as made, term(made, tmp_path) as running:
        for number, pod_set in enumerate(("leader", "workers")):
            annotations = {names.GANG_SIZE: "2", names.POD_SET: pod_set}
            made.add_member("g", number, gpus=8, annotations=annotations)
        await settled(running, lambda: f"{GANGS}/g" in made.server.objects)
        uid = made.gang("g")["metadata"]["uid"]
        await settled(running, lambda: made.reason("g") == "NeverFits")

        assert made.gang("g")["metadata"]["uid"] == uid


@pytest.mark.asyncio
async def test_a_made_gang_whose_pods_run_stays_whatever_they_say(tmp_path: Path) -> None:
    """Somebody writes another size on them, and the gang's status is lost: it takes over what runs."""
    async with cluster() as made, term(made, tmp_path) as running:
        add(made, "2", "2")
        await settled(running, lambda: not made.is_gated("g-0") and not made.is_gated("g-1"))
        made.run_all("g", 2)
        await settled(running, lambda: made.reason("g", names.CONDITION_PODS_READY) == "Started")
        for number in range(2):
            notes = made.pod(f"g-{number}")["metadata"]["annotations"]
            made.change_pod(f"g-{number}", metadata={"annotations": {**notes, names.GANG_SIZE: "3"}})
        seen = lambda uid: running.mirror.pods.by_uid[uid].metadata.annotations[names.GANG_SIZE]  # noqa: E731
        await settled(running, lambda: seen("uid-of-g-0") == seen("uid-of-g-1") == "3")
        gang = made.gang("g")
        made.server.put(f"{GANGS}/g", {key: value for key, value in strip_version(gang).items() if key != "status"})
        await settled(running, lambda: made.reason("g") == "Admitted")

        assert made.gang("g")["metadata"]["uid"] == gang["metadata"]["uid"]


@pytest.mark.asyncio
async def test_a_made_gang_that_somebody_has_edited_stays_whatever_its_pods_say(tmp_path: Path) -> None:
    """Made for a pod of two; its user writes a policy into it. New pods say three: the GpuGang of two counts."""
    async with cluster() as made, term(made, tmp_path) as running:
        add(made, "2")
        await settled(running, lambda: made.reason("g") == "WaitForQuorum")
        gang = made.gang("g")
        metadata = {
            **{key: value for key, value in gang["metadata"].items() if key != "resourceVersion"},
            "generation": 2,
        }
        made.server.put(f"{GANGS}/g", {**gang, "metadata": metadata, "spec": {**gang["spec"], "minMember": 2}})
        made.delete("g-0")
        add(made, "3", "3", "3")
        await settled(running, lambda: sum(not made.is_gated(f"g-{number}") for number in range(3)) == 2)

        assert made.gang("g")["metadata"]["uid"] == metadata["uid"]


@pytest.mark.asyncio
async def test_who_wrote_a_gpugang_said_there_how_many_they_are(tmp_path: Path) -> None:
    """The annotations of its pods mean nothing then, and neither do contradictions among them."""
    async with cluster() as made, term(made, tmp_path) as running:
        made.add_gang("g", 2)
        add(made, "2", "4")
        await settled(running, lambda: not made.is_gated("g-0") and not made.is_gated("g-1"))


@pytest.mark.parametrize(
    ("said", "conflicting"),
    [
        (["4", "4"], None),
        (["4", None], None),
        (["4", "2", "2"], ("p0", "p1")),
        (["2", "2", "4", "3"], ("p0", "p2")),
    ],
)
def test_the_first_two_that_differ_are_named(said: list[str | None], conflicting: tuple[str, str] | None) -> None:
    """By name, so that every look tells the same; whoever says nothing contradicts nobody."""
    pods = [
        make_pod(f"p{number}", annotations={} if size is None else {names.GANG_SIZE: size})
        for number, size in enumerate(said)
    ]
    found = size_conflict(reversed(pods))

    assert (found and tuple(pod.metadata.name for pod in found.pods)) == conflicting
