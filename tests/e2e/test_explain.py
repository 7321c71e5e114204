"""`atoll explain` and `atoll simulate` on a running cluster: their output matches what happens next."""

import asyncio
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from atoll.api import names
from atoll.explain.decision import PodDecision, decide, index_snapshot
from atoll.explain.explanation import Explanation, PodState, explain
from atoll.explain.gang_decision import index_gangs
from atoll.explain.gang_explanation import GangState, explain_gang
from atoll.explain.proposals import ProposalKind
from atollctl.__main__ import app
from atollctl.cluster_source import read_live
from tests.e2e.world import RealCluster

pytestmark = pytest.mark.e2e


def explained(world: RealCluster, name: str) -> Explanation:
    """Explain a pod on the cluster as it is now."""
    snapshot = asyncio.run(read_live(world.cluster.kubeconfig, None))
    pod = snapshot.pod(world.namespace, name)
    assert pod is not None
    return explain(index_snapshot(snapshot), pod)


def decided(world: RealCluster, name: str) -> PodDecision:
    """Return the decision about a pod, recomputed on the cluster as it is now."""
    snapshot = asyncio.run(read_live(world.cluster.kubeconfig, None))
    pod = snapshot.pod(world.namespace, name)
    assert pod is not None
    return decide(index_snapshot(snapshot), pod, snapshot.claim_of(pod))


def given(world: RealCluster, name: str) -> tuple[str, tuple[int, ...]]:
    """Return the node and the device ids that a pod was really given."""
    allocation = world.allocation(name)
    assert allocation is not None
    return allocation.node, allocation.device_ids


def test_explanation_is_the_schedulers_and_its_proposal_comes_true(world: RealCluster) -> None:
    """The reasons are those of the pod's own condition; when the pod that is named ends, the other gets that place."""
    world.claim("machine", 8, models=["nvidia-h100"])
    world.pod("first", "machine")
    world.wait_running("first")
    world.pod("second", "machine")
    message = world.wait_rejected("second")

    told = explained(world, "second")

    assert told.state is PodState.BUSY
    decision = decided(world, "second")
    assert f"{len(decision.full)} Insufficient {names.GPU_RESOURCE}" in message
    for reason, count in Counter(decision.verdicts.rejected.values()).items():
        assert f"{count} {reason}" in message
    proposal = next(one for one in told.help.proposals if one.kind is ProposalKind.END)
    assert proposal.change.ended == (world.get("first")["metadata"]["uid"],)
    world.delete("first")
    world.wait_running("second")
    assert given(world, "second") == (proposal.node, proposal.device_ids)
    assert explained(world, "second").state is PodState.BOUND


def test_simulation_predicts_what_then_happens(world: RealCluster, tmp_path: Path) -> None:
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


def test_misspelt_annotation_is_warned_of(world: RealCluster) -> None:
    """A pod whose key is wrong by a letter starts without GPUs, and whoever creates it is told."""
    body: dict[str, Any] = world.pod_body("typo", None)
    body["metadata"]["annotations"] = {"gpu.scheduling/clam": "pair"}

    created = world.kubectl("create", "-f", "-", text=yaml.safe_dump(body))

    assert created.returncode == 0, created.stderr
    assert "did you mean gpu.scheduling/claim?" in created.stderr


READER = "atoll-reader"
EXTENDER = "http://127.0.0.1:8888"


def account(world: RealCluster, role: str) -> str:
    """Make an account that holds one ClusterRole, and may read the ledger; return its token."""
    namespace, subject = world.namespace, f"--serviceaccount={world.namespace}:{role}"
    assert world.kubectl("create", "serviceaccount", role).returncode == 0
    cluster_wide = ("create", "clusterrolebinding", f"{role}-{namespace}", f"--clusterrole={role}", subject)
    assert world.kubectl(*cluster_wide).returncode == 0
    for space in (names.SYSTEM_NAMESPACE, names.HEARTBEAT_NAMESPACE):
        binding = ("create", "rolebinding", f"{role}-{namespace}", "--clusterrole=atoll-ledger-reader", subject)
        assert world.cluster.kubectl("-n", space, *binding).returncode == 0
    return world.kubectl("create", "token", role).stdout.strip()


@pytest.fixture
def read_only(world: RealCluster, tmp_path: Path) -> Path:
    """A kubeconfig of an account that may get and list what the commands read, and nothing else."""
    config = yaml.safe_load(world.cluster.kubeconfig.read_text())
    for user in config["users"]:
        user["user"] = {"token": account(world, READER)}
    path = tmp_path / "reader.kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


def test_every_question_is_answered_with_rights_to_read_alone(
    world: RealCluster, read_only: Path, tmp_path: Path
) -> None:
    """explain, simulate, snapshot, top, gangs, history and defrag work for an account that may only get and list; as
    `kubectl atoll` too; the API server lets it change nothing, and no pod has come."""
    world.claim("pair", 2, models=["nvidia-h100"])
    world.pod("train", "pair")
    world.wait_running("train")
    node, ids = given(world, "train")
    (tmp_path / "pod.yaml").write_text(yaml.safe_dump(world.pod_body("next", "pair")))
    for command, status in (
        (["explain", "pod/train"], 0),
        (["simulate", "-f", str(tmp_path / "pod.yaml")], 0),
        (["snapshot", str(tmp_path / "cluster.json")], 0),
        (["top", "--once"], 0),
        (["gangs"], 0),
        (["history", f"{node}/{ids[0]}"], 0),
        (["defrag", "--count", "2"], 0),
    ):
        where = [] if command[0] in ("snapshot", "history") else ["-n", world.namespace]
        answer = CliRunner().invoke(app, [*command, *where, "--kubeconfig", str(read_only)])
        assert answer.exit_code == status, (command, answer.output)

    assert "given" in CliRunner().invoke(app, ["history", f"{node}/{ids[0]}", "--kubeconfig", str(read_only)]).output
    kubectl = ["kubectl", "atoll", "explain", "pod/train", "-n", world.namespace, "--kubeconfig", str(read_only)]
    folders = (world.cluster.program("kubectl").parent, Path(sys.executable).parent)
    plugin = subprocess.run(kubectl, env={"PATH": ":".join(map(str, folders))}, capture_output=True, text=True)
    assert f"runs on {node}" in plugin.stdout, plugin
    assert [pod["metadata"]["name"] for pod in world.pods()] == ["train"]
    verbs = world.kubectl("auth", "can-i", "--list", f"--as=system:serviceaccount:{world.namespace}:{READER}").stdout
    for line in verbs.splitlines()[1:]:
        granted = line[line.rindex("[") + 1 : line.rindex("]")].split()
        assert set(granted) <= {"get", "list", "watch"} or "selfsubject" in line, line


def test_gang_is_explained_by_its_condition_and_a_proposal_comes_true(world: RealCluster) -> None:
    """The headline is the message of the gang's own condition; when the pod that is named ends, the gang starts."""
    world.claim("machine", 8, models=["nvidia-h100"])
    world.pod("first", "machine")
    world.wait_running("first")
    path = f"/apis/gpu.scheduling/v1/namespaces/{world.namespace}/gpugangs"
    gang = {"metadata": {"name": "duo"}, "spec": {"podSets": [{"name": "workers", "count": 2}]}}
    world.cluster.api.request("POST", path, {"apiVersion": names.API_VERSION, "kind": "GpuGang", **gang})
    world.claim("half", 4, models=["nvidia-h100"])
    for number in range(2):
        body = world.pod_body(f"duo-{number}", "half")
        body["metadata"]["annotations"][names.GANG] = "duo"
        world.create(body)

    def condition() -> str:
        found = world.cluster.api.get(f"{path}/duo").get("status", {}).get("conditions", [])
        told = [one for one in found if one["type"] == names.CONDITION_ADMITTED and one["reason"] == "WaitForRoom"]
        return told[0]["message"] if told else ""

    message = world.wait(condition, "the gang to wait for room")
    snapshot = asyncio.run(read_live(world.cluster.kubeconfig, None))
    found = snapshot.gang(world.namespace, "duo")
    assert found is not None
    told = explain_gang(index_gangs(index_snapshot(snapshot)), found)

    assert (told.state, told.headline) == (GangState.BUSY, message)
    proposal = next(one for one in told.help.proposals if one.kind is ProposalKind.END)
    assert proposal.change.ended == (world.get("first")["metadata"]["uid"],)
    world.delete("first")
    for number in range(2):
        world.wait_running(f"duo-{number}")
    assert {given(world, f"duo-{number}")[0] for number in range(2)} == set(proposal.nodes)


def check_prediction(world: RealCluster, seed: int, folder: Path, token: str) -> None:
    """Foretell a random workload, create it pod by pod, and compare node and devices."""
    rng = random.Random(seed)
    documents = []
    for number in range(rng.randint(1, 3)):
        policy = rng.choice(["contiguous", "contiguous", "island", "packed", "spread"])
        models = rng.choice([[], [], ["nvidia-h100"], ["nvidia-v100"]])
        devices = {"policy": policy, **({"models": models} if models else {})}
        world.claim(f"c{seed}-{number}", rng.choice([1, 1, 2, 2, 3, 4]), **devices)
        documents.append(world.pod_body(f"p{seed}-{number}", f"c{seed}-{number}"))
    file = folder / f"{seed}.yaml"
    file.write_text(yaml.safe_dump_all(documents))
    command = ["env", f"ATOLL_EXTENDER_TOKEN={token}", sys.executable, "-m", "atollctl", "simulate", "-f", str(file)]
    options = ["-n", world.namespace, "-o", "json", "--extender", EXTENDER]
    done = world.cluster.run(*command, *options, "--kubeconfig", str(world.cluster.kubeconfig_inside))
    assert done.returncode in (0, 1), done.stderr
    for foretold, body in zip(json.loads(done.stdout)["pods"], documents, strict=True):
        name = body["metadata"]["name"]
        world.create(body)
        if foretold["fits"]:
            world.wait(lambda name=name: world.allocation(name), f"pod {name} to get its GPUs")
            assert given(world, name) == (foretold["node"], tuple(foretold["deviceIds"])), f"seed {seed}"
        else:
            world.wait_rejected(name)
    for body in documents:
        world.delete(body["metadata"]["name"])
    world.wait(lambda: not world.pods() and not world.leases(), "the workload to be gone")


def test_random_workloads_go_where_they_were_foretold(world: RealCluster, tmp_path: Path) -> None:
    """Node and devices of each pod, as simulate said with what the extender remembers; two seeds, the others below."""
    token = account(world, "atoll-auditor")
    for seed in range(2):
        check_prediction(world, seed, tmp_path, token)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(10))
def test_a_hundred_random_workloads_go_where_they_were_foretold(world: RealCluster, block: int, tmp_path: Path) -> None:
    """The same over a hundred seeds."""
    token = account(world, "atoll-auditor")
    for seed in range(block * 10, block * 10 + 10):
        check_prediction(world, seed, tmp_path, token)
