"""Preemption for waiting gangs over an API server in memory: victims, kept GPUs, and time limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest
from aiohttp import web

from atoll.api import names
from atoll.kube.mirror import ClusterMirror
from controllers.context import Context
from controllers.gangs.cache import GangCache, GangRules
from controllers.gangs.preemption import GangPreemption
from tests.builders import claim_json, make_allocation, pod_json, report_json
from tests.cluster.gangs.builders import make_gang
from tests.cluster.gangs.test_replacements import PLACES, Ground
from tests.controllers.gang_harness import FULL, GANGS, GangHarness, Term, cluster, settled, term
from tests.controllers.harness import CLAIMS, PODS, REPORTS, strip_version
from tests.fakes.api_server import answering, status
from tests.fakes.clock import ManualClock, until

SOON: dict[str, Any] = {"preemption_delay_seconds": 0.0, "gang_hold_after_seconds": 0.0}
QUIET: dict[str, Any] = {"preemption": False, "gang_hold_after_seconds": 0.0}


async def run_single(made: GangHarness, running: Term, name: str, *devices: int, priority: int = 0) -> None:
    """Add a running pod without a gang, and wait until its GPUs stand in the ledger on disk too."""
    body = pod_json(name, gpus=len(devices), node="n1", allocation=make_allocation("n1", *devices), priority=priority)
    made.server.put(f"{PODS}/{name}", strip_version({**body, "status": {"phase": "Running"}}))
    await settled(running, lambda: len(made.leases_of(name)) == len(devices))


def add_gang(made: GangHarness, name: str, count: int, *, gpus: int = 4, priority: int = 0, **spec: Any) -> None:
    """Create a gang with all of its members."""
    made.add_gang(name, count, **spec)
    for number in range(count):
        made.add_member(name, number, gpus=gpus, priority=priority)


def is_let_go(made: GangHarness, name: str, count: int) -> bool:
    """Tell whether every member has its GPUs and may start."""
    members = [f"{name}-{number}" for number in range(count)]
    return all(not made.is_gated(member) and made.leases_of(member) for member in members)


def evicted(running: Term) -> set[str]:
    """Return the pods whose eviction was asked for."""
    return {path.split("/")[-2] for _, path in running.api.writes if path.endswith("/eviction")}


def told(made: GangHarness) -> set[str]:
    """Return the pods that were told when they end."""
    sent = zip(made.server.requests, made.server.bodies, strict=True)
    patches = ((path, body) for (method, path, _), body in sent if method == "PATCH" and path.startswith(PODS))
    return {
        path.rsplit("/", 1)[1]
        for path, body in patches
        if (body["metadata"].get("annotations") or {}).get(names.PREEMPTION_NOTICE)
    }


async def wait_gone(running: Term, *names: str) -> None:
    """Wait until pods are evicted."""
    uids = {f"uid-of-{name}" for name in names}
    await settled(running, lambda: not uids & running.mirror.ledger.pods.keys(), seconds=20)


async def wait_evicted(made: GangHarness, running: Term, *names: str) -> None:
    """Wait until pods are evicted; then the agent reports, twice, that they run no more."""
    await wait_gone(running, *names)
    for sequence in (1, 2):
        body = strip_version(report_json("n1"))
        evidence = {"podResourceVersion": str(10**6), "kubeletRead": True, "liveRead": True, "sequence": sequence}
        made.server.put(f"{REPORTS}/n1", {**body, "status": {**body["status"], "evidence": evidence}})
        await settled(running, lambda sequence=sequence: heard(running) == sequence)


def heard(running: Term) -> int:
    """Return the sequence of the last report that the controllers have seen."""
    report = running.mirror.reports.get("n1")
    return report.status.evidence.sequence if report is not None and report.status is not None else 0


def kept(made: GangHarness, gang: str, count: int) -> list[str]:
    """Return what is kept for each member, an empty text for nothing."""
    found = [made.pod(f"{gang}-{number}")["metadata"]["annotations"] for number in range(count)]
    return [str(one.get(names.KEPT) or "") for one in found]


async def run(made: GangHarness, running: Term, gang: str, count: int) -> None:
    """Wait until a gang is admitted, and let its members run."""
    await settled(running, lambda: is_let_go(made, gang, count))
    made.run_all(gang, count)
    await settled(running, lambda: made.reason(gang, names.CONDITION_PODS_READY) == "Started")


async def test_a_gang_below_goes_whole_for_one_above_it(tmp_path: Path) -> None:
    """Half of its GPUs would do: it goes whole, for the rest of it would run in vain, and waits again afterwards."""
    async with cluster() as made, term(made, tmp_path, settings=SOON) as running:
        add_gang(made, "low", 2)
        await run(made, running, "low", 2)
        add_gang(made, "high", 1, priority=10)
        await wait_evicted(made, running, "low-0", "low-1")
        await settled(running, lambda: is_let_go(made, "high", 1), seconds=20)

        assert evicted(running) == told(made) == {"low-0", "low-1"}
        assert made.reason("low", names.CONDITION_EVICTED) == "Preempted"
        assert made.reason("low") != "Admitted"


async def test_members_that_are_not_needed_go_first(tmp_path: Path) -> None:
    """Four members run, two are enough: the two highest ranks go, and the gang runs on."""
    async with cluster() as made, term(made, tmp_path, settings=SOON) as running:
        add_gang(made, "low", 4, gpus=2, minMember=2)
        await run(made, running, "low", 4)
        add_gang(made, "high", 1, priority=10)
        await wait_evicted(made, running, "low-2", "low-3")
        await settled(running, lambda: is_let_go(made, "high", 1), seconds=20)

        assert evicted(running) == {"low-2", "low-3"}
        assert made.reason("low") == "Admitted"


async def test_idle_gpus_are_combined_with_those_of_victims(tmp_path: Path) -> None:
    """Four GPUs are idle, four are held by two pods: the one of lower importance that suffices goes alone."""
    async with cluster() as made, term(made, tmp_path, settings=SOON) as running:
        await run_single(made, running, "mild", 0, 1)
        await run_single(made, running, "dear", 2, 3, priority=5)
        add_gang(made, "high", 3, gpus=2, priority=10)
        await wait_evicted(made, running, "mild")
        await settled(running, lambda: is_let_go(made, "high", 3), seconds=20)

        assert evicted(running) == {"mild"}


async def test_an_eviction_that_was_refused_is_tried_again(tmp_path: Path) -> None:
    """A disruption budget that allowed the trial may be spent by somebody else a moment later."""
    refused: list[str] = []

    def refuse_once(_method: str, path: str, body: Any) -> web.Response | None:
        if not path.endswith("/eviction") or body["deleteOptions"].get("dryRun") or refused:
            return None
        refused.append(path)
        return status(429, "TooManyRequests")

    async with cluster() as made, term(made, tmp_path, settings=SOON) as running:
        await run_single(made, running, "mild", 0, 1, 2, 3)
        made.server.intercept(refuse_once)
        add_gang(made, "high", 1, gpus=8, priority=10)
        await wait_evicted(made, running, "mild")
        await settled(running, lambda: is_let_go(made, "high", 1), seconds=20)
    assert refused == [f"{PODS}/mild/eviction"]


@pytest.mark.parametrize("options", [{"priority": 0}, {"priority": 10, "preemptionPolicy": "Never"}])
async def test_nobody_goes_for_a_gang_that_may_not_push(tmp_path: Path, options: dict[str, Any]) -> None:
    """Not for one of the same priority, so that no two gangs evict each other in turn; not where its pods say Never.
    What falls free is kept for it instead."""
    async with cluster() as made, term(made, tmp_path, settings=SOON) as running:
        await run_single(made, running, "running", 0, 1, 2, 3)
        made.add_gang("wide", 2)
        for number in range(2):
            made.add_member("wide", number, **options)
        await settled(running, lambda: all(kept(made, "wide", 2)), seconds=20)
        made.delete("running")
        await wait_evicted(made, running, "running")
        await settled(running, lambda: is_let_go(made, "wide", 2), seconds=20)

        assert evicted(running) == set()


async def test_what_falls_free_is_kept_from_single_pods(tmp_path: Path) -> None:
    """The idle half of a machine is nobody's while the gang that is first in order waits for the other half."""
    async with cluster() as made, term(made, tmp_path, settings=QUIET) as running:
        await run_single(made, running, "running", 0, 1, 2, 3)
        add_gang(made, "wide", 2)
        await settled(running, lambda: all(kept(made, "wide", 2)), seconds=20)

        ledger = running.mirror.ledger
        await settled(running, lambda: ledger.free("n1", now_seconds=0.0, asking_priority=0) == 0)
        assert ledger.free("n1", now_seconds=0.0, asking_priority=1) != 0, "more important pods are not kept off"
        assert not any(made.leases_of(f"wide-{number}") for number in range(2)), "a gang that waits holds nothing"


async def test_a_turn_ends(tmp_path: Path) -> None:
    """The pod that is waited for stays: after the time that the administrator gives, nothing is kept any more."""
    async with cluster() as made, term(made, tmp_path, settings={**QUIET, "gang_hold_seconds": 2.0}) as running:
        await run_single(made, running, "running", 0, 1, 2, 3)
        add_gang(made, "wide", 2)
        await settled(running, lambda: all(kept(made, "wide", 2)), seconds=20)
        await settled(running, lambda: not any(kept(made, "wide", 2)), seconds=20)


async def test_nothing_is_kept_where_the_administrator_does_not_want_it(tmp_path: Path) -> None:
    """gang_hold_seconds 0: a smaller gang takes what is idle, however long the large one waits."""
    async with cluster() as made, term(made, tmp_path, settings={**QUIET, "gang_hold_seconds": 0.0}) as running:
        await run_single(made, running, "running", 0, 1, 2, 3)
        add_gang(made, "wide", 2)
        await settled(running, lambda: made.reason("wide") == "WaitForRoom")
        add_gang(made, "small", 1)
        await settled(running, lambda: is_let_go(made, "small", 1))

        assert kept(made, "wide", 2) == ["", ""]


async def test_nothing_is_kept_for_a_gang_that_never_fits(tmp_path: Path) -> None:
    """It would keep GPUs from others for nothing."""
    async with cluster() as made, term(made, tmp_path, settings=SOON) as running:
        await run_single(made, running, "running", 0, 1, 2, 3)
        add_gang(made, "huge", 3, priority=10)
        await settled(running, lambda: made.reason("huge") == "NeverFits")
        add_gang(made, "small", 1)
        await settled(running, lambda: is_let_go(made, "small", 1))

        assert kept(made, "huge", 3) == ["", "", ""]
        assert evicted(running) == set()


async def test_a_new_leader_takes_off_what_it_does_not_know(tmp_path: Path) -> None:
    """Nobody knows any more since when it is kept: the gang has its turn anew, or nobody has."""
    async with cluster() as made:
        async with term(made, tmp_path, settings=QUIET) as running:
            await run_single(made, running, "running", 0, 1, 2, 3)
            add_gang(made, "wide", 2)
            await settled(running, lambda: all(kept(made, "wide", 2)), seconds=20)
        async with term(made, tmp_path, settings={**QUIET, "gang_hold_seconds": 0.0}) as running:
            await settled(running, lambda: not any(kept(made, "wide", 2)), seconds=20)


@pytest.mark.parametrize("refusals", [0, 3])
async def test_what_is_kept_for_a_gang_that_nobody_led_to_its_end_is_given_back(tmp_path: Path, refusals: int) -> None:
    """Its GpuGang is deleted while nobody leads, and its pods stay: no gang waits then, and no GPU is kept for them."""
    async with cluster() as made:
        async with term(made, tmp_path, settings=QUIET) as running:
            await run_single(made, running, "running", 0, 1, 2, 3)
            add_gang(made, "wide", 2)
            await settled(running, lambda: all(kept(made, "wide", 2)), seconds=20)
        made.server.remove(f"{GANGS}/wide")
        made.server.fail(answering(500, "InternalError"), times=refusals, containing=f"PATCH {PODS}/wide")
        async with term(made, tmp_path, settings=QUIET):
            await until(lambda: not any(kept(made, "wide", 2)), timeout_seconds=20)


PAIRS = "h100-nvl-8"
"""Eight cards, bridged in pairs 0-1, 2-3, 4-5, 6-7."""


async def test_a_member_that_takes_no_write_stops_no_other_gang(tmp_path: Path) -> None:
    """A dead webhook of one namespace answers every change of its pods by 500: gangs elsewhere are admitted."""
    async with cluster("n1", "n2") as made:
        add_gang(made, "odd", 1, gpus=8)
        path = f"{PODS}/odd-0"
        stored = made.server.objects[path]
        annotations = {**stored["metadata"]["annotations"], names.KEPT: "n1:0,1,2,3"}
        made.server.put(path, {**stored, "metadata": {**stored["metadata"], "annotations": annotations}})
        made.server.fail(answering(500, "InternalError"), times=10_000, containing=f"PATCH {path}")
        add_gang(made, "good", 1, gpus=4)
        async with term(made, tmp_path, settings=QUIET) as running:
            await settled(running, lambda: is_let_go(made, "good", 1), seconds=20)


def put_runner(made: GangHarness, name: str, node: str, device: int, *, priority: int = 0, gang: str = "") -> None:
    """Put a running pod with one GPU, of a gang where one is named."""
    notes = {names.GANG: gang} if gang else {}
    allocation = make_allocation(node, device)
    body = pod_json(name, gpus=1, node=node, allocation=allocation, priority=priority, annotations=notes)
    ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    made.server.put(f"{PODS}/{name}", strip_version({**body, "status": ready}))


def put_seeker(made: GangHarness, *, priority: int) -> None:
    """Put a pod that wants a pair, and that kube-scheduler has set aside."""
    made.server.put(f"{CLAIMS}/pair", claim_json("pair", uid="uid-of-pair", count=2, policy="island"))
    notes = {names.CLAIM: "pair", names.CLAIM_UID: "uid-of-pair"}
    refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    body = pod_json("seeker", gpus=2, priority=priority, annotations=notes)
    made.server.put(f"{PODS}/seeker", strip_version({**body, "status": {"phase": "Pending", "conditions": [refused]}}))


@pytest.mark.parametrize(
    ("count", "gone", "reason"),
    [
        pytest.param(3, {"low-0"}, "Admitted", id="a member that is not needed goes alone"),
        pytest.param(2, {"low-0", "low-1"}, "WaitForRelease", id="where all are needed the gang goes whole"),
    ],
)
async def test_a_single_pod_that_wants_an_island_takes_no_gang_below_its_minimum(
    tmp_path: Path, count: int, gone: set[str], reason: str
) -> None:
    """Of each pair one GPU is held; only the gang's member there may go. The others are on a machine that is full.
    Two members are enough."""
    async with cluster("n1", "n2", profile=PAIRS) as made:
        for number in range(3):
            put_runner(made, f"dear-{number}", "n1", 2 * number, priority=10)
        made.add_gang("low", count, minMember=2)
        put_runner(made, "low-0", "n1", 6, gang="low")
        for number in range(1, count):
            put_runner(made, f"low-{number}", "n2", number, gang="low")
        for device in (0, *range(count, 8)):
            put_runner(made, f"full-{device}", "n2", device, priority=10)
        async with term(made, tmp_path, settings={"preemption_delay_seconds": 0.0}) as running:
            await settled(running, lambda: made.reason("low") == "Admitted")
            put_seeker(made, priority=5)
            told = (names.REASON_GPUS_FREEING, "seeker")
            await settled(running, lambda: told in running.notes.recorded, seconds=20)
            await wait_gone(running, *gone)

            assert evicted(running) == gone
            assert made.reason("low") == reason


class Queue:
    """Gangs that wait for two of four machines, which others fill: all that their preemption sees, with time in our
    hand."""

    def __init__(self, *gangs: str, **rules: float) -> None:
        full, sick = ("n1", "n2", "n3", "n4"), ("n5", "n6")
        ground = Ground({}, full=full, sick=sick, podSets=[{"name": "workers", "count": 2}])
        self.request = ground.request(0, 1)
        for member in self.request.chosen:
            ground.ledger.put_pod(member.pod)
        self.gangs = {("team", name): make_gang(2, name=name) for name in gangs}
        self.candidates = set(self.gangs)
        cache = SimpleNamespace(
            rules=GangRules(preemption=False, **rules),
            mirror=SimpleNamespace(ledger=ground.ledger),
            candidates=self.candidates,
            busy=set(),
            gang=self.gangs.get,
            view=lambda gang: replace(self.request.view, gang=gang),
            admitted=dict,
            note_capacity=lambda: None,
        )
        self.clock, self.api, self.events = ManualClock(), AsyncMock(), Mock()
        context = Context(self.api, cast("ClusterMirror", cache.mirror), self.clock, self.events, Mock(), str)
        self.preemption = GangPreemption(context, cast("GangCache", cache))

    async def try_gang(self, name: str, *, priority: int = 0, **parts: Any) -> None:
        """Let a gang find no place, so that something may be kept for it. `parts`: of its request."""
        view = replace(self.request.view, gang=self.gangs["team", name])
        specs = ((one, msgspec.structs.replace(one.pod.spec, priority=priority)) for one in self.request.chosen)
        chosen = tuple(replace(one, pod=msgspec.structs.replace(one.pod, spec=spec)) for one, spec in specs)
        await self.preemption.try_preempt(("team", name), replace(self.request, view=view, chosen=chosen, **parts))

    def written(self) -> list[str | None]:
        """Return what was written on members, in order: what is kept, None for nothing any more."""
        return [call.args[1]["metadata"]["annotations"][names.KEPT] for call in self.api.patch.await_args_list]

    def told(self) -> list[str]:
        """Return the reasons of the events, in order."""
        return [call.kwargs["reason"] for call in self.events.record.call_args_list]


@pytest.mark.parametrize(
    ("ahead", "is_kept"),
    [
        pytest.param("waits", False, id="the gang ahead of it waits, and rests at this moment"),
        pytest.param("is admitted", True, id="the gang ahead of it found its place"),
        pytest.param("is deleted", True, id="the gang ahead of it is gone"),
    ],
)
async def test_gpus_are_kept_for_the_gang_that_is_first_in_order(ahead: str, *, is_kept: bool) -> None:
    """Both have waited long enough when the second one is tried."""
    queue = Queue("a", "g")
    await queue.try_gang("a")
    await queue.try_gang("g")
    await queue.clock.advance(GangRules().hold_after_seconds)
    if ahead == "is admitted":
        queue.candidates.discard(("team", "a"))
    if ahead == "is deleted":
        del queue.gangs["team", "a"]

    await queue.try_gang("g")

    assert len(queue.written()) == (2 if is_kept else 0), "one annotation per member"


@pytest.mark.parametrize(("priority", "is_given_up"), [(0, False), (1, True)])
async def test_what_is_kept_for_a_gang_is_given_up_only_for_one_above_it(priority: int, *, is_given_up: bool) -> None:
    """One of its priority waits for its turn, though it comes first in order: else two would end each other's."""
    queue = Queue("a", "g", hold_after_seconds=0.0)
    await queue.try_gang("g")
    await queue.try_gang("a", priority=priority)

    assert [text is not None for text in queue.written()] == [True, True, *[False, False, True, True] * is_given_up]


async def test_a_gang_for_which_nothing_can_be_kept_holds_up_none_behind_it() -> None:
    """It is the first in order, and there is no machine on which it could run: the next one has its turn."""
    queue = Queue("a", "g", preemption_delay_seconds=0.0, hold_after_seconds=0.0)
    await queue.try_gang("a", cluster=Ground({}, sick=tuple(PLACES)).land())
    await queue.try_gang("g")

    assert len(queue.written()) == 2


@pytest.mark.parametrize(
    ("end", "is_open", "is_taken_off", "told"),
    [
        pytest.param("", True, False, [], id="it waits on"),
        pytest.param("admitted", False, False, [], id="it got what was kept, and nothing has failed"),
        pytest.param("too late", False, True, [names.REASON_PREEMPTION_ENDED], id="it was not admitted in time"),
        pytest.param("deleted", False, True, [], id="it is gone, and its pods stay"),
    ],
)
async def test_how_keeping_gpus_for_a_gang_ends(
    end: str, *, is_open: bool, is_taken_off: bool, told: list[str]
) -> None:
    """Whatever ends it, another gang may be next."""
    queue = Queue("g")
    await queue.try_gang("g")
    await queue.clock.advance(GangRules().hold_after_seconds)
    await queue.try_gang("g")
    if end == "admitted":
        condition = {
            "type": names.CONDITION_ADMITTED,
            "status": "True",
            "reason": "Admitted",
            "lastTransitionTime": FULL,
        }
        queue.gangs["team", "g"] = make_gang(2, status={"conditions": [condition]})
        queue.candidates.clear()
    if end == "too late":
        await queue.clock.advance(GangRules().hold_seconds)
    if end == "deleted":
        del queue.gangs["team", "g"]

    await queue.preemption.reconcile()

    assert queue.preemption.is_open is is_open
    assert queue.written()[2:] == [None, None] * is_taken_off
    assert queue.told() == [names.REASON_GPUS_FREEING, *told]


async def test_gpus_are_not_kept_for_a_member_that_changed_since_it_was_judged(tmp_path: Path) -> None:
    """The first annotation meets a newer version of its pod: the write fails, nothing stays kept, and nobody goes."""
    async with cluster() as made:
        changed: list[str] = []

        def change_first(method: str, path: str, body: Any) -> None:
            if method == "PATCH" and names.KEPT in body["metadata"].get("annotations", {}) and not changed:
                changed.append(path)
                made.server.put(path, made.server.objects[path])

        made.server.intercept(change_first)
        async with term(made, tmp_path, settings=SOON) as running:
            await run_single(made, running, "low", *range(4))
            add_gang(made, "high", 2, priority=10)
            await settled(running, lambda: (names.REASON_PREEMPTION_ENDED, "high") in running.notes.recorded)

            assert kept(made, "high", 2) == ["", ""]
            assert f"{PODS}/low" in made.server.objects
