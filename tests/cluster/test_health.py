"""Consequences of a GPU's incident, and its end."""

from pathlib import Path
from typing import Any

import pytest

from atoll.api import names
from atoll.api.base import ObjectMeta
from atoll.api.node_status import (
    Cordon,
    Device,
    GpuNodeStatus,
    GpuNodeStatusReport,
    GpuNodeStatusSpec,
    Health,
    HealthState,
    Incident,
    IncidentKind,
    Mig,
)
from atoll.cluster.health import XIDS, IncidentAction, action_of, judge, recovery_words
from atoll.cluster.ledger import Ledger
from atoll.cluster.requests import Rejection, Request, request_of
from atoll.cluster.selection import select
from atoll.cluster.transitions import Availability
from tests.builders import make_allocation, make_claim, make_pod, make_report

T0, T1, T2 = (f"2026-01-01T00:0{minute}:00.000000Z" for minute in range(3))


def incident(kind: IncidentKind = IncidentKind.XID, code: int = 0, **fields: Any) -> Incident:
    return Incident(kind=kind, code=code, **{"first_time": T1, "last_time": T1, "boot_id": "b1", **fields})


def status(*devices: Device, spec: GpuNodeStatusSpec | None = None) -> GpuNodeStatus:
    return GpuNodeStatus(
        metadata=ObjectMeta(name="n1"),
        spec=spec or GpuNodeStatusSpec(),
        status=GpuNodeStatusReport(devices=devices),
    )


def card(number: int, *incidents: Incident, **fields: Any) -> Device:
    return Device(id=number, uuid=f"g{number}", model="nvidia-h100", index=number, incidents=incidents, **fields)


@pytest.mark.parametrize("xid", [6, 13, 31, 39, 43, 45, 63, 92, 94])
def test_errors_of_programs_leave_the_gpu_healthy(xid: int) -> None:
    """An error of an application takes no card out of work."""
    assert judge(status(card(0, incident(code=xid)))).standings["g0"].may_be_given_out


@pytest.mark.parametrize("xid", [48, 61, 62, 64, 74, 79, 95, 119, 120, 140, 145, 999])
def test_errors_of_the_card_quarantine_it(xid: int) -> None:
    """An error that only a reset clears quarantines the card and not its neighbour; the reason has the number."""
    standings = judge(status(card(0, incident(code=xid)), card(1))).standings

    assert standings["g0"].state is Availability.QUARANTINED
    assert f"XID {xid}" in standings["g0"].reason
    assert standings["g1"].may_be_given_out


@pytest.mark.parametrize("by", ["reset", "reboot", "recovered"])
def test_an_ended_incident_counts_no_more(by: str) -> None:
    """Released by reset or reboot: history stays on record and keeps nobody away."""
    ended = incident(code=79, ended_time=T2, ended_by=by)

    assert judge(status(card(0, ended))).standings["g0"].may_be_given_out


@pytest.mark.parametrize(
    ("released", "want"),
    [(T0, Availability.QUARANTINED), (T1, Availability.HEALTHY), (T2, Availability.HEALTHY)],
)
def test_an_administrators_word_ends_what_was_until_then(released: str, want: Availability) -> None:
    """A release counts for what happened before it, never for what comes after."""
    read = GpuNodeStatus.model_validate(
        {"metadata": {"name": "n1"}, "spec": {"releases": [{"uuid": "g0", "time": released}]}}
    )

    assert judge(status(card(0, incident(code=79)), spec=read.spec)).standings["g0"].state is want


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        (IncidentKind.XID, 999, "XID 999: not known to Atoll"),
        (IncidentKind.XID, 0, "XID 0: not known to Atoll"),
        (IncidentKind.RECOVERY, 8, "recovery action 8, not known to Atoll"),
        (IncidentKind.RECOVERY, 65_535, "recovery action 65535, not known to Atoll"),
    ],
)
def test_a_number_that_nobody_knows_is_the_worst_of_its_kind(kind: IncidentKind, code: int, words: str) -> None:
    """It keeps pods away as the worst known number does, and is named as unknown."""
    message = f"the driver asks for: {recovery_words(code)}" if kind is IncidentKind.RECOVERY else ""
    judged = judge(status(card(0, incident(kind, code, message=message)), card(1)))

    assert judged.standings["g0"].state is Availability.QUARANTINED
    assert words in judged.standings["g0"].reason
    assert bool(judged.drain) == (kind is IncidentKind.RECOVERY)


def test_a_reboot_that_the_driver_asks_for_drains_the_node() -> None:
    """One card that needs a reboot of its machine keeps new pods from all of them, and says which error did it."""
    judgement = judge(status(card(0, incident(IncidentKind.RECOVERY, 2, message="node reboot")), card(1)))

    assert judgement.drain == "node reboot"
    assert [one.state for one in judgement.standings.values()] == [Availability.QUARANTINED] * 2


@pytest.mark.parametrize(("count", "want"), [(1, True), (8, True), (16, False), (4096, False)])
def test_a_storm_of_uncorrectable_errors_quarantines(count: int, want: bool) -> None:
    """A single uncorrectable error is remapped and warned of; a storm means that the memory is broken."""
    standing = judge(status(card(0, incident(IncidentKind.ECC, count=count, message="ECC errors")))).standings["g0"]

    assert standing.may_be_given_out is want
    assert "ECC" in standing.reason


@pytest.mark.parametrize(
    ("kind", "code", "want"),
    [
        (IncidentKind.LOST, 0, IncidentAction.QUARANTINE),
        (IncidentKind.SILENT, 0, IncidentAction.QUARANTINE),
        (IncidentKind.FAULT, 0, IncidentAction.QUARANTINE),
        (IncidentKind.ROW_REMAP, 0, IncidentAction.WARN),
        (IncidentKind.ROW_REMAP, 1, IncidentAction.QUARANTINE),
        (IncidentKind.RETIRED_PAGES, 0, IncidentAction.WARN),
        (IncidentKind.RECOVERY, 1, IncidentAction.QUARANTINE),
        (IncidentKind.RECOVERY, 2, IncidentAction.DRAIN),
        (IncidentKind.RECOVERY, 5, IncidentAction.QUARANTINE),
        (IncidentKind.RECOVERY, 6, IncidentAction.QUARANTINE),
        (IncidentKind.RECOVERY, 7, IncidentAction.DRAIN),
        (IncidentKind.RECOVERY, 8, IncidentAction.DRAIN),
        (IncidentKind.THROTTLE, 0, IncidentAction.WARN),
        (IncidentKind.NVLINK, 0, IncidentAction.WARN),
    ],
)
def test_the_table(kind: IncidentKind, code: int, want: IncidentAction) -> None:
    """Each kind of incident is worth what the table says."""
    assert action_of(incident(kind, code)) is want


def test_every_kind_and_number_has_an_action_and_words() -> None:
    """No incident can be told that the table does not know."""
    assert all(action_of(incident(kind)) in IncidentAction for kind in IncidentKind)
    assert all(words and 0 <= number <= 65_535 for number, (_, words) in XIDS.items())


def test_unreadable_is_unknown_and_a_cordon_comes_first() -> None:
    """Four states, one at a time: a cordon is the administrator's and hides nothing that he would not know."""
    unknown = card(0, health=Health(state=HealthState.UNKNOWN, reason="not seen"))
    cordons = (Cordon(uuid="g1", reason="fan"),)
    judged = judge(status(unknown, card(1, incident(code=79)), spec=GpuNodeStatusSpec(cordons=cordons))).standings

    assert (judged["g0"].state, judged["g1"].state) == (Availability.UNKNOWN, Availability.CORDONED)
    assert judged["g1"].reason == "fan"


def test_an_instance_is_as_well_as_its_card() -> None:
    """A MIG instance of a card that is ill or cordoned is not given out."""
    parent = card(0, incident(code=79), mig=Mig(enabled=True))
    instance = card(1, mig=Mig(profile="3g.40gb", parent_uuid="g0"))

    assert judge(status(parent, instance)).standings["g1"].state is Availability.QUARANTINED
    spec = GpuNodeStatusSpec(cordons=(Cordon(uuid="g0", reason="fan"),))
    assert judge(status(card(0, mig=Mig(enabled=True)), instance, spec=spec)).standings["g1"].state is (
        Availability.CORDONED
    )


def chosen(incidents: dict[int, list[Incident]], count: int) -> tuple[int, ...] | str:
    """What a DGX H100 with these incidents would give, or the reason why it would not."""
    devices = {number: {"incidents": [one.to_json() for one in found]} for number, found in incidents.items()}
    ledger = Ledger()
    ledger.put_report(make_report("n1", "dgx-h100", devices=devices))
    claim = make_claim(count=count)
    request = request_of(make_pod(claim=claim, gpus=count), claim)
    assert isinstance(request, Request)
    answer = select(ledger.nodes["n1"], ledger.free("n1", now_seconds=0), request)
    return answer.reason if isinstance(answer, Rejection) else answer.choice.positions


def test_the_ledger_obeys_and_islands_shrink() -> None:
    """With one of 8 joined cards ill, 7 are to be had, all without it, and 8 are not."""
    ill = {2: [incident(code=79)]}

    assert chosen(ill, 7) == (0, 1, 3, 4, 5, 6, 7)
    assert isinstance(chosen(ill, 8), str)


def test_a_gpu_that_falls_ill_under_its_pod_frees_nothing() -> None:
    """A pod holds all eight and two of them fall ill: nothing is free, neither six nor less than nothing; when the
    pod is gone six are; when the two are well again, all."""
    holder = make_pod(uid="u1", node="n1", allocation=make_allocation("n1", *range(8)))
    sick = {number: {"incidents": [incident(code=79).to_json()]} for number in (2, 5)}
    ledger = Ledger()
    ledger.put_report(make_report("n1", "dgx-h100"))
    ledger.put_pod(holder)

    ledger.put_report(make_report("n1", "dgx-h100", devices=sick))
    assert to_be_had(ledger) == 0
    ledger.drop_pod(holder.metadata.uid)
    assert to_be_had(ledger) == 0b11011011
    ledger.put_report(make_report("n1", "dgx-h100"))
    assert to_be_had(ledger) == 0b11111111


def to_be_had(ledger: Ledger) -> int:
    """Mask of the devices of n1 that are free and may be given out."""
    return ledger.free("n1", now_seconds=0) & ledger.nodes["n1"].usable


@pytest.mark.parametrize("state", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_nothing_is_placed_before_the_fabric_is_ready(state: int, count: int) -> None:
    """While the fabric manager is not done, the node is refused with that reason; when it is, nothing else is
    needed."""
    waiting = {number: [incident(IncidentKind.FABRIC, state)] for number in range(8)}

    assert chosen(waiting, count) == names.REJECT_FABRIC
    done = {number: [incident(IncidentKind.FABRIC, state, ended_time=T2)] for number in range(8)}
    assert len(chosen(done, count)) == count


def test_the_page_for_administrators_has_every_number() -> None:
    """docs/hardware.md lists each XID of the table with its meaning, in the row of its class."""
    page = (Path(__file__).parents[2] / "docs" / "hardware.md").read_text()
    rows = {
        IncidentAction.IGNORE: "| nothing: the program's own |",
        IncidentAction.WARN: "| a warning |",
        IncidentAction.QUARANTINE: "| quarantine |",
    }
    for action, begin in rows.items():
        line = next(line for line in page.splitlines() if line.startswith(begin))
        told = line.removeprefix(begin).removesuffix("|").strip()
        assert told == "; ".join(
            f"{number} {words}" for number, (worth, words) in sorted(XIDS.items()) if worth is action
        )
