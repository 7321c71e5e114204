"""Every command block of README and docs/ works as it stands, on a cluster where every part of Atoll is a pod.

Blocks of one page run in one shell, in order. Placeholders in capitals are replaced.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.api import names
from devcluster import DevCluster
from tests.docs_blocks import PAGES, REPOSITORY, commands
from tests.e2e.release import ChartRelease, gpu_node
from tests.e2e.world import RealCluster

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1200)]

TEAM = "team"
PRELUDE = r"""
set -e
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
grep() { command grep "$@" || [ $? = 1 ]; }  # nothing found is an answer
sleep() { command sleep $((10 * $1)); }      # this machine is busier than the reader's
atoll() {
  case $1 in
    explain|simulate|defrag|job) command atoll "$@" || [ $? = 1 ] ;;  # it waits, it does not fit: answers too
    *) command atoll "$@" ;;
  esac
}
"""
RUN = [page for page in PAGES if any(not block.reason for block in commands(page))]


@pytest.fixture(scope="module")
def release() -> Iterator[ChartRelease]:
    """A cluster on which the chart was installed by Helm."""
    with ChartRelease.cluster_for((gpu_node("hopper", "dgx-h100"), gpu_node("volta", "dgx1-v100"))) as release:
        release.install()
        yield release


@pytest.fixture(scope="module")
def words(release: ChartRelease) -> dict[str, str]:
    """What stands for the capital words, all of which is there: a pod, a gang, an auditor's account."""
    world = RealCluster.enter(release.installation, TEAM)
    world.claim("pair", 2)
    world.pod("train", "pair")
    gang = {
        "apiVersion": names.API_VERSION,
        "kind": "GpuGang",
        "metadata": {"name": "train"},
        "spec": {"podSets": [{"name": "workers", "count": 2}]},
    }
    world.cluster.api.request("POST", f"/apis/gpu.scheduling/v1/namespaces/{TEAM}/gpugangs", gang)
    for arguments in (
        ("create", "serviceaccount", "auditor", "-n", "default"),
        ("create", "clusterrolebinding", "auditor", "--clusterrole=atoll-auditor", "--serviceaccount=default:auditor"),
    ):
        assert world.cluster.kubectl(*arguments).returncode == 0
    world.wait_running("train")
    selector = ("-l", "app.kubernetes.io/component=agent", "-o", "jsonpath={.items[0].metadata.name}")
    agent = world.cluster.kubectl("-n", names.HEARTBEAT_NAMESPACE, "get", "pods", *selector).stdout
    return {
        "NAMESPACE": TEAM,
        "NAME": "train",
        "NODE": "hopper",
        "ID": "0",
        "POD": agent,
        "PORT": "9433",
        "FILE": "cluster.json",
        "AUDITOR": "auditor",
    }


@pytest.fixture
def folder(release: ChartRelease, words: dict[str, str], tmp_path: Path) -> Path:
    """A folder like the root of the repository, where blocks may leave files; a manifest and a snapshot lie there."""
    for entry in REPOSITORY.iterdir():
        (tmp_path / entry.name).symlink_to(entry)
    (tmp_path / "job.yaml").write_text((REPOSITORY / "examples/job.yaml").read_text())
    done = shell(release.cluster, "atoll snapshot cluster.json", tmp_path)
    assert done.returncode == 0, done.stdout
    return tmp_path


def shell(cluster: DevCluster, script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script as somebody at a terminal of this cluster would."""
    kubectl = cluster.program("kubectl")
    path = f"{Path(sys.executable).parent}:{kubectl.parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", PRELUDE + script],
        cwd=folder,
        env={**os.environ, "PATH": path, "KUBECONFIG": str(cluster.kubeconfig), "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )


def replaced(text: str, words: dict[str, str]) -> str:
    """Put what there is in the place of capital words."""
    return re.sub(r"\b[A-Z]+\b", lambda match: words.get(match[0], match[0]), text)


@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_blocks_of_a_page_work(page: Path, release: ChartRelease, words: dict[str, str], folder: Path) -> None:
    """Each block ends well, one after the other, as a reader would go through them."""
    run = [block for block in commands(page) if not block.reason]
    script = "".join(f"echo '== {page.name}:{block.line}'\n{replaced(block.text, words)}\n" for block in run)
    done = shell(release.cluster, script, folder)
    assert done.returncode == 0, done.stdout[-6000:]
