"""The server of a model: image, arguments and port by runtime, for jobs of deployment type model.

Gives a Server, or a JobMistake for an unknown runtime.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from atoll.jobs.errors import JobMistake
from atoll.jobs.notes import HINT, NO_EFFECT
from atoll.jobs.settings import RenderSettings
from atoll.ml.attributes import PREFIX, DistributedStrategy, MlAttributes, ModelFormat, Precision, Runtime

PORT: Final = 8000
LOAD_SECONDS: Final = 600
"""Time that a large model may take to load, from a registry at least."""
_HALVES: Final = {Precision.FP16: "float16", Precision.BF16: "bfloat16"}
TYPES: Final[Mapping[Runtime, Mapping[Precision, str]]] = {
    Runtime.VLLM: _HALVES | {Precision.FP32: "float32"},
    Runtime.TGI: _HALVES,
}
"""The option --dtype of each server."""


@dataclass(frozen=True, slots=True)
class Server:
    """The server of a model. `health`: the path that answers when it is ready."""

    image: str
    args: tuple[str, ...]
    health: str
    port: int = PORT


def server_of(attributes: MlAttributes, gpus: int, image: str | None, settings: RenderSettings) -> Server:
    """Return the server for the runtime, with the job's own `image` if given. Raises JobMistake."""
    runtime = attributes.runtime
    row = SERVERS.get(runtime) if runtime is not None else None
    chosen = image or (settings.runtime_images.get(runtime) if runtime is not None else None)
    if runtime is None or row is None or chosen is None:
        known = " and ".join(sorted(one for one in SERVERS if one in settings.runtime_images))
        limit = f"deployment_type model is served by {known}"
        raise JobMistake(
            f"{PREFIX}runtime",
            runtime or "nothing",
            limit,
            "choose one, or deployment_type docker with container.image",
        )
    arguments, health = row
    return Server(chosen, (*arguments(attributes, gpus), f"--port={PORT}"), health)


def notes_of(attributes: MlAttributes) -> Iterator[tuple[str, object, str]]:
    """Yield what the server does not take from the attributes: name, value, and what to do."""
    runtime, precision = attributes.runtime, attributes.precision
    if runtime is None:
        return
    if precision not in (None, Precision.FP8, *TYPES.get(runtime, ())):
        text = f"{NO_EFFECT}{runtime} takes that from the model's files: choose a model that is stored in {precision}"
        yield "precision", precision, text
    if attributes.model_format is ModelFormat.GGUF:
        told = "needs the path of one file, and a tokenizer: name both in container.args"
        yield "model_format", attributes.model_format, f"{HINT}{runtime} {told}"
    if runtime is Runtime.TGI and attributes.distributed_strategy is DistributedStrategy.PIPELINE_PARALLEL:
        text = f"{NO_EFFECT}{runtime} knows no pipelines, and shards each layer over the GPUs (--num-shard)"
        yield "distributed_strategy", attributes.distributed_strategy, text


def _model_of(attributes: MlAttributes) -> tuple[str | None, str | None]:
    """Return the model and its revision, as Hugging Face names them if the job says where it is there."""
    scheme, _, rest = (attributes.model_registry_uri or "").partition("://")
    if scheme != "hf":
        return attributes.model_id, attributes.model_version
    model, _, revision = rest.partition("@")
    return model, revision or attributes.model_version


def _vllm(attributes: MlAttributes, gpus: int) -> tuple[str, ...]:
    types = TYPES[Runtime.VLLM]
    model, revision = _model_of(attributes)
    is_pipeline = attributes.distributed_strategy is DistributedStrategy.PIPELINE_PARALLEL
    rows = (
        ("--model", model),
        ("--revision", revision),
        ("--pipeline-parallel-size" if is_pipeline else "--tensor-parallel-size", gpus if gpus > 1 else None),
        ("--dtype", types.get(attributes.precision) if attributes.precision is not None else None),
        ("--quantization", "fp8" if attributes.precision is Precision.FP8 else None),
        ("--max-num-seqs", attributes.max_batch_size),
        ("--max-model-len", attributes.max_tokens),
    )
    return tuple(f"{option}={value}" for option, value in rows if value is not None)


def _tgi(attributes: MlAttributes, gpus: int) -> tuple[str, ...]:
    types = TYPES[Runtime.TGI]
    model, revision = _model_of(attributes)
    rows = (
        ("--model-id", model),
        ("--revision", revision),
        ("--num-shard", gpus if gpus > 1 else None),
        ("--dtype", types.get(attributes.precision) if attributes.precision is not None else None),
        ("--quantize", "fp8" if attributes.precision is Precision.FP8 else None),
        ("--max-concurrent-requests", attributes.max_batch_size),
        ("--max-total-tokens", attributes.max_tokens),
    )
    return tuple(f"{option}={value}" for option, value in rows if value is not None)


Arguments = Callable[[MlAttributes, int], tuple[str, ...]]
SERVERS: Final[Mapping[Runtime, tuple[Arguments, str]]] = {
    Runtime.VLLM: (_vllm, "/health"),
    Runtime.TGI: (_tgi, "/health"),
}
