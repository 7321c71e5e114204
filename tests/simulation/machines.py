"""GPU machines: kubelet, containers, cgroups and the agent that reports them. Their containers are a history's truth.

Modelled on a real kubelet: it handles watch events late and in order, starts bound pods, ends deleted ones, lets
containers of a force-deleted pod run for a moment, reports `terminated` for every container that it ended, and restarts
bound pods after a reboot. While it is cut off or paused, containers keep running.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID
from zlib import crc32

from atoll.api import names
from atoll.api.times import format_microtime, text_of
from tests.builders import report_json
from tests.simulation.faults import FaultPlan
from tests.simulation.gangs import NEVER_READY
from tests.simulation.server import HEARTBEATS, NODES, PODS, REPORTS, Object, ServerEvent, SimulatedServer
from tests.simulation.virtual_time import START, VirtualClock, VirtualLoop

DEVICES = 4
PROFILE = "t4-4"
TERMINAL = ("Succeeded", "Failed")
POLL_SECONDS = 12.0
SLOW_KUBELET = 0.15
HEARTBEAT_SECONDS = 25.0
HEARTBEAT_DURATION_SECONDS = 75


@dataclass(slots=True)
class WantedPod:
    """A pod that kubelet means to run, and the GPUs that its environment will name."""

    name: str
    uuids: frozenset[str]
    is_ending: bool = False
    becomes_ready: bool = False


@dataclass(slots=True)
class SimulatedNode:
    """One machine; several may have borne one node's name. `running` is which GPUs each pod's containers hold now."""

    node: str
    ident: str
    server: SimulatedServer
    loop: VirtualLoop
    weather: FaultPlan
    clock: VirtualClock
    on_start: Callable[["SimulatedNode", str], None]
    boot: int = 1
    is_on: bool = True
    is_online: bool = True
    is_paused: bool = False
    is_agent_down: bool = False
    is_retired: bool = False
    cursor: int = 0
    devices: dict[int, str] = field(default_factory=dict)
    sick: set[int] = field(default_factory=set)
    wants: dict[str, WantedPod] = field(default_factory=dict)
    running: dict[str, frozenset[str]] = field(default_factory=dict)
    cgroups: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    cards: set[str] = field(default_factory=set)
    published: Object = field(default_factory=dict)
    published_sequence: int = 0
    sequence: int = 0
    asked_at: int = 0
    listed: frozenset[str] = frozenset()
    position: int = 0
    node_uid: str = ""
    wanted_evidence: str = ""
    beaten_seconds: float = 0.0
    allocatable: dict[str, str] = field(default_factory=dict)
    """What the Node offers beside devices, where anybody asks."""

    def __post_init__(self) -> None:
        if not self.devices:
            self.devices = {number: f"GPU-{self.ident}-{number}" for number in range(DEVICES)}
        self.cards.update(self.devices.values())

    @property
    def silent_seconds(self) -> float:
        """Return for how long the agent has not been heard, by the only clock that is right."""
        return self.loop.time() - self.beaten_seconds

    @property
    def boot_id(self) -> str:
        """Return the id of this boot, in the form that the kernel gives it."""
        return str(UUID(int=crc32(self.ident.encode()) * 1000 + self.boot))

    # What the judge asks

    def may_use(self, uid: str, uuid: str) -> bool:
        """Tell whether a container of the pod uses the GPU, or may yet without anybody's doing."""
        if uuid in self.running.get(uid, ()):
            return True
        if not self.is_on or uuid not in self.cards or uid in self.ended:
            return False
        want = self.wants.get(uid)
        if want is not None and not want.is_ending and uuid in want.uuids:
            return True
        return any(
            uuid in wanted_uuids(event.object)
            for event in self.unseen()
            if event.object["metadata"]["uid"] == uid and self._would_run(event)
        )

    def unseen(self) -> list[ServerEvent]:
        """Return the pod events that kubelet has not worked off."""
        return self._log()[self.cursor :] if self.is_on and not self.is_retired else []

    # Kubelet

    def hear(self, event_index: int) -> None:
        """A pod event happened; kubelet hears of it in a moment."""
        is_slow = self.weather.draw(f"kubelet {self.node}") < SLOW_KUBELET
        seconds = self.weather.between(f"kubelet {self.node}", *((0.8, 4.0) if is_slow else (0.01, 0.4)))
        self.loop.call_later(seconds, self.work, event_index + 1)

    def work(self, until: int) -> None:
        """Work off the watch up to an event."""
        if not (self.is_on and self.is_online) or self.is_paused:
            return
        self.sync(until)

    def sync(self, until: int) -> None:
        """Take events in order."""
        log = self._log()
        while self.cursor < min(until, len(log)):
            event = log[self.cursor]
            self.cursor += 1
            self._take(event)

    def _take(self, event: ServerEvent) -> None:
        uid = event.object["metadata"]["uid"]
        if event.object["spec"].get("nodeName") != self.node:
            return
        if not self._would_run(event):
            want = self.wants.get(uid)
            is_marked = event.kind != "DELETED" and bool(event.object["metadata"].get("deletionTimestamp"))
            if is_marked and want is not None and not want.is_ending:
                want.is_ending = True
                self._later("grace", (0.05, 4.0), self._end_gracefully, uid)
            elif is_marked and want is None and uid not in self.running:
                self._later("grace", (0.05, 0.5), self._end_gracefully, uid, event.object["metadata"]["name"])
            elif not is_marked and (want is not None or uid in self.running):
                self.wants.pop(uid, None)
                self._later("force", (0.05, 2.0), self._stop, uid)
        elif uid not in self.wants and uid not in self.ended:
            annotations = event.object["metadata"].get("annotations", {})
            becomes_ready = names.GANG in annotations and NEVER_READY not in annotations
            name, uuids = event.object["metadata"]["name"], wanted_uuids(event.object)
            self.wants[uid] = WantedPod(name, uuids, becomes_ready=becomes_ready)
            self._later("start", (0.02, 1.5), self._start, uid)

    def _would_run(self, event: ServerEvent) -> bool:
        pod = event.object
        return (
            event.kind != "DELETED"
            and pod["spec"].get("nodeName") == self.node
            and not pod["metadata"].get("deletionTimestamp")
            and pod["status"].get("phase") not in TERMINAL
        )

    def _start(self, uid: str) -> None:
        want = self.wants.get(uid)
        if want is None or want.is_ending or uid in self.running:
            return
        if self.is_paused:
            self._later("start", (0.5, 1.5), self._start, uid)
            return
        self.running[uid] = want.uuids
        self.cgroups.add(uid)
        self.on_start(self, uid)
        state = [{"name": "main", "state": {"running": {}}}]
        status = {"phase": "Running", "containerStatuses": state}
        if want.becomes_ready:
            status["conditions"] = [{"type": "Ready", "status": "True"}]
        self._write(uid, want.name, {"status": status})

    def crash(self, uid: str) -> None:
        """The pod's sandbox dies; kubelet starts it again after a while, as long as it wants the pod."""
        if self.running.pop(uid, None) is not None:
            self.cgroups.discard(uid)
            self._later("restart", (1.0, 3.0), self._start, uid)

    def finish(self, uid: str, *, has_failed: bool = False) -> None:
        """The containers end by themselves, and kubelet says so."""
        want = self.wants.pop(uid, None)
        if want is None or self.is_paused or not self.is_on:
            if want is not None:
                self.wants[uid] = want
            return
        self.running.pop(uid, None)
        self.ended.add(uid)
        self._later("cgroup", (0.0, 1.0), self.cgroups.discard, uid)
        self._write_end(uid, want.name, *(("Failed", "PodFailed") if has_failed else ("Succeeded", "PodCompleted")))

    def _end_gracefully(self, uid: str, name: str = "") -> None:
        if self.is_paused or not self.is_on or not self.is_online:
            self._later("grace", (0.5, 1.5), self._end_gracefully, uid, name)
            return
        want = self.wants.pop(uid, None)
        name = want.name if want is not None else name
        self.running.pop(uid, None)
        self.ended.add(uid)
        self._later("cgroup", (0.0, 1.0), self.cgroups.discard, uid)
        if not name:
            return
        self._write_end(uid, name, "Failed", "PodFailed")
        current = self.server.objects.get(f"{PODS}/{name}")
        if current is not None and current["metadata"]["uid"] == uid and current["metadata"].get("deletionTimestamp"):
            self.server.delete(f"{PODS}/{name}", force=True)

    def _stop(self, uid: str) -> None:
        if self.is_paused:
            self._later("force", (0.5, 1.5), self._stop, uid)
            return
        self.running.pop(uid, None)
        self._later("cgroup", (0.0, 1.0), self.cgroups.discard, uid)

    def _write_end(self, uid: str, name: str, phase: str, reason: str) -> None:
        if not self.is_online:
            return
        status = {
            "phase": phase,
            "containerStatuses": [{"name": "main", "state": {"terminated": {"exitCode": 0}}}],
            "conditions": [{"type": "Ready", "status": "False", "reason": reason}],
        }
        self._write(uid, name, {"status": status})

    def _write(self, uid: str, name: str, patch: Object) -> None:
        if self.is_online and self.is_on:
            self.server.patch(f"{PODS}/{name}", patch, uid=uid)

    def _later(self, what: str, seconds: tuple[float, float], act: Callable[..., Any], *arguments: Any) -> None:
        boot = self.boot

        def due() -> None:
            if self.boot == boot and self.is_on:
                act(*arguments)

        self.loop.call_later(self.weather.between(f"{what} {self.node}", *seconds), due)

    # The machine

    def power_off(self) -> None:
        """Lose everything that runs."""
        self.is_on = False
        self.running.clear()
        self.cgroups.clear()
        self.wants.clear()
        self.ended.clear()
        self.published = {}

    def power_on(self) -> None:
        """Begin another boot: kubelet reads its Node and then starts what is bound to it now."""
        self.boot += 1
        self.is_on = self.is_online = True
        self.is_paused = False
        self.listed = frozenset()
        self.catch_up()
        self.cursor = self.asked_at = len(self._log())
        for pod in self.server.pods():
            if self._would_run(ServerEvent(0, "ADDED", pod, b"")):
                self._take(ServerEvent(0, "ADDED", pod, b""))

    def catch_up(self) -> None:
        """Be connected again: register a Node where there is none, and work off what was missed."""
        path = f"{NODES}/{self.node}"
        if path not in self.server.objects:
            self.server.create(path, {"metadata": {"name": self.node}})
        self.node_uid = self.server.objects[path]["metadata"]["uid"]
        if self.allocatable and not self.server.objects[path].get("status", {}).get("allocatable"):
            self.server.patch(path, {"status": {"allocatable": self.allocatable}})
        if self.server.objects[path].get("status", {}).get("nodeInfo", {}).get("bootID") != self.boot_id:
            self.server.patch(path, {"status": {"nodeInfo": {"bootID": self.boot_id}}})
        self.work(len(self._log()))

    def insert_card(self, device_id: int) -> None:
        """Put another card in the place of one; it gets an id that no Lease speaks of."""
        self.devices.pop(device_id, None)
        leased = {
            lease["metadata"]["annotations"].get(names.LEASE_DEVICE_ID)
            for lease in self.server.objects.values()
            if lease["metadata"].get("annotations", {}).get(names.LEASE_NODE) == self.node
        }
        new_id = next(number for number in range(64) if number not in self.devices and str(number) not in leased)
        self.devices[new_id] = f"GPU-{self.ident}-{new_id}-boot{self.boot}"
        self.cards.add(self.devices[new_id])

    # The agent

    def look(self, *, is_owed: bool = True, is_listed_anew: bool = False) -> None:
        """Read the machine and report if that is owed or new; position first, machine second, as the agent does."""
        if not (self.is_on and self.is_online) or self.is_agent_down:
            return
        server, weather = self.server, self.weather
        lag = 0 if is_listed_anew else int(weather.draw(f"agent lag {self.node}") * 6)
        self.position = max(self.position, server.version - lag)
        answers = not self.is_paused and (weather.is_calm or weather.draw(f"kubelet answers {self.node}") < 0.85)
        live_read = weather.is_calm or weather.draw(f"cgroups read {self.node}") < 0.95
        if answers:
            self.sync(max(self.asked_at, self.cursor))
            self.asked_at = len(self._log())
            self.listed = frozenset(self.wants)
        self.sequence += 1
        body = self._report(live_read=live_read, kubelet_read=answers)
        content = {**body, "evidence": (live_read, answers), "cards": sorted(self.devices), "sick": sorted(self.sick)}
        if is_owed or content != self.published:
            self._later("report", (0.01, 1.0), self._publish, body, content)

    def _report(self, *, live_read: bool, kubelet_read: bool) -> Object:
        live = self.cgroups | set(self.running) if live_read else set()
        entries = [
            {"uid": uid, "live": uid in live, "kubelet": uid in self.listed} for uid in sorted(live | self.listed)
        ]
        evidence = {
            "sequence": self.sequence,
            "podResourceVersion": str(self.position),
            "liveRead": live_read,
            "kubeletRead": kubelet_read,
        }
        return {
            "bootId": self.boot_id,
            "nodeUid": self.node_uid,
            "pods": entries,
            "evidence": evidence,
        }

    def _publish(self, status: Object, content: Object) -> None:
        if not self.is_online:
            return
        self.published = content
        path = f"{REPORTS}/{self.node}"
        current = self.server.objects.get(path)
        if status["evidence"]["sequence"] <= self.published_sequence:
            return
        self.published_sequence = status["evidence"]["sequence"]
        full = report_json(self.node, PROFILE, ids=sorted(self.devices), uuids=self.devices, sick=tuple(self.sick))
        body = {**full, "metadata": {"name": self.node}, "status": {**full["status"], **status}}
        if current is None:
            self.server.create(path, body)
        else:
            self.server.patch(path, {"status": body["status"]})

    def beat(self) -> None:
        """Renew the heartbeat."""
        if not (self.is_on and self.is_online) or self.is_agent_down:
            return
        path = f"{HEARTBEATS}/{self.node}"
        spec = {
            "holderIdentity": self.node,
            "leaseDurationSeconds": HEARTBEAT_DURATION_SECONDS,
            "renewTime": format_microtime(self.clock.now()),
        }
        now = text_of((START + timedelta(seconds=self.loop.time())).timestamp())
        written = {"managedFields": [{"time": now, "fieldsV1": {"f:spec": {"f:renewTime": {}}}}]}
        if not self.server.patch(path, {"metadata": written, "spec": spec}):
            self.server.create(path, {"metadata": {"name": self.node, **written}, "spec": spec})
        self.beaten_seconds = self.loop.time()

    def hear_of_request(self) -> None:
        """Somebody wants evidence: two complete readings that begin after that."""
        current = self.server.objects.get(f"{REPORTS}/{self.node}")
        wanted = current["metadata"]["annotations"].get(names.EVIDENCE_WANTED, "") if current is not None else ""
        if wanted and wanted != self.wanted_evidence and self.is_on and self.is_online and not self.is_agent_down:
            self.wanted_evidence = wanted
            self._later("asked", (0.1, 0.5), lambda: self.look(is_listed_anew=True))
            self._later("asked", (1.6, 2.0), lambda: self.look(is_listed_anew=True))

    def _log(self) -> list[ServerEvent]:
        return self.server.log(PODS)


def wanted_uuids(pod: Object) -> frozenset[str]:
    """Return what the container's environment will name: the annotation at bind, resolved by kubelet at each start."""
    text = pod["metadata"].get("annotations", {}).get(names.UUIDS, "")
    return frozenset(text.split(",")) - {""}


def machines_of(machines: Iterable[SimulatedNode], node: str) -> list[SimulatedNode]:
    """Return every machine that bears or bore a node's name."""
    return [machine for machine in machines if machine.node == node]
