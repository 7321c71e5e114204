"""Rendered jobs on a real API server: what `atoll job render` prints, kubectl applies."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from devcluster import DevCluster
from tests.jobs.test_job_examples import EXAMPLES, FILES

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).parents[2]
ATOLL = Path(sys.executable).with_name("atoll")


@pytest.fixture(scope="module")
def plane() -> Iterator[DevCluster]:
    """A control plane with Atoll's kinds and the priorities of jobs; without nodes, as nothing is to run."""
    with DevCluster.start(f"jobs-{os.getpid()}", nodes=[], scheduler=False) as cluster:
        cluster.kubectl("apply", "-f", str(REPOSITORY / "deploy/crds"), check=True)
        cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s", check=True)
        cluster.kubectl("apply", "-f", str(EXAMPLES / "priority-classes.yaml"), check=True)
        yield cluster


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_api_server_takes_what_a_job_becomes(plane: DevCluster, path: Path, tmp_path: Path) -> None:
    """Every object of every shipped job passes the real API server's defaults, schemas and rules."""
    done = subprocess.run([ATOLL, "job", "render", "-f", path], capture_output=True, text=True, check=True)
    file = tmp_path / "objects.yaml"
    file.write_text(done.stdout)

    applied = plane.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", str(file))

    assert applied.returncode == 0, applied.stderr
    objects = done.stdout.count("\napiVersion:") + done.stdout.startswith("apiVersion:")
    assert applied.stdout.count("(server dry run)") == objects
