"""Matches jobs with workers and ranks the workers.

Gives unmet hard conditions, in words; a score; and the usable workers, best first. Hard conditions always hold: a job
that no worker meets now waits. Preferences never refuse a worker. A TPU shape that no known worker has is refused.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from atoll.ml import selection, tables
from atoll.ml.attributes import Accelerator, MlAttributes, ModelRegistry
from atoll.ml.capabilities import WorkerCapability, gpus_of
from atoll.ml.policy import MlPolicy
from atoll.ml.registry import Unresolved, resolve

LOADED_POINTS: Final = 100
"""A loaded model saves one to two minutes for 70 billion parameters; it weighs as much as the heaviest preferred
rule."""
CACHED_POINTS: Final = 50
"""A cached model saves the download of some 140 GB, ten to thirty minutes, and still has to be loaded."""
OTHER_VERSION_POINTS: Final = 10
"""Another version of the model shares runtime and often layers of the image with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchInput:
    """The cluster's state for a match.

    free: masks of free positions by worker, None to match the capacity; others: properties of the jobs on a worker,
    such as job_type and model_id; registries: kinds to base URIs.
    """

    free: Mapping[str, int] = field(default_factory=dict)
    others: Mapping[str, tuple[selection.Labels, ...]] = field(default_factory=dict)
    registries: Mapping[ModelRegistry, str] = field(default_factory=dict)
    policy: MlPolicy = field(default_factory=MlPolicy)


def unmet(attributes: MlAttributes, worker: WorkerCapability, situation: MatchInput) -> tuple[str, ...]:
    """Return the hard conditions that a worker does not meet, in words; empty if it serves the job."""
    found = (
        *_accelerator(attributes, worker, situation),
        *_host(attributes, worker),
        *selection.unmet(attributes, worker.labels, situation.others.get(worker.worker_id, ())),
    )
    return (*found, *_model(attributes, worker, situation))


def _accelerator(attributes: MlAttributes, worker: WorkerCapability, situation: MatchInput) -> tuple[str, ...]:
    match attributes.accelerator:
        case Accelerator.GPU:
            reason = gpus_of(worker, attributes, situation.free.get(worker.worker_id))
            return (reason,) if reason else ()
        case Accelerator.TPU:
            return _tpu(attributes, worker)
        case Accelerator.FPGA:
            return ("no FPGA is known to be there",)
        case _:
            return ()


def _tpu(attributes: MlAttributes, worker: WorkerCapability) -> tuple[str, ...]:
    if worker.tpu_type is None:
        return ("no TPU is there",)
    out = []
    if attributes.tpu_type not in {None, worker.tpu_type}:
        out.append(f"TPUs are {worker.tpu_type}, not {attributes.tpu_type}")
    wanted, has = attributes.tpu_topology, worker.tpu_topology
    if wanted is not None and not _same_shape(wanted, has):
        out.append(f"its slice is {has or 'of no known shape'}, not {wanted}")
    chips = attributes.tpu_chip_count
    if wanted is None and chips is not None and chips > _slice_chips(worker):
        out.append(f"its slice has {_slice_chips(worker)} chips, not {chips}")
    return tuple(out)


def _same_shape(wanted: str, has: str) -> bool:
    return all(part.isdigit() for part in has.split("x")) and tables.tpu_shape(wanted) == tables.tpu_shape(has)


def _slice_chips(worker: WorkerCapability) -> int:
    sides = worker.tpu_topology.split("x")
    return tables.tpu_chips(worker.tpu_topology) if all(map(str.isdigit, sides)) else worker.tpu_chip_count


def _host(attributes: MlAttributes, worker: WorkerCapability) -> tuple[str, ...]:
    needs = (
        ("cpu_cores", "cores"),
        ("memory_gb", "GB of memory"),
        ("storage_gb", "GB of storage"),
        ("shm_size_gb", "GB for shared memory"),
    )
    out = [
        f"has {getattr(worker, name):g} {unit}, not {getattr(attributes, name):g}"
        for name, unit in needs
        if (getattr(attributes, name) or 0) > getattr(worker, name)
    ]
    if attributes.runtime is not None and worker.runtimes and attributes.runtime not in worker.runtimes:
        out.append(f"runs {', '.join(worker.runtimes)}, not {attributes.runtime}")
    return tuple(out)


def _model(attributes: MlAttributes, worker: WorkerCapability, situation: MatchInput) -> tuple[str, ...]:
    """Unmet conditions on the model: a versioned model must be present or in a known registry."""
    if attributes.model_id is None or attributes.model_version is None:
        return ()
    answer = resolve(
        attributes,
        loaded=worker.models_loaded,
        cached=worker.models_cached,
        registries=situation.registries,
        policy=situation.policy,
    )
    return (answer.message,) if isinstance(answer, Unresolved) else ()


def locality(attributes: MlAttributes, worker: WorkerCapability) -> int:
    """Return the points for a nearby model: 0 to 100."""
    if attributes.model_id is None:
        return 0
    if any(model.matches(attributes) for model in worker.models_loaded):
        return LOADED_POINTS
    if any(model.matches(attributes) for model in worker.models_cached):
        return CACHED_POINTS
    known = (*worker.models_loaded, *worker.models_cached)
    return OTHER_VERSION_POINTS if any(model.model_id == attributes.model_id for model in known) else 0


def score(attributes: MlAttributes, worker: WorkerCapability, situation: MatchInput) -> int:
    """Return a worker's score: the weights of the preferred rules that it meets, and locality."""
    others = situation.others.get(worker.worker_id, ())
    return selection.score(attributes, worker.labels, others) + locality(attributes, worker)


def rank(
    attributes: MlAttributes, workers: Iterable[WorkerCapability], situation: MatchInput
) -> tuple[WorkerCapability, ...]:
    """Return the workers that serve the job, the highest score first, ties by worker_id."""
    fitting = [worker for worker in workers if not unmet(attributes, worker, situation)]
    return tuple(sorted(fitting, key=lambda worker: (-score(attributes, worker, situation), worker.worker_id)))


def impossible_tpu(attributes: MlAttributes, workers: Iterable[WorkerCapability]) -> str:
    """Return why no known worker, busy or not, can ever give the job's TPU slice; empty if one can, and for other
    jobs."""
    if attributes.accelerator is not Accelerator.TPU:
        return ""
    known = [worker for worker in workers if worker.tpu_type is not None]
    if any(not _tpu(attributes, worker) for worker in known):
        return ""
    slices = sorted({f"{worker.tpu_type} {worker.tpu_topology}".strip() for worker in known})
    wanted = " ".join(filter(None, (attributes.tpu_type, attributes.tpu_topology))) or "a slice of that size"
    return f"no worker has {wanted}; there is {', '.join(slices) or 'no TPU at all'}"
