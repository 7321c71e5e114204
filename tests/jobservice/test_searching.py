"""Searches of whole clusters leave the database its threads: so many callers at a time, each for so long."""

import asyncio
import threading
from typing import Any

import pytest

from atoll.jobs.fitting import JobFit
from jobs import chooser
from jobs.errors import SearchesBusy, SearchTooLong
from jobs.page import gpus
from jobs.page.gpus import JobGpusView
from jobs.searching import SearchThread
from tests.explain.situations import situation
from tests.fakes.clock import until
from tests.jobservice.service import JOBS, JobService

ONE_MACHINE = situation({"n1": {}}).snapshot
AUTO = "/api/clusters/auto/jobs"
GPU_JOB = {"name": "tune", "job_type": "batch", "container": {"image": "busybox:1"}, "ext_ml_gpu_count": 1}


class SlowSearch:
    """A search that goes on until the test lets it end."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> str:
        """Wait for the test."""
        self.begun.set()
        self.may_end.wait(20)
        return "found"


async def test_a_turn_that_takes_too_long_ends_and_counts_until_its_search_has_ended() -> None:
    """The caller is told at once; the thread cannot be stopped, so nobody else has the turn until then."""
    thread, slow = SearchThread("sums", turns_max=1, seconds_max=0.01), SlowSearch()
    with pytest.raises(SearchTooLong, match=r"could not compute the sums within 0\.01 s"):
        async with thread.turn() as search:
            await search.run(slow)
    with pytest.raises(SearchesBusy, match="computes other sums"):
        async with thread.turn():
            raise AssertionError("has a turn")
    slow.may_end.set()
    await until(lambda: all(one.done() for one in thread._left))
    async with thread.turn() as search:
        assert await search.run(lambda: 2) == 2


async def test_a_timeout_within_a_turn_stays_what_it_is() -> None:
    """That of a cluster which does not answer is no turn that took too long."""
    thread = SearchThread("sums", turns_max=1, seconds_max=60)
    with pytest.raises(TimeoutError):
        async with thread.turn():
            raise TimeoutError


async def test_choices_of_clusters_are_bounded_and_leave_the_database_its_threads(
    service: JobService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While as many as may be are computed, the next is sent away and nothing is recorded; jobs are shown meanwhile."""
    slow = SlowSearch()

    def slow_fit(*_: Any, **__: Any) -> JobFit:
        return JobFit(fits=True, reason=slow())

    monkeypatch.setattr(chooser, "fit_of", slow_fit)
    made = (await service.submit()).json()
    names = [f"tune-{number}" for number in range(chooser.CHOICES_MAX)]
    service.links.snapshots["local"] = ONE_MACHINE
    try:
        first = [asyncio.ensure_future(service.call("POST", AUTO, json=GPU_JOB | {"name": name})) for name in names]
        await until(slow.begun.is_set)
        async with asyncio.timeout(10):
            refused = await service.call("POST", AUTO, json=GPU_JOB)
            shown = await asyncio.gather(*(service.call("GET", f"{JOBS}/{made['id']}") for _ in range(20)))
    finally:
        slow.may_end.set()
    accepted = await asyncio.gather(*first)

    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "5")
    assert refused.json()["detail"] == "the service computes other choices of clusters: try again later"
    assert {one.status_code for one in shown} == {200}
    assert {one.status_code for one in accepted} == {201}
    assert (await service.call("GET", AUTO)).json()["total"] == 1 + len(names)


async def test_lists_of_gpus_are_bounded_too(service: JobService, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of a job asks for its GPUs again and again; beyond the bound the answer is to come later."""
    slow = SlowSearch()

    def slow_list(*_: Any) -> JobGpusView:
        slow()
        return JobGpusView(nodes=[], total=0)

    monkeypatch.setattr(gpus, "gpus_of_job", slow_list)
    made = (await service.submit()).json()
    path = f"{JOBS}/{made['id']}"
    try:
        first = [asyncio.ensure_future(service.call("GET", f"{path}/gpus")) for _ in range(gpus.TURNS_MAX)]
        await until(slow.begun.is_set)
        async with asyncio.timeout(10):
            refused = await service.call("GET", f"{path}/gpus")
            shown = await asyncio.gather(*(service.call("GET", path) for _ in range(20)))
    finally:
        slow.may_end.set()
    answered = await asyncio.gather(*first)

    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "5")
    assert {one.status_code for one in shown} == {200}
    assert {one.status_code for one in answered} == {200}
