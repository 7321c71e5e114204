"""A crash at every write of bind, release and unreserve, before or after it is carried out.

The shipped shells run over the simulated API server. The process dies at the write and restarts a moment later. The
judge checks every step; at the end the system is idle, nothing is leaked, and no pod lacks its GPUs.
"""

from dataclasses import dataclass
from typing import Any

import pytest

from controllers import loops, runner
from tests.simulation import shells
from tests.simulation.history import SimulatedCluster, run_world
from tests.simulation.plan import EXTENDERS, Plan, Step
from tests.simulation.virtual_time import VirtualLoop

POD_ENDS = (
    Step(0.5, "create", "p0", number=2),
    Step(1.0, "create", "p1", number=1),
    Step(8.0, "finish", "p0"),
)
POD_IS_DELETED = (
    Step(0.5, "create", "p0", number=3),
    Step(8.0, "delete", "p0"),
    Step(8.5, "replace", "p0", number=2),
)
POD_IS_FORCED_OUT = (Step(0.5, "create", "p0", number=2), Step(8.0, "force delete", "p0"))
NOBODY_BINDS = (
    Step(2.0, "create", "p0", number=2),
    Step(2.6, "stop scheduler"),
    Step(20.0, "switch scheduler"),
)
HISTORIES = {
    "a pod ends": POD_ENDS,
    "a pod is deleted and replaced": POD_IS_DELETED,
    "a pod is deleted by force": POD_IS_FORCED_OUT,
}


@pytest.fixture(autouse=True)
def bare_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the webhook's certificates and the care for the garbage collector."""
    monkeypatch.setattr(runner, "WebhookCertReconciler", shells.Idle)
    monkeypatch.setattr(runner, "freeze_garbage", lambda: None)
    monkeypatch.setattr(loops, "WORKERS", 2)


@dataclass
class Killer:
    """Kills the processes of one part at their n-th write; counts the writes."""

    world: SimulatedCluster
    part: str
    nth: int
    is_after: bool
    stays_dead: bool = False
    count: int = 0
    killed_at: str = ""

    def watch(self) -> None:
        """Follow every session of the part, those that are started later too."""
        original = self.world.follow

        def follow(name: str, session: Any) -> None:
            original(name, session)
            if name.startswith(self.part):
                session.kills = lambda method, path, is_done: self._kills(name, method, path, is_done)

        self.world.follow = follow  # type: ignore[method-assign]

    def _kills(self, name: str, method: str, path: str, is_done: bool) -> bool:
        if path.endswith("/atoll-controllers") or "/events" in path or is_done != self.is_after:
            return False
        self.count += 1
        if self.count != self.nth:
            return False
        self.killed_at = f"{method} {path}"
        if not self.stays_dead:
            self.world.loop.call_later(1.0, self._start_again, name)
        return True

    def _start_again(self, name: str) -> None:
        starts = self.world.start_extender if name in EXTENDERS else self.world.start_controllers
        starts(name)


def play(steps: tuple[Step, ...], *killers: tuple[str, int, bool, bool]) -> list[Killer]:
    """Run a calm history with these kills; raises Broken when a promise is not kept."""
    loop = VirtualLoop()
    loop.set_exception_handler(lambda _loop, _context: None)
    world = SimulatedCluster(Plan(0, steps, ()), loop)
    watching = [Killer(world, part, nth, is_after, stays) for part, nth, is_after, stays in killers]
    for killer in watching:
        killer.watch()
    run_world(world)
    assert world.judge.checks_count
    return watching


@pytest.mark.parametrize("is_after", [False, True], ids=["before the write", "after the write"])
@pytest.mark.parametrize("part", ["extender", "controllers"])
@pytest.mark.parametrize("name", HISTORIES)
def test_crash_at_every_write(name: str, part: str, is_after: bool) -> None:
    """Wherever a part dies, its successor finishes: no GPU is sold twice, none leaks, no pod is left half served."""
    killed: list[str] = []
    for nth in range(1, 40):
        (killer,) = play(HISTORIES[name], (part, nth, is_after, False))
        if not killer.killed_at:
            break
        killed.append(killer.killed_at)

    assert len(killed) == nth - 1
    methods = {text.split()[0] for text in killed}
    paths = " ".join(killed)
    if part == "extender":
        assert "binding" in paths
        assert sum("POST" in text and text.endswith("leases") for text in killed) >= 2
    else:
        assert "DELETE" in methods
        assert sum("leases/gpu-" in text for text in killed) >= 2


@pytest.mark.parametrize("is_after", [False, True], ids=["before the write", "after the write"])
def test_crash_at_every_write_of_taking_back(is_after: bool) -> None:
    """A bind that died before its Binding is taken back: mark, move the pod, delete; a crash between loses nothing."""
    killed: list[str] = []
    for nth in range(1, 40):
        dead, killer = play(NOBODY_BINDS, ("extender-0", 3, False, True), ("controllers", nth, is_after, False))
        assert dead.killed_at.endswith("binding")
        if not killer.killed_at:
            break
        killed.append(killer.killed_at)

    assert len(killed) == nth - 1
    assert sum("PATCH" in text and "leases/gpu-" in text for text in killed) >= 1
    assert any("PATCH" in text and "pods/p0" in text for text in killed)
    assert sum("DELETE" in text and "leases/gpu-" in text for text in killed) >= 1
