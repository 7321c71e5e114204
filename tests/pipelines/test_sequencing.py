"""Branches of a parallel step that need more GPUs than are free run one after the other, and the run says so."""

import json
from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from atoll.jobs.queue_file import QueueFile, parse_queue_file
from atoll.pipelines.deciding import EndRun, RunSnapshot, StartTry, TryOutcome, after_try, new_run, settled
from atoll.pipelines.sequencing import GpuRoom, room_of
from atoll.pipelines.words import RunState
from tests.pipelines.made import JOB, graph, step

QUEUES = {
    "flavors": [{"name": "h100"}],
    "cohorts": [{"name": "all", "flavors": [{"flavor": "h100", "quota": {"gpu": 2}}]}],
    "tenants": [
        {
            "name": "acme",
            "queues": [
                {"cohort": "all", "flavors": [{"flavor": "h100", "quota": {"gpu": {"nominal": 4, "borrow": 3}}}]},
                {"critical": True, "flavors": [{"flavor": "h100", "quota": {"gpu": 1}}]},
            ],
        },
        {"name": "other", "queues": [{"cohort": "all", "flavors": [{"flavor": "h100", "quota": {"gpu": 8}}]}]},
    ],
}
ROOM = GpuRoom({"q": 4}, "q", "critical")


def queue_file(**changes: Any) -> QueueFile:
    """Return the file; changes: of the tenant's first queue."""
    document = yaml.safe_load(yaml.safe_dump(QUEUES))
    document["tenants"][0]["queues"][0] |= changes
    found = parse_queue_file(json.dumps(document).encode(), namespace="tenant-{tenant}")
    assert isinstance(found, QueueFile), found
    return found


@pytest.mark.parametrize(
    ("changes", "used", "free"),
    [
        ({}, 0, 7),
        ({}, 5, 2),
        ({}, 9, 0),
        ({"cohort": None, "flavors": [{"flavor": "h100", "quota": {"gpu": 4}}]}, 1, 3),
        ({"flavors": [{"flavor": "h100", "quota": {"gpu": 4}}]}, 0, 14),
    ],
    ids=["borrowed", "used", "more used than there is", "alone", "borrows without limit"],
)
def test_the_room_is_what_may_be_used_at_most_less_what_is(changes: dict[str, Any], used: int, free: int) -> None:
    """With quota that the queue may borrow; the critical queue borrows nothing."""
    file = queue_file(**changes)
    tenant = file.tenants[0]
    room = room_of(file, tenant, {"tenant-acme-queue": used})

    frees = {"tenant-acme-queue": free, "tenant-acme-critical": 1}
    assert room == GpuRoom(frees, "tenant-acme-queue", "tenant-acme-critical")


def gpu_step(name: str, gpus: int, priority: str = "normal", *after: str) -> dict[str, Any]:
    """Return a job step with GPUs."""
    return step(
        name,
        *after,
        kind="job",
        config=JOB | ({"ext_ml_gpu_count": gpus} if gpus else {}) | {"policy": {"priority_class": priority}},
    )


def begun(run: RunSnapshot) -> list[str]:
    """Return the steps that begin now."""
    return [one.key for one in settled(run)[1] if isinstance(one, StartTry)]


def test_what_does_not_fit_together_runs_by_priority() -> None:
    """A branch without GPUs begins at once; the message has the sums."""
    steps = [
        step("fan", kind="parallel", config={"branches": ["a", "b", "c", "d"]}),
        *(gpu_step("a", 2), gpu_step("b", 2, "low"), gpu_step("c", 1, "high"), gpu_step("d", 0)),
    ]
    run = new_run(graph(*steps), "r1", {})
    order: list[list[str]] = []
    run = replace(run, room=ROOM)
    order.append(begun(run))
    run, _ = settled(run)
    for name in ("c", "a", "b"):
        run = after_try(run, name, TryOutcome({}))
        order.append(begun(run))
        run, _ = settled(run)

    assert order == [["c", "d"], ["a"], ["b"], []]
    told = "c, a, b run one after the other, by priority: they need 5 GPUs together, and queue q has 4 free"
    assert run.of("fan").output["message"] == told


@pytest.mark.parametrize("room", [None, GpuRoom({"q": 5}, "q", "q"), GpuRoom({"other": 0}, "q", "q")])
def test_what_fits_runs_together(room: GpuRoom | None) -> None:
    """Also where there is no quota, or not for that queue."""
    steps = step("fan", kind="parallel", config={"branches": ["a", "b"]}), gpu_step("a", 2), gpu_step("b", 3)

    assert begun(replace(new_run(graph(*steps), "r1", {}), room=room)) == ["a", "b"]


def test_a_loop_counts_the_jobs_that_run_at_a_time() -> None:
    """Three of ten items."""
    loop = {"items": list(range(10)), "body_step": "body", "max_parallel": 3}
    steps = [
        step("fan", kind="parallel", config={"branches": ["a", "each"]}),
        *(gpu_step("a", 2, "low"), step("each", kind="loop", config=loop), gpu_step("body", 1)),
    ]

    assert begun(replace(new_run(graph(*steps), "r1", {}), room=ROOM)) == ["body[0]", "body[1]", "body[2]"]


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["low", "normal", "high"]), st.sets(st.integers(0, 5))),
        min_size=2,
        max_size=6,
    ),
    st.integers(0, 4),
    st.data(),
)
def test_every_branch_ends_whatever_they_wait_for(
    branches: list[tuple[int, str, set[int]]], free: int, data: st.DataObject
) -> None:
    """Whatever the priorities and dependencies; branches in the order run alone among each other."""
    names = [f"b{number}" for number in range(len(branches))]
    steps = [step("fan", kind="parallel", config={"branches": names})]
    for number, (gpus, priority, after) in enumerate(branches):
        steps.append(gpu_step(names[number], gpus, priority, *(names[one] for one in sorted(after) if one < number)))
    run = replace(new_run(graph(*steps), "r1", {}), room=GpuRoom({"q": free}, "q", "q"))
    run, decisions = settled(run)
    running = [one.key for one in decisions if isinstance(one, StartTry)]
    order = run.of("fan").output.get("order", [])
    total = sum(gpus for gpus, _, _ in branches)
    assert bool(order) == (total > free and sum(gpus > 0 for gpus, _, _ in branches) > 1)
    while running:
        assert sum(key in order for key in running) <= 1
        ended = running.pop(data.draw(st.integers(0, len(running) - 1)))
        run, decisions = settled(after_try(run, ended, TryOutcome({})))
        running += [one.key for one in decisions if isinstance(one, StartTry)]

    assert {one.state.value for one in run.steps.values()} == {"succeeded"}
    assert decisions[-1] == EndRun(RunState.SUCCEEDED, "")
