"""The values of every platform on a real API server: it accepts each object that it knows."""

import subprocess
from pathlib import Path

import pytest
import yaml

from devcluster import chart
from devcluster.build import ensure_binaries
from tests.deploy.test_chart import FOREIGN_GROUPS, VALUES

pytestmark = pytest.mark.e2e


@pytest.mark.usefixtures("api")
@pytest.mark.parametrize("values", VALUES)
def test_a_real_api_server_accepts_the_values_of_a_platform(kubeconfig: Path, values: str) -> None:
    """Server-side dry run with strict fields; only kinds of others' (OpenShift, cert-manager) are left out."""
    rendered = [one for one in yaml.safe_load_all(chart.render("--values", chart.CHART / values)) if one]
    known = [one for one in rendered if not one["apiVersion"].startswith(FOREIGN_GROUPS)]
    kubectl = ensure_binaries(real_nodes=False)["kubectl"]
    words = ("apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "-f", "-")

    done = subprocess.run(
        [kubectl, f"--kubeconfig={kubeconfig}", *words],
        input=yaml.safe_dump_all(known),
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("serverside-applied") == len(known)
