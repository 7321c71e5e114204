"""What `atoll explain` and `atoll simulate` say of a running cluster, and what then really happens there."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from atoll.api import names
from atoll.explain.decision import Decision, decide, scene_of
from atoll.explain.explanation import Explanation, State, explain
from atoll.explain.proposals import Kind
from atollctl.__main__ import app
from atollctl.cluster_source import read_live
from tests.e2e.world import World

pytestmark = pytest.mark.e2e


def explained(world: World, name: str) -> Explanation:
    """Explain a pod on the cluster as it is now."""
    snapshot = asyncio.run(read_live(world.cluster.kubeconfig, None))
    pod = snapshot.pod(world.namespace, name)
    assert pod is not None
    return explain(scene_of(snapshot), pod)


def decided(world: World, name: str) -> Decision:
    """Return the decision about a pod, recomputed on the cluster as it is now."""
    snapshot = asyncio.run(read_live(world.cluster.kubeconfig, None))
    pod = snapshot.pod(world.namespace, name)
    assert pod is not None
    return decide(scene_of(snapshot), pod, snapshot.claim_of(pod))


def given(world: World, name: str) -> tuple[str, tuple[int, ...]]:
    """Return the node and the device ids that a pod was really given."""
    allocation = world.allocation(name)
    assert allocation is not None
    return allocation.node, allocation.device_ids


def test_explanation_is_the_schedulers_and_its_proposal_comes_true(world: World) -> None:
    """The reasons are those of the pod's own condition; when the pod that is named ends, the other gets that place."""
    world.claim("machine", 8, models=["nvidia-h100"])
    world.pod("first", "machine")
    world.wait_running("first")
    world.pod("second", "machine")
    message = world.wait_rejected("second")

    told = explained(world, "second")

    assert told.state is State.BUSY
    decision = decided(world, "second")
    assert f"{len(decision.full)} Insufficient {names.GPU_RESOURCE}" in message
    for reason, count in Counter(decision.verdicts.rejected.values()).items():
        assert f"{count} {reason}" in message
    proposal = next(one for one in told.help.proposals if one.kind is Kind.END)
    assert proposal.change.ended == (world.get("first")["metadata"]["uid"],)
    world.delete("first")
    world.wait_running("second")
    assert given(world, "second") == (proposal.node, proposal.device_ids)
    assert explained(world, "second").state is State.BOUND


def test_simulation_predicts_what_then_happens(world: World, tmp_path: Path) -> None:
    """Pod after pod: the node and the devices that were foretold, when nothing else changes meanwhile.

    The claims name a model: what the extender remembers of pods long gone stands in no object, and may decide between
    machines that are equally good otherwise.
    """
    world.claim("pair", 2, models=["nvidia-h100"])
    world.claim("trio", 3, policy="island", models=["nvidia-h100"])
    for name, claim in (("a", "trio"), ("b", "pair"), ("c", "pair")):
        body = world.pod_body(name, claim)
        (tmp_path / "pod.yaml").write_text(yaml.safe_dump(body))
        options = ["--kubeconfig", str(world.cluster.kubeconfig), "-n", world.namespace, "-o", "json"]
        answer = CliRunner().invoke(app, ["simulate", "-f", str(tmp_path / "pod.yaml"), *options])
        assert answer.exit_code == 0, answer.output
        (foretold,) = json.loads(answer.stdout)["pods"]

        world.pod(name, claim)
        world.wait_running(name)

        assert given(world, name) == (foretold["node"], tuple(foretold["deviceIds"]))


def test_misspelt_annotation_is_warned_of(world: World) -> None:
    """A pod whose key is wrong by a letter starts without GPUs, and whoever creates it is told."""
    body: dict[str, Any] = world.pod_body("typo", None)
    body["metadata"]["annotations"] = {"gpu.scheduling/clam": "pair"}

    created = world.kubectl("create", "-f", "-", text=yaml.safe_dump(body))

    assert created.returncode == 0, created.stderr
    assert "did you mean gpu.scheduling/claim?" in created.stderr
