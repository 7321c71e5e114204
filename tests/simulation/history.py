"""One history: the shipped shells in a simulated world, the steps of a plan, and the judge's findings.

After the last step faults stop, and everything cut, paused or killed comes back. Then the system must become idle: no
Lease without a user, no user without a Lease, no pod that waits beside free GPUs, also in every part's memory.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from atoll.api import names
from atoll.api.times import text_of
from atoll.cluster import hints, wakeups
from atoll.cluster.leases import RESERVATION_NAMESPACE
from controllers import loops
from tests.builders import pod_json
from tests.simulation.faults import FaultPlan
from tests.simulation.gangs import GangJudge, GangSteps, JobController
from tests.simulation.judge import Broken, Judge
from tests.simulation.machines import DEVICES, HEARTBEAT_SECONDS, POLL_SECONDS, SimulatedNode, wanted_uuids
from tests.simulation.plan import (
    CALM_KINDS,
    CONTROLLERS,
    EXTENDERS,
    GANG_STEPS,
    NODES,
    RESERVING,
    RESERVING_GANGS,
    SECONDS,
    Plan,
    Step,
)
from tests.simulation.scheduler import Scheduler
from tests.simulation.server import (
    ALL_PODS,
    HEARTBEATS,
    LEASES,
    PODS,
    REPORTS,
    RESERVATIONS,
    Object,
    SimulatedServer,
    canonical,
)
from tests.simulation.server import NODES as NODES_PATH
from tests.simulation.shells import ControllersProcess, ExtenderReplica, ShellEnvironment
from tests.simulation.transport import SimulatedSession
from tests.simulation.virtual_time import VirtualClock, VirtualLoop

REST_SECONDS_MAX = 420.0
PROCESS_SKEW_SECONDS_MAX = 120.0
"""What one leader has dated is over by another's clock before a history must be at rest."""
RESERVATION = "nightly"
OWN = f"{RESERVATION_NAMESPACE}/"
LOOK_SECONDS = 4.0
BOOKMARK_SECONDS = 40.0
CLEANER_SECONDS = 5.0
JOBS_SECONDS = 0.5
REBUILD_SECONDS_MAX = 6.0
NODES_MANY = wakeups.NOMINATION_NODES_MIN
SLOW_THREADS = 0.2
"""Share of the searches beside an event loop that take so long that much changes meanwhile."""
COLLECTIONS = {
    "pods": canonical(ALL_PODS),
    "leases": LEASES,
    "reports": REPORTS,
    "nodes": NODES_PATH,
    "heartbeats": HEARTBEATS,
}


@dataclass(slots=True)
class HistoryOutcome:
    """How a history went."""

    broken: Broken | None
    virtual_seconds: float
    checks_count: int
    binds_count: int
    releases_count: int


class SimulatedCluster:
    """Everything of one history."""

    def __init__(self, plan: Plan, loop: VirtualLoop) -> None:
        self.plan = plan
        self.loop = loop
        self.weather = FaultPlan(plan.seed, dict(plan.rates))
        loop.thread_seconds = self._thread_seconds
        self.server = SimulatedServer()
        self.machines: list[SimulatedNode] = []
        self.excused: set[str] = set()
        self.judge = Judge(self.server, self.machines, is_excused=lambda name: name in self.excused)
        skew = min(plan.skew_seconds, PROCESS_SKEW_SECONDS_MAX)
        hints.NOMINATION_NODES_MIN = wakeups.NOMINATION_NODES_MIN = 1 if plan.is_sampled else NODES_MANY
        self.surroundings = ShellEnvironment(self.server, self.weather, loop, self.plan.settings, skew)
        self.jobs = JobController(self.server, RESERVING_GANGS if plan.reserved_count else ())
        self.gang_steps = GangSteps(self)
        is_undisturbed = not self.plan.rates and all(step.kind in CALM_KINDS for step in self.plan.steps)
        self.gang_judge = GangJudge(
            self.server,
            loop,
            self.jobs,
            self.judge.break_promise,
            is_undisturbed=is_undisturbed,
            is_strict=plan.is_strict,
            is_led=lambda: any(process.is_leading for process in self.controllers.values()),
        )
        self.sessions: dict[str, SimulatedSession] = {}
        self.extenders: dict[str, ExtenderReplica | None] = {}
        self.controllers: dict[str, ControllersProcess] = {}
        self.scheduler: Scheduler | None = None
        self.leading = 0
        self.binds_count = self.releases_count = 0
        self.server.listeners.append(self._on_write)

    # Beginning

    def begin(self) -> None:
        """Set up two machines, perhaps a reservation, and every process."""
        if self.plan.reserved_count:
            self._create_reservation()
        for node in NODES:
            self._add_machine(node, node).power_on()
        for machine in self.machines:
            machine.look()
            machine.beat()
        for name in EXTENDERS:
            self.start_extender(name)
        for name in CONTROLLERS[: self.plan.controllers_count]:
            self.start_controllers(name)
        self.scheduler = self._new_scheduler()
        self._write_leader()
        self._every(POLL_SECONDS, lambda: [machine.look(is_owed=False) for machine in self.machines])
        self._every(HEARTBEAT_SECONDS, lambda: [machine.beat() for machine in self.machines])
        self._every(BOOKMARK_SECONDS, self._bookmark)
        self._every(CLEANER_SECONDS, self._collect_garbage)
        if self.plan.has_gangs:
            self._every(JOBS_SECONDS, self.jobs.work)
            self._every(LOOK_SECONDS, self._look_at_gangs)

    def _create_reservation(self) -> None:
        spec = {"shape": {"count": self.plan.reserved_count}, "namespaces": ["team"]}
        self.server.create(f"{RESERVATIONS}/{RESERVATION}", {"metadata": {"name": RESERVATION}, "spec": spec})

    def _add_machine(self, node: str, ident: str) -> SimulatedNode:
        skew = self.plan.skew_seconds
        clock = VirtualClock(self.loop, skew_seconds=self.weather.between(f"skew {ident}", -skew, skew))
        machine = SimulatedNode(node, ident, self.server, self.loop, self.weather, clock, self.judge.on_start)
        if self.plan.has_gangs or self.plan.is_sampled:
            machine.allocatable = {"cpu": "64", "memory": "512Gi", "pods": "110", names.GPU_RESOURCE: str(DEVICES)}
        self.machines.append(machine)
        return machine

    def machine(self, node: str) -> SimulatedNode:
        """Return the machine that bears the node's name now."""
        return next(machine for machine in reversed(self.machines) if machine.node == node)

    def follow(self, name: str, session: SimulatedSession) -> None:
        """Know the network of a process that was started."""
        self.sessions[name] = session

        def on_sent(_name: str, method: str, path: str, body: Any) -> None:
            self.judge.on_sent(list(session.in_flight.values())[:-1], method, path, body)
            self.gang_judge.on_sent(session.heard.get(canonical(PODS), 0), method, path, body)

        session.on_sent = on_sent

    def start_extender(self, name: str) -> None:
        """Start an extender replica anew."""
        if (old := self.extenders.get(name)) is not None:
            old.kill()
        replica = self.extenders[name] = ExtenderReplica(self.surroundings, name)
        self.follow(name, replica.session)

    def start_controllers(self, name: str) -> None:
        """Start a controllers process anew."""
        if (old := self.controllers.get(name)) is not None:
            old.kill()
        kubelet = partial(self.loop.call_later, REBUILD_SECONDS_MAX, self._revive_controllers, name)
        process = self.controllers[name] = ControllersProcess(self.surroundings, name, kubelet)
        self.follow(name, process.session)

    def _new_scheduler(self) -> Scheduler:
        index = self.leading
        replica = lambda: self.extenders.get(EXTENDERS[index])  # noqa: E731
        return Scheduler(self.server, self.weather, self.loop, replica, is_sampled=self.plan.is_sampled)

    # What happens by itself

    def _on_write(self, path: str, old: Object | None, new: Object | None) -> None:
        collection = canonical(path.rpartition("/")[0])
        event = self.server.log(collection)[-1]
        for session in self.sessions.values():
            session.tell(collection, event)
        if path.startswith(PODS):
            self._on_pod(old, event.object, is_deleted=new is None)
        elif path.startswith(REPORTS) and new is not None:
            self.machine(new["metadata"]["name"]).hear_of_request()
        elif path.startswith(LEASES) and new is None:
            self.releases_count += 1

    def _on_pod(self, old: Object | None, pod: Object, *, is_deleted: bool) -> None:
        node = pod["spec"].get("nodeName")
        if not node:
            if self.scheduler is not None and not is_deleted:
                self.scheduler.hear(pod)
            return
        self.binds_count += old is not None and not old["spec"].get("nodeName")
        index = len(self.server.log(PODS)) - 1
        for machine in self.machines:
            if machine.node == node:
                machine.hear(index)
        if is_deleted or pod["status"].get("phase") in {"Failed", "Succeeded"}:
            machine = self.machine(node)
            self.loop.call_later(self.weather.between(f"agent {node}", 0.2, 1.5), machine.look)
            self.loop.call_later(self.weather.between(f"agent {node}", 2.0, 3.5), machine.look)

    def _bookmark(self) -> None:
        line = b'{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"%d"}}}\n' % self.server.version
        for session in self.sessions.values():
            for watch in session.watches:
                watch.push(self.server.version, line)

    def _collect_garbage(self) -> None:
        """Delete by force the pods of Nodes that do not exist any more, as the pod collector does."""
        for pod in self.server.pods():
            node = pod["spec"].get("nodeName")
            if node and f"{NODES_PATH}/{node}" not in self.server.objects:
                self.server.delete(f"{PODS}/{pod['metadata']['name']}", force=True)

    def _look_at_gangs(self) -> None:
        for problem in self.gang_judge.overdue():
            self.judge.break_promise(10, problem)

    def _every(self, seconds: float, act: Callable[[], Any]) -> None:
        def due() -> None:
            act()
            self.loop.call_later(seconds, due)

        self.loop.call_later(seconds, due)

    # Steps

    def take(self, step: Step) -> None:
        """Carry out one step; one that makes no sense now changes nothing."""
        if step.kind in GANG_STEPS:
            self.gang_steps.take(step)
        else:
            getattr(self, "_" + step.kind.lower().replace(" ", "_"))(step)

    def _pod(self, step: Step) -> Object | None:
        return self.server.objects.get(f"{PODS}/{step.target}")

    def _create(self, step: Step) -> None:
        if self._pod(step) is None:
            uses = self.plan.reserved_count and step.target in RESERVING
            annotations = {names.RESERVATION: RESERVATION} if uses else {}
            body = pod_json(step.target, gpus=int(step.number), annotations=annotations)
            self.server.create(f"{PODS}/{step.target}", body)

    def _delete(self, step: Step) -> None:
        if self._pod(step) is not None:
            self.server.delete(f"{PODS}/{step.target}")

    def _delete_reservation(self, _step: Step) -> None:
        if f"{RESERVATIONS}/{RESERVATION}" in self.server.objects:
            self.server.delete(f"{RESERVATIONS}/{RESERVATION}")

    def _make_reservation_anew(self, step: Step) -> None:
        """Another one of the name: it inherits nothing."""
        self._delete_reservation(step)
        self._create_reservation()

    def _end_reservation(self, _step: Step) -> None:
        """Let it end at a moment that the controllers' clocks disagree about."""
        ends = text_of(VirtualClock(self.loop).now().timestamp() + 1.0)
        self.server.patch(f"{RESERVATIONS}/{RESERVATION}", {"spec": {"ends": ends}})

    def _force_delete(self, step: Step) -> None:
        if self._pod(step) is not None:
            self.server.delete(f"{PODS}/{step.target}", force=True)

    def _force_delete_soon(self, step: Step) -> None:
        """Delete by force just after the pod was bound."""
        pod = self._pod(step)
        if pod is not None and pod["spec"].get("nodeName"):
            self.loop.call_later(self.weather.between("soon", 0.0, 0.1), self._force_delete, step)
        elif pod is not None:
            self.loop.call_later(0.02, self._force_delete_soon, step)

    def _crash_sandbox(self, step: Step) -> None:
        pod = self._pod(step)
        if pod is not None and pod["spec"].get("nodeName"):
            self.machine(pod["spec"]["nodeName"]).crash(pod["metadata"]["uid"])

    def _replace(self, step: Step) -> None:
        self._force_delete(step)
        self._create(step)

    def _finish(self, step: Step) -> None:
        pod = self._pod(step)
        if pod is not None and pod["spec"].get("nodeName"):
            self.machine(pod["spec"]["nodeName"]).finish(pod["metadata"]["uid"])

    def _fail_by_hand(self, step: Step) -> None:
        self.server.patch(f"{PODS}/{step.target}", {"status": {"phase": "Failed"}})

    def _touch(self, step: Step) -> None:
        self.server.patch(f"{PODS}/{step.target}", {"metadata": {"labels": {"touched": str(step.at_seconds)}}})

    def _kill_extender(self, step: Step) -> None:
        replica = self.extenders.get(step.target)
        if replica is None:
            return
        replica.kill()
        self.extenders[step.target] = None
        self.loop.call_later(min(step.number, REBUILD_SECONDS_MAX), self._revive_extender, step.target)

    def _revive_extender(self, name: str) -> None:
        replica = self.extenders.get(name)
        if replica is None or replica.session.is_dead:
            self.start_extender(name)

    def _kill_controllers(self, step: Step) -> None:
        self.controllers[step.target].kill()
        self.loop.call_later(min(step.number, REBUILD_SECONDS_MAX), self._revive_controllers, step.target)

    def _revive_controllers(self, name: str) -> None:
        if self.controllers[name].session.is_dead:
            self.start_controllers(name)

    def _switch_scheduler(self, _step: Step) -> None:
        if self.scheduler is not None:
            self.scheduler.stop()
        self.leading = 1 - self.leading
        self.scheduler = self._new_scheduler()
        self._write_leader()

    def _stop_scheduler(self, _step: Step) -> None:
        if self.scheduler is not None:
            self.scheduler.stop()

    def _write_leader(self) -> None:
        path = f"{LEASES}/{names.SCHEDULER_LEADER_LEASE}"
        spec = {"holderIdentity": f"scheduler-{self.leading}", "leaseDurationSeconds": 15}
        if not self.server.patch(path, {"spec": spec}):
            self.server.create(path, {"metadata": {"name": names.SCHEDULER_LEADER_LEASE}, "spec": spec})

    def _hold_process(self, step: Step) -> None:
        session = self.sessions[step.target]
        session.hold(is_held=True)
        self.loop.call_later(step.number, lambda: session.hold(is_held=False))

    def _watches(self, step: Step) -> Iterator[Any]:
        session = self.sessions[step.target]
        return (watch for watch in list(session.watches) if watch.collection == COLLECTIONS[step.other])

    def _cut_watch(self, step: Step) -> None:
        for watch in self._watches(step):
            watch.cut()

    def _silence_watch(self, step: Step) -> None:
        for watch in self._watches(step):
            watch.fall_silent()

    def _slow_watch(self, step: Step) -> None:
        self.sessions[step.target].slow_watches[COLLECTIONS[step.other]] = step.number

    def _compact(self, _step: Step) -> None:
        for collection in COLLECTIONS.values():
            self.server.compacted[collection] = self.server.version
        for session in self.sessions.values():
            for watch in list(session.watches):
                watch.cut()

    def _pause_kubelet(self, step: Step) -> None:
        machine = self.machine(step.target)
        machine.is_paused = True
        self.loop.call_later(step.number, self._unpause, machine)

    def _unpause(self, machine: SimulatedNode) -> None:
        machine.is_paused = False
        machine.work(len(self.server.log(PODS)))

    def _cut_off_node(self, step: Step) -> None:
        machine = self.machine(step.target)
        machine.is_online = False
        self.loop.call_later(step.number, self._connect, machine)

    def _connect(self, machine: SimulatedNode) -> None:
        if machine is not self.machine(machine.node):
            return
        machine.is_online = True
        if machine.is_on:
            machine.catch_up()

    def _reboot(self, step: Step) -> None:
        machine = self.machine(step.target)
        if machine.is_on:
            machine.power_off()
            self.loop.call_later(min(step.number, REBUILD_SECONDS_MAX), self._power_on, machine)

    def _power_on(self, machine: SimulatedNode) -> None:
        if not machine.is_on and machine is self.machine(machine.node):
            machine.power_on()
            self.loop.call_later(0.5, machine.look)

    def _delete_node(self, step: Step) -> None:
        path = f"{NODES_PATH}/{step.target}"
        if path in self.server.objects:
            self.server.delete(path)
            self.loop.call_later(step.number, lambda: self._connect(self.machine(step.target)))

    def _replace_machine(self, step: Step) -> None:
        """Cut a machine off for good, delete its Node, and give its name to another one."""
        old = self.machine(step.target)
        if len(self.machines) > 3 or not old.is_on:
            return
        old.is_online, old.is_retired = False, True
        self._delete_node(Step(step.at_seconds, "delete node", step.target, number=1e6))
        self._collect_garbage()
        new = self._add_machine(step.target, f"{step.target}-{len(self.machines)}")
        new.cursor = len(self.server.log(PODS))
        for device_id in list(new.devices):
            new.insert_card(device_id)
        self.loop.call_later(step.number, new.power_on)
        new.is_on = False

    def _replace_card(self, step: Step) -> None:
        machine = self.machine(step.target)
        if machine.is_on:
            machine.power_off()
            machine.insert_card(min(machine.devices))
            self.loop.call_later(min(step.number, REBUILD_SECONDS_MAX), self._power_on, machine)

    def _sick_card(self, step: Step) -> None:
        machine = self.machine(step.target)
        device_id = min(machine.devices)
        machine.sick ^= {device_id}
        machine.look()

    def _silence_agent(self, step: Step) -> None:
        machine = self.machine(step.target)
        machine.is_agent_down = True
        self.loop.call_later(step.number, lambda: setattr(machine, "is_agent_down", False))

    def _lose_lease(self, step: Step) -> None:
        """Somebody deletes the Lease of a bound pod by hand, while everybody has seen that the pod is bound."""
        pod = self._pod(step)
        if pod is None or not pod["spec"].get("nodeName") or pod["status"].get("phase") in {"Failed", "Succeeded"}:
            return
        uid = pod["metadata"]["uid"]
        parts = [part for part in (*self.extenders.values(), *self.controllers.values()) if part is not None]
        if any(part.session.is_held or part.mirror.ledger.allocation_of(uid) is None for part in parts):
            return
        for lease in self.server.collection(LEASES):
            if lease["spec"]["holderIdentity"].endswith(f"/{uid}"):
                name = lease["metadata"]["name"]
                self.excused.add(name)
                self.server.delete(f"{LEASES}/{name}")
                self.excused.discard(name)
                return

    def _lose_both(self, step: Step) -> None:
        """Somebody deletes a Lease by hand and its pod by force, before anybody could write the Lease again."""
        self._lose_lease(step)
        self._force_delete(step)

    # End

    def calm_down(self) -> None:
        """End every fault, and bring back what is away."""
        self.weather.is_calm = True
        for session in self.sessions.values():
            session.hold(is_held=False)
            session.slow_watches.clear()
        for name in EXTENDERS:
            self._revive_extender(name)
        for name in self.controllers:
            self._revive_controllers(name)
        for node in NODES:
            machine = self.machine(node)
            machine.is_paused = machine.is_agent_down = False
            machine.sick.clear()
            machine.is_online = True
            if machine.is_on:
                machine.catch_up()
            else:
                machine.power_on()
        for machine in self.machines:
            if machine is not self.machine(machine.node):
                machine.power_off()

    def problems(self) -> list[str]:
        """Return what is not at rest, or not as it should be at rest."""
        found = self.judge.leaks(self._is_nobodys)
        found += [f"{name} ended: {fault!r}" for name, p in self.controllers.items() if (fault := p.failure())]
        free = {node: self._free(node) for node in NODES}
        idle = {node: self._reserved(node, holder=OWN) for node in NODES}
        found += self._reservation_problems(idle, free)
        for pod in self.server.pods():
            count = int(pod["spec"]["containers"][0]["resources"]["limits"][names.GPU_RESOURCE])
            room = idle if names.RESERVATION in pod["metadata"]["annotations"] else free
            roomy = [node for node, uuids in room.items() if len(uuids) >= count]
            is_gated = bool(pod["spec"].get("schedulingGates"))
            if not pod["spec"].get("nodeName") and pod["status"].get("phase") == "Pending" and roomy and not is_gated:
                found.append(f"{pod['metadata']['uid']} waits for {count} GPUs while {roomy} have them")
            if not pod["spec"].get("nodeName") and pod["status"].get("nominatedNodeName") and not is_gated:
                found.append(f"{pod['metadata']['uid']} waits and keeps {pod['status']['nominatedNodeName']}")
        whole = [len(self.machine(node).devices) for node in NODES]
        pool = [len(idle[node]) for node in NODES], [len(self._reserved(node)) for node in NODES]
        found += self.gang_judge.problems([len(free[node]) for node in NODES], whole, pool)
        for name, replica in self.extenders.items():
            found += self._memory_problems(name, replica, free)
        return found

    def _reserved(self, node: str, *, holder: str = "") -> set[str]:
        """Return the GPUs of a node that belong to the reservation of now, and whose holder begins so."""
        reservation = self.server.objects.get(f"{RESERVATIONS}/{RESERVATION}")
        uid = reservation["metadata"]["uid"] if reservation is not None else "none"
        return {
            lease["metadata"]["annotations"][names.LEASE_DEVICE_UUID]
            for lease in self.server.collection(LEASES)
            if lease["metadata"].get("annotations", {}).get(names.RESERVATION) == f"{RESERVATION}/{uid}"
            and lease["spec"]["holderIdentity"].startswith(holder)
            and lease["metadata"]["annotations"][names.LEASE_NODE] == node
        }

    def _reservation_problems(self, idle: dict[str, set[str]], free: dict[str, set[str]]) -> list[str]:
        """Return what the reservation has too much, or lacks while GPUs are free."""
        reservation = self.server.objects.get(f"{RESERVATIONS}/{RESERVATION}")
        kept = sum(lease["spec"]["holderIdentity"].startswith(OWN) for lease in self.server.collection(LEASES))
        if kept > sum(map(len, idle.values())):
            return [f"{kept} GPUs are idle in reservations, more than in the one that exists"]
        has, spare = sum(len(self._reserved(node)) for node in NODES), sum(map(len, free.values()))
        if reservation is None or reservation["spec"].get("ends"):
            return [f"the reservation is over and keeps {kept} GPUs"] if kept else []
        wants = self.plan.reserved_count
        if has > wants and kept:
            return [f"the reservation has {has} GPUs, of {wants}"]
        return [f"the reservation has {has} GPUs, of {wants}, while {spare} are free"] if has < wants and spare else []

    def _is_nobodys(self, annotations: Object) -> bool:
        """Tell whether nothing that reports speaks of a Lease's machine any more: only an administrator can know."""
        machine = self.machine(annotations[names.LEASE_NODE])
        is_there = annotations[names.LEASE_DEVICE_UUID] in machine.devices.values()
        return not is_there and annotations.get(names.LEASE_NODE_UID) != machine.node_uid

    def _memory_problems(self, name: str, replica: ExtenderReplica | None, free: dict[str, set[str]]) -> list[str]:
        if replica is None or not replica.is_ready:
            return [f"{name} is not ready"]
        ledger, now = replica.mirror.ledger, 1000.0 + self.loop.time()
        found = [f"{name} still binds"] if replica.binder._under_way else []
        for node, uuids in free.items():
            devices = ledger.nodes.get(node)
            mask = ledger.free(node, now_seconds=now)
            known = {d.uuid for i, d in enumerate(devices.devices) if mask >> i & 1} if devices is not None else set()
            if known != uuids:
                found.append(f"{name} believes {sorted(known)} of {node} free, which are {sorted(uuids)}")
        return found

    def _thread_seconds(self) -> float:
        """Return how long a search beside an event loop takes: in rough weather sometimes seconds."""
        is_slow = not self.weather.is_calm and not self.plan.is_calm and self.weather.draw("thread") < SLOW_THREADS
        return self.weather.between("thread", *((0.5, 4.0) if is_slow else (0.001, 0.05)))

    def free_counts(self) -> list[int]:
        """Return how many GPUs of each node nobody holds or uses."""
        return [len(self._free(node)) for node in NODES]

    def _free(self, node: str) -> set[str]:
        machine = self.machine(node)
        leases = [lease["metadata"].get("annotations", {}) for lease in self.server.collection(LEASES)]
        ids = {row.get(names.LEASE_DEVICE_ID) for row in leases if row.get(names.LEASE_NODE) == node}
        held = {row.get(names.LEASE_DEVICE_UUID) for row in leases}
        for pod in self.server.pods():
            if pod["spec"].get("nodeName") and pod["status"].get("phase") not in {"Failed", "Succeeded"}:
                held |= wanted_uuids(pod)
        return {uuid for number, uuid in machine.devices.items() if str(number) not in ids and uuid not in held}


def run_history(plan: Plan, *, is_told: bool = False) -> tuple[HistoryOutcome, FaultPlan]:
    """Run one history to its end or to the first breach; print every write if it is to be told."""
    loops.WORKERS = 1 + plan.seed % 2
    loop = VirtualLoop()
    loop.set_exception_handler(lambda _loop, _context: None)
    world = SimulatedCluster(plan, loop)
    if is_told:
        world.server.listeners.append(lambda path, old, new: _tell(world, path, old, new))
    try:
        run_world(world)
    except Broken as broken:
        world.judge.broken = world.judge.broken or broken
    outcome = HistoryOutcome(
        world.judge.broken, loop.time(), world.judge.checks_count, world.binds_count, world.releases_count
    )
    return outcome, world.weather


def run_world(world: SimulatedCluster) -> None:
    """Run a world to its end, and leave nothing of it behind. Raises Broken at the first breach."""
    loop = world.loop
    try:
        loop.run_until_complete(_run(world))
    finally:
        loop.clear()


async def _run(world: SimulatedCluster) -> None:
    world.begin()
    for step in world.plan.steps:
        await asyncio.sleep(max(0.0, step.at_seconds - world.loop.time()))
        _stop_if_broken(world)
        world.take(step)
    await asyncio.sleep(max(0.0, min(SECONDS, world.loop.time() + 10.0) - world.loop.time()))
    world.calm_down()
    end = world.loop.time() + REST_SECONDS_MAX
    while problems := world.problems():
        _stop_if_broken(world)
        if world.loop.time() > end:
            promise = 2
            raise Broken(promise, f"not at rest after {REST_SECONDS_MAX:g} s: " + "; ".join(problems[:6]))
        await asyncio.sleep(LOOK_SECONDS)
    _stop_if_broken(world)


def _tell(world: SimulatedCluster, path: str, old: Object | None, new: Object | None) -> None:
    if not path.startswith((PODS, LEASES, NODES_PATH, REPORTS)) or path.endswith(names.CONTROLLERS_LEADER_LEASE):
        return
    obj = new or old or {}
    spec = obj.get("spec") or {}
    facts = [spec.get("nodeName"), spec.get("holderIdentity"), obj.get("status", {}).get("phase")]
    marks = obj["metadata"].get("annotations", {})
    facts += [
        marks.get(key) for key in (names.ALLOCATED, names.LEASE_ATTEMPT, names.LEASE_FENCED, names.LEASE_IN_DOUBT)
    ]
    verb = "deleted" if new is None else "created" if old is None else "changed"
    told = " ".join(str(fact) for fact in facts if fact)
    uid, version = obj["metadata"]["uid"], world.server.version
    by = world.server.writer or "somebody"
    print(f"{world.loop.time():8.3f} s  {by:14} {verb} {uid} @{version} {told}")


def _stop_if_broken(world: SimulatedCluster) -> None:
    if world.judge.broken is not None:
        raise world.judge.broken
