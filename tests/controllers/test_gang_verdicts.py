"""Verdicts of waiting gangs: busy, not known yet, or never; with strict order only contention blocks others."""

from pathlib import Path
from typing import Any

import pytest

from atoll.api import names
from controllers.gangs.admission import ALL, CUT_SECONDS, AdmissionReconciler
from controllers.gangs.cache import GangCache, GangRules
from tests.builders import claim_json, make_claim
from tests.controllers.gang_harness import CLAIMS, GANGS, TOPOLOGIES, GangHarness, cluster, settled, term
from tests.controllers.harness import strip_version

STRICT = {"gang_order": "strict"}
A100, H100 = "nvidia-a100", "nvidia-h100"


def add_machines(made: GangHarness, **profiles: str) -> None:
    """Add machines of eight GPUs by name."""
    for name, profile in profiles.items():
        made.add_node(name, profile=profile)


def add_claimed_gang(
    made: GangHarness,
    name: str,
    count: int,
    *,
    models: list[str] | None = None,
    gpus: int = 8,
    topology: dict[str, str] | None = None,
    **options: Any,
) -> None:
    """Create a gang whose members ask for such models by a claim of the gang's name."""
    wanted: dict[str, Any] = {"count": gpus, **({"models": models} if models else {})}
    made.server.put(f"{CLAIMS}/{name}", strip_version(claim_json(name, **wanted)))
    made.add_gang(name, count, **({"topology": topology} if topology else {}))
    for number in range(count):
        made.add_member(name, number, gpus=gpus, claim=make_claim(name, **wanted), **options)


def message(made: GangHarness, gang: str) -> str:
    """Return the message of the condition Admitted."""
    found = made.gang(gang).get("status", {}).get("conditions", [])
    return next((str(one["message"]) for one in found if one["type"] == names.CONDITION_ADMITTED), "")


async def test_a_head_that_waits_for_one_model_lets_others_have_another(tmp_path: Path) -> None:
    """The A100s are busy, the H100s are idle: who wants H100s starts, who could take A100s waits behind the head."""
    async with cluster("a1", profile="dgx-a100") as made, term(made, tmp_path, settings=STRICT) as running:
        add_machines(made, h1="dgx-h100")
        add_claimed_gang(made, "holder", 1, models=[A100], gpus=4)
        await settled(running, lambda: made.reason("holder") == "Admitted")
        add_claimed_gang(made, "head", 1, models=[A100], priority=10)
        await settled(running, lambda: made.reason("head") == "WaitForRoom")
        add_claimed_gang(made, "second", 1, models=[A100], gpus=4)
        add_claimed_gang(made, "other", 1, models=[H100])
        await settled(running, lambda: made.reason("other") == "Admitted")
        await settled(running, lambda: made.reason("second") == "WaitForOtherGangs")

        assert "team/head comes first" in message(made, "second")
        assert made.leases_of("second-0") == []


async def test_a_gang_behind_the_head_takes_what_the_head_cannot_use(tmp_path: Path) -> None:
    """It accepts any model, and gets the one that the head does not want."""
    async with cluster("a1", profile="dgx-a100") as made, term(made, tmp_path, settings=STRICT) as running:
        add_machines(made, h1="dgx-h100")
        add_claimed_gang(made, "holder", 1, models=[H100], gpus=4)
        await settled(running, lambda: made.reason("holder") == "Admitted")
        add_claimed_gang(made, "head", 1, models=[H100], priority=10)
        await settled(running, lambda: made.reason("head") == "WaitForRoom")
        add_claimed_gang(made, "any", 1, gpus=4)
        await settled(running, lambda: made.reason("any") == "Admitted")

        notes = [one["metadata"]["annotations"][names.LEASE_NODE] for one in made.leases_of("any-0")]
        assert set(notes) == {"a1"}


RACK = "example.com/rack"
IN_ONE_RACK = {"mode": "required", "level": RACK}
R0, R1 = {"labels": {RACK: "r0"}}, {"labels": {RACK: "r1"}}
UNUSABLE: dict[str, tuple[dict[str, dict[str, Any]], dict[str, Any], dict[str, Any]]] = {
    "machines of another model, of which there are too few": (
        {"n1": {"profile": "dgx-a100"}, "n2": {"profile": "dgx-a100"}, "other": {"profile": "dgx-h100"}},
        {"count": 2},
        {"models": [H100]},
    ),
    "a machine that is too small": ({"n1": {}, "other": {"profile": "t4-4", "gpus": 4}}, {"count": 1}, {"gpus": 4}),
    "a machine without a rack": ({"n1": R0, "other": {}}, {"count": 1, "topology": IN_ONE_RACK}, {}),
    "a rack that is too small": ({"n1": R0, "n2": R0, "other": R1}, {"count": 2, "topology": IN_ONE_RACK}, {}),
}


@pytest.mark.parametrize(("nodes", "head", "other"), UNUSABLE.values(), ids=UNUSABLE)
async def test_a_head_keeps_nothing_that_it_could_not_use_on_an_empty_cluster(
    tmp_path: Path, nodes: dict[str, dict[str, Any]], head: dict[str, Any], other: dict[str, Any]
) -> None:
    """The head waits for GPUs that are busy; who wants the others starts."""
    async with cluster() as made, term(made, tmp_path, settings=STRICT) as running:
        spec = {"levels": [{"nodeLabel": RACK}]}
        made.server.put(f"{TOPOLOGIES}/t", {"metadata": {"name": "t"}, "spec": spec})
        for name, options in nodes.items():
            labels = {**options.get("labels", {}), "name": name}
            made.add_node(name, **{"profile": "dgx-h100", **options, "labels": labels})
        add_claimed_gang(made, "holder", 1, gpus=4, priority=100, nodeSelector={"name": "n1"})
        await settled(running, lambda: made.reason("holder") == "Admitted")
        add_claimed_gang(made, "head", **head, priority=10)
        await settled(running, lambda: made.reason("head") == "WaitForRoom")

        add_claimed_gang(made, "other", 1, **other)

        await settled(running, lambda: made.reason("other") == "Admitted")


@pytest.mark.parametrize("trouble", ["claim", "unlike", "never"])
async def test_a_head_that_can_use_nothing_blocks_nobody(trouble: str, tmp_path: Path) -> None:
    """Its claim does not exist, its members contradict each other, or no machine could hold it: it says so."""
    async with cluster() as made, term(made, tmp_path, settings=STRICT) as running:
        made.add_gang("head", 2)
        for number in range(2):
            gpus = 4 + number if trouble == "unlike" else 8
            annotations = {names.CLAIM: "nowhere"} if trouble == "claim" else {}
            made.add_member("head", number, gpus=gpus, annotations=annotations, priority=10)
        wanted = {"claim": "nowhere", "unlike": "ask for different things", "never": "fits 1 of 2"}[trouble]
        await settled(running, lambda: wanted in message(made, "head"))
        add_claimed_gang(made, "small", 1)
        await settled(running, lambda: made.reason("small") == "Admitted")


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("cordoned", "fits when n2 is uncordoned"),
        ("not ready", "fits when n2 is Ready"),
        ("sick", "fits when n2 gives out the 2 GPUs that it withholds"),
        ("unreported", "waits for the report of 1 node: n2"),
    ],
)
async def test_what_may_change_is_not_never(trouble: str, words: str, tmp_path: Path) -> None:
    """The second machine would do, but for a fact that may pass: the gang waits for that fact and names it."""
    async with cluster() as made, term(made, tmp_path, settings=STRICT) as running:
        made.add_node("n2", sick=(0, 1) if trouble == "sick" else ())
        node = dict(made.server.objects["/api/v1/nodes/n2"])
        if trouble == "cordoned":
            node["spec"] = {"unschedulable": True}
        if trouble == "not ready":
            node["status"] = {**node["status"], "conditions": [{"type": "Ready", "status": "False"}]}
        made.server.put("/api/v1/nodes/n2", {**node, "metadata": {"name": "n2", "uid": "uid-of-n2"}})
        if trouble == "unreported":
            made.server.remove("/apis/gpu.scheduling/v1/gpunodestatuses/n2")
        add_claimed_gang(made, "g", 2)
        await settled(running, lambda: made.reason("g") == "WaitForNodes")
        assert message(made, "g").startswith(words)
        add_claimed_gang(made, "late", 1)
        await settled(running, lambda: made.reason("late") == "WaitForOtherGangs")


@pytest.mark.parametrize("change", ["recreated", "edited"])
async def test_back_off_belongs_to_one_generation_of_one_gang(change: str, tmp_path: Path) -> None:
    """A gang that never fits is tried ever more rarely; made anew or edited so that it fits, it starts at once."""
    async with cluster() as made, term(made, tmp_path) as running:
        made.add_gang("g", 2, minMember=2)
        for number in range(2):
            made.add_member("g", number, gpus=8)
        await settled(running, lambda: made.reason("g") == "NeverFits")
        for _ in range(6):
            running.resync()
            await settled(running, lambda: made.reason("g") == "NeverFits")
        if change == "recreated":
            made.server.remove(f"{GANGS}/g")
            made.add_gang("g", 1)
        else:
            gang = made.gang("g")
            metadata = {key: value for key, value in gang["metadata"].items() if key != "resourceVersion"}
            spec = {**gang["spec"], "minMember": 1}
            made.server.put(f"{GANGS}/g", {**gang, "metadata": {**metadata, "generation": 2}, "spec": spec})
        made.server.remove("/api/v1/namespaces/team/pods/g-1")
        await settled(running, lambda: made.reason("g") == "Admitted", seconds=2.0)


async def test_a_round_tries_so_many_gangs_and_the_next_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many wait in vain: between two rounds what runs, and lacks a member, has its turn."""
    monkeypatch.setattr("controllers.gangs.admission.TRIES_MAX", 2)
    async with cluster() as made, term(made, tmp_path) as running:
        for name in ("a", "b", "c"):
            add_claimed_gang(made, name, 2)
        await settled(running, lambda: [made.reason(name) for name in ("a", "b", "c")] == ["NeverFits"] * 3)
        context = running.reconciler("gang-admission")._context
        cache = GangCache(running.mirror, running.clock, GangRules())
        admission = AdmissionReconciler(context, cache)
        cache.candidates.update(cache.keys())

        assert await admission.reconcile(ALL) == CUT_SECONDS
        assert {name for _, name in cache.attempts} == {"a", "b"}
        await admission.reconcile(ALL)
        assert {name for _, name in cache.attempts} == {"a", "b", "c"}


async def test_a_gang_that_pauses_passes_no_head_because_a_third_finds_room(tmp_path: Path) -> None:
    """Under strict order, half of what the head wants is free. A gang for other machines is admitted meanwhile; the
    second gang still waits behind the head."""
    async with (
        cluster("h1", profile="dgx-h100") as made,
        term(made, tmp_path, settings={"gang_order": "strict"}) as running,
    ):
        add_machines(made, a1="dgx-a100")
        for name in ("hold1", "hold2"):
            add_claimed_gang(made, name, 1, models=[H100], gpus=4, priority=100)
        await settled(running, lambda: made.reason("hold1") == "Admitted" == made.reason("hold2"))
        add_claimed_gang(made, "head", 1, models=[H100], gpus=8, priority=10)
        add_claimed_gang(made, "second", 1, models=[H100], gpus=4, priority=5)
        await settled(running, lambda: made.reason("head") == "WaitForRoom")
        await settled(running, lambda: made.reason("second").startswith("Wait"))
        made.delete("hold2-0")
        add_claimed_gang(made, "other", 1, models=[A100], gpus=8)

        await settled(running, lambda: made.reason("other") == "Admitted")
        await settled(running, lambda: made.reason("second") == "WaitForOtherGangs")
        assert made.held() == 12
