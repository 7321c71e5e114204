"""Rendered jobs on a real API server: kubectl applies the output of `atoll job render`."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.jobs.text import manifest_text
from devcluster.build import ensure_binaries
from tests.jobs.test_job_examples import EXAMPLES, FILES, result_of

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
