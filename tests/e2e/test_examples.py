"""Every manifest in examples/, applied as a reader would, does what its first line says."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml

from devcluster.installation import Installation
from tests.e2e.world import RealCluster

pytestmark = pytest.mark.e2e

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
EXAMPLES_BY_NAME = {path.stem: path for path in EXAMPLES}
GPUS_SEEN = {
    "gang": {"main": 2},
    "index": {"main": 1},
    "island": {"main": 4},
    "job": {"main": 2},
    "pair": {"main": 2},
    "per-container": {"trainer": 2, "evaluator": 1, "exporter": 0},
    "resource-only": {"main": 1},
    "spread": {"main": 2},
}
"""How many GPUs each container of each example sees."""
PODS = {"gang": 2, "job": 3}
CHOOSY = ("island", "spread")


@pytest.fixture(scope="module")
def applied(installation: Installation) -> Iterator[RealCluster]:
    """A namespace in which one `kubectl apply` has created every example, after the two that need room to choose."""
    world = RealCluster.enter(installation, f"examples-{uuid4().hex[:8]}")
    choosy = [word for name in CHOOSY for word in ("-f", str(EXAMPLES_BY_NAME[name]))]
    assert world.kubectl("apply", *choosy).returncode == 0
    world.wait(lambda: len([1 for pod in world.pods() if "nodeName" in pod["spec"]]) == len(CHOOSY), "their GPUs")
    done = world.kubectl("apply", "-f", str(EXAMPLES[0].parent))
    assert done.returncode == 0, done.stderr
    yield world
    world.check_audit()
    world.leave()


def pods_of(world: RealCluster, path: Path) -> list[dict[str, Any]]:
    """Return the pods that the example made, once they are all there and have started."""
    manifests = list(yaml.safe_load_all(path.read_text()))
    owner = next(one["metadata"]["name"] for one in manifests if one["kind"] in {"Pod", "Job"})
    wanted = PODS.get(path.stem, 1)

    def found() -> list[dict[str, Any]]:
        pods = [
            pod
            for pod in world.pods()
            if owner in {pod["metadata"]["name"], pod["metadata"].get("labels", {}).get("job-name")}
        ]
        return pods if [pod["status"]["phase"] in {"Running", "Succeeded"} for pod in pods] == [True] * wanted else []

    return world.wait(found, f"{wanted} started pods of {path.name}")


def printed(world: RealCluster, pod: str, container: str) -> list[str]:
    """Return the devices that a container of an example printed, once it has."""
    prefix = "CUDA_VISIBLE_DEVICES="
    text = world.wait(lambda: prefix in (log := world.logs(pod, container)) and log, f"{pod} to print its GPUs")
    value = text.strip().removeprefix(prefix)
    return value.split(",") if value else []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_works_as_shipped(applied: RealCluster, path: Path) -> None:
    """All examples side by side: each pod starts, and each container sees as many GPUs as its file says."""
    for pod in pods_of(applied, path):
        name = pod["metadata"]["name"]
        parts = {container: printed(applied, name, container) for container in GPUS_SEEN[path.stem]}
        assert {container: len(part) for container, part in parts.items()} == GPUS_SEEN[path.stem]


def test_island_and_spread_keep_their_word(applied: RealCluster) -> None:
    """The island's GPUs lie on one NVLink island, the spread ones on two islands."""
    islands = {name: islands_of(applied, EXAMPLES_BY_NAME[name]) for name in CHOOSY}

    assert len(set(islands["island"])) == 1
    assert islands["island"][0].startswith("nvlink-group-")
    assert len(set(islands["spread"])) == 2


def islands_of(world: RealCluster, path: Path) -> list[str]:
    """Return the island of each GPU of the example's pod."""
    (pod,) = pods_of(world, path)
    allocation = world.allocation(pod["metadata"]["name"])
    assert allocation is not None
    devices = world.report(allocation.node)["status"]["devices"]
    return [device["island"] for device in devices if device["uuid"] in allocation.uuids]


def test_a_job_ends_and_frees_its_gpus(applied: RealCluster) -> None:
    """Pods that have succeeded keep no GPU, although nobody has deleted them."""
    for pod in pods_of(applied, EXAMPLES_BY_NAME["job"]):
        applied.wait_phase(pod["metadata"]["name"], "Succeeded")
        uid = pod["metadata"]["uid"]
        applied.wait(lambda uid=uid: not applied.leases(uid), "its GPUs to be free")


def test_examples_are_listed_and_can_live_side_by_side() -> None:
    """The table of examples/README.md lists every file, and every object of a file bears a name of its own."""
    text = (EXAMPLES[0].parent / "README.md").read_text()
    objects = [
        (one["kind"], one["metadata"]["name"]) for path in EXAMPLES for one in yaml.safe_load_all(path.read_text())
    ]

    assert [path.name for path in EXAMPLES if f"({path.name})" not in text] == []
    assert len(objects) == len(set(objects))
