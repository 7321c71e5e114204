"""`atoll audit`: evidence and next step for every finding, no truncation, no repair that frees a GPU without proof."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from atoll.api import names
from atoll.cluster.audit_remedies import REMEDIES, AuditRepair
from atoll.cluster.consistency import PROMISES, Finding, Problem, audit
from atoll.cluster.leases import Holder
from atoll.cluster.ledger import Ledger
from atoll.cluster.ledger_dump import compare, decode_memory, encode_memory, ledger_dump_of
from atoll.cluster.objects import decode_lease, decode_pod
from atoll.kube.client import ApiClient
from atollctl import audit as command
from atollctl.__main__ import app
from atollctl.audit_repair import CONTROLLERS, RepairOutcome, repair
from tests.builders import (
    lease_json,
    make_allocation,
    make_lease,
    make_pod,
    make_report,
    pod_json,
    report_json,
    uuid_of,
)
from tests.controllers.harness import LEASES, PODS, REPORTS, InMemoryServer, strip_version
from tests.fakes.listening import kubeconfig
from tests.kube.conftest import no_wait

A = Holder("team", "a", "uid-of-a")
LONG = "x" * 150


@pytest.mark.parametrize("problem", list(Problem))
def test_every_problem_has_a_promise_and_a_next_step(problem: Problem) -> None:
    """Whoever reads a finding knows what to do next."""
    assert problem in PROMISES
    assert REMEDIES[problem].next_step


@pytest.mark.parametrize("width", [80, 200])
def test_table_cuts_nothing(width: int) -> None:
    """The whole of a long name and its evidence can be read, on a narrow terminal too."""
    finding = Finding(1, Problem.DOUBLE_USE, f"GPU {LONG}", f"pod {LONG}")
    file = io.StringIO()
    command.print_findings([finding], {}, Console(file=file, width=width, force_terminal=True, color_system=None))
    told = "".join(character for character in file.getvalue() if character == "x")
    assert len(told) >= 2 * len(LONG)


def test_pipe_gets_whole_lines() -> None:
    """Where no terminal is, nothing is wrapped at 80 columns."""
    file = io.StringIO()
    finding = Finding(2, Problem.LEAKED_LEASE, "Lease gpu-n1-0", "holder team/a/uid-of-a", node="n1")
    outcomes = {finding: RepairOutcome(is_done=True, text="asked")}
    command.print_findings([finding], outcomes, Console(file=file))
    line = next(line for line in file.getvalue().splitlines() if "Lease gpu-n1-0" in line)
    assert "holder team/a/uid-of-a" in line
    assert "asked" in file.getvalue()


def test_json_is_for_programs() -> None:
    """Promise, a stable name, the evidence, the next step and the repair, and what became of it."""
    finding = Finding(4, Problem.MISSING_LEASE, "pod team/a", "gpu-n1-0", pod=A, lease="gpu-n1-0")
    told = command.as_dict(finding, RepairOutcome(is_done=True, text="wrote it"))
    assert told == {
        "promise": 4,
        "problem": "MISSING_LEASE",
        "text": "a bound pod's GPU has no Lease",
        "subject": "pod team/a",
        "detail": "gpu-n1-0",
        "nextStep": "the controllers write it again once they run",
        "repair": "write the missing Lease",
        "repaired": True,
        "outcome": "wrote it",
    }


@pytest.mark.parametrize(
    ("findings", "arguments", "status"),
    [
        ((), [], 0),
        ((Finding(1, Problem.DOUBLE_USE, "GPU", "a, b"),), [], 1),
        ((Finding(1, Problem.DOUBLE_USE, "GPU", "a, b"),), ["--repair"], 1),
        ((Finding(4, Problem.MISSING_LEASE, "pod", "gpu"),), ["--repair"], 0),
    ],
    ids=["clean", "finding", "a-person-must-decide", "repaired"],
)
def test_exit_status_is_for_monitoring(
    monkeypatch: pytest.MonkeyPatch, findings: tuple[Finding, ...], arguments: list[str], status: int
) -> None:
    """0 when nothing is left to do, 1 with findings, and the JSON is the only output."""

    async def find(*_: Any, **__: Any) -> tuple[Finding, ...]:
        return findings

    async def repair_all(found: Any, *_: Any) -> dict[Finding, RepairOutcome]:
        return {
            each: RepairOutcome(is_done=REMEDIES[each.problem].repair is not AuditRepair.NONE, text="")
            for each in found
        }

    monkeypatch.setattr(command, "find_twice", find)
    monkeypatch.setattr(command, "repair_all", repair_all)
    result = CliRunner().invoke(app, ["audit", "-o", "json", *arguments])
    assert result.exit_code == status
    assert [each["problem"] for each in json.loads(result.output)] == [each.problem.name for each in findings]


def test_cluster_that_does_not_answer_is_status_2(tmp_path: Path) -> None:
    """A monitor can tell 'broken' from 'unknown'."""
    config = kubeconfig(tmp_path, "http://127.0.0.1:1")
    result = CliRunner().invoke(app, ["audit", "--kubeconfig", str(config)])
    assert result.exit_code == 2
    assert "cannot audit" in result.output


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (f"{REPORTS}/n1", {"metadata": {"name": "n1"}, "status": {"devices": "a kind that is not known yet"}}),
        (f"{PODS}/a", {"metadata": {"name": "a"}, "spec": {"containers": "a kind that is not known yet"}}),
    ],
    ids=["report", "pod"],
)
async def test_object_that_cannot_be_read_is_status_2(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    """An object of a newer release is no finding and no fault of the program: nothing is known, and that is told."""
    async with InMemoryServer().running() as running:
        running.put(path, body)
        config = kubeconfig(tmp_path, running.url)
        result = await asyncio.to_thread(CliRunner().invoke, app, ["audit", "--kubeconfig", str(config)])
    assert result.exit_code == 2, result.output
    assert "cannot audit" in result.output


# Repairs


@pytest.fixture
async def server() -> AsyncIterator[InMemoryServer]:
    """An API server with a node and its report."""
    async with InMemoryServer().running() as running:
        running.put("/api/v1/nodes/n1", {"metadata": {"name": "n1", "uid": "uid-of-n1"}})
        running.put(f"{REPORTS}/n1", {"metadata": {"name": "n1"}})
        yield running


def put_bound(server: InMemoryServer, *ids: int, uid: str = "uid-of-a") -> None:
    """Put pod a, bound to these GPUs of n1."""
    body = pod_json("a", uid=uid, node="n1", phase="Running", allocation=make_allocation("n1", *ids))
    server.put(f"{PODS}/a", strip_version(body))


def put_lease(server: InMemoryServer, device_id: int, **options: Any) -> None:
    """Put a Lease of pod a."""
    server.put(f"{LEASES}/gpu-n1-{device_id}", strip_version(lease_json("n1", device_id, holder=A, **options)))


async def repaired(server: InMemoryServer, tmp_path: Path) -> list[tuple[Problem, bool]]:
    """Audit what the server holds, repair every finding, and return which were."""
    pods = [decode_pod(json.dumps(body)) for path, body in server.objects.items() if path.startswith(PODS)]
    leases = [decode_lease(json.dumps(body)) for path, body in server.objects.items() if path.startswith(LEASES)]
    config = kubeconfig(tmp_path, server.url)
    connect = ApiClient.connect(config, sleep=no_wait, impersonate=CONTROLLERS)
    async with await connect as client:
        findings = audit(pods, leases, [])
        return [(finding.problem, (await repair(client, finding)).is_done) for finding in findings]


async def test_missing_lease_is_written_in_the_name_of_the_controllers(server: InMemoryServer, tmp_path: Path) -> None:
    """The bound pod's annotation is the proof; who acts stands in the API server's log."""
    put_bound(server, 0, 1)
    put_lease(server, 0)
    done = await repaired(server, tmp_path)
    assert (Problem.MISSING_LEASE, True) in done
    lease = server.objects[f"{LEASES}/gpu-n1-1"]
    assert lease["spec"]["holderIdentity"] == str(A)
    assert {headers.get("Impersonate-User") for headers in server.headers} == {CONTROLLERS}


async def test_stray_lease_is_deleted_and_the_pods_own_stay(server: InMemoryServer, tmp_path: Path) -> None:
    """Only the Lease that the bound pod disproves goes, with its uid and version as fence."""
    put_bound(server, 0)
    put_lease(server, 0)
    put_lease(server, 5)
    assert (Problem.STRAY_LEASE, True) in await repaired(server, tmp_path)
    assert {path.rpartition("/")[2] for path in server.objects if path.startswith(LEASES)} == {"gpu-n1-0"}


async def test_leaked_lease_is_never_deleted(server: InMemoryServer, tmp_path: Path) -> None:
    """The audit asks the agent for evidence; whether the GPU is free the controllers decide on proof."""
    put_lease(server, 3)
    assert await repaired(server, tmp_path) == [(Problem.LEAKED_LEASE, True)]
    assert f"{LEASES}/gpu-n1-3" in server.objects
    assert names.EVIDENCE_WANTED in server.objects[f"{REPORTS}/n1"]["metadata"]["annotations"]


async def test_pod_whose_numbers_are_right_again_is_not_evicted(server: InMemoryServer, tmp_path: Path) -> None:
    """A machine may number its GPUs as before by the time of the repair: whoever has the right numbers stays."""
    annotations = {
        f"{names.CONTAINER_DEVICES_PREFIX}main": "0",
        f"{names.CONTAINER_UUIDS_PREFIX}main": uuid_of("n1", 0),
    }
    body = pod_json("a", node="n1", phase="Running", allocation=make_allocation("n1", 0), annotations=annotations)
    server.put(f"{PODS}/a", strip_version(body))
    server.put(f"{REPORTS}/n1", strip_version(report_json("n1")))
    stale = Finding(4, Problem.STALE_NUMBERS, "pod", "", pod=A, node="n1")
    async with await ApiClient.connect(kubeconfig(tmp_path, server.url), sleep=no_wait) as client:
        assert not (await repair(client, stale)).is_done
        assert f"{PODS}/a" in server.objects
        server.put(f"{REPORTS}/n1", strip_version(report_json("n1", indices=[3, 1, 2, 0, 4, 5, 6, 7])))
        assert (await repair(client, stale)).is_done
        assert f"{PODS}/a" not in server.objects


async def test_finding_that_is_over_is_left_alone(server: InMemoryServer, tmp_path: Path) -> None:
    """Between audit and repair the world moved on: everything is read anew."""
    stale = Finding(4, Problem.MISSING_LEASE, "pod", "gpu-n1-0", pod=A, lease="gpu-n1-0", node="n1")
    stray = Finding(2, Problem.STRAY_LEASE, "Lease", "", pod=A, lease="gpu-n1-0")
    stranger = Finding(2, Problem.LEAKED_LEASE, "Lease", "", node="no-such-node")
    put_bound(server, 0, uid="a-successor")
    put_lease(server, 0)
    before = dict(server.objects)
    async with await ApiClient.connect(kubeconfig(tmp_path, server.url), sleep=no_wait) as client:
        for finding in (stale, stray, stranger, Finding(1, Problem.DOUBLE_USE, "GPU", "")):
            assert not (await repair(client, finding)).is_done
    assert server.objects == before


# The extender's memory


def filled() -> Ledger:
    """Return a ledger with a bound pod, its Lease, and a reservation."""
    ledger = Ledger()
    ledger.put_report(make_report())
    ledger.put_pod(make_pod("a", uid="uid-of-a", node="n1", phase="Running", allocation=make_allocation("n1", 0)))
    ledger.put_lease(make_lease("n1", 0, holder=A))
    ledger.put_lease(make_lease("n1", 5))
    return ledger


def test_memory_that_agrees_has_no_finding() -> None:
    """It survives the wire, and is compared with what the API server holds."""
    ledger = filled()
    memory = decode_memory(encode_memory(ledger_dump_of(ledger, 0.0)))
    assert memory.pods == {"uid-of-a": "n1:0"}
    assert memory.free["n1"] == [1, 2, 3, 4, 6, 7]
    assert compare(memory, ledger.pods.values(), [make_lease("n1", 0, holder=A), make_lease("n1", 5)]) == ()


def differences() -> Iterator[Any]:
    """Yield ways in which a memory can be wrong."""
    a, spare = make_lease("n1", 0, holder=A), make_lease("n1", 5)
    yield pytest.param([a], {"Lease gpu-n1-5"}, id="remembers-a-lease-that-is-gone")
    yield pytest.param([a, spare, make_lease("n1", 6)], {"Lease gpu-n1-6"}, id="never-saw-a-lease")
    other = make_lease("n1", 0, holder=Holder("team", "b", "uid-of-b"))
    yield pytest.param([other, spare], {"Lease gpu-n1-0"}, id="remembers-another-holder")


@pytest.mark.parametrize(("leases", "subjects"), [*differences()])
def test_memory_that_differs_is_found(leases: list[Any], subjects: set[str]) -> None:
    """Each difference names the object and both values."""
    ledger = filled()
    findings = compare(ledger_dump_of(ledger, 0.0), ledger.pods.values(), leases)
    assert {finding.subject for finding in findings} == subjects
    assert all("the API server has" in finding.detail for finding in findings)


@pytest.mark.parametrize("odd", ["without a label", "unreadable"])
def test_memory_of_an_odd_lease_is_no_difference(odd: str) -> None:
    """Both know a Lease by its name where its label is gone; one that nobody can read the audit tells by itself."""
    ledger = filled()
    body = lease_json("n1", 6)
    if odd == "unreadable":
        body["spec"]["holderIdentity"] = "nobody"
    else:
        del body["metadata"]["labels"]
    lease = decode_lease(json.dumps(body))
    ledger.put_lease(lease)
    leases = [make_lease("n1", 0, holder=A), make_lease("n1", 5), lease]
    assert compare(ledger_dump_of(ledger, 0.0), ledger.pods.values(), leases) == ()


def test_pod_that_the_memory_does_not_know_is_found() -> None:
    """The extender would sell its GPU."""
    ledger = filled()
    stranger = make_pod("b", uid="uid-of-b", node="n1", phase="Running", allocation=make_allocation("n1", 2))
    leases = [make_lease("n1", 0, holder=A), make_lease("n1", 5)]
    findings = compare(ledger_dump_of(ledger, 0.0), [*ledger.pods.values(), stranger], leases)
    assert [finding.subject for finding in findings] == ["GPUs of pod uid-of-b"]
