"""Deleted Nodes and permanently lost machines: what is removed, what stays, and who can declare GPUs free."""

import contextlib
import math
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from atoll.api import names
from atoll.cluster.gpu_stats import gpu_stats_of
from atoll.cluster.leases import Holder
from atoll.kube.errors import Conflict
from controllers.machines import MachineDeclarations
from tests.builders import lease_json, make_allocation
from tests.controllers.harness import (
    HEARTBEATS,
    LEASES,
    PODS,
    REPORTS,
    ControllerHarness,
    InMemoryServer,
    running_controllers,
    strip_version,
)

NODE, REPORT, BEAT = "/api/v1/nodes/n1", f"{REPORTS}/n1", f"{HEARTBEATS}/n1"
LEFT = Holder("team", "left", "uid-of-left")
SOON: dict[str, Any] = {"forget_nodes_after_seconds": 5.0}
LATER: dict[str, Any] = {"forget_nodes_after_seconds": 31_536_000.0}


def lives(server: InMemoryServer, *, beat_seconds: int = 5) -> None:
    """Shorten the heartbeat's bound; leave a Lease whose pod is gone."""
    beat = server.objects[BEAT]
    server.put(BEAT, {**beat, "spec": {**beat["spec"], "leaseDurationSeconds": beat_seconds}})
    body = strip_version(lease_json("n1", 0, holder=LEFT))
    server.put(f"{LEASES}/{body['metadata']['name']}", body)


def node_lacks(server: InMemoryServer) -> None:
    lives(server)
    del server.objects[NODE]


DECLARED = "2026-01-31T12:00:00Z"


def say(running: ControllerHarness, *, uid: str = "uid-of-n1", forget: bool = False) -> None:
    """Declare the machine gone, as `atoll node` does."""
    report = running.server.objects[REPORT]
    word = {"nodeUid": uid, "by": "jane", "reason": "scrapped", "time": DECLARED, "forget": forget}
    running.server.put(REPORT, {**report, "spec": {**report.get("spec", {}), "gone": [word]}})


def traces(running: ControllerHarness) -> set[str]:
    return {path for path in (REPORT, BEAT) if path in running.server.objects}


async def test_what_a_deleted_node_leaves_goes_after_the_grace_time(tmp_path: Path) -> None:
    """Report and heartbeat are deleted, with an event and out of every figure; the GPU in doubt stays held."""
    async with running_controllers(tmp_path, node_lacks, settings=SOON) as running:
        await running.settled(lambda: not traces(running))
        await running.settled(lambda: "n1" not in running.mirror.ledger.nodes)

        assert running.lease(0), "the end of a Node is no proof"
        assert (names.REASON_MACHINE_FORGOTTEN, "n1") in running.notes.recorded
        assert running.mirror.ledger.is_stale("n1", running.mirror._clock.monotonic_seconds())


XID = {"kind": "xid", "code": 79, "firstTime": "2026-01-01T00:00:00Z", "lastTime": "2026-01-01T00:00:00Z"}
REMEMBERED: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "a cordon": ({"cordons": [{"uuid": "GPU-1", "reason": "smells"}]}, {}, True),
    "an open XID that takes the card out": ({}, XID, True),
    "an XID with an unknown number": ({}, {**XID, "code": 9999}, True),
    "an XID that a reset has ended": ({}, {**XID, "endedTime": "2026-01-02T00:00:00Z"}, False),
    "an XID of a program": ({}, {**XID, "code": 13}, False),
    "a fault that the next agent finds again": ({}, {**XID, "kind": "throttle", "code": 0}, False),
}


@pytest.mark.parametrize("name", REMEMBERED)
async def test_what_no_agent_could_find_out_again_is_kept(tmp_path: Path, name: str) -> None:
    """A machine that is back after a repair of its power supply is as cordoned and as ill as it was. Its alerts end all
    the same, and whoever knows that it never comes back has it forgotten."""
    spec, incident, is_kept = REMEMBERED[name]

    def setup(server: InMemoryServer) -> None:
        node_lacks(server)
        report = server.objects[REPORT]
        report["status"]["devices"][0]["incidents"] = [incident] if incident else []
        server.put(REPORT, {**report, "spec": {**report.get("spec", {}), **spec}})

    async with running_controllers(tmp_path, setup, settings=SOON) as running:
        await running.settled(lambda: BEAT not in running.server.objects)
        await running.settled(lambda: (names.REASON_MACHINE_FORGOTTEN, "n1") in running.notes.recorded)
        kept = traces(running)
        figures = gpu_stats_of(running.mirror.ledger, math.inf, gone={"n1"})
        if is_kept:
            say(running, forget=True)
            await running.settled(lambda: not traces(running))

    assert kept == ({REPORT} if is_kept else set())
    assert (figures.silent_nodes, figures.gpus) == (0, {})


@pytest.mark.parametrize("why", ["the grace time is not over", "the Node is there", "the agent is heard"])
async def test_what_may_come_back_is_kept(tmp_path: Path, why: str) -> None:
    """A Node that is there, an agent that is heard, or a short absence: nothing is deleted."""

    def setup(server: InMemoryServer) -> None:
        lives(server, beat_seconds=36_000)
        if why != "the Node is there":
            del server.objects[NODE]
        if why == "the grace time is not over":
            del server.objects[BEAT]

    settings = LATER if why == "the grace time is not over" else {"forget_nodes_after_seconds": 1.0}
    async with running_controllers(tmp_path, setup, settings=settings) as running:
        waits = await running.reconciler("machines").reconcile("n1")

        assert (waits is None) == (why == "the Node is there")
        assert REPORT in running.server.objects
        assert not any(method == "DELETE" for method, _ in running.api.writes)


async def test_a_node_that_only_our_cache_misses_is_kept(tmp_path: Path) -> None:
    """Before anything is deleted the API server itself is asked for the Node."""

    def intercept(method: str, path: str, _: Any) -> web.Response | None:
        there = {"metadata": {"name": "n1", "uid": "uid-of-n1"}}
        return web.json_response(there) if (method, path) == ("GET", NODE) else None

    def setup(server: InMemoryServer) -> None:
        node_lacks(server)
        server.intercept(intercept)

    async with running_controllers(tmp_path, setup, settings=SOON) as running:
        await running.settled(lambda: running.server.count(f"GET {NODE}"))
        await running.reconciler("machines").reconcile("n1")

        assert traces(running) == {REPORT, BEAT}


async def test_a_word_frees_what_left_and_forgets_the_rest(tmp_path: Path) -> None:
    """Whoever knows that the machine is gone frees its GPUs at once, told by an event that names who and why; then
    report and heartbeat go, long before the grace time is over."""
    async with running_controllers(tmp_path, node_lacks, settings=LATER) as running:
        say(running, forget=True)
        await running.settled(lambda: not running.held() and not traces(running))

        (note,) = running.notes.notes_on(names.REASON_MACHINE_GONE, "n1")
        assert note.startswith(f"jane declared machine uid-of-n1 of node n1 gone for good at {DECLARED}: scrapped")


async def test_a_word_to_forget_waits_for_the_pods(tmp_path: Path) -> None:
    """Somebody declares the machine gone first and deletes its pods afterwards, or Kubernetes does: the declaration
    stays until it has freed their GPUs."""
    async with running_controllers(tmp_path, node_lacks, settings=LATER) as running:
        running.put_pod("left", node="n1", phase="Running", allocation=make_allocation("n1", 0))
        await running.settled(lambda: LEFT.uid in running.mirror.pods.by_uid)
        say(running, forget=True)
        await running.settled(lambda: (names.REASON_MACHINE_GONE, "n1") in running.notes.recorded)
        waits = await running.reconciler("machines").reconcile("n1")
        kept = traces(running), running.held()
        running.server.remove(f"{PODS}/left")
        await running.settled(lambda: not running.held() and not traces(running))

    assert waits is not None
    assert kept == ({REPORT, BEAT}, {"gpu-n1-0"})


async def test_silence_is_what_the_watch_shows(tmp_path: Path) -> None:
    """An agent with a period of a second is not silent because our own watch has said nothing for a while."""

    def setup(server: InMemoryServer) -> None:
        lives(server, beat_seconds=1)
        del server.objects[NODE]

    async with running_controllers(tmp_path, setup, settings=LATER) as running:
        declarations = MachineDeclarations(running.loops[0]._reconciler._context)
        heard = [declarations.is_heard("n1")]
        renewed, since = declarations._renewals["n1"]
        declarations._renewals["n1"] = (renewed, since - 3600)
        heartbeats = running.mirror.heartbeats
        heartbeats._heard_at -= 7200
        heard.append(declarations.is_heard("n1"))
        heartbeats._heard_at += 7200
        heard.append(declarations.is_heard("n1"))

    assert heard == [True, True, False]


async def test_a_word_to_release_keeps_the_report(tmp_path: Path) -> None:
    """Without `forget` only GPUs are freed."""
    async with running_controllers(tmp_path, node_lacks, settings=LATER) as running:
        say(running)
        await running.settled(lambda: not running.held())

        assert traces(running) == {REPORT, BEAT}


async def test_out_of_service_is_such_a_word(tmp_path: Path) -> None:
    """Kubernetes' own taint on a Node whose kubelet does not answer frees the GPUs of pods that left."""

    def setup(server: InMemoryServer) -> None:
        lives(server)
        taint = {"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}
        server.put(NODE, {"metadata": {"name": "n1", "uid": "uid-of-n1"}, "spec": {"taints": [taint]}})

    async with running_controllers(tmp_path, setup) as running:
        await running.settled(lambda: not running.held())

        assert traces(running) == {REPORT, BEAT}
        (note,) = running.notes.notes_on(names.REASON_MACHINE_GONE, "n1")
        assert note.startswith("taint node.kubernetes.io/out-of-service declared")


WRONG_WORDS = ["of another machine", "the agent is heard", "the pod is there", "it reported since, as another Node"]


@pytest.mark.parametrize("why", WRONG_WORDS)
async def test_a_word_that_does_not_hold_frees_nothing(tmp_path: Path, why: str) -> None:
    """A word on another uid, one that a living agent contradicts, a pod that nobody deleted, and a machine that came
    back with a new Node under its name, though it is silent again."""

    def setup(server: InMemoryServer) -> None:
        lives(server, beat_seconds=36_000)
        if why != "the agent is heard":
            del server.objects[BEAT]
        if why != "the pod is there":
            del server.objects[NODE]
        if why == "it reported since, as another Node":
            report = server.objects[REPORT]
            evidence = {**report["status"].get("evidence", {}), "sequence": 9}
            server.put(REPORT, {**report, "status": {**report["status"], "nodeUid": "u2", "evidence": evidence}})

    async with running_controllers(tmp_path, setup, settings=LATER) as running:
        if why == "the pod is there":
            running.put_pod("left", node="n1", phase="Running")
            await running.settled(lambda: LEFT.uid in running.mirror.pods.by_uid)
        say(running, uid="uid-of-another" if why == "of another machine" else "uid-of-n1", forget=True)
        await running.settled(lambda: running.mirror.reports["n1"].spec.gone)
        await running.reconciler("machines").reconcile("n1")
        with contextlib.suppress(Conflict):  # the loop itself marks the same Lease
            await running.reconciler("release").reconcile(LEFT.uid)

        assert running.lease(0)
        assert REPORT in running.server.objects
