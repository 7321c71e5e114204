"""Metrics of an agent, computed at each scrape."""

from collections import Counter
from collections.abc import Iterable, Mapping

from agent.node_agent import NodeAgent
from atoll.api.node_status import Device
from atoll.service.api_metrics import register_watch_metrics
from atoll.service.metrics import Metrics, Series

GPUS_MAX = 1024
"""Limit of GPU series, whatever models and states the machine reports."""


def agent_metrics(metrics: Metrics, agent: NodeAgent) -> None:
    """Register the agent's metrics; once per process."""
    metrics.counter_of("looks", "Looks at the machine", lambda: agent.observations_count)
    metrics.counter_of("publications", "Reports written", lambda: agent.publications_count)
    metrics.counter_of("failures", "Looks whose result could not be published", lambda: agent.failures_count)
    metrics.gauge_of(
        "look_age_seconds", "Age of the last look that succeeded, with its publication", agent.seconds_since_observation
    )
    metrics.gauge_of("look_seconds", "Duration of the last look at the machine", lambda: agent.observation_seconds)
    metrics.gauge_of("evidence_complete", "1 if cgroups and kubelet could be read", lambda: agent.evidence_is_complete)
    metrics.gauge_of(
        "driver_usable",
        "1 if the last look found the driver or released it",
        lambda: not agent.driver_problem,
    )
    gpus = Series(metrics.gauge("gpus", "GPUs of the node by health state", labels=("model", "health")))
    metrics.before_page(lambda: gpus.tell(count_devices(agent.devices)))
    register_watch_metrics(metrics, agent.watches)


def count_devices(devices: Iterable[Device]) -> Mapping[tuple[str, ...], int]:
    """Count whole GPUs by model and health, MIG instances left out."""
    counts: Counter[tuple[str, ...]] = Counter(
        (device.model, str(device.health.state)) for device in devices if not is_instance(device)
    )
    return dict(counts.most_common(GPUS_MAX))


def is_instance(device: Device) -> bool:
    """True if a device is a MIG instance of another."""
    return device.mig is not None and bool(device.mig.profile)
