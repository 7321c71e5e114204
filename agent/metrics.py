"""What an agent tells Prometheus, read from the agent when the page is asked for.

In: the process's Metrics and the agent. Out: registered metrics. Separate, so that their names stand on one page.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from agent.node_agent import NodeAgent
from atoll.api.node_status import Device
from atoll.service.api_metrics import register_watch_metrics
from atoll.service.metrics import Metrics, Series

GPUS_MAX = 1024
"""Series of GPUs at most: models and states of one machine are few, whatever it says."""


def agent_metrics(metrics: Metrics, agent: NodeAgent) -> None:
    """Register the agent's metrics; once per process."""
    metrics.counter_of("looks", "Looks at the machine", lambda: agent.observations_count)
    metrics.counter_of("publications", "Reports written", lambda: agent.publications_count)
    metrics.counter_of("failures", "Looks whose result could not be published", lambda: agent.failures_count)
    metrics.gauge_of(
        "look_age_seconds", "Age of the last look that was published where due", agent.seconds_since_observation
    )
    metrics.gauge_of("look_seconds", "Time that the last look at the machine took", lambda: agent.observation_seconds)
    metrics.gauge_of("evidence_complete", "1 if cgroups and kubelet could be read", lambda: agent.evidence_is_complete)
    gpus = Series(metrics.gauge("gpus", "GPUs of the node by the state of their health", labels=("model", "health")))
    metrics.before_page(lambda: gpus.tell(count_devices(agent.devices)))
    register_watch_metrics(metrics, agent.watches)


def count_devices(devices: Iterable[Device]) -> Mapping[tuple[str, ...], int]:
    """Count whole GPUs by model and health, MIG instances left out."""
    counts: Counter[tuple[str, ...]] = Counter(
        (device.model, str(device.health.state)) for device in devices if not is_instance(device)
    )
    return dict(counts.most_common(GPUS_MAX))


def is_instance(device: Device) -> bool:
    """Tell whether a device is a MIG instance of another."""
    return device.mig is not None and bool(device.mig.profile)
