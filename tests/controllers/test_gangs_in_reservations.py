"""Gangs that name a GpuReservation: whole in its GPUs or not at all, whatever write is lost, and never outside."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from atoll.api import names
from atoll.cluster.gangs.member_assignments import MemberAssignment
from atoll.cluster.gangs.membership import MemberStage
from atoll.cluster.leases import Holder
from atoll.cluster.ledger import Ledger
from controllers.context import Context
from controllers.gangs.writes import reserve
from tests.builders import make_allocation, make_lease
from tests.cluster.gangs.builders import make_gang, member
from tests.controllers.gang_harness import GangHarness, Term, cluster, settled, term
from tests.controllers.harness import FaultyApi, leading
from tests.controllers.test_gang_preemption import evicted, run, wait_evicted
from tests.controllers.test_reservations import MARK, OWN, RESERVATIONS, put_reservation
from tests.fakes.clock import ManualClock

pytestmark = pytest.mark.asyncio

RESERVED = Holder("@reservation", "nightly", "uid-of-nightly")
USES = {names.RESERVATION: "nightly"}


def add_gang(made: GangHarness, name: str, count: int = 2, *, gpus: int = 4, **options: Any) -> None:
    """Create a gang whose members name the reservation."""
    made.add_gang(name, count)
    for number in range(count):
        made.add_member(name, number, gpus=gpus, annotations=USES, **options)


def reserved(made: GangHarness) -> dict[str, str]:
    """Return the holder of each GPU that belongs to the reservation."""
    return {
        path.rpartition("/")[2]: str(one["spec"]["holderIdentity"])
        for path, one in made.server.objects.items()
        if "/leases/gpu-" in path and one["metadata"]["annotations"].get(names.RESERVATION)
    }


def holds(made: GangHarness, gang: str, count: int = 2, *, gpus: int = 4) -> bool:
    """Tell whether every member may start and holds its GPUs of the reservation."""
    return all(
        not made.is_gated(f"{gang}-{number}")
        and len(found := made.leases_of(f"{gang}-{number}")) == gpus
        and all(one["metadata"]["annotations"].get(names.RESERVATION) for one in found)
        for number in range(count)
    )


async def filled(running: Term, made: GangHarness, count: int = 8) -> None:
    """Wait until the reservation holds all of its GPUs."""
    await settled(running, lambda: list(reserved(made).values()) == [OWN] * count)


async def test_it_takes_over_what_the_reservation_holds_and_nothing_else(tmp_path: Path) -> None:
    """Each Lease says whose it is, in which gang, and where it returns; no GPU was free in between."""
    async with cluster("n1", "n2") as made, term(made, tmp_path) as running:
        put_reservation(made.server, 8, shape={"count": 8, "unit": "node"})
        await filled(running, made)
        add_gang(made, "g")
        await settled(running, lambda: holds(made, "g"))
        assert len(reserved(made)) == made.held() == 8
        gangs = {one["metadata"]["annotations"][names.LEASE_GANG] for one in made.leases_of("g-0")}
        assert len(gangs) == 1
        assert not [path for method, path in running.api.writes if method == "DELETE"]


async def test_it_waits_for_the_reservation_though_other_gpus_are_free(tmp_path: Path) -> None:
    """It holds nothing meanwhile and says what it waits for; when the pods before it end, their GPUs are its own."""
    async with cluster("n1", "n2") as made, term(made, tmp_path) as running:
        put_reservation(made.server, 8, shape={"count": 8, "unit": "node"})
        await filled(running, made)
        add_gang(made, "first")
        await settled(running, lambda: holds(made, "first"))
        add_gang(made, "second")
        await settled(running, lambda: made.reason("second") == "WaitForRoom")
        assert made.held() == 8
        assert made.leases_of("second-0") == []
        for number in range(2):
            made.delete(f"first-{number}")
        await settled(running, lambda: holds(made, "second"))
        assert made.held() == 8


async def test_a_gang_larger_than_its_reservation_is_told_so(tmp_path: Path) -> None:
    """Free GPUs beside the reservation do not help it."""
    async with cluster("n1", "n2") as made, term(made, tmp_path) as running:
        put_reservation(made.server, 4)
        await filled(running, made, 4)
        add_gang(made, "g")
        await settled(running, lambda: made.reason("g") == "WaitForRoom")
        notes = running.notes.notes_on(names.REASON_GANG_WAITING, "g")
        assert "does not fit, even if no pod used the 4 GPUs of its GpuReservation" in notes[0]
        assert made.leases_of("g-0") == []


@pytest.mark.parametrize(
    ("options", "told"),
    [
        pytest.param({"namespaces": ["other"]}, names.REJECT_RESERVATION_FOREIGN, id="of another team"),
        pytest.param({"starts": "2999-01-01T00:00:00Z"}, names.REJECT_RESERVATION_EARLY, id="not begun"),
        pytest.param({"ends": "2020-01-01T00:00:00Z"}, names.REJECT_RESERVATION_OVER, id="over"),
        pytest.param(None, names.REJECT_RESERVATION_MISSING, id="missing"),
    ],
)
async def test_a_gang_that_may_not_use_it_is_told_why(
    tmp_path: Path, options: dict[str, Any] | None, told: str
) -> None:
    """It starts nowhere else."""
    async with cluster() as made, term(made, tmp_path) as running:
        if options is not None:
            put_reservation(made.server, 4, **options)
            await settled(running, lambda: made.server.objects[f"{RESERVATIONS}/nightly"].get("status"))
        add_gang(made, "g")
        await settled(
            running, lambda: any(told in text for text in running.notes.notes_on(names.REASON_GANG_WAITING, "g"))
        )
        assert made.leases_of("g-0") == made.leases_of("g-1") == []


async def test_members_of_one_gang_name_one_reservation(tmp_path: Path) -> None:
    """A gang that is half in and half out would not start whole when its reservation says so."""
    async with cluster() as made, term(made, tmp_path) as running:
        put_reservation(made.server, 4)
        await filled(running, made, 4)
        made.add_gang("g", 2)
        made.add_member("g", 0, annotations=USES)
        made.add_member("g", 1)
        await settled(running, lambda: running.notes.notes_on(names.REASON_GANG_WAITING, "g"))
        assert "different GpuReservations" in running.notes.notes_on(names.REASON_GANG_WAITING, "g")[0]


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("dies_at", range(1, 17))
async def test_whichever_write_is_the_last_of_a_leader(tmp_path: Path, dies_at: int, *, is_after: bool) -> None:
    """The next leader lets the gang go whole. None of its GPUs was free or another's, and none is from elsewhere."""
    async with cluster("n1", "n2") as made:
        put_reservation(made.server, 8, shape={"count": 8, "unit": "node"})
        async with term(made, tmp_path) as running:
            await filled(running, made)
        held = set(reserved(made))
        add_gang(made, "g")
        async with term(made, tmp_path, dies_at=dies_at, is_after=is_after) as running:
            await settled(running, lambda: running.api.dead.is_set() or holds(made, "g"))
        async with term(made, tmp_path) as running:
            await settled(running, lambda: holds(made, "g"))
            assert not [path for method, path in running.api.writes if method == "DELETE"]
        assert set(reserved(made)) == held


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("fails_at", range(3, 15))
async def test_a_lost_write_leaves_no_gpu_of_it_free(tmp_path: Path, fails_at: int, *, is_after: bool) -> None:
    """The same leader takes back what it took over, and tries again."""
    async with cluster("n1", "n2") as made:
        put_reservation(made.server, 8, shape={"count": 8, "unit": "node"})
        async with term(made, tmp_path) as running:
            await filled(running, made)
        held = set(reserved(made))
        add_gang(made, "g")
        faulty = leading(made.server, tmp_path, lambda client: FaultyApi(client, fails_at, is_after), with_gangs=True)
        async with faulty as running:
            await settled(running, lambda: holds(made, "g"))
            assert not [path for method, path in running.api.writes if method == "DELETE"]
        assert set(reserved(made)) == held


async def test_among_its_pods_priorities_count_and_nobody_outside_is_evicted(tmp_path: Path) -> None:
    """The gang of higher priority evicts the one that uses the reservation, not the pods beside it."""
    settings = {"preemption_delay_seconds": 0.0}
    async with cluster("n1", "n2") as made, term(made, tmp_path, settings=settings) as running:
        put_reservation(made.server, 8, shape={"count": 8, "unit": "node"})
        await filled(running, made)
        add_gang(made, "low", priority=1)
        await settled(running, lambda: holds(made, "low"))
        await run(made, running, "low", 2)
        made.add_gang("beside", 2)
        for number in range(2):
            made.add_member("beside", number, priority=0)
        await settled(running, lambda: not made.is_gated("beside-0") and not made.is_gated("beside-1"))
        await run(made, running, "beside", 2)
        add_gang(made, "high", priority=10)
        await wait_evicted(made, running, "low-0", "low-1")
        await settled(running, lambda: holds(made, "high"))
        assert evicted(running) == {"low-0", "low-1"}
        assert len(reserved(made)) == 8


@pytest.mark.parametrize(
    ("idle", "is_reserved"),
    [
        pytest.param({"holder": RESERVED, "annotations": {names.RESERVATION: MARK}}, True, id="the reservation's"),
        pytest.param(None, False, id="nobody's any more"),
        pytest.param({"annotations": {names.RESERVATION: MARK}}, False, id="another pod's by now"),
        pytest.param({"holder": RESERVED, "uuid": "GPU-before"}, False, id="of the GPU that stood there before"),
    ],
)
async def test_a_gang_takes_over_only_leases_that_its_reservation_holds(
    idle: dict[str, Any] | None, *, is_reserved: bool
) -> None:
    """As they are when they are written, not when places were searched; no other Lease is made instead."""
    ledger, api = Ledger(), AsyncMock()
    if idle is not None:
        ledger.put_lease(make_lease("n1", 0, **idle))
    context = cast("Context", SimpleNamespace(api=api, clock=ManualClock(), mirror=SimpleNamespace(ledger=ledger)))
    assignment = MemberAssignment(member(0, MemberStage.GATED), make_allocation("n1", 0), "uid-of-n1")

    answer = await reserve(context, make_gang(1), [assignment], {}, "token", RESERVED.uid)

    assert (answer, api.patch.await_count, api.create.await_count) == (is_reserved, int(is_reserved), 0)
