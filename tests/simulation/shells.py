"""The shipped processes, simulated only below `atoll.kube.client`: extender replicas and controllers.

They run unchanged and are assembled as in their `__main__`, with a simulated session and a virtual clock. A kill drops
a process with its memory; requests that it has sent continue.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import Any

import orjson

from atoll.api.claims import VisibleDevices
from atoll.api.node_status import GpuNodeStatus
from atoll.kube.client import ApiClient
from atoll.kube.mirror import ClusterMirror
from controllers import runner
from controllers.settings import ControllersSettings
from extender.app import ExtenderHandlers, ExtenderParts
from extender.binder import Binder, BinderSettings
from tests.simulation.faults import FaultPlan
from tests.simulation.server import SimulatedServer
from tests.simulation.transport import SimulatedCredentials, SimulatedSession
from tests.simulation.virtual_time import VirtualClock, VirtualLoop

ANSWER_SECONDS = 3.0
RESERVATION_SECONDS = 8.0
"""Short, so that taking over happens in a history of a minute."""
EXPECTATION_SECONDS = 5.0


class NoMetric:
    """Counts nothing; fits counters, gauges and histograms."""

    def labels(self, *_: Any) -> "NoMetric":
        """Return itself."""
        return self

    def inc(self, _amount: float = 1.0) -> None:
        """Do nothing."""

    def set(self, _value: float) -> None:
        """Do nothing."""

    def clear(self) -> None:
        """Do nothing."""

    def set_function(self, _read: Any) -> None:
        """Do nothing."""

    def observe(self, _value: float) -> None:
        """Do nothing."""

    def time(self) -> "NoMetric":
        """Return itself as a context."""
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: object) -> None:
        pass


class NoMetrics:
    """Fits Metrics."""

    def counter(self, *_: Any, **__: Any) -> NoMetric:
        """Return a metric that counts nothing."""
        return NoMetric()

    gauge = histogram = gauge_of = counter_of = before_page = counter


@dataclass(slots=True)
class ShellEnvironment:
    """What every process of a history shares."""

    server: SimulatedServer
    weather: FaultPlan
    loop: VirtualLoop
    settings: dict[str, Any] = field(default_factory=dict)
    skew_seconds: float = 2.0

    def __post_init__(self) -> None:
        runner.secrets = NumberedTokens()  # type: ignore[assignment]

    def session(self, name: str) -> SimulatedSession:
        """Return the network of one process."""
        return SimulatedSession(self.server, self.weather, self.loop, name)

    def client(self, session: SimulatedSession) -> ApiClient:
        """Return the shipped client over it."""
        return ApiClient(
            SimulatedCredentials(),  # type: ignore[arg-type]
            requests_per_second=1e6,
            burst=1_000_000,
            rng=random.Random(self.weather.seed),
            session=session,  # type: ignore[arg-type]
        )

    def clock(self, name: str) -> VirtualClock:
        """Return the clock of one process; its next start may be on another machine, with another clock."""
        skew = self.weather.between(f"skew {name}", -self.skew_seconds, self.skew_seconds)
        return VirtualClock(self.loop, skew_seconds=skew)


class NumberedTokens:
    """Fits `secrets` for the controllers: tokens decide pauses, so a replay needs the same ones."""

    def __init__(self) -> None:
        self._numbers = count()

    def token_hex(self, _size: int) -> str:
        """Return a text that no history has twice."""
        return f"token-{next(self._numbers)}"


class StubRequest:
    """Fits web.Request as far as a verb reads it."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def read(self) -> bytes:
        """Return the body."""
        return self._body


class ExtenderReplica:
    """One extender process."""

    def __init__(self, surroundings: ShellEnvironment, name: str) -> None:
        self.name = name
        self.session = surroundings.session(name)
        client = surroundings.client(self.session)
        clock = surroundings.clock(name)
        self.mirror = ClusterMirror(client, clock)
        _seed(self.mirror, surroundings.weather.seed)
        settings = BinderSettings(ANSWER_SECONDS, RESERVATION_SECONDS, VisibleDevices.UUID)
        tokens = iter(range(1_000_000))
        self.binder = Binder(client, self.mirror, clock, settings, new_token=lambda: f"{name}-{next(tokens)}")
        handlers = ExtenderHandlers(ExtenderParts(self.mirror, self.binder, clock, NoMetrics(), EXPECTATION_SECONDS))  # type: ignore[arg-type]
        self._verbs = {verb: handlers.timed(verb, handle) for verb, handle in handlers.routes().items()}
        self._task = surroundings.loop.create_task(self.mirror.run())

    async def call(self, verb: str, body: Any) -> Any | None:
        """Call a verb as kube-scheduler does; None for every answer that is not 200, and for none."""
        if self.session.is_dead:
            return None
        response = await self._verbs[verb](StubRequest(orjson.dumps(body)))  # type: ignore[arg-type]
        return orjson.loads(response.body) if response.status == 200 else None

    @property
    def is_ready(self) -> bool:
        """Tell whether it answers."""
        return not self.session.is_dead and not self.mirror.unready_reason()

    def kill(self) -> None:
        """SIGKILL."""
        self.session.die()
        self._task.cancel()


class Idle:
    """Takes the place of what is no part of a history: the webhook's certificates."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    async def run(self) -> None:
        """Wait for ever."""
        await asyncio.Event().wait()


@dataclass(slots=True)
class ControllersProcess:
    """One controllers process with its real election and reconcilers. `on_end` is called when it ends by itself,
    because its work goes on although it lost leadership."""

    surroundings: ShellEnvironment
    name: str
    on_end: Callable[[], object]
    session: SimulatedSession = field(init=False)
    process: runner.ControllerManager = field(init=False)
    _tasks: list[asyncio.Task[Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.session = self.surroundings.session(self.name)
        settings = ControllersSettings(
            claim_status_seconds=0.0,
            resync_seconds=10.0,
            lease_duration_seconds=14.0,
            renew_deadline_seconds=10.0,
            retry_seconds=4.0,
            **self.surroundings.settings,
        )
        clock = self.surroundings.clock(self.name)
        client = self.surroundings.client(self.session)
        self.process = runner.build_manager(settings, clock, client, NoMetrics())  # type: ignore[arg-type]
        _seed(self.process.mirror, self.surroundings.weather.seed)
        elector = self.process.elector
        elector._rng = random.Random(self.surroundings.weather.seed)
        elector._on_overrun = self._end
        loop = self.surroundings.loop
        self._tasks = [
            loop.create_task(self.process.mirror.run()),
            loop.create_task(runner.lead_term_by_term(self.process)),
        ]

    @property
    def mirror(self) -> ClusterMirror:
        """Its copy of the cluster."""
        return self.process.mirror

    @property
    def is_leading(self) -> bool:
        """Tell whether its reconcilers work."""
        return not self.session.is_dead and bool(self.process.loops)

    def failure(self) -> BaseException | None:
        """Return what ended a task that should run for ever."""
        ended = (task for task in self._tasks if task.done() and not task.cancelled())
        return next((task.exception() for task in ended), None)

    def kill(self) -> None:
        """SIGKILL."""
        self.session.die()
        for task in self._tasks:
            task.cancel()

    def _end(self) -> None:
        self.kill()
        self.on_end()


def _seed(mirror: ClusterMirror, seed: int) -> None:
    for reflector in mirror.reflectors.values():
        reflector._rng = random.Random(seed)
    mirror.node_statuses._decode = _read_report


@lru_cache(maxsize=64)
def _read_report(raw: bytes) -> GpuNodeStatus:
    """Read what the shipped decoder reads, once for all processes: a report is frozen, and reading it is dear."""
    return GpuNodeStatus.model_validate_json(raw)


def prepare_process() -> None:
    """Leave out what is no part of a history and costs time: certificates, logs, the garbage collector's rest."""
    import structlog

    runner.WebhookCertReconciler = Idle  # type: ignore[assignment, misc]
    runner.freeze_garbage = lambda: None
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
