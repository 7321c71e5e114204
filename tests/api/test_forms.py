"""People are told in words what a field takes: every pattern of every model has them."""

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import pytest
from pydantic import BaseModel

import atoll
import jobs
import pipelines
from atoll.api.forms import UNKNOWN, form_of
from atoll.jobs.documents import parse_job
from atoll.jobs.queue_file import parse_queue_file
from atoll.ml.envelope import parse


def models(*packages: ModuleType) -> Iterator[type[BaseModel]]:
    """Yield every model of these packages."""
    names = [
        one.name for package in packages for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]
    for name in names:
        if "migrations" not in name and not name.endswith("__main__"):
            importlib.import_module(name)
    yield from (one for one in below(BaseModel) if one.__module__.partition(".")[0] in {"atoll", "jobs", "pipelines"})


def below(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield the models that are derived from one."""
    for one in model.__subclasses__():
        yield one
        yield from below(one)


def patterns(schema: object) -> Iterator[str]:
    """Yield the patterns of a JSON schema."""
    if isinstance(schema, dict):
        if isinstance(schema.get("pattern"), str):
            yield schema["pattern"]
        yield from (key for key in schema.get("patternProperties", {}) if isinstance(key, str))
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from patterns(part)


def test_every_pattern_has_words() -> None:
    """Whoever adds one writes what it means; the words hold no part of a regular expression."""
    found = {pattern for model in models(atoll, jobs, pipelines) for pattern in patterns(model.model_json_schema())}
    silent = sorted(pattern for pattern in found if form_of(pattern) == UNKNOWN)

    assert len(found) > 40
    assert silent == []
    assert not [form for form in map(form_of, found) if any(mark in form for mark in ("^", "[", "(", "\\", "$"))]


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ("name: a\njob_type: batch\ncontainer: {image: a:1, env: [{name: 1a, value: x}]}\n", "not begin with a digit"),
        ("name: a\njob_type: batch\ncontainer: {image: a:1}\nlabels: {a: 'b c'}\n", "must be the value of a label"),
        ("name: a\njob_type: batch\ncontainer: {image: a:1}\npolicy: {max_retry: 1}\n", "did you mean max_retries?"),
        (
            "name: a\njob_type: batch\ncontainer: {image: a:1}\next_ml_affinity: {require: []}\n",
            "did you mean required?",
        ),
        (
            "name: a\njob_type: batch\ncontainer: {image: a:1}\nextml_gpu_count: 1\n",
            "did you mean ext_ml_gpu_count?",
        ),
        ("name: a\njob_type: batch\ncontainer: {image: a:1, prots: []}\n", "did you mean ports?"),
    ],
)
def test_a_mistake_in_a_job_is_told_in_words(document: str, told: str) -> None:
    """Forms and near misses of names, at any depth."""
    (problem,) = parse_job(document.encode()).problems

    assert told in str(problem)


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ("flavors: [{name: A}]\n", "must be lower-case letters, digits and hyphens"),
        ("flavors: [{name: a, taints: [{key: a, effect: Never}]}]\n", "must be one of NoSchedule, NoExecute"),
        ("flavors: [{name: a, spott: true}]\n", "did you mean spot?"),
        ("tenants: [{name: a, queues: [{flavors: [{flavor: a, quota: {gpu: x}}]}]}]\n", "must be a quantity such as 8"),
    ],
)
def test_a_mistake_in_a_file_of_queues_is_told_in_words(document: str, told: str) -> None:
    """As in jobs."""
    problems = parse_queue_file(document.encode(), namespace="tenant-{tenant}")

    assert isinstance(problems, tuple)
    assert any(told in str(problem) for problem in problems)


def test_a_mistake_in_an_envelope_is_told_in_words() -> None:
    """The queue's name, and a key that is nearly an attribute's, which would be ignored."""
    refused = parse(b"queue: GPU\next_ml_gpu_count: 1\n")
    ignored = parse(b"extml_gpu_count: 1\nsomething: 2\n")

    assert "must be lower-case letters" in str(refused.problems[0])
    assert [str(note) for note in ignored.notes] == ["extml_gpu_count: ignored; did you mean ext_ml_gpu_count?"]
