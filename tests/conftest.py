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
# searches, with `--hypothesis-profile=search`: other examples at each run, ten times as many.
settings.register_profile("repeatable", derandomize=True)
settings.register_profile("search", max_examples=1000)
settings.load_profile("repeatable")

REPOSITORY = Path(__file__).parent.parent
WITH_NODES = ("agent", "devcluster", "e2e")
"""The folders whose end-to-end tests start real nodes."""
E2E_SECONDS = 900
"""An end-to-end test's share may include the start of its cluster; the waits inside of it are bounded by themselves."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give end-to-end tests the time that a machine several times slower needs, where they name none themselves."""
    for item in items:
        if item.get_closest_marker("e2e") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(E2E_SECONDS))


class NodesTogether(LoadScopeScheduling):  # type: ignore[misc]
    """Tests that start nodes run in one process, those that need a control plane alone in another.

    Ten kubelets use up the inotify instances that Linux gives a user; nodes of several processes at once would be more.
    """

    def _split_scope(self, nodeid: str) -> str:
        return "nodes" if nodeid.split("/")[1] in WITH_NODES else "plane"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> NodesTogether | None:
    """Part the tests so for `--dist loadscope`, with which `make test-e2e` runs them."""
    return NodesTogether(config, log) if config.getvalue("dist") == "loadscope" else None


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
