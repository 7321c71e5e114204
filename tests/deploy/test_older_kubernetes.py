"""The end-to-end tests of this folder once more, on the oldest Kubernetes that is supported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from devcluster import Cluster

OLDEST = "1.35.4"


@pytest.mark.long
@pytest.mark.e2e
def test_doors_roles_and_custom_resources_on_the_oldest_kubernetes() -> None:
    """Every door is shut, every errand runs, every rule of the custom resources holds there too."""
    folder = Path(__file__).parent
    with Cluster.start(f"doors-oldest-{os.getpid()}", nodes=[], scheduler=False, kubernetes=OLDEST) as cluster:
        result = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-m", "e2e and not long", "-p", "no:cacheprovider", str(folder)],
            env={**os.environ, "ATOLL_E2E_KUBECONFIG": str(cluster.kubeconfig)},
            cwd=folder.parents[1],
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
    assert result.returncode == 0, result.stdout[-4000:]
