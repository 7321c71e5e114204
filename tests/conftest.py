"""Fixtures that several folders share."""

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

# A shell that runs the tests in the background has SIGINT ignored, and every process that a test starts would inherit
# that and outlive the interrupt that the test sends it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What everybody runs must judge the change, not the day: properties draw the same examples every time. `make test-long`
# searches, with `--hypothesis-profile=search`: other examples at each run, ten times as many. Neither has deadlines.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", max_examples=1000, deadline=None)
settings.load_profile("repeatable")

REPOSITORY = Path(__file__).parent.parent
OWN_NODES = ("tests/devcluster", "tests/agent", "tests/e2e/test_as_pods.py")
"""End-to-end tests that start nodes of their own and end them."""
MACHINE_ROOM = tuple(f"tests/e2e/test_{name}.py" for name in ("amd", "cordon", "hardware_chain", "isolation"))
CONTROL_PLANE = ("tests/e2e/test_jobs.py", "tests/extender", "tests/kube", "tests/agent/test_mass_start.py")
"""Those that share the fixtures `machine_room` and `control_plane`."""
E2E_SECONDS = 900
"""An end-to-end test's share may include the start of its cluster; the waits inside of it are bounded by themselves."""


def cluster_of(nodeid: str) -> str:
    """Return which cluster an end-to-end test shares with others: those of a folder have one, but for some modules."""
    path = nodeid.partition("::")[0]
    if path.startswith(CONTROL_PLANE):
        return "control plane"
    if path.startswith((*OWN_NODES, *MACHINE_ROOM)):
        return "machine room"
    return path if path.endswith("test_scheduler_facts.py") else path.rpartition("/")[0]


ORDER = ("tests/e2e", "machine room", "control plane", "tests/deploy")
"""The clusters whose tests take longest, in this order."""


def place_of(item: pytest.Item) -> tuple[int, bool]:
    """Order the clusters, and the tests that end their nodes before those that keep them till the end of the run."""
    if not item.get_closest_marker("e2e"):
        return -1, False
    cluster = cluster_of(item.nodeid)
    return ORDER.index(cluster) if cluster in ORDER else len(ORDER), item.nodeid.startswith(MACHINE_ROOM)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the end-to-end tests, and give those the time that a machine several times slower needs that name none."""
    items.sort(key=place_of)
    for item in (item for item in items if item.get_closest_marker("e2e")):
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(E2E_SECONDS))
        for fixture in ("machine_room", "control_plane"):
            if fixture in getattr(item, "fixturenames", ()) and cluster_of(item.nodeid) != fixture.replace("_", " "):
                raise pytest.UsageError(f"{item.nodeid}: name its module in {fixture.upper()} of {__file__}")


class ClusterScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Tests of one cluster run in one process, the longest first; whichever process has ended its own takes the next.

    A node takes about ten of the 128 inotify instances that Linux gives a user. At most eight nodes run at a time: the
    four of the installation in one process, in the other those of one test module or the three of the machine room.
    """

    def _split_scope(self, nodeid: str) -> str:
        return cluster_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ClusterScheduling | None:
    """Part the tests so for `--dist loadscope`, with which `make test-e2e` runs them."""
    if config.getvalue("dist") != "loadscope":
        return None
    config.option.loadscopereorder = False  # by the number of tests, which says nothing here
    return ClusterScheduling(config, log)


@pytest.fixture(autouse=True)
def logs_of_one_test() -> Iterator[None]:
    """End a test's log configuration with the test: its stream is closed then, and whoever logs next would fail."""
    handlers, level = list(logging.root.handlers), logging.root.level
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


@pytest.fixture(scope="session")
def control_plane() -> Iterator[Path]:
    """Administrator's kubeconfig of a real control plane without nodes, with Atoll's CRDs and namespaces.

    `ATOLL_E2E_KUBECONFIG` names a cluster of the user's own instead, which the tests may fill and change. Tests share
    it: they name their objects so that they do not meet, and remove them. Under xdist every worker has one of its own.
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
