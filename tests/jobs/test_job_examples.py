"""The example jobs: each is valid and renders reproducibly to objects that Kubernetes' schemas accept."""

from pathlib import Path

import pytest
import yaml

from atoll.api.claims import GpuClaim
from atoll.api.gangs import GpuGang
from atoll.jobs.documents import parse_job
from atoll.jobs.rendering import Rendered, render
from atoll.jobs.text import manifest_text
from tests.jobs.render import look
from tests.kubernetes_schemas import validate

EXAMPLES = Path(__file__).parents[2] / "examples/jobs/complete"
FILES = sorted(path for path in EXAMPLES.glob("*.yaml") if path.name != "priority-classes.yaml")
GOLDEN = {
    "inference": ("nvidia-a100", 2, "normal"),
    "training": ("nvidia-h100", 8, "high"),
    "tpu": (None, None, "high"),
    "sweep": ("nvidia-a100", 4, "low"),
    "cpu": (None, None, "normal"),
    "chain-1-prepare": (None, None, "normal"),
    "chain-2-train": ("nvidia-h100", 8, "high"),
    "chain-3-evaluate": ("nvidia-a100", 2, "normal"),
    "chain-4-tell": (None, None, "normal"),
    "group-text": ("nvidia-a100", 4, "normal"),
    "group-image": ("nvidia-l4", 1, "normal"),
    "group-speech": ("nvidia-t4", 1, "normal"),
}


def result_of(path: Path) -> Rendered:
    """Render an example."""
    parsed = parse_job(path.read_bytes())
    assert parsed.problems == ()
    assert parsed.job is not None
    return render(parsed.job)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_examples_render_to_valid_manifests(path: Path) -> None:
    """What is printed is what the API server takes, for the oldest and the newest supported Kubernetes."""
    text = manifest_text(result_of(path))
    objects = [one for one in yaml.safe_load_all(text) if one is not None]

    assert objects == list(result_of(path).objects)
    assert text == manifest_text(result_of(path))
    for one in objects:
        if one["kind"] == "GpuClaim":
            GpuClaim.model_validate(one)
        elif one["kind"] == "GpuGang":
            GpuGang.model_validate(one)
        else:
            for version in ("1.35", "1.37"):
                validate(one, version, strict=True)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_jobs_ask_for_what_they_say(name: str) -> None:
    """Model, count and priority of every job of the seven envelopes."""
    result = result_of(EXAMPLES / f"{name}.yaml")
    model, count, priority = GOLDEN[name]
    models = look(result, "GpuClaim.spec.devices.models")

    assert (models[0] if models else None, look(result, "GpuClaim.spec.devices.count")) == (model, count)
    assert look(result, "POD.spec.priorityClassName") == priority


def test_steps_of_a_chain_inherit_nothing() -> None:
    """The last step asks for no GPU, no memory and no checkpoint, whatever came before."""
    last = result_of(EXAMPLES / "chain-4-tell.yaml")

    assert [one["kind"] for one in last.objects] == ["Job"]
    assert look(last, "POD.spec.containers[0].resources.requests") == {"cpu": "1", "memory": "4Gi"}
