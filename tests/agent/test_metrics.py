"""The agent's metrics: whole cards are counted by model and health, MIG instances with their card."""

from agent.metrics import count_devices
from tests.builders import make_devices


def test_cards_are_counted_once() -> None:
    """A sick card is counted as such; instances of a card are not cards."""
    mig = {"mig": {"enabled": False, "profile": "1g.5gb", "parentUuid": "GPU-n1-0000"}}
    devices = make_devices("n1", "t4-4", sick=(1,), devices={3: mig}).devices

    counts = count_devices(devices)
    assert {health: count for (_, health), count in counts.items()} == {"healthy": 2, "unhealthy": 1}
    assert {model for model, _ in counts} == {devices[0].model}
