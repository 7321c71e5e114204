"""Rendered jobs on a real API server: kubectl applies the output of `atoll job render`."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.jobs.documents import parse_job
from atoll.jobs.errors import JobMistake
from atoll.jobs.model import Job
from atoll.jobs.rendering import render
from atoll.jobs.text import manifest_text
from atoll.ml.attributes import PREFIX
from devcluster.build import ensure_binaries
from tests.deploy.api_server import RealApi
from tests.jobs.render import NOW_SECONDS
from tests.jobs.test_job_examples import EXAMPLES, FILES, result_of
from tests.jobs.test_job_properties import jobs
from tests.ml.strategies import raw_attributes

pytestmark = pytest.mark.e2e

Kubectl = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def kubectl(control_plane: Path, tmp_path_factory: pytest.TempPathFactory) -> Kubectl:
    """Run kubectl on a control plane with Atoll's kinds and the priorities of jobs; nothing is to run there."""
    program, cache = ensure_binaries(real_nodes=False)["kubectl"], tmp_path_factory.mktemp("kubectl")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        options = (f"--kubeconfig={control_plane}", f"--cache-dir={cache}")
        return subprocess.run([program, *options, *words], capture_output=True, text=True, check=False)

    assert run("apply", "-f", str(EXAMPLES / "priority-classes.yaml")).returncode == 0
    return run


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_api_server_takes_what_a_job_becomes(kubectl: Kubectl, path: Path, tmp_path: Path) -> None:
    """Every object of every shipped job passes the real API server's defaults, schemas and rules."""
    text = manifest_text(result_of(path))
    file = tmp_path / "objects.yaml"
    file.write_text(text)

    applied = kubectl("apply", "--dry-run=server", "--validate=strict", "-f", str(file))

    assert applied.returncode == 0, applied.stderr
    objects = text.count("\napiVersion:") + text.startswith("apiVersion:")
    assert applied.stdout.count("(server dry run)") == objects


PLURALS = {
    "GpuClaim": "gpuclaims",
    "GpuGang": "gpugangs",
    "HorizontalPodAutoscaler": "horizontalpodautoscalers",
    "Deployment": "deployments",
    "Job": "jobs",
    "PersistentVolumeClaim": "persistentvolumeclaims",
    "Service": "services",
    "StatefulSet": "statefulsets",
}
NEAR = {"policy", "name", "workers", "job_type", "container"}
"""Fields that a mistake of attributes may be told by, beside the attributes."""


@pytest.fixture(scope="module")
def server(kubectl: Kubectl, control_plane: Path) -> RealApi:
    """Return the API server of `kubectl`, without a new process for each object."""
    assert kubectl("version").returncode == 0
    return RealApi(control_plane)


def check_taken(server: RealApi, job: Job) -> None:
    """Fail unless the API server takes every object of a job, each field known and each value valid."""
    for one in render(job, now_seconds=NOW_SECONDS).objects:
        version = one["apiVersion"]
        root = f"/apis/{version}" if "/" in version else f"/api/{version}"
        path = f"{root}/namespaces/default/{PLURALS[one['kind']]}?fieldValidation=Strict"
        answer = server.send("POST", path, one, dry_run=True)
        assert answer.is_accepted, f"{one['kind']}: {answer.message}"


ANY = settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))


@ANY
@given(job=jobs())
def test_api_server_takes_what_any_job_becomes(server: RealApi, job: Job) -> None:
    """Whatever a job says beside its attributes: policy, intent, container, type."""
    check_taken(server, job)


@ANY
@given(attributes=raw_attributes(), job_type=st.sampled_from(("service", "batch", "training")))
def test_api_server_takes_any_attributes_that_are_not_refused_by_name(
    server: RealApi, attributes: dict[str, Any], job_type: str
) -> None:
    """A job with any valid attributes becomes objects that the API server takes, or is refused with the attribute."""
    document = {"name": "work", "job_type": job_type, "container": {"image": "work:1"}, "attributes": attributes}
    parsed = parse_job(yaml.safe_dump(document).encode())
    if parsed.job is None:
        refused = {problem.attribute for problem in parsed.problems}
    else:
        try:
            check_taken(server, parsed.job)
        except JobMistake as mistake:
            refused = {mistake.problem.attribute}
        else:
            return
    assert all(name.startswith(PREFIX) or name in NEAR for name in refused), refused
