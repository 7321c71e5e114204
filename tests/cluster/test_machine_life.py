"""Lifecycle of a machine: its state from the known facts, and when a declaration that it is gone counts."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from atoll.api import names
from atoll.api.node_status import GoneMachine, GpuNodeStatus
from atoll.cluster.machine_life import (
    MACHINE_LIFE,
    OUT_OF_SERVICE,
    MachineFacts,
    MachinePhase,
    declaration_on,
    phase_of,
)
from atoll.cluster.objects import Node
from tests.builders import report_json

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
BOOT = "11111111-2222-3333-4444-555555555555"
NEXT_BOOT = "66666666-2222-3333-4444-555555555555"


def node(
    uid: str = "u1",
    *,
    ready: str = "True",
    boot: str = BOOT,
    cordoned: bool = False,
    taint: str = "",
    released: bool = False,
) -> Node:
    """Return a Node as kubelet and an administrator keep it."""
    taints = [{"key": taint, "effect": "NoExecute"}] if taint else []
    body = {
        "metadata": {"name": "n1", "uid": uid, "labels": {names.DRIVER_HOLD: "released"} if released else {}},
        "spec": {"unschedulable": cordoned, "taints": taints},
        "status": {"nodeInfo": {"bootID": boot}, "conditions": [{"type": "Ready", "status": ready}]},
    }
    return msgspec.convert(body, Node)


def status(
    uid: str = "u1",
    *,
    sequence: int = 7,
    boot: str = BOOT,
    said: tuple[str, int] | None = None,
    former: tuple[str, int] | None = None,
    reported: bool = True,
) -> GpuNodeStatus:
    """Return a report of the machine with this Node uid. said: a word on a uid, at a sequence. former: a uid that had
    the name before, and the sequence of its last report."""
    body: dict[str, Any] = report_json("n1", node_uid=uid, boot=boot)
    body["status"]["evidence"] = {"sequence": sequence}
    if former is not None:
        body["status"]["formerNodes"] = [{"nodeUid": former[0], "sequence": former[1]}]
    if not reported:
        del body["status"]
    if said is not None:
        body["spec"]["gone"] = [{"nodeUid": said[0], "by": "jane", "sequence": said[1]}]
    return GpuNodeStatus.model_validate(body)


PHASES: dict[str, tuple[MachineFacts, MachinePhase]] = {
    "Node is there, agent has not reported": (MachineFacts(node(), None, is_heard=False), MachinePhase.JOINING),
    "its object is there, without a report": (
        MachineFacts(node(), status(reported=False), is_heard=False), MachinePhase.JOINING),
    "reports": (MachineFacts(node(), status(), is_heard=True), MachinePhase.WORKING),
    "kubelet is late, agent is heard": (MachineFacts(node(ready="Unknown"), status(), is_heard=True),
                                        MachinePhase.WORKING),
    "cordoned": (MachineFacts(node(cordoned=True), status(), is_heard=True), MachinePhase.CORDONED),
    "driver is released for its upgrade": (
        MachineFacts(node(cordoned=True, released=True), status(), is_heard=True), MachinePhase.DRIVER_RELEASED),
    "its report is refused": (MachineFacts(node(cordoned=True), status(), is_heard=True, refusal="why"),
                              MachinePhase.REFUSED),
    "refused and silent": (MachineFacts(node(), status(), is_heard=False, refusal="why"), MachinePhase.REFUSED),
    "booted since, and refused therefore": (MachineFacts(node(boot=NEXT_BOOT), status(), is_heard=True, refusal="why"),
                                            MachinePhase.REBOOTED),
    "agent is silent": (MachineFacts(node(), status(), is_heard=False), MachinePhase.SILENT),
    "cordoned and silent": (MachineFacts(node(cordoned=True), status(), is_heard=False), MachinePhase.SILENT),
    "booted since": (MachineFacts(node(boot=NEXT_BOOT), status(), is_heard=True), MachinePhase.REBOOTED),
    "Node made anew": (MachineFacts(node("u2"), status(), is_heard=True), MachinePhase.REPLACED),
    "Node deleted": (MachineFacts(None, status(), is_heard=False), MachinePhase.DELETED),
    "Node deleted, agent runs on": (MachineFacts(None, status(), is_heard=True), MachinePhase.DELETED),
    "only Leases are left": (MachineFacts(None, None, is_heard=False), MachinePhase.UNKNOWN),
    "Node deleted, declared gone": (MachineFacts(None, status(said=("u1", 7)), is_heard=False),
                                    MachinePhase.DECLARED_GONE),
    "out of service": (MachineFacts(node(ready="Unknown", taint=OUT_OF_SERVICE), status(), is_heard=False),
                       MachinePhase.DECLARED_GONE),
}  # fmt: skip


@pytest.mark.parametrize("name", PHASES)
def test_where_a_machine_stands(name: str) -> None:
    """Each phase follows from Node, report and heartbeat alone."""
    facts, phase = PHASES[name]

    assert phase_of(facts) is phase


def test_every_phase_is_reached_and_told() -> None:
    """No phase without a situation, and the page for administrators carries the table as the code has it."""
    assert {phase for _, phase in PHASES.values()} == set(MachinePhase) == set(MACHINE_LIFE)
    text = PAGE.read_text(encoding="utf-8")
    for phase, rules in MACHINE_LIFE.items():
        assert f"| {phase} | {rules.report} | {rules.leases} | {rules.moves_on} |" in text


DOWN = node(ready="Unknown")
WORDS: dict[str, tuple[MachineFacts, str, bool]] = {
    "nobody says so": (MachineFacts(None, status(), is_heard=False), "u1", False),
    "said of this machine": (MachineFacts(None, status(said=("u1", 7)), is_heard=False), "u1", True),
    "said of another machine of the name": (MachineFacts(None, status(said=("u2", 7)), is_heard=False), "u1", False),
    "said while its Node is not Ready": (MachineFacts(DOWN, status(said=("u1", 7)), is_heard=False), "u1", True),
    "its kubelet answers": (MachineFacts(node(), status(said=("u1", 7)), is_heard=False), "u1", False),
    "its agent is heard": (MachineFacts(DOWN, status(said=("u1", 7)), is_heard=True), "u1", False),
    "it reported since, and is silent again": (MachineFacts(DOWN, status(said=("u1", 6)), is_heard=False), "u1", False),
    "its report is gone": (MachineFacts(None, status(reported=False, said=("u1", 0)), is_heard=False), "u1", True),
    "its report is gone, and it reports again": (MachineFacts(None, status(sequence=1, said=("u1", 0)), is_heard=False),
                                                 "u1", False),
    "its successor works": (MachineFacts(node("u2"), status("u2", said=("u1", 0)), is_heard=True), "u1", True),
    "it reported since, and another has the name": (
        MachineFacts(node("u2"), status("u2", said=("u1", 7), former=("u1", 8), sequence=9), is_heard=True),
        "u1",
        False,
    ),
    "it never reported since, and another has the name": (
        MachineFacts(node("u2"), status("u2", said=("u1", 8), former=("u1", 8), sequence=9), is_heard=True),
        "u1",
        True,
    ),
    "said of the one that was, not of its successor": (
        MachineFacts(node("u2", ready="False"), status("u2", said=("u1", 9)), is_heard=False), "u2", False),
    "out of service": (MachineFacts(node(ready="Unknown", taint=OUT_OF_SERVICE), status(), is_heard=False), "u1", True),
    "out of service without a report": (
        MachineFacts(node(ready="False", taint=OUT_OF_SERVICE), None, is_heard=False), "u1", True),
    "out of service, but its kubelet answers": (MachineFacts(node(taint=OUT_OF_SERVICE), status(), is_heard=False),
                                                "u1", False),
    "out of service, but its agent is heard": (
        MachineFacts(node(ready="Unknown", taint=OUT_OF_SERVICE), status(), is_heard=True), "u1", False),
    "out of service is its successor": (
        MachineFacts(node("u2", ready="Unknown", taint=OUT_OF_SERVICE), status(), is_heard=False), "u1", False),
    "another taint": (MachineFacts(node(ready="Unknown", taint="node.kubernetes.io/unreachable"), status(),
                                   is_heard=False), "u1", False),
}  # fmt: skip


@pytest.mark.parametrize("name", WORDS)
def test_when_a_word_counts(name: str) -> None:
    """A word counts for one machine and until something contradicts it; then for ever no more."""
    facts, uid, counts = WORDS[name]

    found = declaration_on(uid, facts)

    assert (found is not None) == counts
    assert found is None or found.by in {"jane", f"taint {OUT_OF_SERVICE}"}
    assert found is None or isinstance(found, GoneMachine)
