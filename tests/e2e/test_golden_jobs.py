"""The seven golden envelopes on real nodes: where their jobs run, and what each container saw.

Four machines play an A100, an H100, an L4 and a T4 machine, and together the hosts of a TPU slice. Images and commands
are those of a small machine, and amounts of memory, storage and CPU are a fraction of the envelope's; all else is as
`atoll job render` prints it. A time-out below five minutes gets five more, because the machine is slow.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest
import yaml

from atoll.api import names
from atoll.cluster.quantities import parse_amount
from atoll.jobs.aliases import PRIORITIES
from atoll.jobs.settings import RenderSettings
from atoll.ml.attributes import PREFIX, MlPriorityClass
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
LOOK = (
    "env; mount | sed -n 's|.* on \\(/[^ ]*\\) type .*|MOUNT=\\1|p'; "
    "cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null | sed 's/^/MEMORY=/'; "
    "df -k /dev/shm | sed -n 's/^[^ ]* *\\([0-9]*\\) .*/SHM=\\1/p'; echo END"
)
SHARE_OF_BYTES = 4000
SHARE_OF_CPU = 100
BYTES_MIN = 32 * 2**20
PAGE_BYTES = 4096
SLOW_SECONDS = 300


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
        deadline = one["spec"].get("activeDeadlineSeconds", SLOW_SECONDS)
        if deadline < SLOW_SECONDS:
            one["spec"]["activeDeadlineSeconds"] = deadline + SLOW_SECONDS
        spec = one["spec"]["template"]["spec"]
        for volume in spec.get("volumes", ()):
            if "sizeLimit" in volume.get("emptyDir", {}):
                volume["emptyDir"] = small(volume["emptyDir"])
        for container in spec["containers"]:
            resources = {kind: small(amounts) for kind, amounts in container["resources"].items()}
            command = ["/bin/sh", "-c", LOOK]
            container |= {"image": "localhost/busybox:1", "imagePullPolicy": "Never", "command": command}
            container["resources"] = resources
    return found


def small(amounts: dict[str, str]) -> dict[str, str]:
    """Return amounts of a large machine as the same share of a small one; devices stay."""
    found = dict(amounts)
    for key, amount in amounts.items():
        if key == "cpu":
            found[key] = f"{parse_amount(key, amount) // SHARE_OF_CPU}m"
        elif key in {"memory", "ephemeral-storage", "sizeLimit"}:
            found[key] = str(small_bytes(parse_amount(key, amount)))
    return found


def small_bytes(amount: int) -> int:
    """Return a share of an amount, with which a container can start."""
    return max(BYTES_MIN, amount // SHARE_OF_BYTES)


def check_amounts(world: RealCluster, name: str, job: dict[str, Any], pod: dict[str, Any]) -> None:
    """Compare a pod with the text of its envelope: cores, memory, storage, shared memory, time-out, grace, class."""
    said = {
        key.removeprefix(PREFIX): value
        for key, value in yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text()).items()
    }
    variables = dict(line.partition("=")[::2] for line in world.logs(pod["metadata"]["name"]).splitlines())
    (container,) = pod["spec"]["containers"]
    requests, limits = container["resources"]["requests"], container["resources"]["limits"]
    shared = said.get("shm_size_gb", 0)
    if "memory_gb" in said:
        memory = small_bytes((said["memory_gb"] + shared) * 10**9)
        assert parse_amount("memory", requests["memory"]) == parse_amount("memory", limits["memory"]) == memory
        assert int(variables["MEMORY"]) == memory // PAGE_BYTES * PAGE_BYTES
    if shared:
        assert int(variables["SHM"]) * 1024 == small_bytes(shared * 10**9) // PAGE_BYTES * PAGE_BYTES
    if "storage_gb" in said:
        scratch = parse_amount("ephemeral-storage", requests["ephemeral-storage"])
        assert scratch == small_bytes(said["storage_gb"] * 10**9)
    if "cpu_cores" in said:
        assert parse_amount("cpu", requests["cpu"]) == said["cpu_cores"] * 1000 // SHARE_OF_CPU
    timeout = said.get("timeout_seconds")
    slow = SLOW_SECONDS if timeout is not None and timeout < SLOW_SECONDS else 0
    assert job["spec"].get("activeDeadlineSeconds") == (timeout and timeout + slow)
    grace = pod["spec"]["terminationGracePeriodSeconds"]
    assert variables["ATOLL_GRACE_SECONDS"] == str(grace)
    assert grace >= said.get("preemption_grace_period_s", 0)
    values = {one["metadata"]["name"]: one["value"] for one in priority_classes()}
    assert pod["spec"]["priority"] == values[pod["spec"]["priorityClassName"]]
    assert pod["spec"]["priorityClassName"] in PRIORITIES[MlPriorityClass(said.get("priority_class", "on-demand"))]


def priority_classes() -> list[dict[str, Any]]:
    """Return the PriorityClasses of the examples."""
    found = yaml.safe_load_all((EXAMPLES / "priority-classes.yaml").read_text())
    return [one for one in found if one["kind"] == "PriorityClass"]


def check(world: RealCluster, name: str) -> None:
    """Wait until a job is done, and compare what its containers saw."""
    want = WANTS[name]
    job = next(one for one in objects_of(name) if one["kind"] == "Job")["metadata"]["name"]
    path = f"/apis/batch/v1/namespaces/{world.namespace}/jobs/{job}"
    world.wait(lambda: world.cluster.api.get(path)["status"].get("succeeded") == want.pods, f"job {name} to be done")
    found = [pod for pod in world.pods() if pod["metadata"]["labels"].get("app") == job]
    assert len({pod["spec"]["nodeName"] for pod in found}) == len(found) == want.pods
    for pod in found:
        check_amounts(world, name, world.cluster.api.get(path), pod)
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


def test_timeout_of_an_envelope_ends_its_job(hall: Installation) -> None:
    """Within the seconds that the envelope says, as printed; Kubernetes says why."""
    with RealCluster.of_one_test(hall) as world:
        (job,) = (one for one in objects_of("cpu") if one["kind"] == "Job")
        job["spec"]["activeDeadlineSeconds"] -= SLOW_SECONDS
        job["spec"]["template"]["spec"]["containers"][0]["command"] = ["/bin/sleep", "3600"]
        done = world.kubectl("apply", "-f", "-", text=yaml.safe_dump(job))
        assert done.returncode == 0, done.stderr
        path = f"/apis/batch/v1/namespaces/{world.namespace}/jobs/{job['metadata']['name']}"

        def reasons() -> list[str]:
            conditions = world.cluster.api.get(path)["status"].get("conditions", ())
            return [one["reason"] for one in conditions if one["type"] == "Failed"]

        world.wait(lambda: reasons() == ["DeadlineExceeded"], "the deadline to pass")
