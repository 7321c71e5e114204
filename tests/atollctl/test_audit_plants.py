"""Every kind of inconsistency beside healthy pods: the audit finds it, and the repair fixes only it.

The same situations as in tests/cluster/test_consistency.py, but read and repaired through an API server.
"""

import copy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atoll.api.node_status import GpuNodeStatus
from atoll.cluster.audit_remedies import AuditRepair, remedy
from atoll.cluster.consistency import Finding, Problem
from atoll.cluster.objects import Lease, Pod
from atoll.kube.client import ApiClient
from atollctl.audit import _find
from atollctl.audit_repair import CONTROLLERS, repair
from tests.cluster.test_consistency import BROKEN, bound, leases
from tests.controllers.harness import LEASES, PODS, REPORTS, InMemoryServer, strip_version
from tests.fakes.listening import kubeconfig
from tests.kube.conftest import no_wait

BYSTANDERS = [bound("y", 6), bound("z", 7)]
NOT_IN_THE_API = {Problem.WRONG_MEMORY, Problem.WRONG_PRINTED_VALUE}
"""Found in an extender's memory and in what a container printed; see test_audit.py and test_consistency.py."""


@pytest.fixture
async def server() -> AsyncIterator[InMemoryServer]:
    """An API server with a node and two pods with whom all is well."""
    async with InMemoryServer().running() as running:
        running.put("/api/v1/nodes/n1", {"metadata": {"name": "n1", "uid": "uid-of-n1"}})
        running.put(f"{REPORTS}/n1", {"metadata": {"name": "n1"}, "spec": {}})
        plant(running, BYSTANDERS, [*leases("y", 6), *leases("z", 7)], [])
        yield running


def plant(server: InMemoryServer, pods: list[Pod], held: list[Lease], reports: list[GpuNodeStatus]) -> None:
    """Put objects as they are."""
    for kind, path in ((pods, PODS), (held, LEASES)):
        for each in kind:
            body: Any = msgspec.to_builtins(each)
            server.put(f"{path}/{each.metadata.name}", strip_version(body))
    for report in reports:
        body = report.model_dump(mode="json", by_alias=True, exclude_none=True)
        server.put(f"{REPORTS}/{report.metadata.name}", strip_version(body))


async def find(server: InMemoryServer, tmp_path: Path) -> tuple[Finding, ...]:
    """Audit once."""
    async with await ApiClient.connect(kubeconfig(tmp_path, server.url), sleep=no_wait) as client:
        return await _find(client, None)


@pytest.mark.parametrize(
    ("pods", "held", "reports", "problems"), [row[1:] for row in BROKEN], ids=[r[0] for r in BROKEN]
)
async def test_repair_cures_what_was_planted_and_nothing_else(
    server: InMemoryServer,
    tmp_path: Path,
    pods: list[Pod],
    held: list[Lease],
    reports: list[GpuNodeStatus],
    problems: set[Problem],
) -> None:
    """Only the objects of what was found are written, and only as its remedy says; what nobody can know stays."""
    assert await find(server, tmp_path) == ()
    plant(server, pods, held, reports)
    before = copy.deepcopy(server.objects)
    findings = await find(server, tmp_path)
    assert {finding.problem for finding in findings} == problems

    async with await ApiClient.connect(
        kubeconfig(tmp_path, server.url), sleep=no_wait, impersonate=CONTROLLERS
    ) as client:
        done = {finding: (await repair(client, finding)).is_done for finding in findings}

    assert {f for f, is_done in done.items() if is_done} == {
        f for f in findings if remedy(f).repair is not AuditRepair.NONE
    }
    assert changed(before, server.objects) == {path for finding in findings for path in touched(finding)}
    after = await find(server, tmp_path)
    cured = {AuditRepair.WRITE, AuditRepair.DELETE, AuditRepair.EVICT}
    left = {finding for finding in findings if remedy(finding).repair not in cured}
    freed = {finding for finding in after if finding.problem is Problem.LEAKED_LEASE}
    is_evicted = any(remedy(finding).repair is AuditRepair.EVICT for finding in findings)
    assert set(after) - (freed if is_evicted else set()) == left


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Return the paths of objects that were made, changed or deleted."""
    return {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}


def touched(finding: Finding) -> set[str]:
    """Return what the remedy of a finding may write."""
    paths = {
        AuditRepair.NONE: set(),
        AuditRepair.ASK: {f"{REPORTS}/{finding.node}"},
        AuditRepair.WRITE: {f"{LEASES}/{finding.lease}"},
        AuditRepair.DELETE: {f"{LEASES}/{finding.lease}"},
        AuditRepair.EVICT: {f"{PODS}/{finding.pod.name}"} if finding.pod is not None else set(),
    }
    return paths[remedy(finding).repair]


def test_every_kind_is_planted() -> None:
    """No kind of disagreement that the API server can show is left out."""
    planted = {problem for row in BROKEN for problem in row[4]}

    assert planted == set(Problem) - NOT_IN_THE_API
