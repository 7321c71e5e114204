"""Preemption by the controllers: evictions in the right order whatever write is lost, and none without use."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import msgspec
import orjson
import pytest
from aiohttp import web

from atoll.api import names
from atoll.api.times import seconds_of
from atoll.cluster.leases import Holder
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import Pod, PodStatus
from atoll.cluster.soft_reservations import SoftReservation
from atoll.kube.errors import Conflict
from controllers.eviction_progress import (
    BUDGET_PATIENCE_SECONDS,
    UNUSED_SECONDS,
    EvictionAttempt,
    EvictionStatus,
    EvictionStep,
    next_step,
)
from controllers.preemption import (
    ALL,
    ATTEMPTS_MAX,
    IN_FLIGHT_MAX,
    PAUSE_SECONDS,
    PLANNED_MAX,
    PreemptionReconciler,
)
from controllers.settings import ControllersSettings
from tests.builders import (
    claim_json,
    lease_json,
    make_allocation,
    make_claim,
    make_pod,
    make_report,
    pod_json,
    report_json,
)
from tests.controllers.harness import (
    CLAIMS,
    HEARTBEATS,
    LEASES,
    PODS,
    REPORTS,
    ControllerHarness,
    InMemoryServer,
    running_controllers,
    strip_version,
)
from tests.fakes.api_server import answering
from tests.fakes.clock import ManualClock, until
from tests.service.test_metrics import samples

BUDGETS = "/apis/policy/v1/namespaces/team/poddisruptionbudgets"
PAIRS = "h100-nvl-8"
REFUSED = {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]}


def put_holder(
    server: InMemoryServer, name: str, device_id: int, priority: int, *, on: str = "n1", **options: Any
) -> None:
    """Put a running pod with one GPU of a node and its Lease on the server."""
    allocation = make_allocation(on, device_id)
    body = pod_json(name, node=on, phase="Running", priority=priority, allocation=allocation, **options)
    server.put(f"{PODS}/{name}", strip_version(body))
    lease = lease_json(on, device_id, holder=Holder("team", name, f"uid-of-{name}"))
    server.put(f"{LEASES}/gpu-{on}-{device_id}", strip_version(lease))


def add_second_node(server: InMemoryServer) -> None:
    """Another machine like the first, where e is the least important, and above a."""
    server.put(f"{REPORTS}/n2", strip_version(report_json("n2", PAIRS)))
    node = server.objects["/api/v1/nodes/n1"]
    server.put("/api/v1/nodes/n2", {**node, "metadata": {"name": "n2", "uid": "uid-of-n2"}})
    beat = server.objects[f"{HEARTBEATS}/n1"]
    server.put(f"{HEARTBEATS}/n2", {"metadata": {"name": "n2"}, "spec": {**beat["spec"], "holderIdentity": "n2"}})
    put_holder(server, "e", 0, 5, on="n2")
    for number, name in enumerate("fgh", start=1):
        put_holder(server, name, 2 * number, 10, on="n2")


def put_waiting(server: InMemoryServer, *, priority: int = 10, **options: Any) -> None:
    """Put a pod that wants a pair, and that kube-scheduler has set aside."""
    claim = claim_json("pair", uid="uid-of-pair", count=2, policy="island")
    server.put(f"{CLAIMS}/pair", claim)
    annotations = {names.CLAIM: "pair", names.CLAIM_UID: "uid-of-pair", **options.pop("annotations", {})}
    body = pod_json("high", gpus=2, priority=priority, annotations=annotations, **options)
    server.put(f"{PODS}/high", strip_version({**body, "status": REFUSED}))


def setup(server: InMemoryServer, **options: Any) -> None:
    """One GPU of each of four pairs is held: by a, the least important, and by three that may not go."""
    server.put(f"{REPORTS}/n1", strip_version(report_json("n1", PAIRS)))
    allocatable = {"cpu": "4", "pods": "10", "gpu.scheduling/gpu": "8"}
    server.put(
        "/api/v1/nodes/n1", {"metadata": {"name": "n1", "uid": "uid-of-n1"}, "status": {"allocatable": allocatable}}
    )
    put_holder(server, "a", 0, 0)
    for number, name in enumerate("bcd", start=1):
        put_holder(server, name, 2 * number, 10)
    put_waiting(server, **options)


def evictions(running: ControllerHarness) -> set[str]:
    """Return the pods whose eviction was asked for, tries included."""
    return {path.split("/")[-2] for _, path in running.api.writes if path.endswith("/eviction")}


def kept(running: ControllerHarness) -> str | None:
    """Return what is kept for the waiting pod."""
    text: str | None = running.server.objects[f"{PODS}/high"]["metadata"].get("annotations", {}).get(names.KEPT)
    return text


def is_gone(running: ControllerHarness, name: str) -> bool:
    """Tell whether a pod was evicted."""
    return f"{PODS}/{name}" not in running.server.objects


def prove_nothing_runs(running: ControllerHarness, sequence: int) -> None:
    """Publish a complete reading of the machine that shows no pod."""
    body = running.server.objects[f"{REPORTS}/n1"]
    evidence = {"sequence": sequence, "podResourceVersion": str(running.server.version)}
    status = {**body["status"], "pods": [], "evidence": {**evidence, "liveRead": True, "kubeletRead": True}}
    running.server.put(f"{REPORTS}/n1", {**body, "status": status})


@pytest.mark.parametrize(("fails_at", "is_after"), [(n, after) for n in range(5) for after in (False, True)])
async def test_least_important_pod_goes_and_its_pair_is_kept(tmp_path: Path, fails_at: int, *, is_after: bool) -> None:
    """Whichever write is lost: one pod is evicted, no other, and its pair is kept for the waiting one."""
    async with running_controllers(tmp_path, setup, fails_at=fails_at, is_after=is_after) as running:
        await running.settled(lambda: is_gone(running, "a"))
        assert kept(running) == "n1:0,1"
        await running.settled(lambda: (names.REASON_GPUS_FREEING, "high") in running.notes.recorded or fails_at)
        assert evictions(running) == {"a"}
        assert [is_gone(running, name) for name in "bcd"] == [False] * 3


async def test_waiting_pod_is_woken_once_the_gpus_are_free(tmp_path: Path) -> None:
    """The victim's Lease ends on proof; then the pod for which it went is woken, and nobody else is."""

    def crowd(server: InMemoryServer) -> None:
        setup(server)
        thief = pod_json(
            "thief", gpus=2, priority=0, annotations=server.objects[f"{PODS}/high"]["metadata"]["annotations"]
        )
        server.put(f"{PODS}/thief", strip_version({**thief, "status": REFUSED}))

    async with running_controllers(tmp_path, crowd) as running:
        await running.settled(lambda: is_gone(running, "a"))
        for sequence in range(1, 100):
            prove_nothing_runs(running, sequence)
            with contextlib.suppress(TimeoutError):
                await until(lambda: "gpu-n1-0" not in running.held(), timeout_seconds=0.5)
                break
        await running.settled(lambda: names.WOKEN in running.server.objects[f"{PODS}/high"]["metadata"]["annotations"])
        assert names.WOKEN not in running.server.objects[f"{PODS}/thief"]["metadata"]["annotations"]
        assert kept(running) == "n1:0,1"


async def test_a_pod_that_got_its_gpus_is_counted_and_makes_way_for_the_next(tmp_path: Path) -> None:
    """Only so many pods at a time may have GPUs freed: one that is bound is none of them any more."""
    async with running_controllers(tmp_path, setup) as running:
        preemption = running.reconciler("preemption")
        await running.settled(lambda: preemption.attempts)
        notes = running.server.objects[f"{PODS}/high"]["metadata"]["annotations"]
        running.put_pod("high", node="n1", gpus=2, allocation=make_allocation("n1", 0, 1), annotations=notes)
        await running.settled(lambda: not preemption.attempts)

        assert samples(running.metrics)["atoll_controllers_preemptions_total", "placed"] == 1.0


async def test_what_was_begun_is_seen_through_by_the_next_leader(tmp_path: Path) -> None:
    """The annotation is the plan: a leader that finds it evicts who holds those GPUs, without a plan of its own."""

    def begun(server: InMemoryServer) -> None:
        setup(server, annotations={names.KEPT: "n1:0,1"})

    async with running_controllers(tmp_path, begun) as running:
        await running.settled(lambda: is_gone(running, "a"))
        await running.settled(lambda: (names.REASON_PREEMPTED, "a") in running.notes.recorded)
        assert evictions(running) == {"a"}


async def test_nobody_is_evicted_any_more_for_a_pod_whose_claim_is_gone(tmp_path: Path) -> None:
    """It could not be bound: nothing is kept for it, and it learns why."""

    def unclaimed(server: InMemoryServer) -> None:
        setup(server, annotations={names.KEPT: "n1:0,1"})
        server.remove(f"{CLAIMS}/pair")

    async with running_controllers(tmp_path, unclaimed) as running:
        await running.settled(lambda: kept(running) is None)
        await running.settled(lambda: running.notes.notes_on(names.REASON_PREEMPTION_ENDED, "high"))

        (told,) = running.notes.notes_on(names.REASON_PREEMPTION_ENDED, "high")
        assert told.startswith("the pod's request cannot be served: ")
        assert evictions(running) == set()


async def test_pod_is_told_when_its_gpus_went_to_somebody_above_it(tmp_path: Path) -> None:
    """A pod that may not be evicted holds what is kept: nothing is kept any more, and the pod learns why."""

    def taken(server: InMemoryServer) -> None:
        setup(server, annotations={names.KEPT: "n1:2,3"})

    async with running_controllers(tmp_path, taken) as running:
        await running.settled(lambda: (names.REASON_PREEMPTION_ENDED, "high") in running.notes.recorded)
        assert kept(running) is None
        assert not is_gone(running, "b")
        assert samples(running.metrics)["atoll_controllers_preemptions_total", "failed"] == 1.0


async def test_pod_whose_attempt_failed_is_left_alone_for_a_while(tmp_path: Path) -> None:
    """What spoiled one attempt may spoil the next: no pod of another node is evicted sooner than for a new pod."""

    def taken(server: InMemoryServer) -> None:
        setup(server, annotations={names.KEPT: "n1:2,3"})
        add_second_node(server)

    async with running_controllers(tmp_path, taken) as running:
        await running.settled(lambda: (names.REASON_PREEMPTION_ENDED, "high") in running.notes.recorded)
        reconciler = running.reconciler("preemption")
        await running.settled(lambda: reconciler._refused_at)
        assert await reconciler.reconcile(ALL) > ControllersSettings().preemption_delay_seconds
        assert kept(running) is None
        assert evictions(running) == set()


async def test_victim_is_told_when_it_ends_before_it_is_evicted(tmp_path: Path) -> None:
    """Its containers read the end of its grace period in the pod's annotation; whoever goes on is told nothing."""

    def graceful(server: InMemoryServer) -> None:
        setup(server)
        put_holder(server, "a", 0, 0, terminationGracePeriodSeconds=120)

    async with running_controllers(tmp_path, graceful) as running:
        await running.settled(lambda: is_gone(running, "a"))
        sent = list(zip(running.server.requests, running.server.bodies, strict=True))
    steps = [(method, body) for (method, path, _), body in sent if path in (f"{PODS}/a", f"{PODS}/a/eviction")]
    told = [number for number, (method, _) in enumerate(steps) if method == "PATCH"]
    assert told == [len(steps) - 2], "told once, right before the eviction that counts"
    assert not steps[-1][1]["deleteOptions"].get("dryRun")
    assert seconds_of(steps[told[0]][1]["metadata"]["annotations"][names.PREEMPTION_NOTICE]) is not None


async def test_notice_that_nothing_followed_is_withdrawn(tmp_path: Path) -> None:
    """A controller died between notice and eviction, and the plan is gone: the training must not think that it ends."""
    long_ago = {names.PREEMPTION_NOTICE: "2020-01-01T00:00:00Z"}

    def left(server: InMemoryServer) -> None:
        setup(server, priority=0)
        put_holder(server, "a", 0, 0, annotations=long_ago)
        put_holder(server, "b", 2, 10, annotations={names.PREEMPTION_NOTICE: "2999-01-01T00:00:00Z"})

    async with running_controllers(tmp_path, left) as running:
        notice = lambda name: running.server.objects[f"{PODS}/{name}"]["metadata"]["annotations"].get(  # noqa: E731
            names.PREEMPTION_NOTICE
        )
        await running.settled(lambda: notice("a") is None)
        assert notice("b") is not None


@pytest.mark.parametrize(
    "obstacle",
    [
        pytest.param({"budget": 0}, id="a-budget"),
        pytest.param({"cpu": "5"}, id="no-cpu-for-it"),
        pytest.param({"priority": 0}, id="an-equal"),
        pytest.param({"options": {"preemptionPolicy": "Never"}}, id="it-may-not-preempt"),
        pytest.param({"options": {"affinity": {"podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone"}]}}}}, id="nobody-can-judge-it"),
        pytest.param({"dry_run": True}, id="the-eviction-would-be-refused"),
    ],
)  # fmt: skip
async def test_nobody_is_evicted_in_vain(tmp_path: Path, obstacle: dict[str, Any]) -> None:
    """Before the first eviction everything is asked: budgets, the node's cpu, what kube-scheduler alone can judge."""

    def obstruct(server: InMemoryServer) -> None:
        setup(server, priority=obstacle.get("priority", 10), **obstacle.get("options", {}))
        if "cpu" in obstacle:
            put_waiting(server, overhead={"cpu": obstacle["cpu"]})
        if "budget" in obstacle:
            put_holder(server, "a", 0, 0, labels={"app": "x"})
            spec, status = {"selector": {"matchLabels": {"app": "x"}}}, {"disruptionsAllowed": 0}
            server.put(f"{BUDGETS}/b", {"metadata": {"name": "b"}, "spec": spec, "status": status})
        if "dry_run" in obstacle:
            server.fail(answering(429, "TooManyRequests"), times=50, containing="/eviction")

    async with running_controllers(tmp_path, obstruct) as running:
        asked = lambda: running.server.count("GET /apis/policy/v1/poddisruptionbudgets")  # noqa: E731
        if obstacle.keys() & {"budget", "cpu", "dry_run"}:
            await running.settled(asked)
        if "affinity" in obstacle.get("options", {}):
            await running.settled(lambda: (names.REASON_PREEMPTION_ENDED, "high") in running.notes.recorded)
        for loop in running.loops:
            await loop.run_once()
        assert kept(running) is None
        assert not is_gone(running, "a")


async def test_budget_that_changes_its_mind_delays_the_eviction(tmp_path: Path) -> None:
    """The trial was allowed, the eviction is refused: it is asked for again while the GPUs stay kept, and the victim is
    told that it goes on."""
    asked: list[bool] = []

    async def refuse(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        is_trial = bool(body["deleteOptions"].get("dryRun"))
        asked.append(is_trial)
        if is_trial:
            return web.json_response({}, status=201)
        return web.json_response({"code": 429}, status=429, headers={"Retry-After": "1"})

    def prepare(server: InMemoryServer) -> None:
        setup(server)
        server.fail(refuse, times=5, containing="/eviction")

    async with running_controllers(tmp_path, prepare) as running:
        await running.settled(lambda: is_gone(running, "a"))
        assert asked == [True, True, False, True, False]
        assert [path for method, path in running.api.writes if method == "PATCH" and path.endswith("/a")] == [
            f"{PODS}/a"
        ] * 5, "told, taken back, told, taken back, told"


OBSTINATE = {
    "two-budgets": answering(500, "InternalError"),
    "a-webhook-forbids-it": answering(403, "Forbidden"),
    "a-webhook-finds-it-odd": answering(422, "Invalid"),
}


@pytest.mark.parametrize("answer", OBSTINATE.values(), ids=OBSTINATE)
async def test_pod_that_nobody_can_evict_is_left_out(tmp_path: Path, answer: Any) -> None:
    """The eviction API refuses a pod with two budgets by 500, a webhook as it likes: the next best node is tried."""

    def prepare(server: InMemoryServer) -> None:
        setup(server)
        add_second_node(server)
        server.fail(answer, times=10_000, containing=f"POST {PODS}/a/eviction")

    async with running_controllers(tmp_path, prepare) as running:
        await running.settled(lambda: is_gone(running, "e"))
        assert kept(running) == "n2:0,1"
        assert not is_gone(running, "a")


@pytest.mark.parametrize("answer", OBSTINATE.values(), ids=OBSTINATE)
async def test_pod_that_takes_no_write_keeps_no_other_waiting(tmp_path: Path, answer: Any) -> None:
    """An admission webhook of one namespace may refuse every change of its pods: others are served all the same."""

    def prepare(server: InMemoryServer) -> None:
        setup(server)
        annotations = server.objects[f"{PODS}/high"]["metadata"]["annotations"] | {names.KEPT: "n1:2,3"}
        frozen = pod_json("frozen", gpus=2, priority=10, annotations=annotations)
        server.put(f"{PODS}/frozen", strip_version({**frozen, "status": REFUSED}))
        server.fail(answer, times=10_000, containing=f"PATCH {PODS}/frozen")

    async with running_controllers(tmp_path, prepare) as running:
        await running.settled(lambda: is_gone(running, "a"))
        assert kept(running) == "n1:0,1"


async def test_pods_that_nobody_can_help_do_not_use_up_every_pass(tmp_path: Path) -> None:
    """More pods than one pass plans for, more important and too large for any node: the next one is helped all the
    same."""

    def prepare(server: InMemoryServer) -> None:
        setup(server)
        annotations = server.objects[f"{PODS}/high"]["metadata"]["annotations"]
        for number in range(PLANNED_MAX):
            name = f"greedy-{number}"
            body = pod_json(name, gpus=2, priority=20, annotations=annotations, overhead={"cpu": "5"})
            server.put(f"{PODS}/{name}", strip_version({**body, "status": REFUSED}))

    async with running_controllers(tmp_path, prepare) as running:
        await running.settled(lambda: is_gone(running, "a"))
        assert kept(running) == "n1:0,1"


# How an attempt goes on


def test_only_holders_of_the_kept_gpus_are_victims() -> None:
    """Who holds other GPUs of the node is left alone; an ending holder is waited for, and is nobody's victim."""
    ledger = Ledger()
    ledger.put_report(make_report("n1"))
    ledger.put_heartbeat("n1", 1000.0, 60.0)
    for name, device in (("a", 0), ("b", 1), ("c", 2)):
        bound = make_pod(name, uid=name, node="n1", priority=1, allocation=make_allocation("n1", device))
        ledger.put_pod(bound)
    waiting = make_pod("high", uid="high", priority=9)

    def status(*kept: int) -> EvictionStatus:
        return EvictionStatus.of(ledger, waiting, SoftReservation("n1", kept, 9), 1000.0)

    assert [pod.metadata.name for pod in status(0, 3).victims] == ["a"]
    assert {pod.metadata.name for pod in status(0, 1).victims} == {"a", "b"}
    assert status(3, 4) == EvictionStatus(is_free=True)
    ledger.drop_report("n1")
    assert status(0, 3) == EvictionStatus(is_blind=True)


VICTIM = make_pod("v", uid="v")


def after(seconds: float, outlook: EvictionStatus, **attempt: Any) -> EvictionStep | str:
    """Return the next step of an attempt that began `seconds` ago."""
    return next_step(EvictionAttempt(1000.0 - seconds, **attempt), outlook, 1000.0, timeout_seconds=600.0)


@pytest.mark.parametrize(
    ("seconds", "outlook", "attempt", "expected"),
    [
        pytest.param(0, EvictionStatus((VICTIM,)), {}, EvictionStep((VICTIM,)), id="evict"),
        pytest.param(1, EvictionStatus((VICTIM,)), {"evicted": {"v"}}, EvictionStep(), id="evicted-and-not-seen-yet"),
        pytest.param(1, EvictionStatus((VICTIM,)), {"again_seconds": {"v": 1005.0}}, EvictionStep(),
                     id="refused-a-moment-ago"),
        pytest.param(1, EvictionStatus((VICTIM,)), {"again_seconds": {"v": 999.0}}, EvictionStep((VICTIM,)),
                     id="ask-again"),
        pytest.param(99, EvictionStatus((VICTIM,)),
                     {"first_refusal_seconds": {"v": 1000.0 - BUDGET_PATIENCE_SECONDS - 1}},
                     "a disruption budget keeps team/v", id="a-budget-that-does-not-give"),
        pytest.param(1, EvictionStatus(), {}, EvictionStep(), id="ending-pods-take-their-time"),
        pytest.param(601, EvictionStatus(), {}, "the GPUs were not free within 600 s", id="too-much-time"),
        pytest.param(1, EvictionStatus(is_taken=True), {},
                     "some of the GPUs are held by a pod that may not be evicted for it", id="taken"),
        pytest.param(1, EvictionStatus(is_blind=True), {}, EvictionStep(), id="the-node-is-not-heard"),
        pytest.param(1, EvictionStatus(is_free=True), {}, EvictionStep((), UNUSED_SECONDS), id="free"),
        pytest.param(99, EvictionStatus(is_free=True), {"free_since_seconds": 1000.0 - UNUSED_SECONDS},
                     "the GPUs were free for 30 s and were not taken", id="free-and-not-taken"),
    ],
)  # fmt: skip
def test_course_of_an_attempt(
    seconds: float, outlook: EvictionStatus, attempt: dict[str, Any], expected: EvictionStep | str
) -> None:
    """Evict, ask again, wait, or end with a reason that the pod is told."""
    assert after(seconds, outlook, **attempt) == expected


async def test_a_pod_is_looked_at_again_when_its_delay_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before, and without any change that reminds of it."""
    clock, ledger, claim = ManualClock(), Ledger(), make_claim(count=2, policy="island")
    pod = make_pod("high", gpus=2, claim=claim, priority=10)
    ledger.put_pod(msgspec.structs.replace(pod, status=msgspec.convert(REFUSED, PodStatus)))
    mirror = SimpleNamespace(ledger=ledger, unready_reason=str, claim=lambda *_: claim, reservation_of=lambda _: None)
    context = SimpleNamespace(clock=clock, api=None, mirror=mirror)
    settings = ControllersSettings(preemption_delay_seconds=5.0)
    reconciler = PreemptionReconciler(context, settings)  # type: ignore[arg-type]
    planned = AsyncMock(return_value=())
    monkeypatch.setattr(reconciler, "_plans", planned)

    assert (await reconciler.reconcile(""), planned.await_count) == (5.0, 0)
    await clock.advance(5.0)
    assert (await reconciler.reconcile(""), planned.await_count) == (None, 1)


async def test_a_pod_for_which_three_attempts_failed_is_left_alone_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it waits: whatever spoils every attempt would have others evicted in vain."""
    clock, ledger, claim = ManualClock(), Ledger(), make_claim(count=2, policy="island")
    pod = make_pod("high", gpus=2, claim=claim, priority=10)
    ledger.put_pod(msgspec.structs.replace(pod, status=msgspec.convert(REFUSED, PodStatus)))
    mirror = SimpleNamespace(ledger=ledger, unready_reason=str, claim=lambda *_: claim, reservation_of=lambda _: None)
    context = SimpleNamespace(clock=clock, api=None, mirror=mirror, metrics=Mock(), events=Mock())
    reconciler = PreemptionReconciler(context, ControllersSettings())  # type: ignore[arg-type]
    planned = AsyncMock(return_value=(object(),))
    monkeypatch.setattr(reconciler, "_plans", planned)
    monkeypatch.setattr(reconciler, "begin", AsyncMock(side_effect=lambda one, _: reconciler._give_up(one, "n1", "no")))

    for _ in range(ATTEMPTS_MAX + 2):
        await clock.advance(PAUSE_SECONDS * 4**ATTEMPTS_MAX)
        await reconciler.reconcile(ALL)

    assert planned.await_count == ATTEMPTS_MAX


UNJUDGED = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone"}]}}


@pytest.mark.parametrize(
    ("pod", "refusal"),
    [
        pytest.param(pod_json("high"), {"return_value": False}, id="its plan is refused"),
        pytest.param(
            pod_json("high"), {"side_effect": Conflict("", status=409, reason="", path="")}, id="a call fails"
        ),
        pytest.param(pod_json("high", affinity=UNJUDGED), {}, id="nobody can judge it"),
    ],
)
async def test_what_does_not_begin_takes_nobodys_turn(
    monkeypatch: pytest.MonkeyPatch, pod: dict[str, Any], refusal: dict[str, Any]
) -> None:
    """So many a minute may begin; pods for which nothing could be done do not count among them."""
    clock = ManualClock()
    api = SimpleNamespace(get=AsyncMock(return_value=orjson.dumps(pod)))
    mirror = SimpleNamespace(ledger=SimpleNamespace(pods={}))
    context = SimpleNamespace(clock=clock, api=api, mirror=mirror, metrics=Mock(), events=Mock())
    reconciler = PreemptionReconciler(context, ControllersSettings(preemptions_per_minute=1.0))  # type: ignore[arg-type]
    monkeypatch.setattr(reconciler, "can_begin", AsyncMock(**refusal))
    monkeypatch.setattr(reconciler, "start", started := AsyncMock(return_value=True))
    waiting, plans = make_pod("high", priority=10), (object(),)
    for _ in range(IN_FLIGHT_MAX):
        with contextlib.suppress(Conflict):
            await reconciler.begin(waiting, plans)  # type: ignore[arg-type]

    api.get.return_value = orjson.dumps(pod_json("high"))
    monkeypatch.setattr(reconciler, "can_begin", AsyncMock(return_value=True))
    await clock.advance(IN_FLIGHT_MAX)
    for _ in range(IN_FLIGHT_MAX):
        await reconciler.begin(waiting, plans)  # type: ignore[arg-type]

    assert started.await_count == IN_FLIGHT_MAX


async def test_attempts_are_bounded_in_rate_and_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred pods that could push somebody out: some begin at once, then so many a minute, never more at a time."""
    clock, begun = ManualClock(), list[str]()
    api = SimpleNamespace(get=AsyncMock(return_value=orjson.dumps(pod_json("high", priority=10))))
    mirror = SimpleNamespace(ledger=SimpleNamespace(pods={}))
    context = SimpleNamespace(clock=clock, api=api, mirror=mirror)
    reconciler = PreemptionReconciler(context, ControllersSettings(preemptions_per_minute=6.0))  # type: ignore[arg-type]

    async def start(pod: Pod, _plan: object) -> bool:
        begun.append(pod.metadata.uid)
        return True

    monkeypatch.setattr(reconciler, "can_begin", AsyncMock(return_value=True))
    monkeypatch.setattr(reconciler, "start", start)
    waiting = [make_pod(f"high-{number}", priority=10) for number in range(100)]
    plans = (object(),)
    for expected in (IN_FLIGHT_MAX, 6, 6):
        begun.clear()
        for pod in waiting:
            assert await reconciler.begin(pod, plans) is not None  # type: ignore[arg-type]
        assert len(begun) == expected
        await clock.advance(60.0)

    reconciler.attempts = {f"uid-{number}": object() for number in range(IN_FLIGHT_MAX)}  # type: ignore[misc]
    begun.clear()
    await reconciler.begin(waiting[0], plans)  # type: ignore[arg-type]
    assert begun == []
