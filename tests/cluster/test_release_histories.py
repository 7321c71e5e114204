"""Random histories of pod, kubelet, agent and controllers: never a release without proof.

The oracle is the machine itself: it knows which container runs, and will run. A proof while the container runs, or
before it runs again, is a failure. Each class states the model's assumptions. A failing test prints its seed.
"""

import random
from collections import deque
from dataclasses import dataclass, field

import msgspec
import pytest

from atoll.api.node_status import Evidence, GpuNodeStatusReport, PodEvidence
from atoll.cluster.objects import Pod
from atoll.cluster.release import PodTermination, Proof, judge, observe, version_number
from tests.builders import make_pod
from tests.cluster.test_release import TERMINATED, make_with_status

UID = "uid-of-p"
NODE = "n1"
STEPS = 60
SEEDS_PER_CASE = 300


@dataclass
class ApiServer:
    """The pod's one truth: versions grow by one with every write. None: the pod does not exist any more."""

    version: int = 10
    pod: Pod | None = field(default_factory=lambda: make_pod(version="10"))
    history: list[tuple[str, Pod]] = field(default_factory=list)

    def write(self, pod: Pod) -> None:
        self.version += 1
        self.pod = _at(pod, self.version)
        self.history.append(("MODIFIED", self.pod))

    def delete(self) -> None:
        assert self.pod is not None
        self.version += 1
        self.history.append(("DELETED", _at(self.pod, self.version)))
        self.pod = None


@dataclass
class HistoryMachine:
    """Kubelet, cgroup and container. Kubelet works off its watch in order, as late as it likes; paused, not at all.

    It answers the agent only while it works, and between two of its answers it has worked off what had happened at the
    first: that is what the time between two readings is for.
    """

    api: ApiServer
    boot: int = 1
    position: int = 0
    is_paused: bool = False
    wants: bool = False
    cgroup: bool = False
    runs: bool = False

    def sync(self, until: int | None = None) -> None:
        """Work off the watch: start what is bound, stop what is gone or terminal."""
        events = self.api.history[self.position : until]
        self.position += len(events)
        for kind, pod in events:
            self.wants = kind != "DELETED" and bool(pod.spec.node_name) and pod.status.phase not in _TERMINAL

    def work(self, rng: random.Random) -> None:
        """Do one thing that kubelet might do next."""
        if self.is_paused:
            return
        if rng.random() < 0.5:
            self.sync(self.position + 1)
        elif self.wants and not self.runs:
            self.cgroup = self.runs = True
        elif not self.wants and self.runs:
            self.runs = False
        elif not self.wants:
            self.cgroup = False

    def crash_container(self) -> None:
        self.runs = False

    def reboot(self) -> None:
        """Lose every container; kubelet lists the pods anew, so it knows the present."""
        self.boot += 1
        self.runs = self.cgroup = self.wants = self.is_paused = False
        self.position = len(self.api.history)
        pod = self.api.pod
        self.wants = pod is not None and bool(pod.spec.node_name) and pod.status.phase not in _TERMINAL


@dataclass
class HistoryAgent:
    """Reads its position first and the machine second. An empty cgroup counts as live until kubelet has removed it."""

    machine: HistoryMachine
    sequence: int = 0
    position: int = 10
    asked_at: int = 0

    def hear(self, rng: random.Random) -> None:
        """Move on in the watch, half of the time to its end."""
        self.position = max(self.position, rng.randint(10, self.machine.api.version), *self._end(rng))

    def _end(self, rng: random.Random) -> tuple[int, ...]:
        return (self.position, self.machine.api.version if rng.random() < 0.5 else 0)

    def read(self, rng: random.Random, *, faultless: bool = False) -> GpuNodeStatusReport:
        machine = self.machine
        kubelet_answers = not machine.is_paused and (faultless or rng.random() < 0.8)
        if kubelet_answers:
            machine.sync(max(self.asked_at, machine.position))
            self.asked_at = len(machine.api.history)
        self.sequence += 1
        live_read = faultless or rng.random() < 0.9
        is_live = live_read and (machine.runs or machine.cgroup)
        entry = PodEvidence(uid=UID, live=is_live, kubelet=kubelet_answers and machine.wants)
        return GpuNodeStatusReport(
            boot_id=f"boot-{machine.boot}",
            pods=(entry,) if entry.live or entry.kubelet else (),
            evidence=Evidence(
                sequence=self.sequence,
                pod_resource_version=str(self.position),
                live_read=live_read,
                kubelet_read=kubelet_answers,
            ),
        )


@dataclass
class Controllers:
    """Sees pods by one watch and reports by another, each in order, each as late as it likes, pods with gaps."""

    api: ApiServer
    reports: deque[GpuNodeStatusReport] = field(default_factory=deque)
    pod_position: int = 0
    pod: Pod | None = None
    seen_live_boot: str = ""
    latest: GpuNodeStatusReport | None = None
    departure: PodTermination | None = None

    def hear_of_pod(self) -> None:
        if self.pod_position >= len(self.api.history):
            return
        kind, pod = self.api.history[self.pod_position]
        self.pod_position += 1
        self.pod = pod
        if kind == "DELETED":
            self._depart(
                pod, is_deleted=True, deletion_seen=True, version=version_number(pod.metadata.resource_version)
            )
        elif pod.status.phase in _TERMINAL:
            self._depart(pod, is_deleted=False, deletion_seen=False, version=self._ended_at(pod))

    def relist(self) -> None:
        """Lose the watch: what happened meanwhile is not seen, only the outcome."""
        self.pod_position = len(self.api.history)
        if self.api.pod is not None:
            self.pod = self.api.pod
            if self.pod.status.phase in _TERMINAL:
                self._depart(self.pod, is_deleted=False, deletion_seen=False, version=self._ended_at(self.pod))
        elif self.departure is None or not self.departure.is_deleted:
            self._depart(self.pod, is_deleted=True, deletion_seen=False, version=self.api.version)

    def restart(self) -> None:
        """Forget everything but the Lease and the report that is stored."""
        self.pod, self.departure, self.seen_live_boot = None, None, ""
        self.relist()

    def hear_report(self) -> None:
        if not self.reports:
            return
        self.latest = self.reports.popleft()
        if any(pod.uid == UID and pod.live for pod in self.latest.pods):
            self.seen_live_boot = self.latest.boot_id
        if self.departure is not None:
            self.departure = observe(self.departure, self.latest)

    def _ended_at(self, pod: Pod) -> int:
        known = self.departure
        return known.version if known is not None else version_number(pod.metadata.resource_version)

    def _depart(self, pod: Pod | None, *, is_deleted: bool, deletion_seen: bool, version: int) -> None:
        departure = PodTermination(
            uid=UID,
            node=NODE,
            pod=pod,
            is_deleted=is_deleted,
            deletion_seen=deletion_seen,
            version=version,
            boot_id=self.seen_live_boot,
            seen_live=bool(self.seen_live_boot),
        )
        self.departure = observe(departure, self.latest) if self.latest is not None else departure


@dataclass
class History:
    """One random history, and the oracle's check after every step."""

    seed: int
    rng: random.Random
    api: ApiServer
    machine: HistoryMachine
    agent: HistoryAgent
    controllers: Controllers
    log: list[str] = field(default_factory=list)
    released_by: Proof | None = None

    def act(self, what: str) -> None:
        self.log.append(what)
        getattr(self, what)()
        self.check()

    def check(self) -> None:
        """Ask the oracle: nothing runs after a release, and nothing runs where one is decided."""
        if self.released_by is not None:
            assert not self.machine.runs, self.story("runs after its GPUs were released")
            return
        departure = self.controllers.departure
        verdict = judge(departure) if departure is not None else None
        if isinstance(verdict, Proof):
            assert not self.machine.runs, self.story(f"released by {verdict} while it runs")
            self.released_by = verdict

    def story(self, fault: str) -> str:
        return f"seed {self.seed}: {fault}: {' > '.join(self.log)}\n{self.controllers.departure}"

    def bind(self) -> None:
        if self.api.pod is not None and not self.api.pod.spec.node_name:
            self.api.write(make_pod(node=NODE, phase=self.api.pod.status.phase))

    def end_gracefully(self) -> None:
        """Kubelet ends the pod itself: it stops the container for good, then says so."""
        pod = self.api.pod
        if pod is None or not pod.spec.node_name or self.machine.is_paused:
            return
        self.machine.sync()
        self.machine.wants = self.machine.runs = False
        self.api.write(make_with_status(make_pod(node=NODE, phase="Succeeded", containers=("c0",)), [_ENDED]))
        self.machine.position = len(self.api.history)

    def fail_by_hand(self) -> None:
        if self.api.pod is not None:
            state = {"running": {}} if self.machine.runs else {"waiting": {}}
            failed = make_pod(node=self.api.pod.spec.node_name, phase="Failed", containers=("c0",))
            self.api.write(make_with_status(failed, [{"name": "c0", "state": state}]))

    def force_delete(self) -> None:
        if self.api.pod is not None:
            self.api.delete()

    def bind_and_delete(self) -> None:
        """Come and go before anybody has looked."""
        self.bind()
        self.force_delete()

    def reboot_under_it(self) -> None:
        """Restart the machine while the pod is bound, delete the pod while kubelet starts it again."""
        self.reboot()
        self.force_delete()

    def pause(self) -> None:
        self.machine.is_paused = True

    def resume(self) -> None:
        self.machine.is_paused = False

    def kubelet(self) -> None:
        self.machine.work(self.rng)

    def crash(self) -> None:
        self.machine.crash_container()

    def reboot(self) -> None:
        self.machine.reboot()

    def agent_hears(self) -> None:
        self.agent.hear(self.rng)

    def agent_reports(self) -> None:
        self.controllers.reports.append(self.agent.read(self.rng))

    def pod_event(self) -> None:
        self.controllers.hear_of_pod()

    def report_event(self) -> None:
        self.controllers.hear_report()

    def relist(self) -> None:
        self.controllers.relist()

    def restart_controllers(self) -> None:
        self.controllers.restart()


_TERMINAL = ("Succeeded", "Failed")
_ENDED = {"name": "c0", "state": TERMINATED}
QUIET = ("kubelet", "agent_hears", "agent_reports", "pod_event", "report_event")
CASES = {
    "pods come and go": ("bind", "end_gracefully", "force_delete", "bind_and_delete"),
    "third parties interfere": ("bind", "fail_by_hand", "force_delete", "crash"),
    "kubelet is paused": ("bind", "force_delete", "pause", "resume", "crash"),
    "machine restarts": ("bind", "force_delete", "fail_by_hand", "reboot", "reboot_under_it", "pause", "resume"),
    "controllers lose sight": ("bind", "force_delete", "end_gracefully", "relist", "restart_controllers", "crash"),
    "everything at once": (
        "bind", "end_gracefully", "fail_by_hand", "force_delete", "crash", "pause", "resume", "reboot", "relist",
        "restart_controllers", "bind_and_delete", "reboot_under_it",
    ),
}  # fmt: skip


def begin(seed: int) -> History:
    """Return a history with a pod that was just created."""
    api = ApiServer()
    machine = HistoryMachine(api)
    return History(seed, random.Random(seed), api, machine, HistoryAgent(machine), Controllers(api, pod=api.pod))


@pytest.mark.parametrize("case", CASES)
def test_no_history_frees_a_gpu_that_is_in_use(case: str) -> None:
    """Whatever happens in whatever order: a proof is given only when the container is gone for good."""
    for seed in range(SEEDS_PER_CASE):
        history = begin(seed)
        for _ in range(STEPS):
            common = history.rng.random() < 0.75
            history.act(history.rng.choice(QUIET if common else CASES[case]))


@pytest.mark.parametrize("case", CASES)
def test_every_history_ends_with_free_gpus(case: str) -> None:
    """Nothing leaks: once the pod is deleted, kubelet works and the agent has reported twice, there is a proof."""
    for seed in range(SEEDS_PER_CASE):
        history = begin(seed)
        for _ in range(STEPS):
            common = history.rng.random() < 0.75
            history.act(history.rng.choice(QUIET if common else CASES[case]))
        settle(history)
        assert history.released_by is not None, history.story("never released")


def settle(history: History) -> None:
    """Let the pod be deleted and everybody catch up; the agent answers with two complete readings."""
    history.act("force_delete")
    history.act("resume")
    for _ in range(100):
        history.act("kubelet")
    history.machine.sync()
    for _ in range(100):
        history.act("kubelet")
    for _ in range(len(history.api.history)):
        history.act("pod_event")
    history.agent.position = history.api.version
    for _ in range(2):
        history.controllers.reports.append(history.agent.read(history.rng, faultless=True))
    for _ in range(len(history.controllers.reports)):
        history.act("report_event")
    if history.controllers.departure is None or not history.controllers.departure.is_deleted:
        history.act("relist")


def _at(pod: Pod, version: int) -> Pod:
    """Return the pod at a version."""
    raw = msgspec.to_builtins(pod)
    raw["metadata"]["resourceVersion"] = str(version)
    return msgspec.convert(raw, Pod)
