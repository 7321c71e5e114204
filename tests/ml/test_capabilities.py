"""Workers: what they advertise, which can serve a job, and which is best."""

import itertools
import json
from collections.abc import Mapping
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.api import names
from atoll.cluster.objects import Node, decode_node
from atoll.ml import tables
from atoll.ml.attributes import MlAttributes, ModelRegistry
from atoll.ml.capabilities import WorkerCapability, capability_of
from atoll.ml.infer import complete
from atoll.ml.mapping import device_claim
from atoll.ml.matching import MatchInput, impossible_tpu, locality, rank, score, unmet
from atoll.ml.policy import MlPolicy
from tests.builders import make_report

LLAMA = {"model_id": "llama", "model_version": "2.1", "model_format": "safetensors"}
AMOUNTS = {"cpu": "64", "memory": "256Gi", "ephemeral-storage": "1000G"}


def make_node(
    name: str = "n1",
    *,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    **allocatable: str,
) -> Node:
    """Return a node with 64 cores, 256 GiB of memory and 1000 GB of scratch space."""
    body = {
        "metadata": {"name": name, "labels": dict(labels or {}), "annotations": dict(annotations or {})},
        "status": {"allocatable": {**AMOUNTS, **allocatable}},
    }
    return decode_node(orjson.dumps(body))


def make_worker(
    name: str = "n1", profile: str | None = None, *, pods: tuple[Mapping[str, str], ...] = (), **options: Any
) -> WorkerCapability:
    """Return a worker; with the GPUs of a known machine where a profile is given."""
    report = make_report(name, profile) if profile is not None else None
    return capability_of(make_node(name, **options), report, pods)


def make_tpu(name: str = "t1", kind: str = "tpu-v5-lite-podslice", topology: str = "4x4") -> WorkerCapability:
    """Return one host of a slice of TPUs."""
    labels = {tables.TPU_TYPE_LABEL: kind, tables.TPU_TOPOLOGY_LABEL: topology}
    return capability_of(
        decode_node(
            orjson.dumps({
                "metadata": {"name": name, "labels": labels},
                "status": {"allocatable": {**AMOUNTS, tables.TPU_RESOURCE: "4"}},
            })
        )
    )  # fmt: skip


def job(**fields: Any) -> MlAttributes:
    """Return completed attributes."""
    return complete(MlAttributes.model_validate(fields)).attributes


def test_worker_advertises_what_its_node_and_report_tell() -> None:
    """Everything that a scheduler elsewhere asks for, in one mapping."""
    labels = {"topology.kubernetes.io/zone": "eu-1a", "tier": "gold"}
    told = {names.MODELS_LOADED: json.dumps([LLAMA]), names.RUNTIMES: "vllm, pytorch"}
    worker = make_worker(profile="dgx-h100", labels=labels, annotations=told)

    assert worker.to_json() == {
        "worker_id": "n1",
        "accelerator": "gpu",
        "gpu": {
            "type": "nvidia-h100", "count": 8, "memory_gb": 80, "compute_capability": "9.0", "interconnect": "nvlink",
        },
        "cpu_cores": 64,
        "memory_gb": 256 * 2**30 / 10**9,
        "storage_gb": 1000,
        "shm_size_gb": 256 * 2**30 / 10**9,
        "models_loaded": [LLAMA],
        "runtimes": ["vllm", "pytorch"],
        "labels": {
            **labels,
            "zone": "eu-1a",
            "gpu_type": "nvidia-h100",
            "gpu_memory": "80",
            "compute_capability": "9.0",
            "gpu_interconnect": "nvlink",
        },
    }  # fmt: skip


def test_host_of_a_slice_advertises_the_slice() -> None:
    """Generation, shape and the chips of the host, and no GPU."""
    told = make_tpu().to_json()

    assert (told["accelerator"], told["tpu"]) == ("tpu", {"type": "v5e", "topology": "4x4", "count": 4})
    assert "gpu" not in told
    assert make_worker().to_json().keys().isdisjoint({"gpu", "tpu"})


GPUS = {
    "dgx-a100": ("nvidia-a100", 8, 40, "8.0", "nvlink"),
    "hgx-a100-intel": ("nvidia-a100", 8, 80, "8.0", "nvlink"),
    "dgx1-v100": ("nvidia-v100", 8, 32, "7.0", "pcie"),
    "t4-4": ("nvidia-t4", 4, 16, "7.5", "pcie"),
    "dgx-b200": ("nvidia-b200", 8, 192, "10.0", "nvlink"),
    "h100-nvl-8": ("nvidia-h100", 8, 94, "9.0", "pcie"),
    "mi250-16gcd": ("amd-mi250", 16, 128, "9.0", "pcie"),
    "mi300x-8": ("amd-mi300x", 8, 192, "9.4", "nvlink"),
    "a40x8-bridged": ("nvidia-a40", 8, 48, "8.6", "pcie"),
}


@pytest.mark.parametrize("profile", GPUS)
def test_gpus_are_advertised_under_their_id_and_nominal_size(profile: str) -> None:
    """As the reference names them, whatever the driver calls them."""
    worker = make_worker(profile=profile)
    (gpu,) = worker.gpus

    assert (gpu.type, gpu.count, gpu.memory_gb, gpu.compute_capability, gpu.interconnect) == GPUS[profile]


@pytest.mark.parametrize("profile", GPUS)
def test_worker_serves_the_job_that_asks_for_what_it_advertises(profile: str) -> None:
    """What is advertised can be had: all GPUs of the type, of that size, joined as told."""
    worker = make_worker(profile=profile)
    (gpu,) = worker.gpus
    wanted = job(gpu_type=gpu.type, gpu_count=gpu.count, gpu_memory_gb=gpu.memory_gb)

    assert unmet(wanted, worker, MatchInput()) == ()
    if gpu.interconnect == "nvlink":
        assert unmet(job(gpu_type=gpu.type, gpu_count=gpu.count, gpu_interconnect="nvlink"), worker, MatchInput()) == ()


def test_gpus_that_are_sick_or_divided_are_not_advertised() -> None:
    """What cannot be given out whole is no offer."""
    divided = {2: {"mig": {"enabled": True}}, 3: {"mig": {"profile": "1g.5gb", "parentUuid": "GPU-n1-0002"}}}
    worker = capability_of(make_node(), make_report("n1", "t4-4", sick=[0], devices=divided))

    assert [gpu.count for gpu in worker.gpus] == [1]
    assert unmet(job(gpu_count=2), worker, MatchInput()) != ()


def test_labels_of_the_report_cannot_be_set_by_hand() -> None:
    """A node that is labelled as an H100 and has a T4 is a T4."""
    worker = make_worker(profile="t4-4", labels={"gpu_type": "nvidia-h100", "zone": "own"})

    assert (worker.labels["gpu_type"], worker.labels["zone"]) == ("nvidia-t4", "own")


UNREADABLE = ("[", "{}", '[{"model_version": "1"}]', '[{"model_id": 1}]', "[1]", "[" * 100_000, '"x"')


@pytest.mark.parametrize("text", UNREADABLE, ids=lambda text: text[:20])
def test_annotation_that_cannot_be_read_hides_no_other(text: str) -> None:
    """It is told of, and what the others say counts."""
    worker = make_worker(annotations={names.MODELS_LOADED: text}, pods=({names.MODELS_LOADED: json.dumps([LLAMA])},))

    assert worker.unreadable == (names.MODELS_LOADED,)
    assert [model.model_id for model in worker.models_loaded] == ["llama"]


def test_pods_tell_of_models_and_only_nodes_of_runtimes() -> None:
    """A pod cannot keep others off its node by an annotation."""
    worker = make_worker(pods=({names.MODELS_CACHED: json.dumps([LLAMA]), names.RUNTIMES: "vllm"},))

    assert [model.model_id for model in worker.models_cached] == ["llama"]
    assert worker.runtimes == ()


HARD: dict[str, tuple[WorkerCapability, dict[str, Any], str]] = {
    "no GPU": (make_worker(), {"gpu_count": 1}, "no GPU can be given out"),
    "another type": (make_worker(profile="t4-4"), {"gpu_type": "nvidia-l4"}, names.REJECT_NO_MODEL),
    "too few": (make_worker(profile="t4-4"), {"gpu_count": 5}, names.REJECT_NEVER_FITS),
    "more than a pod can have": (make_worker(profile="t4-4"), {"gpu_count": 65}, names.REJECT_NEVER_FITS),
    "too little memory": (make_worker(profile="dgx-a100"), {"gpu_memory_gb": 80}, names.REJECT_NO_MEMORY),
    "a lower capability": (make_worker(profile="t4-4"), {"gpu_compute_capability": "8.0"}, names.REJECT_NO_CAPABILITY),
    "a capability that the precision needs": (
        make_worker(profile="t4-4"), {"gpu_count": 1, "precision": "bf16"}, names.REJECT_NO_CAPABILITY,
    ),
    "no NVLink": (make_worker(profile="t4-4"), {"gpu_count": 2, "gpu_interconnect": "nvlink"}, "NVLink"),
    "no NVLink for tensor parallel work": (
        make_worker(profile="t4-4"), {"gpu_count": 2, "distributed_strategy": "tensor_parallel"}, "NVLink",
    ),
    "no TPU": (make_worker(profile="t4-4"), {"tpu_type": "v5e"}, "no TPU is there"),
    "another generation of TPU": (make_tpu(), {"tpu_type": "v4"}, "TPUs are v5e, not v4"),
    "another slice": (make_tpu(), {"tpu_topology": "4x8"}, "its slice is 4x4, not 4x8"),
    "a slice of no shape": (make_tpu(topology="?"), {"tpu_topology": "4x8"}, "its slice is ?, not 4x8"),
    "too few chips": (make_tpu(), {"tpu_chip_count": 17}, "its slice has 16 chips, not 17"),
    "no FPGA": (make_worker(), {"accelerator": "fpga"}, "no FPGA"),
    "too few cores": (make_worker(), {"cpu_cores": 65}, "has 64 cores, not 65"),
    "too little host memory": (make_worker(), {"memory_gb": 275}, "GB of memory, not 275"),
    "too little scratch space": (make_worker(), {"storage_gb": 1001}, "has 1000 GB of storage, not 1001"),
    "too little shared memory": (make_worker(), {"shm_size_gb": 300}, "for shared memory, not 300"),
    "another runtime": (
        make_worker(annotations={names.RUNTIMES: "vllm"}), {"runtime": "pytorch"}, "runs vllm, not pytorch",
    ),
    "another label": (make_worker(labels={"zone": "a"}), {"node_selector": {"zone": "b"}}, "label zone is not b"),
    "a required rule": (
        make_worker(profile="t4-4"),
        {"affinity": {"required": [{"key": "compute_capability", "operator": "Gte", "values": ["8.0"]}]}},
        "required compute_capability Gte 8.0 does not hold",
    ),
    "a version that is out of reach": (
        make_worker(), {"model_id": "llama", "model_version": "2.1"}, "model llama 2.1 is neither loaded nor cached",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("worker", "fields", "text"), HARD.values(), ids=HARD)
def test_hard_condition_that_a_worker_lacks_refuses_it(
    worker: WorkerCapability, fields: dict[str, Any], text: str
) -> None:
    """Each hard condition alone, in words; without it the worker serves."""
    found = unmet(job(**fields), worker, MatchInput())

    assert len(found) == 1
    assert text in found[0]
    assert rank(job(**fields), [worker], MatchInput()) == ()
    assert unmet(job(), worker, MatchInput()) == ()


SERVED: dict[str, tuple[WorkerCapability, dict[str, Any]]] = {
    "a CPU job on a GPU worker": (make_worker(profile="t4-4"), {"accelerator": "cpu", "cpu_cores": 64}),
    "one GPU with an interconnect": (make_worker(profile="t4-4"), {"gpu_count": 1, "gpu_interconnect": "nvlink"}),
    "a slice that lies the other way": (make_tpu(topology="2x4"), {"tpu_type": "v5e", "tpu_topology": "4x2"}),
    "fewer chips than the slice": (make_tpu(), {"tpu_chip_count": 8}),
    "all chips of the slice": (make_tpu(), {"tpu_chip_count": 16}),
    "a worker that names no runtime": (make_worker(), {"runtime": "vllm"}),
    "a model without a version": (make_worker(), {"model_id": "llama"}),
    "what is only preferred": (
        make_worker(), {"affinity": {"preferred": [{"key": "zone", "operator": "Exists", "weight": 100}]}},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("worker", "fields"), SERVED.values(), ids=SERVED)
def test_worker_serves_what_asks_for_no_more_than_it_has(worker: WorkerCapability, fields: dict[str, Any]) -> None:
    """Nothing else refuses."""
    assert unmet(job(**fields), worker, MatchInput()) == ()


def test_gpus_that_are_taken_now_are_not_had_now() -> None:
    """With a mask of free positions the question is about now, without it about ever."""
    worker, wanted = make_worker(profile="t4-4"), job(gpu_count=2)

    assert unmet(wanted, worker, MatchInput(free={"n1": 0b0011})) == ()
    assert unmet(wanted, worker, MatchInput(free={"n1": 0b0001})) != ()


def test_version_restricts_and_a_model_alone_prefers() -> None:
    """With a version only workers that have or reach it; a registry makes it reachable for all."""
    has = make_worker("has", annotations={names.MODELS_LOADED: json.dumps([LLAMA])})
    other = make_worker("other", annotations={names.MODELS_LOADED: json.dumps([{**LLAMA, "model_version": "2.0"}])})
    none = make_worker("a-none")
    workers = (none, other, has)
    exact, any_version = job(model_id="llama", model_version="2.1"), job(model_id="llama")
    hub = MatchInput(registries={ModelRegistry.HUGGINGFACE: ""})

    assert [worker.worker_id for worker in rank(exact, workers, MatchInput())] == ["has"]
    assert [worker.worker_id for worker in rank(exact, workers, hub)] == ["has", "other", "a-none"]
    assert [worker.worker_id for worker in rank(any_version, workers, MatchInput())] == ["has", "other", "a-none"]


@pytest.mark.parametrize(
    ("told", "points"),
    [
        ({names.MODELS_LOADED: [LLAMA]}, 100),
        ({names.MODELS_CACHED: [LLAMA]}, 50),
        ({names.MODELS_LOADED: [{**LLAMA, "model_version": "1"}]}, 10),
        ({names.MODELS_LOADED: [{**LLAMA, "model_format": "gguf"}]}, 10),
        ({names.MODELS_LOADED: [{**LLAMA, "model_id": "bert"}]}, 0),
        ({}, 0),
    ],
    ids=["loaded", "cached", "another version", "another format", "another model", "nothing"],
)
def test_nearer_models_earn_more(told: dict[str, Any], points: int) -> None:
    """Loaded, cached, another version, nothing."""
    worker = make_worker(annotations={key: json.dumps(value) for key, value in told.items()})

    assert locality(job(model_id="llama", model_version="2.1", model_format="safetensors"), worker) == points
    assert locality(job(), worker) == 0


def test_what_runs_there_counts_for_the_distance() -> None:
    """A second replica goes to another worker."""
    apart = {"anti_affinity": {"required": [{"key": "model_id", "operator": "In", "values": ["llama"]}]}}
    situation = MatchInput(others={"n1": ({"model_id": "llama"},)})

    assert [worker.worker_id for worker in rank(job(**apart), (make_worker("n1"), make_worker("n2")), situation)] == [
        "n2"
    ]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans(), st.integers(0, 3)), max_size=5), st.integers(0, 100))
@settings(deadline=None)
def test_best_worker_comes_first_in_any_order_of_asking(rows: list[tuple[str, bool, int]], weight: int) -> None:
    """The highest sum of preferred weights and locality, ties by name; nobody is left out or let in by it."""
    workers = [
        make_worker(
            f"n{number}",
            labels={"zone": zone},
            annotations={names.MODELS_LOADED: json.dumps([LLAMA])} if loaded else {},
            cpu=str(cores),
        )
        for number, (zone, loaded, cores) in enumerate(rows)
    ]
    preferred = {"key": "zone", "operator": "In", "values": ["a"], "weight": weight}
    wanted = job(cpu_cores=2, model_id="llama", affinity={"preferred": [preferred]})
    expected = sorted(
        (f"n{number}" for number, row in enumerate(rows) if row[2] >= 2),
        key=lambda name: (-(weight * (rows[int(name[1:])][0] == "a") + 100 * rows[int(name[1:])][1]), name),
    )

    assert [worker.worker_id for worker in rank(wanted, workers, MatchInput())] == expected
    assert rank(wanted, reversed(workers), MatchInput()) == rank(wanted, workers, MatchInput())
    assert all(score(wanted, worker, MatchInput()) >= 0 for worker in workers)


def test_slice_that_no_worker_has_is_refused_and_a_busy_one_waited_for() -> None:
    """What is impossible on any known worker is never waited for."""
    workers = (make_worker(profile="t4-4"), make_tpu(), make_tpu("t2", "tpu-v4-podslice", "2x2x2"))

    assert impossible_tpu(job(tpu_type="v5e", tpu_topology="4x4"), workers) == ""
    assert impossible_tpu(job(tpu_type="v4", tpu_topology="2x2x2"), workers) == ""
    assert impossible_tpu(job(tpu_type="v5e", tpu_topology="4x8"), workers) == (
        "no worker has v5e 4x8; there is v4 2x2x2, v5e 4x4"
    )
    assert impossible_tpu(job(tpu_chip_count=8), ()) == "no worker has a slice of that size; there is no TPU at all"
    assert impossible_tpu(job(gpu_count=1), ()) == ""


CLAIMS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "everything": (
        {
            "gpu_type": "nvidia-h100", "gpu_count": 8, "gpu_memory_gb": 80, "precision": "bf16",
            "gpu_interconnect": "nvlink",
        },
        {
            "count": 8, "models": ["nvidia-h100"], "memory": "80G", "computeCapability": "8.0",
            "interconnect": "nvlink", "vendor": "nvidia",
        },
    ),
    "a count": ({"gpu_count": 2}, {"count": 2, "models": [], "interconnect": "any", "vendor": "nvidia"}),
    "a card of AMD": (
        {"gpu_type": "amd-mi250", "gpu_memory_gb": 128},
        {
            "count": 1, "models": ["amd-instinct-mi250", "amd-instinct-mi250x"], "memory": "64G",
            "interconnect": "any", "vendor": "amd",
        },
    ),
    "no GPU": ({"accelerator": "cpu"}, None),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "expected"), CLAIMS.values(), ids=CLAIMS)
def test_claim_says_what_the_job_says(fields: dict[str, Any], expected: dict[str, Any] | None) -> None:
    """Type, count, memory, capability and interconnect, each in its place."""
    claim = device_claim(job(**fields))

    if expected is None:
        assert claim is None
    else:
        assert claim is not None
        assert expected.items() <= claim.to_json().items()
        assert ("memory" in expected) == ("memory" in claim.to_json())


def test_every_part_of_a_situation_matters() -> None:
    """Free positions, other jobs, registries and policy each change an answer."""
    inner = {ModelRegistry.MLFLOW: "mlflow://10.0.0.5"}
    exact = job(model_id="llama", model_version="2.1")
    answers = [
        unmet(exact, make_worker(), MatchInput(registries=inner, policy=policy))
        for policy in (MlPolicy(), MlPolicy(hosts=("10.0.0.5",)))
    ]

    assert [bool(answer) for answer in answers] == [True, False]
    assert len(list(itertools.chain.from_iterable(answers))) == 1
