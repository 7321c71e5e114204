"""The gang loops when a GpuGang is recreated, members are garbage-collected, or one admission follows another."""

from pathlib import Path
from typing import Any

import pytest

from atoll.api import names
from tests.controllers.gang_harness import GANGS, JOBS, GangHarness, cluster, settled, term
from tests.controllers.test_gang_adversities import add_gang, is_let_go, put_holder, reserve
from tests.controllers.test_gangs import JOB, add_owned

pytestmark = pytest.mark.asyncio

QUICK = {"enable": True, "timeout": "2s", "recoveryTimeout": "1s", "requeuingStrategy": {"backoffBaseSeconds": 1}}
READY = names.CONDITION_PODS_READY


def admission_of(made: GangHarness, name: str) -> str:
    """Return the id that a member bears."""
    return str(made.pod(name)["metadata"]["annotations"].get(names.ADMISSION, ""))


def is_taken_over(made: GangHarness) -> bool:
    """Tell whether the gang of that name knows of an admission whose time runs."""
    status = made.gang("g").get("status", {})
    return made.reason("g") == "Admitted" and bool((status.get("assignment") or {}).get("time"))


@pytest.mark.parametrize("how", ["made anew", "loses its status"])
async def test_a_gang_that_is_taken_over_unready_is_evicted_in_time(tmp_path: Path, how: str) -> None:
    """Its members were let go and one is not ready: adopted, and evicted when its time is over, not before and not
    never; with blockAdmission the gang behind it then starts."""
    blocking = {
        "wait_for_pods_ready": {"enable": True, "block_admission": True, "recovery_timeout_seconds": 600},
    }
    async with cluster("n1", "n2") as made, term(made, tmp_path, settings=blocking) as running:
        made.server.put(f"{JOBS}/job", JOB)
        made.add_gang("g", 2, waitForPodsReady=QUICK)
        add_owned(made, range(2))
        await settled(running, lambda: is_let_go(made, "g-0", "g-1"))
        for name in ("g-0", "g-1"):
            made.bind(name)
        admission = admission_of(made, "g-0")
        gang = made.gang("g")
        made.server.remove(f"{GANGS}/g")
        kept = gang["metadata"] if how == "loses its status" else {"name": "g"}
        metadata = {key: value for key, value in kept.items() if key != "resourceVersion"}
        made.server.put(f"{GANGS}/g", {"metadata": metadata, "spec": gang["spec"]})
        await settled(running, lambda: is_taken_over(made))
        assert made.gang("g")["status"]["admission"] == admission
        add_gang(made, "behind", 2)
        assert made.leases_of("behind-0") == []

        await settled(running, lambda: made.reason("g", names.CONDITION_EVICTED) == "PodsReadyTimeout", seconds=20)
        await settled(running, lambda: is_let_go(made, "behind-0", "behind-1"), seconds=20)


async def test_every_member_bears_the_admission_in_which_it_was_let_go(tmp_path: Path) -> None:
    """The leader dies between Leases and gates, the next one lets go; a successor bears the same id, the members of
    the next admission another."""
    async with cluster() as made:
        made.server.put(f"{JOBS}/job", JOB)
        add_gang(made)
        await reserve(made, tmp_path)
        admission = made.gang("g")["status"]["admission"]
        assert admission
        assert admission_of(made, "g-0") == ""
        async with term(made, tmp_path) as second:
            await settled(second, lambda: is_let_go(made, "g-0", "g-1"))
            assert {admission_of(made, name) for name in ("g-0", "g-1")} == {admission}
            made.run_all("g", 2)
            await settled(second, lambda: made.reason("g", READY) == "Started")
            made.end("g-1", "Failed")
            made.add_member("g", 2)
            await settled(second, lambda: is_let_go(made, "g-2"))
            assert admission_of(made, "g-2") == admission
            made.bind("g-2")
            for name in ("g-0", "g-2"):
                made.end(name, "Failed")
            await settled(second, lambda: made.reason("g") == "WaitForQuorum")
            made.add_member("g", 3)
            made.add_member("g", 4)
            await settled(second, lambda: is_let_go(made, "g-3", "g-4"))

        again = made.gang("g")["status"]["admission"]
        assert {admission_of(made, name) for name in ("g-3", "g-4")} == {again}
        assert again not in {"", admission}


@pytest.mark.parametrize("is_quick", [False, True], ids=["after a look", "before anybody looks"])
async def test_a_member_that_is_collected_after_its_success_evicts_nobody(tmp_path: Path, is_quick: bool) -> None:
    """minMember of all, a recovery timeout of a second: p0 is done and deleted, the others run on; one by one they
    follow, and the gang ends as finished, also for the next leader."""
    async with cluster() as made:
        async with term(made, tmp_path) as first:
            made.add_gang("g", 4, minMember=4, waitForPodsReady=QUICK)
            for number in range(4):
                made.add_member("g", number, gpus=2, restartPolicy="Never")
            await settled(first, lambda: not any(made.is_gated(f"g-{number}") for number in range(4)))
            made.run_all("g", 4)
            await settled(first, lambda: made.reason("g", READY) == "Started")
            made.end("g-0")
            if not is_quick:
                await settled(first, lambda: made.gang("g")["status"].get("succeeded"))
            made.delete("g-0")
            await settled(first, lambda: made.gang("g")["status"]["members"] == 3)
            assert made.gang("g")["status"]["ready"] == 4
        async with term(made, tmp_path) as second:
            for number in range(1, 4):
                made.end(f"g-{number}")
                await settled(second, lambda n=number: made.gang("g")["status"]["succeeded"][0]["count"] == n + 1)
                made.delete(f"g-{number}")
            await settled(second, lambda: made.gang("g")["status"]["phase"] == "Finished")

        conditions = {one["type"]: one["reason"] for one in made.gang("g")["status"]["conditions"]}
        assert (conditions["Admitted"], conditions[READY], conditions["Evicted"]) == (
            "Admitted",
            "Started",
            "NotEvicted",
        )


async def test_a_gang_that_is_made_anew_counts_a_success_whose_pod_goes_at_once(tmp_path: Path) -> None:
    """The new GpuGang takes over the members that run; the one that is done was deleted before anybody looked."""
    async with cluster() as made, term(made, tmp_path) as running:
        made.add_gang("g", 4, minMember=4)
        for number in range(4):
            made.add_member("g", number, gpus=2, restartPolicy="Never")
        await settled(running, lambda: not any(made.is_gated(f"g-{number}") for number in range(4)))
        made.run_all("g", 4)
        made.end("g-0")
        await settled(running, lambda: made.gang("g")["status"].get("succeeded"))
        made.server.remove(f"{GANGS}/g")
        made.add_gang("g", 4, minMember=4)
        made.delete("g-0")

        await settled(running, lambda: made.gang("g").get("status", {}).get("succeeded"))
        await settled(running, lambda: made.gang("g")["status"]["ready"] == 4)


async def test_one_that_still_terminates_since_an_earlier_admission_ends_no_later_one(tmp_path: Path) -> None:
    """kube-scheduler took it then; the gang runs elsewhere by now and loses a member: it waits for a successor."""
    async with cluster("n1", "n2") as made, term(made, tmp_path) as running:
        add_gang(made)
        await settled(running, lambda: is_let_go(made, "g-0", "g-1"))
        made.run_all("g", 2)
        await settled(running, lambda: made.reason("g", READY) == "Started")
        taken = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
        made.change_pod("g-1", metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}, status={"conditions": [taken]})
        await settled(running, lambda: f"{GANGS}/g" in made.server.objects and not made.server.objects.get("g-0"))
        await settled(running, lambda: made.gang("g")["status"]["conditions"][-1]["status"] != "True")
        for number in (2, 3):
            made.add_member("g", number)
        await settled(running, lambda: is_let_go(made, "g-2", "g-3"))
        for name in ("g-2", "g-3"):
            made.bind(name)
            made.make_ready(name)
        await settled(running, lambda: made.reason("g", READY) == "Started")
        made.end("g-3", "Failed")
        await settled(running, lambda: made.reason("g", READY) == "WaitForRecovery")
        for _ in range(3):
            running.resync()
        made.add_member("g", 4)
        await settled(running, lambda: is_let_go(made, "g-4"))

        assert made.reason("g", names.CONDITION_EVICTED) == "NotEvicted"
        assert admission_of(made, "g-4") == admission_of(made, "g-2") != admission_of(made, "g-1")


ANEW = {
    "with its members": (True, {}),
    "alone": (False, {}),
    "alone, with another policy": (False, {"waitForPodsReady": QUICK}),
    "with its members, and elastic": (True, {"minMember": 1}),
}


@pytest.mark.parametrize(("with_members", "spec"), ANEW.values(), ids=ANEW)
async def test_a_gang_that_is_made_anew_has_its_turn_to_make_room_of_its_own(
    tmp_path: Path, with_members: bool, spec: dict[str, Any]
) -> None:
    """The first of its name had its turn, in vain, and would have to wait for ten minutes; the second begins one."""
    slow: dict[str, Any] = {"gang_hold_after_seconds": 0.0, "gang_hold_seconds": 600.0}
    async with cluster() as made, term(made, tmp_path, settings=slow) as running:
        put_holder(made, "busy", "n1", range(8))
        add_gang(made)
        kept = names.REASON_GPUS_FREEING
        await settled(running, lambda: running.notes.notes_on(kept, "g"))
        for number in range(2) if with_members else ():
            made.delete(f"g-{number}")
        made.server.remove(f"{GANGS}/g")
        made.add_gang("g", 2, **spec)
        for number in range(2) if with_members else ():
            made.add_member("g", number)
        await settled(running, lambda: len(running.notes.notes_on(kept, "g")) > 1)

        assert names.KEPT in made.pod("g-0")["metadata"]["annotations"]
