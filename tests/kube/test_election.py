"""The leader election: never two leaders, whatever API, clocks and work do."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.api.times import parse_microtime
from atoll.kube import errors
from atoll.kube.election import LeaderElector
from tests.fakes.api_server import merge
from tests.fakes.clock import ManualClock, settle


class LeaseApi:
    """One Lease in memory, with the API server's checks; stands in for ApiClient."""

    def __init__(self) -> None:
        self.lease: dict | None = None
        self.version = 0
        self.fault = "none"
        self.delay: Callable[[], Awaitable[None]] | None = None
        self.writes: list[dict] = []

    @property
    def spec(self) -> dict:
        assert self.lease is not None
        return self.lease["spec"]

    async def get(self, path: str) -> bytes:
        await self._trouble(path)
        if self.lease is None:
            raise errors.NotFound("no lease", status=404, reason="NotFound", path=path)
        return msgspec.json.encode(self.lease)

    async def create(self, path: str, body: dict) -> bytes:
        await self._trouble(path)
        if self.lease is not None:
            raise errors.AlreadyExists("there", status=409, reason="AlreadyExists", path=path)
        return await self._store({**body, "metadata": {**body["metadata"], "uid": f"uid{self.version}"}}, path)

    async def patch(self, path: str, body: dict) -> bytes:
        await self._trouble(path)
        if self.lease is None:
            raise errors.NotFound("no lease", status=404, reason="NotFound", path=path)
        for key, value in body["metadata"].items():
            if self.lease["metadata"][key] != value:
                raise errors.Conflict(f"{key} differs", status=409, reason="Conflict", path=path)
        return await self._store(merge(self.lease, body), path)

    async def _store(self, lease: dict, path: str) -> bytes:
        for key in ("renewTime", "acquireTime"):
            if key in lease["spec"]:
                assert len(lease["spec"][key]) == 27, f"the API server refuses {lease['spec'][key]}"
        self.version += 1
        self.lease = merge(lease, {"metadata": {"resourceVersion": str(self.version)}})
        self.writes.append(lease["spec"])
        if self.delay is not None:
            await self.delay()
        if self.fault == "lose answers":
            raise errors.Unanswered("cut", path=path, sent=True)
        return msgspec.json.encode(self.lease)

    async def _trouble(self, path: str) -> None:
        if self.fault == "hang":
            await asyncio.Event().wait()
        if self.fault == "refuse connections":
            raise errors.Unanswered("refused", path=path, sent=False)
        if self.fault == "fail":
            raise errors.ServerError("broken", status=500, reason="", path=path)
        if self.fault == "nonsense":
            raise ZeroDivisionError


class Contender:
    """One process that wants to lead, and what its work saw."""

    def __init__(
        self,
        api: LeaseApi,
        clock: ManualClock,
        identity: str,
        *,
        stubborn: bool = False,
        workers: list[str] | None = None,
    ) -> None:
        self.workers = workers if workers is not None else []
        self.overrun = False
        self.clock = clock
        self.identity = identity
        self.elector = LeaderElector(
            api,  # type: ignore[arg-type]
            "atoll-system",
            "controllers",
            identity,
            clock=clock,
            rng=random.Random(identity),
            on_overrun=self._note_overrun,
        )
        self.terms: list[int] = []
        self.working = False
        self.finish = asyncio.Event()
        self.stubborn = stubborn
        self.task = asyncio.create_task(self.elector.lead(self._work))

    async def _work(self, term: int) -> None:
        self.terms.append(term)
        self.workers.append(self.identity)
        assert len(self.workers) == 1, f"several work at once: {self.workers}"
        self.working = True
        try:
            await self.finish.wait()
        finally:
            if self.stubborn:
                with suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
            self.working = False
            self.workers.remove(self.identity)

    def _note_overrun(self) -> None:
        self.overrun = True

    async def stop(self) -> None:
        self.task.cancel()
        while not self.task.done():
            await self.clock.advance(0.25)
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture
def api() -> LeaseApi:
    return LeaseApi()


@pytest.mark.parametrize("start", [datetime(2026, 1, 31, 12, tzinfo=UTC), datetime(2026, 1, 31, 12, 0, 0, 120000, UTC)])
async def test_first_contender_leads_and_renews(api: LeaseApi, start: datetime) -> None:
    """The Lease is made, kept fresh, and its times have six digits also when the microseconds are zero."""
    clock = ManualClock(start)
    first = Contender(api, clock, "first")
    await clock.advance(60)

    assert first.working
    assert first.elector.is_leader
    assert api.spec["holderIdentity"] == "first"
    assert (clock.now() - parse_microtime(api.spec["renewTime"])).total_seconds() <= 2
    await first.stop()


async def test_only_one_leads_and_the_other_takes_over_after_a_release(api: LeaseApi, clock: ManualClock) -> None:
    """A leader that stops gives the Lease back, so the next one need not wait for its end; the term grows."""
    first, second = Contender(api, clock, "first"), Contender(api, clock, "second")
    await clock.advance(60)
    leader, other = (first, second) if first.working else (second, first)
    assert not other.working

    await leader.stop()
    assert not leader.working
    assert api.spec["holderIdentity"] == ""
    await clock.advance(3)

    assert other.working
    assert other.terms == [leader.terms[0] + 1]
    await other.stop()


async def test_work_that_ends_gives_the_lease_back(api: LeaseApi, clock: ManualClock) -> None:
    """lead returns with its work."""
    first = Contender(api, clock, "first")
    await clock.advance(5)
    first.finish.set()
    await settle()

    assert first.task.done()
    assert first.task.exception() is None
    assert api.spec["holderIdentity"] == ""


async def test_fault_of_the_work_is_passed_on(api: LeaseApi, clock: ManualClock) -> None:
    """A crash of the work ends lead with that error, after the Lease was given back."""

    async def work(_term: int) -> None:
        raise ValueError("bug")

    elector = LeaderElector(api, "ns", "name", "me", clock=clock)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="bug"):
        await elector.lead(work)
    assert api.spec["holderIdentity"] == ""


@pytest.mark.parametrize("fault", ["hang", "refuse connections", "fail", "nonsense", "lose answers"])
async def test_leader_that_cannot_renew_stops_before_anyone_else_starts(
    api: LeaseApi, clock: ManualClock, fault: str
) -> None:
    """Whatever keeps it from renewing, work stops at the renewal deadline and the successor starts after that."""
    first = Contender(api, clock, "first")
    await clock.advance(4)
    api.fault = fault
    began = clock.monotonic_seconds()
    while first.working:
        await clock.advance(0.5)
    stopped_after = clock.monotonic_seconds() - began
    await clock.advance(3)

    with pytest.raises(errors.LeadershipLost):
        await first.task
    assert not first.elector.is_leader
    assert stopped_after <= 10.5
    assert not first.overrun


async def check_leads_for(contender: Contender, clock: ManualClock, seconds: float) -> None:
    """Assert that it leads for so long and not 0.2 s more, and stop it."""
    await clock.advance(seconds)
    assert contender.elector.is_leader
    await clock.advance(0.2)
    assert not contender.elector.is_leader
    await contender.stop()


async def test_is_leader_turns_false_at_the_deadline_by_itself(api: LeaseApi, clock: ManualClock) -> None:
    """A writer that checks before each write stops in time even while a renewal hangs."""
    first = Contender(api, clock, "first")
    await clock.advance(1)
    api.fault = "hang"
    await check_leads_for(first, clock, 8.9)


async def test_slow_answers_do_not_lengthen_the_leadership(api: LeaseApi, clock: ManualClock) -> None:
    """Others count from when the server stored the renewal: a late answer must not make us count from later."""
    api.delay = lambda: clock.sleep(4)
    first = Contender(api, clock, "first")
    await clock.advance(4.5)
    assert first.elector.is_leader
    api.fault = "hang"
    await check_leads_for(first, clock, 5.4)


async def test_slow_renewals_do_not_lengthen_the_leadership(api: LeaseApi, clock: ManualClock) -> None:
    """The same for a renewal: sent at 2 s, answered at 6 s, good until 12 s and not until 16 s."""
    first = Contender(api, clock, "first")
    await clock.advance(1)
    api.delay = lambda: clock.sleep(4)
    await clock.advance(5.5)
    assert len(api.writes) == 2
    api.fault = "hang"
    await check_leads_for(first, clock, 5.4)


async def test_work_that_will_not_end_ends_the_process(api: LeaseApi, clock: ManualClock) -> None:
    """Work that ignores its cancellation may not run beside a successor: the last resort is the process itself."""
    first = Contender(api, clock, "first", stubborn=True)
    await clock.advance(1)
    api.fault = "hang"
    await clock.advance(13)
    assert not first.overrun
    await clock.advance(4)

    assert first.overrun
    with pytest.raises(errors.LeadershipLost):
        await first.task


async def test_lease_taken_by_another_stops_the_work_at_once(api: LeaseApi, clock: ManualClock) -> None:
    """A loser does not wait for its deadline."""
    first = Contender(api, clock, "first")
    await clock.advance(1)
    assert api.lease is not None
    taken = {"spec": {"holderIdentity": "thief"}, "metadata": {"resourceVersion": "99"}}
    api.lease = merge(api.lease, taken)
    await clock.advance(2)

    assert not first.working
    with pytest.raises(errors.LeadershipLost):
        await first.task
    assert api.spec["holderIdentity"] == "thief"


async def test_lease_that_was_deleted_stops_the_work(api: LeaseApi, clock: ManualClock) -> None:
    """A deleted Lease may be somebody else's a moment later."""
    first = Contender(api, clock, "first")
    await clock.advance(1)
    api.lease = None
    await clock.advance(2)

    with pytest.raises(errors.LeadershipLost):
        await first.task


async def test_foreign_label_on_the_lease_does_no_harm(api: LeaseApi, clock: ManualClock) -> None:
    """Somebody else's write moves the resourceVersion; the leader notices that it still leads."""
    first = Contender(api, clock, "first")
    await clock.advance(1)
    assert api.lease is not None
    api.version += 1
    api.lease = merge(api.lease, {"metadata": {"labels": {"x": "y"}, "resourceVersion": str(api.version)}})
    await clock.advance(30)

    assert first.working
    await first.stop()


async def test_expiry_is_judged_by_our_own_clock(api: LeaseApi, clock: ManualClock) -> None:
    """A holder whose clock is years off is neither expired nor eternal: only whether the Lease changes counts."""
    api.lease = {
        "metadata": {"uid": "u", "resourceVersion": "1"},
        "spec": {"holderIdentity": "old", "renewTime": "1999-01-01T00:00:00.000000Z", "leaseDurationSeconds": 15},
    }
    second = Contender(api, clock, "second")
    await clock.advance(14)
    assert not second.working
    await clock.advance(6)

    assert second.working
    assert second.terms == [1]
    await second.stop()


async def test_longer_duration_in_the_lease_is_respected(api: LeaseApi, clock: ManualClock) -> None:
    """A holder that asked for more time than we do has it."""
    api.lease = {
        "metadata": {"uid": "u", "resourceVersion": "1"},
        "spec": {"holderIdentity": "old", "leaseDurationSeconds": 60, "leaseTransitions": 7},
    }
    second = Contender(api, clock, "second")
    await clock.advance(59)
    assert not second.working
    await clock.advance(5)

    assert second.terms == [8]
    await second.stop()


async def test_lost_answer_of_an_acquisition_is_recognised(api: LeaseApi, clock: ManualClock) -> None:
    """A contender that took the Lease without learning of it does not wait for itself; the term is new again."""
    api.fault = "lose answers"
    first = Contender(api, clock, "first")
    await clock.advance(1)
    assert not first.working
    api.fault = "none"
    await clock.advance(3)

    assert first.working
    assert first.terms[0] >= 2
    await first.stop()


async def test_campaign_survives_an_api_that_is_down(api: LeaseApi, clock: ManualClock) -> None:
    """Contenders keep trying, without spinning."""
    api.fault = "nonsense"
    first = Contender(api, clock, "first")
    await clock.advance(600)
    assert not first.task.done()
    api.fault = "none"
    await clock.advance(3)

    assert first.working
    await first.stop()


def test_timing_that_cannot_be_safe_is_refused(api: LeaseApi, clock: ManualClock) -> None:
    """A renewal deadline at or beyond the Lease's duration would allow two leaders."""
    with pytest.raises(ValueError, match="renew deadline"):
        LeaderElector(api, "ns", "n", "me", clock=clock, renew_deadline_seconds=15)  # type: ignore[arg-type]


FAULTS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["none", "hang", "refuse connections", "fail", "lose answers", "stop"]),
        st.integers(1, 12),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=100, deadline=None)
@given(FAULTS)
def test_never_two_leaders(script: list[tuple[int, str, int]]) -> None:
    """Three contenders with their own broken connections to one Lease: at every half second at most one works."""
    asyncio.run(_play(script))


async def _play(script: list[tuple[int, str, int]]) -> None:
    clock = ManualClock()
    shared = LeaseApi()
    links = [Link(shared) for _ in range(3)]
    workers: list[str] = []
    contenders = [Contender(link, clock, f"c{index}", workers=workers) for index, link in enumerate(links)]
    leaders: dict[int, str] = {}
    for step, (index, fault, seconds) in enumerate(script):
        if fault == "stop":
            await contenders[index].stop()
        links[index].fault = "none" if fault == "stop" else fault
        if contenders[index].task.done():
            await contenders[index].stop()
            contenders[index] = Contender(links[index], clock, f"c{index}-{step}", workers=workers)
        for _ in range(seconds * 2):
            await clock.advance(0.5)
            assert sum(contender.elector.is_leader for contender in contenders) <= 1
            for contender in contenders:
                for term in contender.terms:
                    assert leaders.setdefault(term, contender.identity) == contender.identity
    for contender in contenders:
        await contender.stop()
        assert contender.task.cancelled() or not isinstance(contender.task.exception(), AssertionError)


class Link(LeaseApi):
    """One contender's own connection to a shared Lease: it breaks alone."""

    def __init__(self, shared: LeaseApi) -> None:
        super().__init__()
        self._shared = shared

    async def get(self, path: str) -> bytes:
        await self._trouble(path)
        return await self._shared.get(path)

    async def create(self, path: str, body: dict) -> bytes:
        await self._trouble(path)
        return self._pass_on(await self._shared.create(path, body), path)

    async def patch(self, path: str, body: dict) -> bytes:
        await self._trouble(path)
        return self._pass_on(await self._shared.patch(path, body), path)

    def _pass_on(self, answer: bytes, path: str) -> bytes:
        if self.fault == "lose answers":
            raise errors.Unanswered("cut", path=path, sent=True)
        return answer
