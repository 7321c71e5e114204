"""Writes of gangs whose answers are lost: what arrives late changes nothing, and no member starts without its GPUs."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import orjson
import pytest
from aiohttp import web

from atoll.api import names
from atoll.api.times import format_microtime
from atoll.cluster.leases import RESERVATION_NAMESPACE, Holder
from atoll.cluster.ledger import Ledger
from atoll.kube.errors import NotFound
from atoll.kube.mirror import ClusterMirror
from controllers.context import Context
from controllers.gangs.writes import is_reserved
from tests.builders import lease_json, make_lease
from tests.controllers.gang_harness import GANGS, JOBS, GangHarness, Term, cluster, settled, term
from tests.controllers.harness import LEASES, PODS
from tests.controllers.test_gangs import JOB, QUICK, add_owned
from tests.fakes.api_server import Object, answering, status
from tests.fakes.clock import ManualClock, until

pytestmark = pytest.mark.asyncio

RESERVED = 11
"""The write after which all Leases stand, the gang is admitted, and nobody was let go."""


def add_gang(made: GangHarness, count: int = 2, **spec: Any) -> None:
    """Create a gang and all of its members, four GPUs each."""
    made.add_gang("g", count, **spec)
    for number in range(count):
        made.add_member("g", number)


def is_let_go(made: GangHarness, *members: str) -> bool:
    """Tell whether these members may start and hold their four GPUs."""
    return all(not made.is_gated(member) and len(made.leases_of(member)) == 4 for member in members)


def is_admission(body: Any) -> bool:
    """Tell whether a patch of a gang's status admits it."""
    found = ((body or {}).get("status") or {}).get("conditions") or []
    return any(one["type"] == names.CONDITION_ADMITTED and one["status"] == "True" for one in found)


@dataclass
class LateAdmission:
    """Holds up the first admission of a gang, and carries it out when the first Lease is about to be deleted."""

    made: GangHarness
    held_up: list[Object] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    on_held_up: Any = None

    def __call__(self, method: str, path: str, body: Any) -> web.Response | None:
        """Answer in the server's place, or let it answer."""
        if method == "PATCH" and path == f"{GANGS}/g/status" and is_admission(body) and not self.held_up:
            self.held_up.append(body)
            if self.on_held_up is not None:
                self.on_held_up()
            return status(504, "Timeout", "the server took too long")
        if method == "DELETE" and path.startswith(f"{LEASES}/gpu-") and self.held_up and not self.answers:
            late = self.made.server.respond("PATCH", f"{GANGS}/g/status", {}, self.held_up[0])
            self.answers.append(late.status)
        return None


@pytest.mark.parametrize("leader", ["lives", "dies"])
async def test_an_admission_that_arrives_late_admits_nobody(tmp_path: Path, leader: str) -> None:
    """Whoever takes back the Leases of an admission without an answer moves the gang's version first."""
    async with cluster() as made:
        late = LateAdmission(made)
        made.server.intercept(late)
        async with term(made, tmp_path) as first:
            late.on_held_up = first.api.dead.set if leader == "dies" else None
            add_gang(made)
            await settled(first, lambda: first.api.dead.is_set() or is_let_go(made, "g-0", "g-1"))
        async with term(made, tmp_path) as second:
            await settled(second, lambda: is_let_go(made, "g-0", "g-1"))

        assert late.answers == [409]
        assert made.gang("g")["status"]["admission"] != late.held_up[0]["status"]["admission"]


async def test_a_status_without_an_answer_is_fenced_first(tmp_path: Path) -> None:
    """Whatever the write was about: the next one is based on a version that refuses the first."""
    async with cluster() as made, term(made, tmp_path) as running:
        held_up: list[Object] = []

        def lose_first(method: str, path: str, body: Any) -> web.Response | None:
            if method == "PATCH" and path == f"{GANGS}/g/status" and not held_up:
                held_up.append(body)
                return status(504, "Timeout", "the server took too long")
            return None

        made.server.intercept(lose_first)
        add_gang(made)
        await settled(running, lambda: is_let_go(made, "g-0", "g-1"))
        writes = [path for _, path in running.api.writes if path.startswith(GANGS)]

    assert writes[:2] == [f"{GANGS}/g/status", f"{GANGS}/g"]
    assert made.gang("g")["metadata"]["annotations"][names.GANG_FENCED]
    assert made.server.respond("PATCH", f"{GANGS}/g/status", {}, held_up[0]).status == 409


async def test_a_lost_status_of_a_running_gang_is_written_again_before_the_next_resync(tmp_path: Path) -> None:
    """No other gang waits, and the mirror will never show the write that nobody carried out."""
    async with cluster() as made, term(made, tmp_path) as running:
        add_gang(made)
        await settled(running, lambda: is_let_go(made, "g-0", "g-1"))
        lost: list[Object] = []

        def lose_once(method: str, path: str, body: Any) -> web.Response | None:
            if method != "PATCH" or path != f"{GANGS}/g/status" or lost:
                return None
            lost.append(body)
            return status(504, "Timeout", "the server took too long")

        made.server.intercept(lose_once)
        made.run_all("g", 2)
        await until(lambda: lost)
        await until(lambda: made.gang("g")["status"].get("wasReady"))


async def test_a_gang_of_which_a_member_lost_a_lease_before_the_gates_open_is_admitted_anew(tmp_path: Path) -> None:
    """Nobody is let go while another has three of four GPUs."""
    async with cluster() as made:
        add_gang(made)
        async with term(made, tmp_path, dies_at=RESERVED) as first:
            await settled(first, first.api.dead.is_set)
        lost = made.leases_of("g-1")[0]["metadata"]["name"]
        made.server.remove(f"{LEASES}/{lost}")
        async with term(made, tmp_path) as second:
            await settled(second, lambda: is_let_go(made, "g-0", "g-1"))

        assert made.gang("g")["status"]["admissions"] == 2


async def test_a_new_leader_renews_what_is_reserved_before_the_gates_open(tmp_path: Path) -> None:
    """It would run out, and be given to others, while kube-scheduler binds."""
    deadlines: list[str] = []

    def watch(method: str, path: str, body: Any) -> web.Response | None:
        if method == "PATCH" and path.startswith(f"{LEASES}/gpu-"):
            deadlines.append(body["metadata"]["annotations"].get(names.LEASE_DEADLINE, ""))
        return None

    async with cluster() as made:
        add_gang(made)
        async with term(made, tmp_path, dies_at=RESERVED) as first:
            await settled(first, first.api.dead.is_set)
        made.server.intercept(watch)
        begin = format_microtime(datetime.now(UTC))
        async with term(made, tmp_path) as second:
            await settled(second, lambda: is_let_go(made, "g-0", "g-1"))

    assert len(deadlines) >= 8
    assert min(deadlines) > begin


MEMBER, OTHER = Holder("team", "g-0", "uid-of-g-0"), Holder("team", "other", "uid-of-other")
IDLE = Holder(RESERVATION_NAMESPACE, "r", "uid-of-r")


@pytest.mark.parametrize(
    ("seen", "live", "is_renewed"),
    [
        pytest.param(MEMBER, MEMBER, True, id="its own"),
        pytest.param(None, MEMBER, True, id="its own, which the watch does not show yet"),
        pytest.param(IDLE, MEMBER, True, id="its own, taken over from a GpuReservation a moment ago"),
        pytest.param(OTHER, OTHER, False, id="another pod's"),
        pytest.param(None, OTHER, False, id="another pod's, which the watch does not show yet"),
        pytest.param(None, None, False, id="none"),
    ],
)
async def test_a_member_may_go_only_with_leases_that_are_its_own(
    seen: Holder | None, live: Holder | None, *, is_renewed: bool
) -> None:
    """Where the watch shows anything else, the API server is asked; what is another's is not written."""
    ledger, api = Ledger(), AsyncMock()
    if seen is not None:
        ledger.put_lease(make_lease("n1", 0, holder=seen))
    answer = orjson.dumps(lease_json("n1", 0, holder=live, version="2"))
    api.get.side_effect = [answer] if live is not None else NotFound("gone", status=404, reason="NotFound", path="")
    api.patch.return_value = answer
    mirror = cast("ClusterMirror", SimpleNamespace(ledger=ledger))
    context = Context(api, mirror, ManualClock(), Mock(), Mock(), str)

    assert await is_reserved(context, MEMBER.uid, ["gpu-n1-0"]) is is_renewed
    assert api.patch.await_count == is_renewed
    assert not await is_reserved(context, MEMBER.uid, [])


async def test_a_member_that_is_made_anew_before_the_gates_open_undoes_the_admission(tmp_path: Path) -> None:
    """Its successor is there at once and holds nothing: the other member is not let go before it does."""
    async with cluster("n1", "n2") as made:
        add_gang(made)
        async with term(made, tmp_path, dies_at=RESERVED) as first:
            await settled(first, first.api.dead.is_set)
        made.delete("g-1")
        made.add_member("g", 2)
        async with term(made, tmp_path) as second:
            await settled(second, lambda: is_let_go(made, "g-0", "g-2"))

        assert made.gang("g")["status"]["admissions"] == 2


@pytest.mark.parametrize("dies_at", [0, RESERVED], ids=["same-leader", "next-leader"])
async def test_nobody_is_let_go_when_another_goes_while_members_are_nominated(tmp_path: Path, dies_at: int) -> None:
    """The nomination of the second takes long; meanwhile the first, which has all of its GPUs, is deleted."""
    opened: list[str] = []
    async with cluster() as made:

        def watch(method: str, path: str, body: Any) -> web.Response | None:
            if method == "PATCH" and path.startswith(PODS) and "schedulingGates" in ((body or {}).get("spec") or {}):
                opened.append(path.rpartition("/")[2])
            return None

        made.server.intercept(watch)
        async with term(made, tmp_path, dies_at=dies_at) as first:
            if dies_at:
                add_gang(made)
                await settled(first, first.api.dead.is_set)
            else:
                await _delete_other_while_nominated(made, first)
        if dies_at:
            async with term(made, tmp_path) as second:
                await _delete_other_while_nominated(made, second)

    assert set(opened) == {"g-1", "g-2"}


async def test_nobody_is_let_go_while_another_could_not_be_nominated(tmp_path: Path) -> None:
    """It has changed meanwhile, and keeps all of its GPUs: the first gate opens after its second nomination."""
    async with cluster() as made:
        add_gang(made)
        async with term(made, tmp_path, dies_at=RESERVED) as first:
            await settled(first, first.api.dead.is_set)
        made.server.fail(answering(409, "Conflict"), containing=f"PATCH {PODS}/g-1/status")
        async with term(made, tmp_path) as second:
            await settled(second, lambda: is_let_go(made, "g-0", "g-1"))
            writes = [path for _, path in second.api.writes]

    begin = min(writes.index(f"{PODS}/{name}") for name in ("g-0", "g-1"))
    assert writes[:begin].count(f"{PODS}/g-1/status") == 2


async def test_nobody_is_let_go_when_another_goes_while_leases_are_renewed(tmp_path: Path) -> None:
    """All were nominated and nobody has lost a GPU, but the gang is not whole any more."""
    let_go_alone: list[str] = []
    async with cluster() as made:
        add_gang(made)
        async with term(made, tmp_path, dies_at=RESERVED) as first:
            await settled(first, first.api.dead.is_set)

        def watch(method: str, path: str, body: Any) -> web.Response | None:
            is_gate = method == "PATCH" and "schedulingGates" in ((body or {}).get("spec") or {})
            if is_gate and sum(one.startswith(PODS) for one in made.server.objects) < 2:
                let_go_alone.append(path)
            return None

        async with term(made, tmp_path) as second:

            async def hold_up(request: web.Request) -> web.Response:
                made.delete("g-0")
                await until(lambda: "uid-of-g-0" not in second.mirror.pods.by_uid)
                return made.server.respond("PATCH", request.path, {}, await request.json())

            made.server.intercept(watch)
            made.server.fail(hold_up, containing=f"PATCH {LEASES}/{made.leases_of('g-1')[0]['metadata']['name']}")
            await settled(second, lambda: let_go_alone or made.reason("g") == "WaitForQuorum")

    assert let_go_alone == []


async def _delete_other_while_nominated(made: GangHarness, running: Term) -> None:
    """Hold up the nomination of g-1 until the leader has seen that g-0 is gone; then have the gang made whole."""

    async def hold_up(request: web.Request) -> web.Response:
        made.delete("g-0")
        await until(lambda: "uid-of-g-0" not in running.mirror.pods.by_uid)
        return made.server.respond("PATCH", request.path, {}, await request.json())

    made.server.fail(hold_up, containing=f"PATCH {PODS}/g-1/status")
    if f"{GANGS}/g" not in made.server.objects:
        add_gang(made)
    await settled(running, lambda: made.reason("g") == "WaitForQuorum" and not made.leases_of("g-1"))
    assert made.is_gated("g-1")
    assert not made.pod("g-1")["status"].get("nominatedNodeName")  # kube-scheduler keeps no cpu for it
    made.add_member("g", 2)
    await settled(running, lambda: is_let_go(made, "g-1", "g-2"))


@pytest.mark.parametrize("when", ["before the leader starts", "when the leader asks for them"])
async def test_the_rest_of_a_gang_is_let_go_only_with_all_of_its_gpus(tmp_path: Path, when: str) -> None:
    """One member runs; a Lease of the other is gone: it gets four GPUs anew before its gate opens."""
    opened_with: list[int] = []
    async with cluster() as made:
        add_gang(made)
        async with term(made, tmp_path, dies_at=RESERVED) as first:
            await settled(first, first.api.dead.is_set)
        made.change_pod("g-0", spec={"schedulingGates": []})
        made.bind("g-0")
        made.make_ready("g-0")
        lost = made.leases_of("g-1")[0]["metadata"]["name"]

        def watch(method: str, path: str, body: Any) -> web.Response | None:
            if method == "PATCH" and path == f"{LEASES}/{lost}" and path in made.server.objects and not opened_with:
                made.server.remove(path)
                opened_with.append(0)
            if method == "PATCH" and path == f"{PODS}/g-1" and "schedulingGates" in (body.get("spec") or {}):
                opened_with.append(len(made.leases_of("g-1")))
            return None

        if when == "before the leader starts":
            made.server.remove(f"{LEASES}/{lost}")
            opened_with.append(0)
        made.server.intercept(watch)
        async with term(made, tmp_path) as second:
            await settled(second, lambda: is_let_go(made, "g-1"))

        assert opened_with == [0, 4]
        assert made.gang("g")["status"]["admissions"] == 1


async def test_a_suspension_that_arrives_after_the_pause_suspends_nobody(tmp_path: Path) -> None:
    """Its answer was lost, and all members went by themselves: the Job would stay suspended for ever."""
    held_up: list[Object] = []
    async with cluster() as made, term(made, tmp_path) as running:

        def hold_up(method: str, path: str, body: Any) -> web.Response | None:
            if method == "PATCH" and path == f"{JOBS}/job" and not held_up:
                held_up.append(body)
                for number in range(2):
                    made.delete(f"g-{number}")
                return status(504, "Timeout", "the server took too long")
            return None

        made.server.intercept(hold_up)
        made.server.put(f"{JOBS}/job", JOB)
        made.add_gang("g", 2, waitForPodsReady=QUICK)
        add_owned(made, range(2))
        await settled(running, lambda: held_up and made.reason("g") == "WaitForQuorum", seconds=20)

        assert held_up[0]["spec"] == {"suspend": True}
        assert made.server.respond("PATCH", f"{JOBS}/job", {}, held_up[0]).status == 409


async def test_gpus_that_are_kept_by_a_late_write_for_nobodys_turn_are_kept_no_longer(tmp_path: Path) -> None:
    """The turn was given up without an answer; the annotation arrives when it is over."""
    async with cluster() as made, term(made, tmp_path, settings={"gang_hold_seconds": 0.0}) as running:
        add_gang(made, count=3)
        await settled(running, lambda: made.reason("g") == "NeverFits")
        notes = made.pod("g-0")["metadata"]["annotations"]
        made.change_pod("g-0", metadata={"annotations": {**notes, names.KEPT: "n1:0,1,2,3"}})
        await settled(running, lambda: names.KEPT not in made.pod("g-0")["metadata"]["annotations"], seconds=20)
