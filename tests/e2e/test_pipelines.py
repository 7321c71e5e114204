"""Pipelines on real nodes: the golden chain and group from their envelopes to what the containers saw, and a use case.

Four machines play an A100, an H100, an L4 and a T4 machine. Commands, images and amounts of memory and CPU are those of
a small machine: a container of busybox stands for each model.
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any
from uuid import uuid4

import pytest
import yaml

from atoll.api import job_names, names
from devcluster import DevCluster, DevNodeSpec
from devcluster.installation import Installation
from pipelines.usecases import SHIPPED
from tests.e2e.conftest import OPTIONS
from tests.e2e.running_service import NAMESPACE, RunningService, wait
from tests.jobs.test_job_examples import EXAMPLES

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

NODES = (
    DevNodeSpec("ampere", profile="a100-vm-flat-numa"),
    DevNodeSpec("hopper", profile="dgx-h100"),
    DevNodeSpec("ada", profile="l4-8"),
    DevNodeSpec("turing", profile="t4-4"),
)
GPUS = {"nvidia-a100": 8, "nvidia-h100": 8}
IMAGE = "localhost/busybox:1"
SMALL = {"cpu_request": "10m", "memory_request": "32Mi", "memory_limit": "128Mi"}
AMOUNTS = ("ext_ml_cpu_cores", "ext_ml_memory_gb", "ext_ml_storage_gb")
STAY = "trap 'exit 0' TERM; while [ ! -e /tmp/go ]; do sleep 0.2; done"
STAYS = ("ml.infer",)
"""Types of envelopes whose containers run until they are told to go."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    """A cluster with the machines, all of Atoll, and a tenant."""
    with DevCluster.start(f"pipes-{uuid4().hex[:6]}", nodes=NODES, scheduler=False) as cluster:
        Installation(cluster, options=OPTIONS).install()
        cluster.kubectl("apply", "-f", str(EXAMPLES / "priority-classes.yaml"), check=True)
        for namespace in (NAMESPACE, "tenant-other"):
            cluster.kubectl("create", "namespace", namespace, check=True)
            account = ("get", "serviceaccount", "default", "-n", namespace)
            wait(lambda account=account: cluster.kubectl(*account).returncode == 0, "the default account")
        yield cluster


def runner(kind: str) -> dict[str, Any]:
    """Return what runs a type of envelope: a container that prints its environment."""
    command = ["/bin/sh", "-c", f"env; echo END; {STAY if kind in STAYS else ''}"]
    return {"job_type": "batch", "container": {"image": IMAGE, "command": command}, "resources": {**SMALL}}


def played_rag() -> dict[str, Any]:
    """Return the shipped template with a container in place of each model, and everything else as it is."""
    found: dict[str, Any] = yaml.safe_load((SHIPPED / "rag.yaml").read_text())
    for one in found["components"]:
        script = f"env; echo END; httpd -p {one['port']} -h /tmp; {STAY}"
        one["job"]["container"]["command"] = ["/bin/sh", "-c", script]
        one["job"]["resources"] = {**SMALL}
    return found


@pytest.fixture(scope="module")
def service(cluster: DevCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A service with runners of the golden envelopes, and the played template."""
    folder = tmp_path_factory.mktemp("service")
    kinds = ("data.prepare", "ml.train", "ml.evaluate", "report.send", "ml.infer")
    (folder / "runners.yaml").write_text(yaml.safe_dump({kind: runner(kind) for kind in kinds}))
    (folder / "templates").mkdir()
    (folder / "templates" / "rag.yaml").write_text(yaml.safe_dump(played_rag()))
    options = ("--runners", folder / "runners.yaml", "--usecase-templates", folder / "templates")
    service = RunningService(cluster, folder, options=options)
    service.start()
    yield service
    service.kill()


def begin(service: RunningService, example: str) -> str:
    """Apply a workflow of the examples and begin a run; return the pipeline's name."""
    workflow = yaml.safe_load((EXAMPLES.parent / f"{example}.yaml").read_text())
    for one in (*workflow.get("steps", ()), *workflow.get("jobs", ())):
        for key in AMOUNTS:
            one.pop(key, None)
    file = service.folder / f"{example}.yaml"
    file.write_text(yaml.safe_dump(workflow))
    service.atoll("pipeline", "apply", "-f", str(file))
    service.atoll("pipeline", "run", workflow["name"])
    return str(workflow["name"])


def run_of(service: RunningService, name: str) -> Any:
    """Return the newest run of a pipeline."""
    return json.loads(service.atoll("pipeline", "show", name, "-o", "json"))


def ended(service: RunningService, name: str) -> Any:
    """Wait for the end of a run, and return it."""
    return wait(lambda: (run := run_of(service, name))["completed_at"] and run, f"the run of {name} to end")


def pods_of(service: RunningService) -> Mapping[str, Any]:
    """Return the pods of the tenant, by the id of their job."""
    listed = service.cluster.kubectl("get", "pods", "-n", NAMESPACE, "-o", "json", check=True).stdout
    return {one["metadata"]["labels"].get(job_names.JOB_ID, ""): one for one in json.loads(listed)["items"]}


def go(service: RunningService, pod: str) -> None:
    """Let a container that stays end with success."""
    service.cluster.kubectl("exec", "-n", NAMESPACE, pod, "--", "touch", "/tmp/go", check=True)


def seen(service: RunningService, job: str) -> dict[str, str]:
    """Return the environment that a job's container printed."""
    lines = service.job("logs", job).splitlines()
    assert "END" in lines
    return dict(line.partition("=")[::2] for line in lines)


def check(service: RunningService, step: Mapping[str, Any], node: str, gpus: int) -> dict[str, str]:
    """Check where the job of a step ran and which GPUs its container saw; return what else it saw."""
    pod, found = pods_of(service)[step["job_id"]], seen(service, step["output"]["name"])
    uuids = [one for one in found.get("NVIDIA_VISIBLE_DEVICES", "").split(",") if one]
    assert len({*uuids}) == len(uuids) == gpus
    if gpus:
        report = service.cluster.api.get(f"/apis/gpu.scheduling/v1/gpunodestatuses/{node}")
        assert pod["spec"]["nodeName"] == node
        assert {*uuids} <= {one["uuid"] for one in report["status"]["devices"]}
    return found


def waits_for(service: RunningService, component: str) -> str:
    """Return what the scheduler tells of the pod of a component of the use case."""
    job = next(one["job_id"] for one in run_of(service, "uc-answers")["steps"] if one["name"] == component)
    conditions = pods_of(service)[job]["status"].get("conditions", []) if job in pods_of(service) else []
    return "".join(one.get("message", "") for one in conditions if one["type"] == "PodScheduled")


def test_the_golden_chain_runs_step_by_step(service: RunningService) -> None:
    """CPU, eight H100, two A100, CPU: each begins after the one before, nothing is inherited but the meta."""
    run = ended(service, begin(service, "chain"))
    steps = run["steps"]
    wants = (("", 0), ("hopper", 8), ("ampere", 2), ("", 0))
    told = [check(service, step, *want) for step, want in zip(steps, wants, strict=True)]

    assert (run["status"], [step["attempt"] for step in steps]) == ("succeeded", [1] * 4)
    for earlier, later in itertools.pairwise(steps):
        assert earlier["ended_at"] <= later["started_at"]
    assert {json.loads(one["ATOLL_META"])["experiment"] for one in told} == {"exp-42"}
    assert [json.loads(one["ATOLL_ARGS"]) for one in told][3] == [{"to": "team"}]
    assert [one.get("ML_DISTRIBUTED_STRATEGY") for one in told] == [None, "fsdp", None, None]
    assert [one.get("ML_RUNTIME") for one in told] == [None, None, "vllm", None]


def test_the_golden_group_runs_at_once(service: RunningService) -> None:
    """Three models run at the same time, each on the card that suits it, and the run ends after all of them."""
    name = begin(service, "group")

    def running() -> Any:
        steps = run_of(service, name)["steps"]
        pods = pods_of(service)
        mine = [pods[step["job_id"]] for step in steps if step["job_id"] in pods]
        return len(mine) == 3 and all(pod["status"]["phase"] == "Running" for pod in mine) and mine

    for pod in wait(running, f"all jobs of the group to run: {run_of(service, name)}"):
        go(service, pod["metadata"]["name"])
    run = ended(service, name)
    models = [
        check(service, step, *want)["ML_MODEL_ID"]
        for step, want in zip(run["steps"], (("ampere", 4), ("ada", 1), ("turing", 1)), strict=True)
    ]

    assert (run["status"], [step["attempt"] for step in run["steps"]]) == ("succeeded", [1] * 3)
    assert models == ["llama-3.1-70b", "stable-diffusion-xl", "whisper-large-v3"]


def test_rag_runs_cpu_parts_first_and_its_large_part_waits_for_room(service: RunningService) -> None:
    """Vector store and embedder run while others hold the GPUs; the model server waits, then runs, then the
    orchestrator; healthy when all run; after the delete nothing of it is left."""
    for kind, count in GPUS.items():
        attributes = {"ext_ml_gpu_type": kind, "ext_ml_gpu_count": count - 2}
        service.submit(kind, STAY, resources=SMALL, policy={"priority_class": "high"}, **attributes)
        service.wait(kind, "running")
    parameters = ("vector_db", "server", "orchestrator")
    words = [word for one in parameters for word in ("--set", f"{one}={IMAGE}")]
    service.atoll("usecase", "create", "rag", "--name", "answers", *words)

    def states() -> dict[str, str]:
        found = json.loads(service.atoll("usecase", "show", "answers", "-o", "json"))
        return {"whole": found["status"], **{one["name"]: one["status"] for one in found["components"]}}

    def small_ones_run() -> bool:
        now = states()
        return now["vector_store"] == now["embedder"] == "running" and now["model_server"] not in ("pending", "queued")

    wait(small_ones_run, f"vector store and embedder to run: {states()}")
    unscheduled = wait(lambda: waits_for(service, "model_server"), "the model server to be told why it waits")
    before = states()
    service.job("cancel", "nvidia-h100", "--wait")
    wait(lambda: states()["whole"] == "healthy", f"all of it to run: {states()}")
    after = json.loads(service.atoll("usecase", "show", "answers", "-o", "json"))
    steps = {one["name"]: one for one in run_of(service, "uc-answers")["steps"]}
    server = check(service, steps["model_server"], "hopper", 4)
    service.atoll("usecase", "delete", "answers")
    wait(lambda: "answers" not in service.atoll("usecase", "list"), "the use case to be gone")
    service.job("cancel", "nvidia-a100", "--wait")

    assert (before["whole"], before["orchestrator"]) == ("deploying", "pending")
    assert before["model_server"] != "running"
    assert f"Insufficient {names.GPU_RESOURCE}" in unscheduled
    assert server["ML_MODEL_ID"] == "Qwen/Qwen2.5-7B-Instruct"
    assert steps["model_server"]["ended_at"] <= steps["orchestrator"]["started_at"]
    assert after["entrypoint"].endswith(f".{NAMESPACE}:8080")
    assert not {one for one in pods_of(service) if one in {step["job_id"] for step in steps.values()}}
