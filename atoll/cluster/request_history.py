"""The sizes and CPU that pods asked for, including pods that are long gone: the extender weighs its choices by them.

The debug endpoint shows them, and a simulation takes them into its ledger. No object of the API server holds them, so a
simulation without them may choose the other of two sets that are nearly as good.
"""

import msgspec

from atoll.cluster.errors import MalformedValue
from atoll.cluster.host_cpu import CpuRequestKind
from atoll.cluster.ledger import Ledger
from topology.demand import Histogram
from topology.model import DEVICES_MAX


class RequestHistory(msgspec.Struct, frozen=True, rename="camel"):
    """sizes: (GPUs, weight) of asks. kinds: (GPUs, whole cores, weight) of asks with CPU; seen: how many there were."""

    sizes: tuple[tuple[int, float], ...] = ()
    kinds: tuple[tuple[int, int, float], ...] = ()
    seen: int = 0


decode_past_asks = msgspec.json.Decoder(RequestHistory).decode
encode_past_asks = msgspec.json.Encoder().encode


def request_history_of(ledger: Ledger) -> RequestHistory:
    """Return what a ledger remembers."""
    asks = ledger.fleet.asked
    kinds = tuple((kind.gpus, kind.cores, kind.weight) for kind in asks.kinds)
    return RequestHistory(ledger.sizes.weights, kinds, asks.seen)


def recall(ledger: Ledger, past: RequestHistory) -> None:
    """Let a ledger weigh by these asks instead of those that it has seen. Raises MalformedValue."""
    if any(not 1 <= size <= DEVICES_MAX or not weight >= 0 for size, weight in past.sizes):
        raise MalformedValue("past asks", str(past.sizes)[:200], "sizes are 1 to the most GPUs of a machine")
    ledger.sizes = Histogram(tuple(sorted(past.sizes)))
    ledger.fleet.asked.recall([CpuRequestKind(*kind) for kind in past.kinds], past.seen)
