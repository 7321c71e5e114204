"""Job documents: which are accepted, and how others are refused."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from atoll.jobs.contracts import CONTRACTS
from atoll.jobs.documents import parse_job
from atoll.jobs.model import Job
from atoll.jobs.profiles import Pattern, patterns_of, profile_of
from atoll.jobs.words import PRIORITY_VALUES, JobType, Priority
from atoll.jobs.working_out import given_attributes
from atoll.ml.attributes import MlAttributes
from tests.jobs.render import job

PLAIN = "name: work\njob_type: batch\ncontainer: {image: a:1}\n"
SERVICE = PLAIN.replace("batch", "service")

REFUSED = {
    "no-image": ("name: work\njob_type: batch\n", "container.image", None),
    "no-type": ("name: work\ncontainer: {image: a:1}\n", "job_type", 1),
    "an-unknown-type": (PLAIN.replace("batch", "trainng"), "job_type", 2),
    "a-name-in-capitals": (PLAIN.replace("work", "Work"), "name", 1),
    "a-name-that-is-too-long-for-pods": (PLAIN.replace("work", "w" * 53), "name", 1),
    "an-attribute-that-nobody-knows": (PLAIN + "ext_ml_gpu_cont: 1\n", "ext_ml_gpu_cont", 4),
    "an-attribute-without-its-prefix": (PLAIN + "attributes: {gpu_count: 1}\n", "gpu_count", 4),
    "an-attribute-of-the-wrong-kind": (PLAIN + "ext_ml_gpu_count: many\n", "ext_ml_gpu_count", 4),
    "an-attribute-said-twice": (
        PLAIN + "ext_ml_gpu_count: 1\nattributes:\n  ext_ml_gpu_count: 2\n",
        "ext_ml_gpu_count",
        4,
    ),
    "more-than-anybody-gets": (PLAIN + "ext_ml_gpu_count: 1000\n", "ext_ml_gpu_count", 4),
    "less-memory-than-any-program-has": (PLAIN + "ext_ml_memory_gb: 1.0e-300\n", "ext_ml_memory_gb", 4),
    "gpus-of-a-job-without": (PLAIN + "ext_ml_gpu_count: 0\next_ml_gpu_type: nvidia-l4\n", "ext_ml_gpu_count", 4),
    "two-types-of-gpu": (
        PLAIN + "resources:\n  gpu_type: A100\next_ml_gpu_type: nvidia-h100\n",
        "resources.gpu_type",
        5,
    ),
    "two-sizes-of-memory": (
        PLAIN + "resources: {memory_request: 1Gi}\next_ml_memory_gb: 2\n",
        "resources.memory_request",
        4,
    ),
    "no-such-gpu": (PLAIN + "resources: {gpu_type: fast}\n", "resources.gpu_type", 4),
    "cores-that-are-none": (PLAIN + "resources: {cpu_request: much}\n", "resources.cpu_request", 4),
    "memory-without-a-unit": (PLAIN + "resources:\n  memory_request: '8'\n", "resources.memory_request", 5),
    "a-limit-below-its-request": (PLAIN + "resources: {memory_request: 4Gi, memory_limit: 2Gi}\n", "resources", 4),
    "replicas-of-a-batch": (PLAIN + "policy: {min_replicas: 2}\n", "policy.min_replicas", 4),
    "a-batch-without-requests": (PLAIN + "policy: {scale_to_zero: true}\n", "policy.scale_to_zero", 4),
    "no-replicas-without-a-way-back": (SERVICE + "policy: {min_replicas: 0}\n", "policy", 4),
    "fewer-at-most-than-at-least": (SERVICE + "policy: {min_replicas: 3, max_replicas: 2}\n", "policy", 4),
    "checkpoints-of-a-batch": (PLAIN + "intent: {checkpoint_config: {}}\n", "intent.checkpoint_config", 4),
    "workers-of-a-service": (SERVICE + "workers: 2\n", "workers", 4),
    "workers-beside-parallelism": (PLAIN + "workers: 2\nparallelism: 2\n", "workers", 4),
    "a-deadline-before-the-start": (
        PLAIN + "policy: {scheduled_start: '2030-01-02T00:00:00Z', deadline: '2030-01-01T00:00:00Z'}\n",
        "policy",
        4,
    ),
    "a-time-without-a-zone": (PLAIN + "policy: {deadline: '2030-01-01T00:00:00'}\n", "policy.deadline", 4),
    "a-window-in-a-policy": (PLAIN + "policy:\n  time_window: night\n", "policy.time_window", 5),
    "number-for-a-priority": (PLAIN + "priority: 5\n", "priority", 4),
    "another-job-to-wait-for": (PLAIN + "depends_on: [other]\n", "depends_on", 4),
    "a-variable-of-atolls-own": (
        "name: work\njob_type: batch\ncontainer:\n  image: a:1\n  env:\n  - {name: CUDA_VISIBLE_DEVICES, value: '0'}\n",
        "container.env[0]",
        6,
    ),
    "a-variable-of-atolls-name": (
        "name: work\njob_type: batch\ncontainer:\n  image: a:1\n  env:\n  - {name: ATOLL_MODEL_HOSTS, value: a}\n",
        "container.env[0]",
        6,
    ),
    "a-path-that-leads-elsewhere": (
        "name: a\njob_type: batch\ncontainer:\n  image: a:1\n  volumes: [{name: a, mount_path: /a/../b, claim: c}]\n",
        "container.volumes[0].mount_path",
        5,
    ),
    "a-label-of-somebody-elses": (PLAIN + "labels: {kueue.x-k8s.io/queue-name: a}\n", "labels", 4),
    "the-label-of-the-pods": (PLAIN + "labels: {app: a}\n", "labels", 4),
    "an-administrators-label": (
        PLAIN + "ext_ml_node_selector: {security_zone: a}\n",
        "ext_ml_node_selector.security_zone",
        4,
    ),
    "two-answers-of-one-label": (
        PLAIN + "policy: {node_selector: {zone: a}}\next_ml_node_selector: {zone: b}\n",
        "policy.node_selector.zone",
        4,
    ),
    "two-answers-of-one-label-by-two-names": (
        PLAIN + "ext_ml_node_selector: {region: a}\npolicy:\n  node_selector: {topology.kubernetes.io/region: b}\n",
        "policy.node_selector.topology.kubernetes.io/region",
        6,
    ),
    "two-answers-of-one-label-in-one-place": (
        PLAIN + "ext_ml_node_selector: {region: a, topology.kubernetes.io/region: b}\n",
        "ext_ml_node_selector.topology.kubernetes.io/region",
        4,
    ),
    "a-number-for-a-deadline": (PLAIN + "policy: {deadline: 5}\n", "policy.deadline", 4),
    "a-number-in-quotes-for-a-start": (PLAIN + "policy: {scheduled_start: '5'}\n", "policy.scheduled_start", 4),
    "a-taint-tolerated-longer-than-clocks-count": (
        PLAIN + "policy: {tolerations: [{key: a, effect: NoExecute, toleration_seconds: 99999999999999999999}]}\n",
        "policy.tolerations[0]",
        4,
    ),
    "a-queue-with-an-empty-part": (PLAIN + "policy: {queue_name: a..b}\n", "policy.queue_name", 4),
    "a-class-with-an-empty-part": (
        PLAIN.replace("batch", "training") + "intent: {checkpoint_config: {storage_class: a..b}}\n",
        "intent.checkpoint_config.storage_class",
        4,
    ),
    "an-account-with-an-empty-part": (
        PLAIN.replace("a:1", "a:1, service_account_name: a..b"),
        "container.service_account_name",
        3,
    ),
    "a-secret-with-a-part-that-begins-with-a-hyphen": (
        PLAIN.replace("a:1", "a:1, env_secrets: [a.-b]"),
        "container.env_secrets[0]",
        3,
    ),
    "a-pull-secret-with-an-empty-part": (
        PLAIN.replace("a:1", "a:1, image_pull_secrets: [a..b]"),
        "container.image_pull_secrets[0]",
        3,
    ),
    "a-label-of-no-domain": (PLAIN + "labels: {a..b/x: c}\n", "labels.a..b/x", 4),
    "an-annotation-of-no-domain": (PLAIN + "annotations: {a..b/x: c}\n", "annotations.a..b/x", 4),
    "a-selector-of-no-domain": (PLAIN + "policy: {node_selector: {a..b/x: c}}\n", "policy.node_selector.a..b/x", 4),
    "a-taint-of-no-domain": (
        PLAIN + "policy: {tolerations: [{key: a..b/x, value: c}]}\n",
        "policy.tolerations[0].key",
        4,
    ),
    "a-chart-for-another-way": (PLAIN + "helm: {chart: a/b}\n", "deployment_type", None),
    "a-model-without-a-name": ("name: a\njob_type: service\ndeployment_type: model\n", "ext_ml_model_id", None),
    "no-mapping": ("- a\n", "", 1),
    "no-yaml": ("a: [\n", "", 2),
    "an-anchor": (PLAIN + "labels: &a {b: c}\nannotations: *a\n", "", 5),
    "nothing": ("", "", None),
    "only-a-comment": ("# later\n", "", 1),
    "an-attribute-without-a-value": (PLAIN + "ext_ml_gpu_count:\n", "ext_ml_gpu_count", 4),
    "a-manifest": ("apiVersion: v1\nkind: Pod\nmetadata: {name: a}\n", "kind", 2),
    "a-model-with-characters-that-hide": (PLAIN + "ext_ml_model_id: a\u200bb\n", "ext_ml_model_id", 4),
    "a-reservation-that-cannot-be": (
        PLAIN + "ext_ml_gpu_count: 1\next_ml_reservation_id: a..b\n",
        "ext_ml_reservation_id",
        5,
    ),
    "a-volume-over-the-kernels": (
        PLAIN.replace("a:1", "a:1, volumes: [{name: a, mount_path: /proc/x, claim: c}]"),
        "container.volumes[0].mount_path",
        3,
    ),
}


@pytest.mark.parametrize(("text", "field", "line"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_is_told_by_field_value_limit_and_line(text: str, field: str, line: int | None) -> None:
    """Whoever reads the message finds the place and knows what to write instead."""
    parsed = parse_job(text.encode())

    assert parsed.job is None
    problem = parsed.problems[0]
    assert problem.attribute == field
    assert line is None or problem.line == line
    assert problem.limit
    assert problem.hint


def test_a_record_that_broke_no_rule_of_its_time_stays_readable() -> None:
    """Rules that came later hold for new documents alone; the job service reads what it recorded before."""
    toleration = {"key": "a..b/x", "effect": "NoExecute", "toleration_seconds": 10**12}
    policy = {"queue_name": "a..b", "deadline": 5, "tolerations": [toleration]}
    selector = {"region": "a", "topology.kubernetes.io/region": "b"}

    read = job(policy=policy, labels={"a..b/x": "c"}, ext_ml_node_selector=selector)

    assert read.policy.queue_name == "a..b"


def test_every_mistake_of_a_document_is_told_at_once() -> None:
    """Nobody has to run the command once for each."""
    text = PLAIN.replace("work", "Work") + "policy: {priority_class: urgent}\next_ml_gpu_count: many\n"

    told = {problem.attribute for problem in parse_job(text.encode()).problems}

    assert told == {"name", "policy.priority_class", "ext_ml_gpu_count"}


@pytest.mark.parametrize(
    "data",
    [b"\xff\xfe", b"{" * 100_000, b"a: " + b"[" * 5000, b"\x00", b"x" * 300_000, b"!!python/object:os.system {}"],
)
def test_no_bytes_crash_the_reading(data: bytes) -> None:
    """Nonsense is a problem like any other."""
    parsed = parse_job(data)

    assert parsed.job is None
    assert parsed.problems


@pytest.mark.parametrize("name", ["A100", "a100", "nvidia-a100"])
def test_a_gpu_has_several_names(name: str) -> None:
    """The platform's short names and the vocabulary of models mean the same card."""
    assert given_attributes(job(resources={"gpu_type": name})).gpu_type == "nvidia-a100"


def test_attributes_may_stand_beside_other_fields_or_together() -> None:
    """An envelope's attributes can be pasted as they are."""
    beside = parse_job((PLAIN + "ext_ml_gpu_count: 2\n").encode()).job
    together = parse_job((PLAIN + "attributes:\n  ext_ml_gpu_count: 2\n").encode()).job

    assert beside == together
    assert beside is not None
    assert beside.attributes.gpu_count == 2


PATTERNS: Mapping[Pattern, Mapping[str, Any]] = {
    Pattern.SERVERLESS: {"job_type": "service", "policy": {"scale_to_zero": True}},
    Pattern.SPOT: {"intent": {"spot_eligible": True}},
    Pattern.SCHEDULED: {"policy": {"scheduled_start": "2030-01-01T00:00:00Z"}},
    Pattern.INTERACTIVE: {"job_type": "service", "intent": {"workload_class": "interactive"}},
    Pattern.SYSTEM: {"owner_type": "platform"},
    Pattern.BACKGROUND: {"policy": {"priority_class": "low"}},
    Pattern.TIME_BOUNDED: {"policy": {"deadline": "2030-01-01T00:00:00Z"}},
    Pattern.COST_OPTIMISED: {"intent": {"optimization_goal": "cost"}},
}


@pytest.mark.parametrize("pattern", Pattern)
def test_what_people_call_a_type_is_a_type_with_a_policy(pattern: Pattern) -> None:
    """Each pattern is found by what makes it, and by nothing less."""
    assert patterns_of(job(**PATTERNS[pattern])) == (pattern,)
    assert patterns_of(job()) == ()


@pytest.mark.parametrize(
    ("says", "name", "flavor"),
    [
        pytest.param({"resources": {"gpu_type": "H100", "gpu_count": 8}}, "gpu-intensive", "gpu-h100", id="gpus"),
        pytest.param({"ext_ml_cpu_cores": 4}, "cpu-only", "cpu-standard", id="few-cores"),
        pytest.param({"ext_ml_cpu_cores": 32}, "cpu-only", "cpu-compute", id="many-cores"),
        pytest.param({"ext_ml_memory_gb": 256}, "memory-intensive", "memory-optimized", id="memory"),
        pytest.param(
            {"ext_ml_memory_gb": 256, "ext_ml_gpu_count": 8}, "gpu-intensive", "gpu-any", id="gpus-before-memory"
        ),
        pytest.param({"ext_ml_storage_gb": 4000}, "storage-intensive", "storage-optimized", id="storage"),
    ],
)
def test_a_job_has_the_profile_of_what_it_needs_most(says: dict[str, Any], name: str, flavor: str) -> None:
    """A profile names the flavors of machines that suit the job, the best first."""
    wanted = job(**says)
    profile = profile_of(wanted, given_attributes(wanted))

    assert profile.name == name
    assert profile.flavors[0] == flavor


def test_every_type_has_a_contract() -> None:
    """Life, restarts, priority, preemption, billing and service level of the three types."""
    rows = {of: (row.kind, row.restart_policy, row.priority, row.service_level) for of, row in CONTRACTS.items()}

    assert rows == {
        JobType.SERVICE: ("Deployment", "Always", Priority.HIGH, 0.999),
        JobType.BATCH: ("Job", "Never", Priority.NORMAL, 0.95),
        JobType.TRAINING: ("Job", "OnFailure", Priority.NORMAL, 0.9),
    }
    assert list(PRIORITY_VALUES.values()) == [1000, 100, 10, 1]


def test_the_shipped_priority_classes_are_those_of_the_words() -> None:
    """Whoever applies the example has the classes that rendered pods name."""
    from tests.jobs.test_job_examples import EXAMPLES

    objects = yaml.safe_load_all((EXAMPLES / "priority-classes.yaml").read_text())

    assert {one["metadata"]["name"]: one["value"] for one in objects} == dict(PRIORITY_VALUES)


def fields_of(model: type[BaseModel]) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of every field below a model, with 0 for the entry of a list."""
    for name, field in model.model_fields.items():
        yield (name,)
        text = str(field.annotation)
        for part in parts_of(field.annotation):
            path = (name, 0) if "tuple[" in text else (name,)
            yield from ((*path, *rest) for rest in fields_of(part))


def parts_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if annotation is not MlAttributes:
            yield annotation
        return
    for one in get_args(annotation):
        yield from parts_of(one)


@pytest.mark.parametrize("path", list(fields_of(Job)), ids=lambda path: ".".join(map(str, path)))
def test_every_field_says_in_words_what_it_takes(path: tuple[str | int, ...]) -> None:
    """Whatever of another kind stands there; no message is left to a library, or says that it should be different."""
    for odd in (None, [], {}, "", "?", 5, -1, 1.5, True, "x" * 20_000, [[]], 10**30):
        value: Any = odd
        for part in reversed(path):
            value = [value] if isinstance(part, int) else {part: value}
        parsed = parse_job(json.dumps(value).encode())
        for problem in parsed.problems:
            assert not re.search("another form|Input should|is None", str(problem)), problem
