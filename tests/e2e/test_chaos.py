"""Everything around Atoll fails for minutes, on a cluster of its own; afterwards every promise holds and nothing leaks.

Parts and kube-scheduler are killed and paused; the API server is killed and restarted; etcd is paused; all connections
of Atoll's central parts to the API server are cut at once; a real kubelet is paused, killed and restarted. Meanwhile
hundreds of pods start, and end by themselves, by a user, or by force, and a tenant means harm all the while.
"""

import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from atoll.api import names
from atoll.cluster.allocations import parse_allocation
from devcluster import DevCluster, DevNodeSpec, control_plane
from devcluster.errors import AdminApiError, DevclusterError
from devcluster.installation import AtollPart, Installation
from tests.e2e.conftest import OPTIONS
from tests.e2e.hostile_tenant import HostileTenant
from tests.e2e.world import HOLD, STAY, RealCluster

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(3000)]

SECONDS = float(os.environ.get("ATOLL_CHAOS_SECONDS", "300"))
PAUSE_SECONDS_MAX = 20.0
FAULT_EVERY_SECONDS = 6.0
WAITING_MAX = 24
RUNNING_MAX = 4
PODS_MIN = 200
BOUND_MIN = 60
"""On a slow machine it goes on until so many have come, and so many of them were bound; half of that beside a hostile
tenant, who costs the control plane time too."""
LEFT_MAX = 2
"""Pods that go on beside a gang that must start: with the hostile tenant's quota they leave four GPUs."""
BYSTANDERS = ("bystander-0", "bystander-1")
CREATED_MAX = 4
FORCED_SHARE = 0.25
GIVEN_UP_SHARE = 0.3
"""How often a pod is deleted that waits; it may be being bound just now."""
SHORT_SHARE = 0.5
SHORT = "sleep 2"
"""Half of the pods end by themselves."""
SIZES = (1, 1, 1, 2, 2, 4)
SETTLE_SECONDS = 600.0
RELAY_PORT = 7443
RESTART_SECONDS = 5.0
"""How soon a supervisor starts what ended by itself, at the latest."""
PAUSE_SECONDS = 0.1
NODES = (DevNodeSpec("volta", profile="dgx1-v100"), DevNodeSpec("hopper", profile="dgx-h100"))
READINESS = ("enable", "block-admission", "timeout-seconds=90", "recovery-timeout-seconds=30")
CHAOS_OPTIONS = {
    **OPTIONS,
    "controllers": (*OPTIONS["controllers"], *(f"--wait-for-pods-ready-{option}" for option in READINESS)),
}
"""One gang at a time is admitted, so that a hostile one could keep all others waiting."""
API = frozenset({"kube-apiserver", "etcd"})
CENTRAL = ("controllers", "webhook", "extender")
RELAY = f"""
import asyncio, socket, sys
from devcluster.proxy import relay
async def main():
    listener = socket.create_server(("127.0.0.1", {RELAY_PORT}))
    await (await relay(listener, host=sys.argv[1], port=int(sys.argv[2]))).serve_forever()
asyncio.run(main())
"""
"""Ended and started again it cuts every connection that leads through it."""


class RelayedInstallation(Installation):
    """Atoll whose central parts reach the API server through a relay that can be cut."""

    def start_parts(self) -> None:
        """Start the relay before those who need it."""
        self.start_relay()
        super().start_parts()

    def start_relay(self) -> None:
        """Let connections through."""
        host, port = self.cluster.server_url_inside.removeprefix("https://").split(":")
        self.cluster.spawn("relay", [sys.executable, "-c", RELAY, host, port])

    def _kubeconfig(self, part: AtollPart) -> Path:
        direct = super()._kubeconfig(part)
        if part.name not in CENTRAL:
            return direct
        relayed = direct.with_name(f"{direct.name}-relayed")
        relayed.touch(mode=0o600)
        relayed.write_text(
            direct.read_text().replace(self.cluster.server_url_inside, f"https://127.0.0.1:{RELAY_PORT}")
        )
        return relayed


@pytest.fixture
def world() -> Iterator[RealCluster]:
    """A cluster of this test's own: its API server does not survive."""
    with DevCluster.start(f"chaos-{uuid4().hex[:6]}", nodes=NODES, scheduler=False) as cluster:
        installation = RelayedInstallation(cluster, options=CHAOS_OPTIONS)
        installation.install()
        yield RealCluster.enter(installation, f"t-{uuid4().hex[:8]}")


@dataclass(frozen=True, slots=True)
class Mend:
    """What puts one broken thing right, when, and whether it waits until the API server knows of it."""

    due: float
    name: str
    act: Callable[[], None]
    needs_api: bool


class Chaos:
    """Breaks something every few seconds and mends it a while later; users go on meanwhile."""

    def __init__(self, world: RealCluster, rng: random.Random, tenant: HostileTenant | None) -> None:
        self.world = world
        self.cluster = world.cluster
        self.rng = rng
        self.counts: Counter[str] = Counter()
        self._mends: list[Mend] = []
        self._broken: set[str] = set()
        self._created = 0
        self._bound: set[str] = set()
        self._deck: list[Callable[[Chaos], bool]] = []
        self.tenant = tenant

    # Faults: each tells whether it happened

    def _later(
        self, name: str, act: Callable[[], None], seconds_max: float = PAUSE_SECONDS_MAX, *, needs_api: bool = False
    ) -> None:
        self._broken.add(name)
        due = time.monotonic() + self.rng.uniform(0.5, seconds_max)
        self._mends.append(Mend(due, name, act, needs_api))

    def _whole_part(self) -> str:
        parts = [name for name in self.world.installation.parts if name not in self._broken]
        return self.rng.choice(parts) if parts else ""

    def kill_part(self) -> bool:
        """SIGKILL to a part of Atoll."""
        if name := self._whole_part():
            self.world.installation.kill(name)
            self._later(name, lambda: self.world.installation.start(name, wait=False), needs_api=True)
        return bool(name)

    def pause_part(self) -> bool:
        """SIGSTOP to a part of Atoll: it goes on with what it believed."""
        if name := self._whole_part():
            self.cluster.signal(name, "STOP")
            self._later(name, lambda: self.cluster.signal(name, "CONT"))
        return bool(name)

    def kill_scheduler(self) -> bool:
        """SIGKILL to kube-scheduler."""
        if "kube-scheduler" in self._broken:
            return False
        self.cluster.stop_scheduler()
        self._later("kube-scheduler", self.world.installation.start_scheduler, RESTART_SECONDS, needs_api=True)
        return True

    def kill_api_server(self) -> bool:
        """SIGKILL to the API server, which comes back."""
        if self._broken & API:
            return False
        self.cluster.signal("kube-apiserver", "KILL")
        self.cluster.wait_exit("kube-apiserver")
        self._later("kube-apiserver", self._start_api_server, 4.0)
        return True

    def pause_etcd(self) -> bool:
        """SIGSTOP to etcd: every write waits."""
        if self._broken & API:
            return False
        self.cluster.signal("etcd", "STOP")
        self._later("etcd", lambda: self.cluster.signal("etcd", "CONT"), 6.0)
        return True

    def cut_connections(self) -> bool:
        """Cut every watch and request of the central parts at once."""
        self.cluster.signal("relay", "KILL")
        self.cluster.wait_exit("relay")
        self.world.installation.start_relay()
        return True

    def _whole_kubelet(self) -> str:
        nodes = [node.name for node in NODES if f"kubelet@{node.name}" not in self._broken]
        return self.rng.choice(nodes) if nodes else ""

    def pause_kubelet(self) -> bool:
        """A kubelet falls silent; its containers run on."""
        if node := self._whole_kubelet():
            name = f"kubelet@{node}"
            self.cluster.signal(name, "STOP")
            self._later(name, lambda: self.cluster.signal(name, "CONT"))
        return bool(node)

    def lose_kubelet(self) -> bool:
        """A kubelet dies; its containers run on until it is back."""
        if node := self._whole_kubelet():
            self.cluster.signal(f"kubelet@{node}", "KILL")
            self._later(f"kubelet@{node}", lambda: self.cluster.restart_kubelet(node), needs_api=True)
        return bool(node)

    FAULTS = (
        kill_part, kill_part, pause_part, pause_part, kill_scheduler, kill_api_server, pause_etcd, cut_connections,
        cut_connections, pause_kubelet, lose_kubelet,
    )  # fmt: skip
    """A deck: shuffled, dealt to its end and shuffled again, so that a run of a minute has met every kind."""

    def _fault(self) -> Callable[["Chaos"], bool]:
        """Deal the next fault. One that cannot happen now, because its victim is broken already, goes back."""
        if not self._deck:
            self._deck = self.rng.sample(self.FAULTS, len(self.FAULTS))
        return self._deck.pop()

    def _break(self) -> None:
        """Let the next fault happen that can."""
        put_back = []
        while len(put_back) < len(self.FAULTS):
            fault = self._fault()
            with suppress(DevclusterError, OSError):
                if fault(self):
                    self.counts[fault.__name__] += 1
                    break
            put_back.append(fault)
        self._deck = [*put_back, *self._deck]

    # Mending

    def _start_api_server(self) -> None:
        command = control_plane.api_server_command(self.cluster._binaries, self.cluster.layout)
        self.cluster._spawn_part("kube-apiserver", command)

    def _mend(self, *, everything: bool = False) -> None:
        """Mend what is due; one that cannot be mended yet, because something else is broken, is tried again."""
        for mend in [mend for mend in self._mends if everything or mend.due <= time.monotonic()]:
            if mend.needs_api and self._broken & API:
                continue
            with suppress(DevclusterError, OSError):
                mend.act()
                self._mends.remove(mend)
                self._broken.discard(mend.name)

    def _revive(self) -> None:
        """Start what ended by itself because it lost the API server, as a supervisor does. While there is none nothing
        starts, and every attempt keeps all else broken for a minute."""
        for name, process in self.cluster.processes().items():
            if process.running or name in self._broken or (self._broken & API and name != "relay"):
                continue
            with suppress(DevclusterError, OSError):
                if name in self.world.installation.parts:
                    self.world.installation.start(name, wait=False)
                elif name == "relay":
                    self.world.installation.start_relay()
                elif name == "kube-apiserver":
                    self._later(name, self._start_api_server, RESTART_SECONDS)
                elif name == "kube-scheduler":
                    self._later(name, self.world.installation.start_scheduler, RESTART_SECONDS, needs_api=True)
                elif name == "kube-controller-manager":
                    self.cluster._start_controller_manager(node_grace_seconds=control_plane.NODE_GRACE_SECONDS)

    def mend_all(self) -> None:
        """Mend everything, and wait until every part is ready."""
        self.world.wait(self._is_mended, "everything to be mended", seconds=SETTLE_SECONDS)
        self.world.wait(self._is_ready, "every part to be ready", seconds=SETTLE_SECONDS)
        for node in NODES:
            self.cluster.wait_node_ready(node.name)

    def _is_mended(self) -> bool:
        self._mend(everything=True)
        self._revive()
        return not self._mends and all(process.running for process in self.cluster.processes().values())

    def _is_ready(self) -> bool:
        """A part that lost its leadership just now ends, and is started again as a supervisor would."""
        self._revive()
        return all(self.world.installation.is_ready(name) for name in self.world.installation.parts)

    # Users

    def _use(self) -> None:
        """Create and delete pods, as far as anybody answers; users wait while every write waits."""
        if "etcd" in self._broken:
            return
        with suppress(DevclusterError, OSError):
            pods = self.world.pods()
            self._bound |= {pod["metadata"]["uid"] for pod in pods if pod["spec"].get("nodeName")}
            waiting = [pod for pod in pods if not pod["spec"].get("nodeName")]
            running = [pod for pod in pods if pod["spec"].get("nodeName") and not _has_ended(pod)]
            unwanted = self.rng.sample(running, max(0, len(running) - RUNNING_MAX))
            if waiting and self.rng.random() < GIVEN_UP_SHARE:
                unwanted.append(self.rng.choice(waiting))
            for pod in (*filter(_has_ended, pods), *unwanted):
                self.world.delete(pod["metadata"]["name"], force=self.rng.random() < FORCED_SHARE)
            if len(waiting) < WAITING_MAX:
                for _ in range(self.rng.randint(1, CREATED_MAX)):
                    self._create()

    def _create(self) -> None:
        script = HOLD + (SHORT if self.rng.random() < SHORT_SHARE else STAY)
        options = {"terminationGracePeriodSeconds": 1, "restartPolicy": "Never"}
        claim = f"size-{self.rng.choice(SIZES)}"
        self.world.create(self.world.pod_body(f"pod-{self._created:04}", claim, script=script, **options))
        self._created += 1

    def run(self, seconds: float) -> None:
        """Break, mend and use for so long, and until enough pods have come."""
        for size in sorted(set(SIZES)):
            self.world.claim(f"size-{size}", size)
        if self.tenant is not None:
            self.tenant.move_in()
        end, fault_at, share = time.monotonic() + seconds, 0.0, 1 if self.tenant is None else 2
        while time.monotonic() < end or self._created < PODS_MIN // share or len(self._bound) < BOUND_MIN // share:
            if time.monotonic() >= fault_at:
                self._break()
                fault_at = time.monotonic() + self.rng.uniform(0.3, 1.7) * FAULT_EVERY_SECONDS
            self._mend()
            self._revive()
            self._use()
            time.sleep(PAUSE_SECONDS)
        self.mend_all()
        print(f"{self._created} pods, {len(self._bound)} of them seen bound; faults: {dict(self.counts)}")


def check_bystanders_start(world: RealCluster) -> None:
    """Fail unless a gang starts although the tenant's flood and his gangs go on. Users leave room for it."""
    pods = world.pods()
    kept = [pod for pod in pods if pod["spec"].get("nodeName")][:LEFT_MAX]
    for pod in (pod for pod in pods if pod not in kept):
        world.delete(pod["metadata"]["name"])
    world.wait(lambda: _do_bystanders_run(world), "the bystanders to run", seconds=SETTLE_SECONDS)


def _do_bystanders_run(world: RealCluster) -> bool:
    """Tell whether both run. One that a slow machine did not make ready in time was evicted, and is created again."""
    phases = {pod["metadata"]["name"]: pod["status"].get("phase") for pod in world.pods()}
    for name in (name for name in BYSTANDERS if name not in phases):
        body = world.pod_body(name, "size-1", terminationGracePeriodSeconds=1)
        body["metadata"]["annotations"] |= {names.GANG: "bystanders", names.GANG_SIZE: str(len(BYSTANDERS))}
        with suppress(AdminApiError):
            world.create(body)
    return all(phases.get(name) == "Running" for name in BYSTANDERS)


def _has_ended(pod: dict[str, Any]) -> bool:
    return pod["status"].get("phase") in {"Succeeded", "Failed"}


@pytest.mark.parametrize("is_harmed", [False, True], ids=["faults", "faults and a hostile tenant"])
def test_chaos_breaks_no_promise(world: RealCluster, is_harmed: bool) -> None:
    """After minutes of faults of every kind the audit is clean, no Lease is left, and no GPU ever had two users; a
    tenant who means harm got nothing that he may not have, and stopped nobody's pods."""
    seed = int(os.environ.get("ATOLL_SEED") or random.SystemRandom().randrange(10**6))
    print(f"seed {seed}; repeat with ATOLL_SEED={seed}")
    rng = random.Random(seed)
    tenant = HostileTenant(world, random.Random(seed)) if is_harmed else None
    chaos = Chaos(world, rng, tenant)
    try:
        chaos.run(SECONDS)
    finally:
        with suppress(AdminApiError):
            chaos.mend_all()

    assert {fault.__name__ for fault in Chaos.FAULTS} == set(chaos.counts)
    if tenant is not None:
        assert {harm.__name__ for harm in HostileTenant.HARMS} == set(tenant.counts)
        assert tenant.let_through == []
        check_bystanders_start(world)
        tenant.move_out()
    bound = [pod for pod in world.pods() if pod["spec"].get("nodeName")]
    assert [pod["metadata"]["name"] for pod in bound if parse_allocation(pod["metadata"]["annotations"]) is None] == []
    began = time.monotonic()
    world.check_audit(seconds=SETTLE_SECONDS)  # every part has just come back; hundreds of pods ended meanwhile
    print(f"the audit is clean after {time.monotonic() - began:.0f} s")
    for pod in world.pods():
        world.delete(pod["metadata"]["name"])
    world.wait(lambda: not world.pods(), "every pod to be gone", seconds=SETTLE_SECONDS)
    world.wait(lambda: not world.leases(), "every Lease to be released", seconds=SETTLE_SECONDS)
    world.check_no_contention()
    world.check_audit()
