"""A cluster that keeps its own scheduler, with the administrator's own certificate, as in docs/clusters.md.

The cluster's own kube-scheduler runs all the time; GPU nodes start with a taint.
"""

from __future__ import annotations

import os
import sys
from base64 import b64decode
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from atoll.api import names
from devcluster import DevNodeSpec, chart
from devcluster.certificates import CertificateAuthority, Subject
from tests.e2e.release import CONFIGURATION, ChartRelease, gpu_node
from tests.e2e.world import RealCluster

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="real nodes need root on Linux"),
]

NODES = (gpu_node("hopper", "dgx-h100"), DevNodeSpec("office"))
TAINT = "gpu.scheduling/only=true:NoSchedule"
TOLERATION = {"key": "gpu.scheduling/only", "operator": "Exists"}


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChartRelease]:
    """A cluster with the values for managed clouds beside its own scheduler, and the administrator's certificate."""
    folder = tmp_path_factory.mktemp("certificate")
    with ChartRelease.cluster_for(NODES) as release:
        assert release.cluster.kubectl("taint", "node", "hopper", TAINT).returncode == 0
        bundle = store_certificate(release, folder)
        own = ("--set", "webhook.tls.source=secret", "--set-file", f"webhook.tls.caBundle={bundle}")
        release.install("--values", chart.CHART / "values-managed.yaml", *own, beside=True)
        yield release


@pytest.fixture
def world(release: ChartRelease) -> Iterator[RealCluster]:
    """A namespace for one test; afterwards its pods are gone and the audit finds nothing."""
    with RealCluster.of_one_test(release.installation) as world:
        yield world


def store_certificate(release: ChartRelease, folder: Path) -> Path:
    """Put a certificate of another authority into the Secret, as its administrator would; return the authority's."""
    authority = CertificateAuthority(folder, now=datetime.now(UTC))
    pair = authority.issue("webhook", Subject("webhook", dns_names=[f"atoll-webhook.{names.SYSTEM_NAMESPACE}.svc"]))
    files = (f"--cert={pair.certificate}", f"--key={pair.key}")
    for words in (
        ("create", "namespace", names.SYSTEM_NAMESPACE),
        ("-n", names.SYSTEM_NAMESPACE, "create", "secret", "tls", "atoll-webhook-tls", *files),
    ):
        done = release.cluster.kubectl(*words)
        assert done.returncode == 0, done.stderr
    return authority.pair.certificate


def node_of(pod: dict[str, Any]) -> str:
    """Return where a pod was bound."""
    return str(pod["spec"].get("nodeName", ""))


def test_parts_keep_off_the_nodes_with_gpus(release: ChartRelease) -> None:
    """The cluster's scheduler placed them, and the taint holds for them too; only the agents tolerate it."""
    for component in ("controllers", "scheduler", "webhook"):
        assert {node_of(pod) for pod in release.pods(component).values()} == {"office"}
    assert {node_of(pod) for pod in release.pods("agent").values()} == {"hopper"}


def test_each_scheduler_places_its_own_pods(world: RealCluster) -> None:
    """A pod without GPUs goes where the cluster's scheduler wants it, one with GPUs to the tainted node, by Atoll."""
    world.claim("pair", 2)

    plain = world.pod("plain", None)
    world.pod("train", "pair", tolerations=[TOLERATION])
    bound = {name: world.wait_running(name) for name in ("plain", "train")}

    assert plain["spec"]["schedulerName"] == "default-scheduler"
    assert node_of(bound["plain"]) == "office"
    assert bound["train"]["spec"]["schedulerName"] == names.SCHEDULER_NAME
    assert node_of(bound["train"]) == "hopper"
    allocation = world.allocation("train")
    assert allocation is not None
    assert set(world.seen("train").nvidia) == set(allocation.uuids)


def test_a_pod_without_the_toleration_is_told_so(world: RealCluster) -> None:
    """It waits, and the reason names the taint, not a want of GPUs."""
    world.claim("pair", 2)
    world.pod("forgetful", "pair")

    assert "untolerated taint" in world.wait_rejected("forgetful")
    assert not world.leases(world.get("forgetful")["metadata"]["uid"])


def test_the_administrators_certificate_stays(release: ChartRelease, world: RealCluster) -> None:
    """The API server trusts that authority alone, the webhook answers under it, and the controllers touch neither."""
    configuration = release.cluster.api.get(CONFIGURATION)
    bundles = release.bundles()
    managers = {entry["manager"] for entry in configuration["metadata"].get("managedFields", [])}
    world.claim("one", 1)

    shaped = world.pod("train", "one", tolerations=[TOLERATION])

    assert len(bundles) == 1
    assert b"BEGIN CERTIFICATE" in b64decode(bundles.pop())
    assert managers == {"helm"}
    assert names.AUTHORITY_SECRET not in secrets_of(release)
    assert shaped["spec"]["schedulerName"] == names.SCHEDULER_NAME
    world.wait_running("train")


def secrets_of(release: ChartRelease) -> set[str]:
    """Return the names of the Secrets in Atoll's namespace."""
    path = f"/api/v1/namespaces/{names.SYSTEM_NAMESPACE}/secrets"
    return {item["metadata"]["name"] for item in release.cluster.api.get(path)["items"]}
