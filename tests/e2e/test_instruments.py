"""Checks of the end-to-end tests themselves: they detect the faults that they are for."""

import pytest

from tests.e2e.world import CONTENTION, RealCluster

pytestmark = pytest.mark.e2e


def test_the_locks_tell_of_a_gpu_that_two_containers_hold(world: RealCluster) -> None:
    """Two containers on two nodes that believe in the same uuid leave the file that fails every other test."""
    contention = world.locks / CONTENTION
    for node in ("volta", "hopper"):
        body = world.pod_body(f"believer-{node}", None, nodeName=node)
        body["spec"]["containers"][0]["env"] = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "GPU-of-both"}]
        world.create(body)

    text = world.wait(lambda: contention.exists() and contention.read_text(), "the locks to notice")
    contention.unlink()  # by then the file has done its work, and other tests would fail of it

    assert isinstance(text, str)
    assert text.startswith("GPU-of-both wanted by believer-")
