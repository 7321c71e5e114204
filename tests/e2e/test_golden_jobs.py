"""The seven golden envelopes on real nodes: where their jobs run, and what each container saw.

Four machines play an A100, an H100, an L4 and a T4 machine, and together the hosts of a TPU slice. Images, commands,
time-outs and amounts of memory and CPU are those of a small machine; all else is as `atoll job render` prints it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest
import yaml

from atoll.api import names
from atoll.jobs.settings import RenderSettings
from atoll.ml.tables import TPU_TOPOLOGY_LABEL, TPU_TYPE_LABEL
from devcluster import DevCluster, DevNodeSpec
from devcluster.installation import Installation
from tests.e2e.conftest import OPTIONS
from tests.e2e.world import RealCluster
from tests.jobs.test_job_examples import EXAMPLES, result_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

NODES = (
    DevNodeSpec("ampere", profile="a100-vm-flat-numa"),
    DevNodeSpec("hopper", profile="dgx-h100"),
    DevNodeSpec("ada", profile="l4-8"),
    DevNodeSpec("turing", profile="t4-4"),
)
LABELS = {"hopper": {"cluster": "training", "node.kubernetes.io/instance-type": "p5.48xlarge"}}
SLICE = {
    TPU_TYPE_LABEL: "tpu-v5-lite-podslice",
    TPU_TOPOLOGY_LABEL: "4x4",
    RenderSettings().slice_level: "slice",
}
SLICES = {
    "apiVersion": names.API_VERSION,
    "kind": "Topology",
    "metadata": {"name": "slices"},
    "spec": {"levels": [{"nodeLabel": RenderSettings().slice_level}, {"nodeLabel": "kubernetes.io/hostname"}]},
}
LOOK = "env; mount | sed -n 's|.* on \\(/[^ ]*\\) type .*|MOUNT=\\1|p'; echo END"


@dataclass(frozen=True, slots=True)
class Want:
    """What the containers of a job must see: so many GPUs of this node; these variables; these mounts; so many pods."""

    node: str = ""
    gpus: int = 0
    env: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    pods: int = 1


TRAINED = ("ML_DISTRIBUTED_STRATEGY=fsdp", "ATOLL_CHECKPOINT_INTERVAL_SECONDS=600")
WANTS = {
    "inference": Want("ampere", 2, ("ML_MODEL_ID=llama-3.1-70b", "ML_RUNTIME=vllm", "ML_MAX_TOKENS=4096",
                                    "ML_PRECISION=fp16", "ML_TIMEOUT_SECONDS=60")),
    "training": Want("hopper", 8, (*TRAINED, "ML_PRECISION=bf16", "ATOLL_CHECKPOINT_MAX_COUNT=5"),
                     ("/dev/shm", "/scratch", "/etc/atoll")),
    "tpu": Want(env=("ML_TPU_TYPE=v5e", "ML_TPU_TOPOLOGY=4x4", "ML_RUNTIME=tensorflow", "ATOLL_WORKERS=4",
                     "ATOLL_CHECKPOINT_INTERVAL_SECONDS=900"), pods=4),
    "sweep": Want("ampere", 4, ("ML_DISTRIBUTED_STRATEGY=data_parallel", "ATOLL_GRACE_SECONDS=300",
                                "ATOLL_CHECKPOINT_ON_PREEMPTION=true"), ("/etc/atoll",)),
    "cpu": Want(env=("ML_RUNTIME=onnx", "ML_MAX_BATCH_SIZE=32", "ML_MODEL_ID=distilbert-base")),
    "chain-1-prepare": Want(env=("ML_ACCELERATOR=cpu",), mounts=("/scratch",)),
    "chain-2-train": Want("hopper", 8, TRAINED),
    "chain-3-evaluate": Want("ampere", 2, ("ML_RUNTIME=vllm", "ML_TIMEOUT_SECONDS=7200")),
    "chain-4-tell": Want(env=("ML_TIMEOUT_SECONDS=300",)),
    "group-text": Want("ampere", 4, ("ML_MODEL_ID=llama-3.1-70b",)),
    "group-image": Want("ada", 1, ("ML_MODEL_ID=stable-diffusion-xl",)),
    "group-speech": Want("turing", 1, ("ML_MODEL_ID=whisper-large-v3",)),
}  # fmt: skip
ENVELOPES: dict[str, tuple[tuple[str, ...], ...]] = {
    **{name: ((name,),) for name in ("inference", "training", "tpu", "sweep", "cpu")},
    "chain": (("chain-1-prepare",), ("chain-2-train",), ("chain-3-evaluate",), ("chain-4-tell",)),
    "group": (("group-text", "group-image", "group-speech"),),
}
"""The jobs of each envelope, step by step."""


@pytest.fixture(scope="module")
def hall() -> Iterator[Installation]:
    """A cluster with the machines that the envelopes ask for."""
    with DevCluster.start(f"golden-{uuid4().hex[:6]}", nodes=NODES, scheduler=False) as cluster:
        installation = Installation(cluster, options=OPTIONS)
        installation.install()
        assert cluster.kubectl("apply", "-f", str(EXAMPLES / "priority-classes.yaml")).returncode == 0
        for node in NODES:
            labels = (f"{key}={value}" for key, value in (SLICE | LABELS.get(node.name, {})).items())
            assert cluster.kubectl("label", "--overwrite", "node", node.name, *labels).returncode == 0
            chips = '{"status": {"capacity": {"google.com/tpu": "4"}, "allocatable": {"google.com/tpu": "4"}}}'
            done = cluster.kubectl("patch", "node", node.name, "--subresource=status", "--type=merge", f"-p={chips}")
            assert done.returncode == 0, done.stderr
        cluster.kubectl("apply", "-f", "-", input=yaml.safe_dump(SLICES), check=True)
        yield installation


def objects_of(name: str) -> list[dict[str, Any]]:
    """Return the objects of an example job, for machines as small as those here."""
    found = [dict(one) for one in yaml.safe_load_all(yaml.safe_dump_all(result_of(EXAMPLES / f"{name}.yaml").objects))]
    for one in found:
        if one["kind"] != "Job":
            continue
        one["spec"].pop("activeDeadlineSeconds", None)
        spec = one["spec"]["template"]["spec"]
        for volume in spec.get("volumes", ()):
            volume.get("emptyDir", {}).pop("sizeLimit", None)
        for container in spec["containers"]:
            devices = {key: value for key, value in container["resources"]["limits"].items() if "/" in key}
            container |= {
                "image": "localhost/busybox:1",
                "imagePullPolicy": "Never",
                "command": ["/bin/sh", "-c", LOOK],
                "resources": {"limits": devices},
            }
    return found


def check(world: RealCluster, name: str) -> None:
    """Wait until a job is done, and compare what its containers saw."""
    want = WANTS[name]
    job = next(one for one in objects_of(name) if one["kind"] == "Job")["metadata"]["name"]
    path = f"/apis/batch/v1/namespaces/{world.namespace}/jobs/{job}"
    world.wait(lambda: world.cluster.api.get(path)["status"].get("succeeded") == want.pods, f"job {name} to be done")
    found = [pod for pod in world.pods() if pod["metadata"]["labels"].get("app") == job]
    assert len({pod["spec"]["nodeName"] for pod in found}) == len(found) == want.pods
    for pod in found:
        lines = world.logs(pod["metadata"]["name"]).splitlines()
        variables = dict(line.partition("=")[::2] for line in lines)
        assert lines[-1] == "END"
        assert {*want.env, *(f"MOUNT={path}" for path in want.mounts)} <= {*lines}
        seen = [uuid for uuid in variables.get("NVIDIA_VISIBLE_DEVICES", "").split(",") if uuid]
        assert variables.get("CUDA_VISIBLE_DEVICES", "") == ",".join(seen)
        assert len({*seen}) == len(seen) == want.gpus
        if want.gpus:
            assert pod["spec"]["nodeName"] == want.node
            assert {*seen} <= {one["uuid"] for one in world.report(want.node)["status"]["devices"]}


@pytest.mark.parametrize("envelope", ENVELOPES)
def test_containers_of_an_envelope_see_what_it_says(hall: Installation, envelope: str) -> None:
    """Each job runs on the machine that it asks for, and its containers see their GPUs, the model, the run time, the
    checkpoints and the mounts; the jobs of a chain run one after the other, those of a group at once."""
    with RealCluster.of_one_test(hall) as world:
        for step in ENVELOPES[envelope]:
            for name in step:
                done = world.kubectl("apply", "-f", "-", text=yaml.safe_dump_all(objects_of(name)))
                assert done.returncode == 0, done.stderr
            for name in step:
                check(world, name)
        world.kubectl("delete", "jobs", "--all", "--wait=false")
