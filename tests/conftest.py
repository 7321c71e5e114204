"""Fixtures of several folders, and the order of end-to-end tests."""

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

# A shell that runs the tests in the background ignores SIGINT. Processes of a test would inherit that and survive the
# interrupt that the test sends.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Results must depend only on the code, so properties use the same examples at every run. `make test-long` searches with
# ten times as many random examples (`--hypothesis-profile=search`). Neither has deadlines.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", max_examples=1000, deadline=None)
settings.load_profile("repeatable")

REPOSITORY = Path(__file__).parent.parent
OWN_NODES = ("tests/devcluster", "tests/agent", "tests/e2e/test_as_pods.py")
"""End-to-end tests that start and stop their own nodes."""
MACHINE_ROOM = tuple(f"tests/e2e/test_{name}.py" for name in ("amd", "cordon", "hardware_chain", "isolation"))
CONTROL_PLANE = ("tests/e2e/test_jobs.py", "tests/extender", "tests/kube", "tests/agent/test_mass_start.py")
"""Tests that share the fixtures `machine_room` and `control_plane`."""
E2E_SECONDS = 900
"""Timeout in seconds of an end-to-end test, which may include the start of its cluster; waits inside have their own."""


def cluster_of(nodeid: str) -> str:
    """Return the cluster that an end-to-end test shares: one per folder, except for some modules."""
    path = nodeid.partition("::")[0]
    if path.startswith(CONTROL_PLANE):
        return "control plane"
    if path.startswith((*OWN_NODES, *MACHINE_ROOM)):
        return "machine room"
    return path if path.endswith("test_scheduler_facts.py") else path.rpartition("/")[0]


ORDER = ("tests/e2e", "machine room", "control plane", "tests/deploy")
"""Clusters with the longest tests, longest first."""


def place_of(item: pytest.Item) -> tuple[int, bool]:
    """Sort key: the order of clusters; tests that stop their nodes come before tests that keep them until the end."""
    if not item.get_closest_marker("e2e"):
        return -1, False
    cluster = cluster_of(item.nodeid)
    return ORDER.index(cluster) if cluster in ORDER else len(ORDER), item.nodeid.startswith(MACHINE_ROOM)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the end-to-end tests; set a default timeout that suits a machine several times slower."""
    items.sort(key=place_of)
    for item in (item for item in items if item.get_closest_marker("e2e")):
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(E2E_SECONDS))
        for fixture in ("machine_room", "control_plane"):
            if fixture in getattr(item, "fixturenames", ()) and cluster_of(item.nodeid) != fixture.replace("_", " "):
                raise pytest.UsageError(f"{item.nodeid}: name its module in {fixture.upper()} of {__file__}")


class ClusterScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Runs the tests of one cluster in one process, longest first; a process that is done takes the next cluster.

    A node needs about ten of the 128 inotify instances that Linux allows a user. At most eight nodes run at a time: the
    four of the installation in one process, those of one test module or of the machine room in the other.
    """

    def _split_scope(self, nodeid: str) -> str:
        return cluster_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ClusterScheduling | None:
    """Use this scheduler for `--dist loadscope`, as in `make test-e2e`."""
    if config.getvalue("dist") != "loadscope":
        return None
    config.option.loadscopereorder = False  # no reordering by number of tests, which does not predict the duration
    return ClusterScheduling(config, log)


@pytest.fixture(autouse=True)
def logs_of_one_test() -> Iterator[None]:
    """Reset the log configuration after each test: its stream is closed, so later logs would fail."""
    handlers, level = list(logging.root.handlers), logging.root.level
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


@pytest.fixture(scope="session")
def control_plane() -> Iterator[Path]:
    """Yield the administrator's kubeconfig of a real control plane without nodes, with Atoll's CRDs and namespaces.

    `ATOLL_E2E_KUBECONFIG` selects an existing cluster instead, which tests may change. Tests share the cluster: they
    use unique object names and remove their objects. Under xdist every worker has its own.
    """
    if given := os.environ.get("ATOLL_E2E_KUBECONFIG"):
        yield Path(given)
        return
    from devcluster import DevCluster

    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    with DevCluster.start(f"plane-{worker}-{os.getpid()}", nodes=[], scheduler=False) as cluster:
        for manifest in ("namespaces.yaml", "crds"):
            cluster.kubectl("apply", "-f", str(REPOSITORY / "deploy" / manifest), check=True)
        cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s", check=True)
        yield Path(cluster.kubeconfig)
