"""The simulated machine: the same cards for the same seed, and every fault that a test needs."""

import json
from pathlib import Path

import pytest

from agent.errors import ReadingFailed, SettingsMistake
from agent.report import model_slug
from agent.simulated import SimulatedBackend, play
from topology.profiles import profile, profile_names

V100 = profile("dgx1-v100")


def uuids(backend: SimulatedBackend) -> list[str | None]:
    return [device.uuid for device in backend.read().devices]


def test_the_seed_decides_the_cards() -> None:
    """A restarted agent plays the same cards; another node has others."""
    first, again = (SimulatedBackend(play(V100, seed="n1")) for _ in range(2))

    assert uuids(first) == uuids(again)
    assert not set(uuids(first)) & set(uuids(SimulatedBackend(play(V100, seed="n2"))))
    assert len(set(uuids(first))) == 8


@pytest.mark.parametrize(
    ("order", "want"),
    [
        pytest.param("", (0, 1, 2, 3, 4, 5, 6, 7), id="as the profile"),
        pytest.param("reversed", (7, 6, 5, 4, 3, 2, 1, 0), id="reversed"),
        pytest.param("1,0,3,2,5,4,7,6", (1, 0, 3, 2, 5, 4, 7, 6), id="given"),
    ],
)
def test_order_permutes_the_index_and_nothing_else(order: str, want: tuple[int, ...]) -> None:
    """The NVML index moves; slot, uuid, minor and links stay with the card."""
    plain = SimulatedBackend(play(V100, seed="n1")).read()
    backend = SimulatedBackend(play(V100, seed="n1", order=order))

    reading = backend.read()

    assert [device.index for device in reading.devices] == list(range(8))
    assert reading.links.links is not None
    assert plain.links.links is not None
    for index, position in enumerate(want):
        device, card = reading.devices[index], plain.devices[position]
        assert (device.uuid, device.pci_bus_id, device.minor) == (card.uuid, card.pci_bus_id, card.minor)
        assert [reading.links.links[index][other] for other in range(8)] == [
            plain.links.links[position][peer] for peer in want
        ]


def test_a_shuffled_order_follows_from_the_seed() -> None:
    """Shuffled means the same for the same node, or a restart would look like a reboot."""
    orders = {play(V100, seed="n1", order="shuffled").order for _ in range(3)}

    assert len(orders) == 1
    assert sorted(orders.pop()) == list(range(8))


@pytest.mark.parametrize("order", ["0,1", "0,0,1,2,3,4,5,6", "a,b", "-1,0,1,2,3,4,5,6", "upside-down"])
def test_an_impossible_order_is_refused(order: str) -> None:
    """A mistyped option stops the start with a sentence that says what is wanted."""
    with pytest.raises(SettingsMistake, match="every position"):
        play(V100, seed="n1", order=order)


def test_given_uuids_must_fit() -> None:
    """Given uuids are used as they are; too few or repeated ones are refused."""
    given = tuple(f"GPU-{position}" for position in range(8))
    assert uuids(SimulatedBackend(play(V100, seed="n1", given_uuids=given))) == list(given)

    with pytest.raises(SettingsMistake, match="8 devices"):
        play(V100, seed="n1", given_uuids=("GPU-0",) * 8)


def test_the_state_file_is_read_at_every_look(tmp_path: Path) -> None:
    """Lost, faulty, replaced, absent and busy cards, another order and another boot, without a restart."""
    path = tmp_path / "state.json"
    backend = SimulatedBackend(play(V100, seed="n1"), state_path=path)
    assert len(backend.read().devices) == 8
    state = {
        "bootId": "second",
        "order": [1, 0, 2, 3, 4, 5, 6, 7],
        "devices": {
            "0": {"lost": True},
            "2": {"fault": "XID 48"},
            "3": {"uuid": "GPU-spare", "processes": [41]},
            "5": {"absent": True},
        },
    }
    path.write_text(json.dumps(state))

    reading = backend.read()

    assert backend.boot_id() == "second"
    assert [device.is_lost for device in reading.devices] == [False, True, False, False, False, False, False]
    assert (reading.devices[1].uuid, reading.devices[1].pci_bus_id) == (None, "00000000:01:00.0")
    assert reading.devices[2].fault == "XID 48"
    assert (reading.devices[3].uuid, reading.devices[3].process_ids) == ("GPU-spare", (41,))
    assert reading.expected_count == 7
    assert reading.links.unread == {1}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"bootid": "x"}',
        '{"order": [0, 1]}',
        '{"devices": {"a": {}}}',
        '{"devices": {"8": {"lost": true}}}',
        '{"devices": {"0": {"lots": true}}}',
    ],
)
def test_a_broken_state_file_fails_the_reading(text: str, tmp_path: Path) -> None:
    """Nonsense is an unreadable machine with a reason, never a healthy one."""
    path = tmp_path / "state.json"
    path.write_text(text)

    with pytest.raises(ReadingFailed, match=r"state\.json"):
        SimulatedBackend(play(V100, seed="n1"), state_path=path).read()


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_can_be_played(name: str) -> None:
    """Each known machine gives a whole reading, and its product name the model that claims use."""
    machine = profile(name)

    reading = SimulatedBackend(play(machine, seed="n1")).read()

    assert len(reading.devices) == machine.machine.count
    assert reading.links.links == machine.machine.links
    assert model_slug(machine.product_name, vendor=machine.machine.vendor) == machine.model
