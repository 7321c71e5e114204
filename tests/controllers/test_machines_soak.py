"""Three hundred machines over a thousand swaps, boots and removals, with the real controllers and the agent's rules: at
the end only objects, Leases and memory of existing machines are left."""

import contextlib
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agent.evidence import EvidenceReading
from agent.identities import LeaseLookup, assign
from agent.report import ReportContext, build_report, inventory_of, uuids_by_slot
from atoll.api import names
from atoll.api.node_status import GpuNodeStatusReport, PodEvidence
from atoll.cluster.allocations import Allocation
from atoll.cluster.gpu_stats import gpu_stats_of
from atoll.cluster.leases import Holder, lease_name
from tests.agent.builders import make_device, make_reading
from tests.builders import lease_json, pod_json
from tests.controllers.harness import (
    HEARTBEATS,
    LEASES,
    PODS,
    REPORTS,
    FaultyApi,
    InMemoryServer,
    Term,
    leading,
    strip_version,
)
from tests.fakes.clock import until

CARDS = 4


@dataclass
class PlayedMachine:
    """One machine and its agent: cards by slot, the boot, the last report, the pod that runs there."""

    server: InMemoryServer
    name: str
    cards: list[str]
    uid: str
    boot: int = 0
    report: GpuNodeStatusReport | None = None
    pod: str = ""
    ended: list[str] = field(default_factory=list)

    def join(self) -> None:
        self.server.put(f"/api/v1/nodes/{self.name}", {"metadata": {"uid": self.uid}})
        beat = {"holderIdentity": self.name, "leaseDurationSeconds": 1, "renewTime": "2026-01-31T12:00:00.000000Z"}
        self.server.put(f"{HEARTBEATS}/{self.name}", {"spec": beat})
        self.look()

    def look(self) -> None:
        """Take and publish one complete look, as the agent does."""
        devices = [make_device(slot, card, slot=slot) for slot, card in enumerate(self.cards)]
        reading = make_reading(*devices)
        context = ReportContext(
            "1", f"{self.name}-{self.boot}", self.uid, str(self.server.version), "2026-01-31T12:00:00.000000Z"
        )
        known = inventory_of(self.report, reading, context).ids
        leases: dict[int, str | None] = {}
        while isinstance(step := assign(uuids_by_slot(reading), known=known, leases=leases), LeaseLookup):
            leases |= {device_id: self._lease(device_id) for device_id in step.ids}
        live = (PodEvidence(uid=f"uid-of-{self.pod}", live=True, kubelet=True),) if self.pod else ()
        evidence = EvidenceReading(live, live_read=True, kubelet_read=True)
        made = build_report(reading, ids=step.ids, evidence=evidence, previous=self.report, context=context)
        sequence = (self.report.evidence.sequence if self.report is not None else 0) + 1
        self.report = made.model_copy(update={"evidence": made.evidence.model_copy(update={"sequence": sequence})})
        stored = self.server.objects.get(f"{REPORTS}/{self.name}", {"metadata": {}})
        self.server.put(
            f"{REPORTS}/{self.name}",
            {"metadata": stored["metadata"], "spec": stored.get("spec", {}), "status": self.report.to_json()},
        )

    def run(self, name: str) -> None:
        """Bind a pod to the first two cards."""
        assert self.report is not None
        two = self.report.devices[:2]
        held = Allocation(self.name, tuple(one.id for one in two), tuple(one.uuid for one in two))
        self.pod = name
        for device in two:
            body = lease_json(self.name, device.id, uuid=device.uuid, holder=Holder("team", name, f"uid-of-{name}"))
            body["metadata"]["annotations"][names.LEASE_NODE_UID] = self.uid
            self.server.put(f"{LEASES}/{body['metadata']['name']}", strip_version(body))
        pod = strip_version(pod_json(name, node=self.name, phase="Running", gpus=2, allocation=held))
        self.server.put(f"{PODS}/{name}", pod)

    def holds(self) -> bool:
        """Tell whether any GPU of the machine has a Lease."""
        return any(path.startswith(f"{LEASES}/gpu-{self.name}-") for path in self.server.objects)

    def _lease(self, device_id: int) -> str | None:
        lease = self.server.objects.get(f"{LEASES}/{lease_name(self.name, device_id)}")
        return lease["metadata"]["annotations"].get(names.LEASE_DEVICE_UUID, "") if lease is not None else None


def step(chance: random.Random, alive: dict[str, PlayedMachine], number: int) -> PlayedMachine | None:
    """One thing that happens to one machine; the machine is returned if it is gone for good."""
    machine = alive[chance.choice(sorted(alive))]
    server, what = machine.server, chance.choices(("swap", "boot", "run", "delete", "remove"), (50, 15, 20, 10, 5))[0]
    if what == "swap":
        machine.cards[chance.randrange(CARDS)] = f"{machine.name}-n{number}"
        machine.boot += 1
        machine.pod = ""
    elif what == "boot":
        machine.boot += 1
    elif (
        what == "run" and not machine.pod and not any(machine.name in path for path in server.objects if LEASES in path)
    ):
        machine.run(f"p{number}")
    elif what == "delete" and machine.pod:
        if f"{PODS}/{machine.pod}" in server.objects:
            server.remove(f"{PODS}/{machine.pod}")
        machine.pod = ""
    elif what == "remove" and len(alive) > 10:
        server.remove(f"/api/v1/nodes/{machine.name}")
        for path in [
            path for path, one in server.objects.items() if one.get("spec", {}).get("nodeName") == machine.name
        ]:
            server.remove(path)
        return alive.pop(machine.name)
    for _ in range(2):
        machine.look()
    return None


def declare_gone(machine: PlayedMachine) -> None:
    """Say that a machine is gone for good, as `atoll node forget` does."""
    server, path = machine.server, f"{REPORTS}/{machine.name}"
    stored = server.objects.get(path, {"metadata": {}})
    sequence = stored.get("status", {}).get("evidence", {}).get("sequence", 0)
    word = {"nodeUid": machine.uid, "by": "jane", "reason": "scrapped", "sequence": sequence, "forget": True}
    server.put(path, {**stored, "spec": {"gone": [word]}})


def named(server: InMemoryServer, collection: str) -> set[str]:
    return {path.rpartition("/")[2] for path in server.objects if path.startswith(f"{collection}/")}


def is_settled(server: InMemoryServer, alive: dict[str, PlayedMachine]) -> bool:
    """Tell whether only living machines have report and heartbeat, and only bound pods Leases, two each."""
    bound = {f"uid-of-{name}" for name in named(server, PODS)}
    leases = [one for path, one in server.objects.items() if path.startswith(f"{LEASES}/gpu-")]
    held = {one["spec"]["holderIdentity"].rpartition("/")[2] for one in leases}
    is_clean = named(server, REPORTS) == named(server, HEARTBEATS) == set(alive)
    return is_clean and held <= bound and len(leases) == 2 * len(held)


async def settle(term: Term, server: InMemoryServer, alive: dict[str, PlayedMachine]) -> None:
    """Let agents look and controllers look at everything again, until nothing is left to do."""
    for _ in range(30):
        for machine in alive.values():
            machine.pod = machine.pod if f"{PODS}/{machine.pod}" in server.objects else ""
            machine.look()
        for stream in server.open_streams:
            stream.send("BOOKMARK", server.bookmark())
        term.resync()
        with contextlib.suppress(TimeoutError):
            await until(lambda: is_settled(server, alive), timeout_seconds=3.0)
            return
    left = named(server, LEASES), named(server, REPORTS) ^ set(alive), named(server, HEARTBEATS) ^ set(alive)
    raise AssertionError(left)


@pytest.mark.parametrize(
    ("seed", "machines", "swaps"), [(1, 40, 150), pytest.param(2, 300, 1000, marks=pytest.mark.long)]
)
async def test_what_is_kept_is_what_the_living_machines_need(
    tmp_path: Path, seed: int, machines: int, swaps: int
) -> None:
    """Reports, heartbeats and Leases of machines that are gone go, and so does every memory of them."""
    chance = random.Random(seed)
    async with InMemoryServer().running() as server:
        alive = {
            name: PlayedMachine(server, name, [f"{name}-c{slot}" for slot in range(CARDS)], f"uid-of-{name}")
            for name in (f"m{number}" for number in range(machines))
        }
        for machine in alive.values():
            machine.join()
        settings = {"forget_nodes_after_seconds": 1.0}
        async with leading(server, tmp_path, lambda client: FaultyApi(client), settings=settings) as term:
            gone = [found for number in range(swaps) if (found := step(chance, alive, number)) is not None]
            for machine in gone:
                declare_gone(machine)
            await settle(term, server, alive)
            ledger = term.mirror.ledger
            await until(lambda: set(ledger.nodes) == set(alive), timeout_seconds=20.0)
            await until(lambda: set(ledger.leases) == named(server, LEASES), timeout_seconds=20.0)

            assert gone
            assert set(ledger._reports._heard) == set(alive)
            assert set(ledger._holds._history._events) | set(ledger.uncounted) <= set(alive)
            figures = gpu_stats_of(ledger, 0.0)
            assert (sum(figures.gpus.values()), figures.leases_in_doubt) == (CARDS * len(alive), 0)
            for machine in alive.values():
                assert machine.report is not None
                assert {one.uuid for one in machine.report.devices} == set(machine.cards)
