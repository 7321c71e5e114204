"""Every kind of inconsistency on a real API server with the shipped roles and policies: found and repaired.

The rows of tests/cluster/test_consistency.py, written by the identities that could cause them: the scheduler's account
binds pods and writes Leases, a kubelet writes statuses, the node's agent writes reports. The controllers do not run, so
only the audit repairs.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from atoll.api.node_status import GpuNodeStatus
from atoll.cluster import pods
from atoll.cluster.audit_remedies import AuditRepair, remedy
from atoll.cluster.consistency import Finding, Problem
from atoll.cluster.objects import Lease, Pod
from atoll.kube.client import ApiClient
from atollctl.audit import _find
from atollctl.audit_repair import CONTROLLERS, RepairOutcome, repair
from devcluster import DevCluster
from tests.atollctl.test_audit_plants import BYSTANDERS, touched
from tests.builders import make_report
from tests.cluster.test_consistency import BROKEN, leases
from tests.controllers.reconciler_harness import LEASES, PODS, REPORTS, Json, ReconcilerHarness
from tests.deploy.requests import MERGE, pod, shaped, shaped_container

pytestmark = [pytest.mark.e2e, pytest.mark.long]

NODE = "n1"
FORCE = {"gracePeriodSeconds": 0}
TOLD_BY_THE_REPORT = {
    "one card under two ids": {Problem.WRONG_UUID},
    "a container was told too many numbers": {Problem.STALE_NUMBERS},
}
"""Found beside what a row says, because here every row has a report of the node."""


class Garden:
    """The stage of one row: what was planted, and the uids that the API server gave."""

    def __init__(self, stage: ReconcilerHarness) -> None:
        self.stage = stage
        self.uids: dict[str, str] = {}

    def plant(self, planted: Sequence[Pod], held: Sequence[Lease], reports: Sequence[GpuNodeStatus]) -> None:
        """Put the objects of a row, with the uids that its pods were given."""
        for each in planted:
            self._pod(each)
        for lease in held:
            self._lease(lease)
        for report in reports:
            self._report(report)

    def _pod(self, planted: Pod) -> None:
        name, annotations = planted.metadata.name, planted.metadata.annotations
        gpus = sum(count for _, count in pods.device_counts(planted))
        containers = [shaped_container(container.name, gpus=gpus) for container in planted.spec.containers]
        body = shaped(name, *containers, annotations={}) if gpus else pod(name)
        created = self.stage.do("POST", PODS, body, identity="admin")
        self.uids[planted.metadata.uid] = created["metadata"]["uid"]
        if not planted.spec.node_name:
            return
        binding = {"metadata": {"name": name, "annotations": annotations}, "target": {"kind": "Node", "name": NODE}}
        self.stage.do("POST", f"{PODS}/{name}/binding", binding, identity="scheduler")
        status = {"status": {"phase": planted.status.phase}}
        self.stage.do("PATCH", f"{PODS}/{name}/status", status, identity=f"kubelet@{NODE}", kind=MERGE)

    def _lease(self, lease: Lease) -> None:
        body: Any = msgspec.to_builtins(lease)
        body["metadata"] = {key: body["metadata"][key] for key in ("name", "labels", "annotations")}
        namespace, _, rest = body["spec"]["holderIdentity"].partition("/")
        if rest:
            name, _, uid = rest.partition("/")
            body["spec"]["holderIdentity"] = f"{namespace}/{name}/{self.uids.get(uid, uid)}"
        self.stage.do("POST", LEASES, body, identity="scheduler")

    def _report(self, report: GpuNodeStatus) -> None:
        status = report.model_dump(mode="json", by_alias=True, exclude_none=True)["status"]
        status["nodeUid"] = self.stage.do("GET", f"/api/v1/nodes/{NODE}")["metadata"]["uid"]
        status["pods"] = [
            {**entry, "uid": self.uids.get(entry["uid"], entry["uid"])} for entry in status.get("pods", ())
        ]
        status["hostUses"] = status.get("hostUses", [])
        body = {"status": status}
        self.stage.do("PATCH", f"{REPORTS}/{NODE}/status", body, identity=f"agent@{NODE}", kind=MERGE)

    def snapshot(self) -> dict[str, str]:
        """Return path and version of everything that a repair could touch."""
        found = {}
        for path in (PODS, LEASES, REPORTS):
            for item in self.stage.do("GET", path)["items"]:
                found[f"{path}/{item['metadata']['name']}"] = item["metadata"]["resourceVersion"]
        return found

    def clear(self) -> None:
        """Remove what was planted, as kubelet and controllers would in the end."""
        for item in self.stage.do("GET", PODS)["items"]:
            self.stage.do("DELETE", f"{PODS}/{item['metadata']['name']}", FORCE)
        for item in self.stage.do("GET", LEASES)["items"]:
            if item["metadata"]["name"].startswith("gpu-"):
                self.stage.do("DELETE", f"{LEASES}/{item['metadata']['name']}", identity="controllers")
        self._report(make_report(NODE))


@pytest.fixture(scope="module")
def stage() -> Iterator[ReconcilerHarness]:
    """A control plane with Atoll's manifests and one node, and nobody who repairs anything."""
    with DevCluster.start(f"plants-{os.getpid()}", nodes=[], scheduler=False) as cluster:
        made = ReconcilerHarness.setup(cluster)
        made.kill_controllers()
        made.add_node(NODE)
        yield made


@pytest.fixture
def garden(stage: ReconcilerHarness) -> Iterator[Garden]:
    """Two pods with whom all is well, and room for what is not."""
    made = Garden(stage)
    made.plant(BYSTANDERS, [*leases("y", 6), *leases("z", 7)], [])
    yield made
    made.clear()


async def find(stage: ReconcilerHarness) -> tuple[Finding, ...]:
    """Audit once."""
    async with await ApiClient.connect(stage.cluster.kubeconfig) as client:
        return await _find(client, None)


async def repair_each(stage: ReconcilerHarness, findings: Sequence[Finding]) -> dict[Finding, RepairOutcome]:
    """Repair under the controllers' own rights."""
    async with await ApiClient.connect(stage.cluster.kubeconfig, impersonate=CONTROLLERS) as client:
        return {finding: await repair(client, finding) for finding in findings}


@pytest.mark.parametrize(
    ("planted", "held", "reports", "problems"),
    [(*row[1:4], row[4] | TOLD_BY_THE_REPORT.get(row[0], set())) for row in BROKEN],
    ids=[row[0] for row in BROKEN],
)
async def test_what_is_planted_is_found_and_cured_under_the_shipped_policies(
    garden: Garden, planted: list[Pod], held: list[Lease], reports: list[GpuNodeStatus], problems: set[Problem]
) -> None:
    """The audit names exactly the row's problems; the repair writes what its remedies say, and nothing else."""
    stage = garden.stage
    assert await find(stage) == ()
    garden.plant(planted, held, reports)
    findings = await find(stage)
    assert {finding.problem for finding in findings} == problems

    before = garden.snapshot()
    outcomes = await repair_each(stage, findings)
    after = garden.snapshot()

    curable = {finding for finding in findings if remedy(finding).repair is not AuditRepair.NONE}
    assert {finding for finding, outcome in outcomes.items() if outcome.is_done} == curable, outcomes
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert changed == {path for finding in findings for path in touched(finding)}
    assert set(await find(stage)) == {finding for finding in findings if not is_cured(stage, finding)}


def is_cured(stage: ReconcilerHarness, finding: Finding) -> bool:
    """Tell whether the repair of a finding ends it at once; of an eviction, that kubelet was told to end the pod."""
    action = remedy(finding).repair
    if action is AuditRepair.EVICT:
        assert finding.pod is not None
        evicted: Json = stage.pod(finding.pod.name)
        assert evicted["metadata"].get("deletionTimestamp")
    return action in {AuditRepair.WRITE, AuditRepair.DELETE}
