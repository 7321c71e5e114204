"""Reference tables: the search that places pods finds the card of every row."""

from typing import NamedTuple

import pytest

from atoll.cluster.requests import Rejection, device_request
from atoll.cluster.selection import select
from atoll.ml import tables
from atoll.ml.attributes import MlAttributes, Precision, TpuType
from atoll.ml.infer import complete
from atoll.ml.mapping import device_claim
from tests.builders import make_devices

MIB = 2**20


class Card(NamedTuple):
    """A card as its agent reports it. full_mib: memory that the driver tells, less than the card is sold with."""

    slug: str
    full_mib: int
    capability: str
    vendor: str = "nvidia"


CARDS: dict[tuple[str, int], tuple[Card, ...]] = {
    ("nvidia-v100", 16): (Card("nvidia-v100-sxm2-16gb", 16_160, "7.0"), Card("nvidia-v100-pcie-16gb", 16_384, "7.0")),
    ("nvidia-v100", 32): (Card("nvidia-v100-sxm2-32gb", 32_510, "7.0"),),
    ("nvidia-t4", 16): (Card("nvidia-t4", 15_360, "7.5"), Card("nvidia-t4", 15_109, "7.5")),
    ("nvidia-a100", 40): (Card("nvidia-a100-sxm4-40gb", 40_536, "8.0"), Card("nvidia-a100-pcie-40gb", 40_960, "8.0")),
    ("nvidia-a100", 80): (Card("nvidia-a100-sxm4-80gb", 81_251, "8.0"), Card("nvidia-a100-80gb-pcie", 81_920, "8.0")),
    ("nvidia-a10g", 24): (Card("nvidia-a10g", 23_028, "8.6"), Card("nvidia-a10g", 22_731, "8.6")),
    ("nvidia-l4", 24): (Card("nvidia-l4", 23_034, "8.9"),),
    ("nvidia-l40s", 48): (Card("nvidia-l40s", 46_068, "8.9"),),
    ("nvidia-h100", 80): (Card("nvidia-h100-80gb-hbm3", 81_559, "9.0"), Card("nvidia-h100-pcie", 81_559, "9.0")),
    ("nvidia-h200", 141): (Card("nvidia-h200", 143_771, "9.0"),),
    ("nvidia-b200", 192): (Card("nvidia-b200", 183_359, "10.0"),),
    ("amd-mi250", 128): (
        Card("amd-instinct-mi250", 65_536, "9.0", "amd"),
        Card("amd-instinct-mi250x", 65_520, "9.0", "amd"),
    ),
    ("amd-mi300x", 192): (Card("amd-instinct-mi300x", 196_592, "9.4", "amd"),),
}
"""What drivers tell of each row of the table: type and GB that the card is sold with."""


def test_every_row_and_size_has_a_card() -> None:
    """A new row comes with what drivers tell of it."""
    assert set(CARDS) == {(row.id, size) for row in tables.GPU_TYPES.values() for size in row.memory_gb}


def is_found(attributes: MlAttributes, card: Card) -> bool:
    """Tell whether a node with such a card gets the job, by the search that places pods."""
    claim = device_claim(complete(attributes).attributes)
    told = {
        "model": card.slug,
        "memoryBytes": card.full_mib * MIB,
        "computeCapability": card.capability,
        "vendor": card.vendor,
    }
    devices = make_devices(profile="t4-4", devices=dict.fromkeys(range(4), told))
    assert claim is not None
    return not isinstance(select(devices, devices.usable, device_request(claim)), Rejection)


@pytest.mark.parametrize(("gpu_type", "memory_gb"), CARDS)
def test_nominal_size_finds_the_card_that_reports_less(gpu_type: str, memory_gb: int) -> None:
    """Whoever asks for what is printed on the box gets it; whoever asks for a tenth more does not."""
    for card in CARDS[gpu_type, memory_gb]:
        assert is_found(MlAttributes(gpu_type=gpu_type, gpu_memory_gb=memory_gb), card)
        assert is_found(MlAttributes(gpu_type=gpu_type), card)
        assert not is_found(MlAttributes(gpu_type=gpu_type, gpu_memory_gb=memory_gb * 1.1), card)


@pytest.mark.parametrize("gpu_type", tables.GPU_TYPES)
def test_no_other_type_passes_for_it(gpu_type: str) -> None:
    """A type that is asked for is never served by a card of another row: an L4 is no L40S."""
    others = [card for (other, _), cards in CARDS.items() for card in cards if other != gpu_type]

    assert not [card for card in others if is_found(MlAttributes(gpu_type=gpu_type), card)]


@pytest.mark.parametrize("gpu_type", [row.id for row in tables.GPU_TYPES.values() if row.compute_capability])
def test_capability_of_a_row_is_that_of_its_card(gpu_type: str) -> None:
    """The card has what the table says, and not the next capability."""
    row = tables.GPU_TYPES[gpu_type]
    assert row.compute_capability is not None
    has = tables.capability_text(row.compute_capability)
    more = tables.capability_text((row.compute_capability[0], row.compute_capability[1] + 1))
    (card, *_) = CARDS[gpu_type, row.memory_gb[0]]

    assert is_found(MlAttributes(gpu_type=gpu_type, gpu_compute_capability=has), card)
    assert not is_found(MlAttributes(gpu_type=gpu_type, gpu_compute_capability=more), card)


@pytest.mark.parametrize(
    ("memory_gb", "gpu_type", "quantity"),
    [
        (80, None, "80G"),
        (22.5, None, "22500M"),
        (0.0001, None, "1M"),
        (128, "amd-mi250", "64G"),
        (80, "nvidia-a100", "80G"),
    ],
)
def test_memory_of_a_claim_is_decimal_and_rounded_up(memory_gb: float, gpu_type: str | None, quantity: str) -> None:
    """GB are 10^9 bytes, and a card that is two GPUs is asked for half."""
    assert tables.claim_memory(memory_gb, gpu_type) == quantity


@pytest.mark.parametrize(
    ("name", "gpu_id"),
    [
        ("A100", "nvidia-a100"),
        ("t4", "nvidia-t4"),
        ("MI300X", "amd-mi300x"),
        ("nvidia-h100", "nvidia-h100"),
        ("x-9", "x-9"),
    ],
)
def test_short_names_of_cards_are_known(name: str, gpu_id: str) -> None:
    """Queues may say a100 where attributes say nvidia-a100."""
    assert tables.gpu_id(name) == gpu_id


def test_tables_hold_every_word_of_their_enumeration() -> None:
    """No precision and no TPU is without its row, and every needed capability has a name."""
    assert set(tables.PRECISIONS) == set(Precision)
    assert set(tables.TPU_TYPES) == set(TpuType)
    assert {facts.compute_capability for facts in tables.PRECISIONS.values()} <= set(tables.GENERATIONS)
    assert {row.compute_capability for row in tables.GPU_TYPES.values()} - {None} <= set(tables.GENERATIONS)


@pytest.mark.parametrize(
    ("model_id", "precision", "weights_gb"),
    [
        ("llama-3.1-8b", "fp16", 16),
        ("meta/llama-3.1-70b", "fp16", 140),
        ("llama-3.1-405b-instruct", "fp16", 810),
        ("llama-3.1-405B", "fp8", 405),
        ("phi-3.8b", "int4", 1.9),
        ("bert-large", "fp32", None),
        ("b2b-classifier", "fp16", None),
        ("llama-70b", None, None),
    ],
)
def test_weights_are_estimated_from_name_and_precision(
    model_id: str, precision: Precision | None, weights_gb: float | None
) -> None:
    """Parameters times bytes, where the name tells the parameters."""
    assert tables.weights_gb(MlAttributes.model_validate({"model_id": model_id, "precision": precision})) == weights_gb


@pytest.mark.parametrize(
    ("topology", "shape", "chips"),
    [("2x2", (2, 2), 4), ("4x2x1", (2, 4), 8), ("4x8", (4, 8), 32), ("2x2x4", (2, 2, 4), 16)],
)
def test_shape_of_a_slice_does_not_depend_on_how_it_lies(topology: str, shape: tuple[int, ...], chips: int) -> None:
    """4x2x1 is 2x4: eight chips."""
    assert tables.tpu_shape(topology) == shape
    assert tables.tpu_chips(topology) == chips
