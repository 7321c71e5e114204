"""The controllers' memory of terminated pods, under the random histories of test_release_histories.

The real memory replaces the model's: what it keeps, forgets and looks up must be as safe and must not leak. The oracle,
the machine and the agent are those of the histories.
"""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from atoll.api.node_status import GpuNodeStatus, GpuNodeStatusReport
from atoll.cluster import pods
from atoll.cluster.leases import Holder
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import Pod
from atoll.cluster.release import PodTermination
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.mirror import ClusterMirror, WatchedKind
from controllers.leases.terminations import GONE_MAX, PodTerminations
from tests.builders import make_lease, make_pod
from tests.cluster.test_release_histories import (
    CASES,
    NODE,
    QUIET,
    SEEDS_PER_CASE,
    STEPS,
    UID,
    Controllers,
    History,
    begin,
    settle,
)


@dataclass
class RealControllers(Controllers):
    """The model's watch in front of the real memory. Its ledger holds the one Lease from the start."""

    ledger: Ledger = field(default_factory=Ledger)
    stored: dict[str, GpuNodeStatus] = field(default_factory=dict)
    memory: PodTerminations = field(init=False)

    def __post_init__(self) -> None:
        self.ledger.put_lease(make_lease(NODE, 0, holder=Holder("team", "p", UID), annotations=UNKNOWN_MACHINE))
        self.forget()

    def forget(self) -> None:
        mirror = SimpleNamespace(ledger=self.ledger, reports=self.stored, on_rewind=lambda _: None)
        self.memory = PodTerminations(cast("ClusterMirror", mirror))

    def hear_of_pod(self) -> None:
        if self.pod_position >= len(self.api.history):
            return
        kind, pod = self.api.history[self.pod_position]
        self.pod_position += 1
        self.tell(ChangeKind.DELETED if kind == "DELETED" else ChangeKind.MODIFIED, pod)

    def relist(self) -> None:
        self.pod_position = len(self.api.history)
        if self.api.pod is not None:
            self.tell(ChangeKind.MODIFIED, self.api.pod)
        elif self.pod is not None:
            self.tell(ChangeKind.DELETED, self.pod, synthetic=True)

    def restart(self) -> None:
        self.pod = None
        self.ledger.drop_pod(UID)
        self.forget()
        self.relist()

    def hear_report(self) -> None:
        if self.reports:
            report = self.reports.popleft()
            status = GpuNodeStatus.model_validate({"metadata": {"name": NODE}, "status": report})
            self.stored[NODE] = status
            self.memory.observe(WatchedKind.REPORT, Change(ChangeKind.MODIFIED, status))

    def tell(self, kind: ChangeKind, pod: Pod, *, synthetic: bool = False) -> None:
        """Bring one change of the pod to the ledger and then to the memory, as the mirror does."""
        old, self.pod = self.pod, None if kind is ChangeKind.DELETED else pod
        if kind is ChangeKind.DELETED:
            self.ledger.drop_pod(UID)
        else:
            self.ledger.put_pod(pod)
        self.memory.observe(WatchedKind.POD, Change(kind, pod, old, synthetic=synthetic))

    def decide(self) -> None:
        """Do what the release does with its one Lease, look-up included."""
        leases = self.ledger.leases_of(UID)
        if self.pod is not None:
            if pods.is_terminal(self.pod):
                self.departure = self.memory.ended(self.pod, leases)
            else:
                self.memory.close(UID)
                self.departure = None
            return
        gone = self.memory.gone(UID)
        if gone is None and self.api.pod is None:
            gone = self.memory.note_absence(UID, self.api.version)
        self.departure = self.memory.departed(UID, gone, leases) if gone is not None else None


UNKNOWN_MACHINE = {"gpu.scheduling/node-uid": "", "gpu.scheduling/device-uuid": ""}


@dataclass
class RealHistory(History):
    """A history in which the release looks at its Lease after each step, or leaves it for later."""

    def act(self, what: str) -> None:
        assert isinstance(self.controllers, RealControllers)
        getattr(self, what)()
        if self.released_by is None and self.rng.random() < 0.7:
            self.controllers.decide()
        else:
            self.controllers.departure = self.controllers.departure if self.released_by else None
        self.log.append(what)
        self.check()


def begin_real(seed: int) -> RealHistory:
    """Return a history whose controllers have the real memory."""
    model = begin(seed)
    controllers = RealControllers(model.api)
    assert model.api.pod is not None
    controllers.tell(ChangeKind.ADDED, model.api.pod)
    return RealHistory(seed, model.rng, model.api, model.machine, model.agent, controllers)


@pytest.mark.parametrize("case", CASES)
def test_memory_frees_no_gpu_that_is_in_use_and_leaks_none(case: str) -> None:
    """The real memory passes the histories of the model: safe at each step, and free at the end."""
    for seed in range(SEEDS_PER_CASE):
        history = begin_real(seed)
        for _ in range(STEPS):
            common = history.rng.random() < 0.75
            history.act(history.rng.choice(QUIET if common else CASES[case]))
        settle(history)
        for _ in range(2):
            history.controllers.reports.append(history.agent.read(history.rng, faultless=True))
            history.act("report_event")
            cast("RealControllers", history.controllers).decide()
            history.check()
        assert history.released_by is not None, history.story("never released")


def memory() -> tuple[PodTerminations, Ledger, dict[str, Any]]:
    """Return an empty memory with its ledger and reports."""
    ledger, reports = Ledger(), dict[str, Any]()
    mirror = SimpleNamespace(ledger=ledger, reports=reports, on_rewind=lambda _: None)
    return PodTerminations(cast("ClusterMirror", mirror)), ledger, reports


def deleted(name: str, *, synthetic: bool = False, **options: Any) -> Change[Pod]:
    """Return the deletion of a pod."""
    pod = make_pod(name, **options)
    return Change(ChangeKind.DELETED, pod, pod, synthetic=synthetic)


def test_memory_is_bounded() -> None:
    """A hundred thousand short pods cost no more than the bound; the newest are the ones remembered."""
    remembered, _, _ = memory()
    for number in range(GONE_MAX + 100):
        remembered.observe(WatchedKind.POD, deleted(f"p{number}"))
    assert remembered.gone("uid-of-p0") is None
    assert remembered.gone(f"uid-of-p{GONE_MAX + 99}") is not None


def test_plain_pods_are_not_remembered() -> None:
    """A cluster's other pods cost nothing."""
    remembered, _, _ = memory()
    remembered.observe(WatchedKind.POD, deleted("plain", gpus=None))
    assert remembered.gone("uid-of-plain") is None


def test_late_deletion_event_counts_for_more_than_a_look_up() -> None:
    """The look-up only knew that the pod is gone; the event shows that it was never bound."""
    remembered, ledger, _ = memory()
    ledger.put_lease(make_lease(NODE, 0))
    leases = ledger.leases_of("uid-of-p")
    first = remembered.departed("uid-of-p", remembered.note_absence("uid-of-p", 50), leases)
    assert not first.deletion_seen
    remembered.observe(WatchedKind.POD, deleted("p", version="40"))
    gone = remembered.gone("uid-of-p")
    assert gone is not None
    second: PodTermination = remembered.departed("uid-of-p", gone, leases)
    assert (second.deletion_seen, second.version) == (True, 40)
    assert remembered.note_absence("uid-of-p", 60) is gone, "the event came while the API server was asked"


def test_a_terminal_pod_that_is_deleted_later_counts_as_deleted() -> None:
    """Without that no restart of its machine would ever prove that it has ended."""
    remembered, ledger, _ = memory()
    ledger.put_lease(make_lease(NODE, 0))
    leases = ledger.leases_of("uid-of-p")
    assert not remembered.ended(make_pod("p", node=NODE, phase="Failed"), leases).is_deleted

    assert remembered.departed("uid-of-p", remembered.note_absence("uid-of-p", 50), leases).is_deleted


@pytest.mark.parametrize("is_deleted", [False, True], ids=["it stays as a terminal pod", "it is deleted"])
def test_what_reports_have_said_of_an_end_is_not_asked_again(is_deleted: bool) -> None:
    """Reports count from when the pod was first seen to have ended. A terminal pod is still edited, which asks for no
    newer report each time; and a look-up that comes late does not begin it anew."""
    remembered, ledger, _ = memory()
    ledger.put_lease(make_lease(NODE, 0))
    leases = ledger.leases_of("uid-of-p")

    def look(version: int) -> PodTermination:
        if is_deleted:
            return remembered.departed("uid-of-p", remembered.note_absence("uid-of-p", version), leases)
        return remembered.ended(make_pod("p", node=NODE, phase="Failed", version=str(version)), leases)

    look(50)
    evidence = {"sequence": 1, "podResourceVersion": "50", "liveRead": True, "kubeletRead": True}
    status = GpuNodeStatusReport.model_validate({"evidence": evidence})
    said = GpuNodeStatus.model_validate({"metadata": {"name": NODE}, "status": status})
    before = look(50)
    remembered.observe(WatchedKind.REPORT, Change(ChangeKind.MODIFIED, said))
    after = look(60)

    assert replace(after, pod=None) != replace(before, pod=None), "the report was taken"
    assert after.version == 50
    assert replace(look(70), pod=None) == replace(after, pod=None)


def test_report_of_another_node_says_nothing() -> None:
    """Reports are folded into the departures of their own node alone."""
    remembered, ledger, reports = memory()
    ledger.put_lease(make_lease(NODE, 0))
    leases = ledger.leases_of("uid-of-p")
    before = remembered.departed("uid-of-p", remembered.note_absence("uid-of-p", 50), leases)
    other = GpuNodeStatus.model_validate({"metadata": {"name": "n2"}, "status": GpuNodeStatusReport()})
    reports["n2"] = other
    remembered.observe(WatchedKind.REPORT, Change(ChangeKind.MODIFIED, other))
    gone = remembered.gone("uid-of-p")
    assert gone is not None
    assert remembered.departed("uid-of-p", gone, leases) == before
