"""Rules over several attributes, and the cluster's policy.

Gives a Complaint for each broken rule; values are already well formed. Rules are rows of a table; they check a job's
attributes as given, and again after queue defaults and inference.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from atoll.api.claims import InterconnectKind
from atoll.ml import tables
from atoll.ml.attributes import GPU_NAMES, PREFIX, TPU_NAMES, Accelerator, LabelAffinity, MlAttributes, MlPriorityClass
from atoll.ml.policy import MlPolicy
from atoll.ml.problems import shown
from atoll.ml.registry import CHECKSUM_DIGITS
from atoll.ml.selection import ORDERED, dotted_number
from atoll.ml.uris import refuse_checkpoint_uri, refuse_model_uri


@dataclass(frozen=True, slots=True)
class Complaint:
    """A broken rule: the attribute without its prefix, what must hold, what to do. path: below the attribute; value: of
    a part of it, else the attribute's own."""

    name: str
    limit: str
    hint: str
    path: tuple[str | int, ...] = ()
    value: str = ""


GIGABYTES_MIN: Final = 0.001
Rule = Callable[[MlAttributes, MlPolicy], Iterator[Complaint]]


def complaints(attributes: MlAttributes, policy: MlPolicy) -> tuple[Complaint, ...]:
    """Return the broken rules over the attributes, in a fixed order."""
    return tuple(complaint for rule in RULES for complaint in rule(attributes, policy))


def _bounds(attributes: MlAttributes, policy: MlPolicy) -> Iterator[Complaint]:
    for name, value in attributes.given().items():
        bound = policy.bound_of(name)
        if bound is not None and value > bound:
            yield Complaint(name, f"may be at most {bound:.15g}", "ask for less, or have the bound raised")
        if name.endswith("_gb") and value < GIGABYTES_MIN:
            yield Complaint(name, f"must be at least {GIGABYTES_MIN}", "ask for more, or leave it out")


def _accelerator(attributes: MlAttributes, _policy: MlPolicy) -> Iterator[Complaint]:
    """A named accelerator excludes attributes of the others; a GPU job has a GPU."""
    named = attributes.accelerator
    own = {Accelerator.GPU: GPU_NAMES, Accelerator.TPU: TPU_NAMES}
    if named is None:
        tpu = [name for name in TPU_NAMES if getattr(attributes, name) is not None]
        gpu = [name for name in GPU_NAMES if _wants_gpus(attributes, name)]
        if tpu and gpu:
            yield Complaint(tpu[0], f"must not stand beside {PREFIX}{gpu[0]}", "a job has GPUs or TPUs; remove one")
        return
    for kind, names in own.items():
        for name in names if kind is not named else ():
            if _wants_gpus(attributes, name) if kind is Accelerator.GPU else getattr(attributes, name) is not None:
                yield Complaint(
                    name,
                    f"must not stand beside {PREFIX}accelerator {named}",
                    f"remove it, or set {PREFIX}accelerator to {kind}",
                )
    if named is Accelerator.GPU and attributes.gpu_count == 0:
        yield Complaint("gpu_count", f"must be at least 1 beside {PREFIX}accelerator gpu", "ask for a GPU, or for cpu")


def _wants_gpus(attributes: MlAttributes, name: str) -> bool:
    """True if an attribute asks for GPUs; a count of 0 does not."""
    value = getattr(attributes, name)
    return value is not None and not (name == "gpu_count" and value == 0)


def _no_gpus(attributes: MlAttributes, _policy: MlPolicy) -> Iterator[Complaint]:
    if attributes.gpu_count != 0:
        return
    wanted = [name for name in GPU_NAMES if _wants_gpus(attributes, name)]
    if attributes.gpu_interconnect is InterconnectKind.ANY:
        wanted.remove("gpu_interconnect")
    if wanted:
        named = ", ".join(PREFIX + name for name in wanted)
        yield Complaint("gpu_count", f"must be at least 1 beside {named}", "ask for a GPU, or remove them")


def _capability(attributes: MlAttributes, _policy: MlPolicy) -> Iterator[Complaint]:
    """A known GPU type must support the requested capability and precision."""
    row, gpu_type = tables.GPU_TYPES.get(attributes.gpu_type or ""), attributes.gpu_type or ""
    if attributes.gpu_compute_capability is not None and tables.has_no_capability(gpu_type):
        yield Complaint(
            "gpu_compute_capability", f"must not stand beside {gpu_type}: AMD's cards have none", "remove it"
        )
    if row is None or row.compute_capability is None:
        return
    has = tables.capability_text(row.compute_capability)
    if attributes.gpu_compute_capability is not None:
        if tables.parse_capability(attributes.gpu_compute_capability) > row.compute_capability:
            yield Complaint(
                "gpu_compute_capability", f"may be at most {has}, which {row.id} has", "choose another type"
            )
    elif attributes.precision is not None:
        needs = tables.PRECISIONS[attributes.precision].compute_capability
        if needs > row.compute_capability:
            yield Complaint(
                "precision",
                f"needs compute capability {tables.capability_text(needs)} and {row.id} has {has}",
                f"choose another type or precision; {PREFIX}gpu_compute_capability {has} says that it works regardless",
            )


def _tpu(attributes: MlAttributes, policy: MlPolicy) -> Iterator[Complaint]:
    topology = attributes.tpu_topology
    if topology is None:
        return
    chips = tables.tpu_chips(topology)
    if attributes.tpu_chip_count is not None and attributes.tpu_chip_count != chips:
        yield Complaint("tpu_chip_count", f"must be {chips}, the chips of {topology}", "correct one of the two")
    facts = tables.TPU_TYPES.get(attributes.tpu_type) if attributes.tpu_type is not None else None
    if facts is not None and len(tables.tpu_shape(topology)) > facts.sides_max:
        yield Complaint(
            "tpu_topology", f"must have {facts.sides_max} sides on {attributes.tpu_type}", "no such slice exists"
        )
    most = policy.bound_of("tpu_chip_count")
    if most is not None and chips > most:
        yield Complaint("tpu_topology", f"may have at most {most:.15g} chips", "ask for a smaller slice")


def _model(attributes: MlAttributes, policy: MlPolicy) -> Iterator[Complaint]:
    model_id, checksum = attributes.model_id, attributes.model_checksum
    if model_id is not None:
        if not model_id.isprintable():
            yield Complaint("model_id", "must be of characters that can be seen", "type it anew; do not copy it")
        elif ".." in model_id or model_id.startswith("/"):
            yield Complaint("model_id", "must be a name without ..", "write it as the registry does")
        elif not policy.allows_model(model_id):
            yield Complaint("model_id", "must be one of " + ", ".join(policy.model_ids), "ask for it to be allowed")
    elif attributes.model_version is not None and attributes.model_registry_uri is None:
        yield Complaint("model_version", f"needs {PREFIX}model_id", "name the model too")
    if checksum is not None:
        algorithm, _, digits = checksum.partition(":")
        length = CHECKSUM_DIGITS.get(algorithm)
        if length is None:
            yield Complaint("model_checksum", "must begin with one of " + ", ".join(CHECKSUM_DIGITS), "use sha256:")
        elif len(digits) != length:
            yield Complaint("model_checksum", f"must have {length} digits after {algorithm}:", f"it has {len(digits)}")


def _uris(attributes: MlAttributes, policy: MlPolicy) -> Iterator[Complaint]:
    if attributes.model_registry_uri is not None:
        problem = refuse_model_uri(attributes.model_registry_uri, attributes.model_registry, policy)
        if problem is not None:
            yield Complaint("model_registry_uri", problem.limit, problem.hint)
    if attributes.checkpoint_storage_uri is not None:
        problem = refuse_checkpoint_uri(attributes.checkpoint_storage_uri, policy)
        if problem is not None:
            yield Complaint("checkpoint_storage_uri", problem.limit, problem.hint)


def _selectors(attributes: MlAttributes, policy: MlPolicy) -> Iterator[Complaint]:
    for key in attributes.node_selector or {}:
        if not policy.allows_key(key):
            yield Complaint("node_selector", *KEY_REFUSED, (key,), shown(key))
    for name in ("affinity", "anti_affinity"):
        affinity = getattr(attributes, name) or LabelAffinity()
        for kind in ("required", "preferred"):
            for index, rule in enumerate(getattr(affinity, kind)):
                path = (kind, index)
                if not policy.allows_key(rule.key):
                    yield Complaint(name, *KEY_REFUSED, (*path, "key"), shown(rule.key))
                count = len(rule.values)
                if rule.operator in ORDERED and (count != 1 or dotted_number(rule.values[0]) is None):
                    limit = f"must be one number such as 8.0 for operator {rule.operator}"
                    yield Complaint(name, limit, "correct the values", (*path, "values"), shown(list(rule.values)))
                if rule.operator in {"In", "NotIn"} and not count:
                    limit = f"must name a value for operator {rule.operator}"
                    yield Complaint(name, limit, "Exists and DoesNotExist take none", (*path, "values"), "empty")


KEY_REFUSED: Final = ("must be a label that jobs may choose by", "administrators keep this label; leave it out")


def _escalation(attributes: MlAttributes, _policy: MlPolicy) -> Iterator[Complaint]:
    target, own = attributes.escalation_target_class, attributes.priority_class
    order = list(MlPriorityClass)
    if target is not None and order.index(target) <= order.index(own or MlPriorityClass.SPOT):
        yield Complaint(
            "escalation_target_class",
            f"must be above {PREFIX}priority_class {own or MlPriorityClass.SPOT}",
            "the order is " + " < ".join(order),
        )


def _reservation(attributes: MlAttributes, _policy: MlPolicy) -> Iterator[Complaint]:
    if attributes.reservation_timeout_s is not None and attributes.reservation_id is None:
        yield Complaint("reservation_timeout_s", f"needs {PREFIX}reservation_id", "name the reservation, or remove it")
    if any(part in (attributes.reservation_id or "") for part in ("..", "-.", ".-")):
        yield Complaint("reservation_id", "must be a name in lower case, such as nightly-h100", "correct it")


RULES: Final[tuple[Rule, ...]] = (
    _bounds,
    _accelerator,
    _no_gpus,
    _capability,
    _tpu,
    _model,
    _uris,
    _selectors,
    _escalation,
    _reservation,
)
