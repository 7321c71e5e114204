"""The fleet: one computation over arrays gives the same choice as node by node, and as bind."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.cluster import fleet as fleet_module
from atoll.cluster.fleet import Fleet
from atoll.cluster.ledger import Ledger
from atoll.cluster.machines import NodeDevices, cell_of
from atoll.cluster.requests import Rejection, Request, Verdict, request_of
from atoll.cluster.selection import PREFERENCE, select
from tests.builders import make_claim, make_devices, make_pod, report_json
from topology.choice import Reason
from topology.demand import PRIOR, Demand

EIGHTS = Demand(shares=((8, 1.0),))
INSTANCE = {"mig": {"profile": "3g.40gb", "parentUuid": "GPU-n1-0000"}}
OTHER_INSTANCE = {"mig": {"profile": "1g.10gb", "parentUuid": "GPU-n1-0001"}}
ROOMS: dict[str, dict[str, Any]] = {
    "mesh": {"profile": "dgx1-v100"},
    "switch": {"profile": "dgx-h100"},
    "tray": {"profile": "gb200-tray"},
    "sixteen": {"profile": "dgx2-v100"},
    "mixed": {"profile": "l40s-8", "devices": {i: {"model": "nvidia-t4"} for i in (0, 1, 5)}},
    "divided": {
        "profile": "l40s-8",
        "devices": {0: {"mig": {"enabled": True}}, 5: INSTANCE, 6: INSTANCE, 7: OTHER_INSTANCE},
    },
}
DEVICES: dict[str, NodeDevices] = {name: make_devices(name, **room) for name, room in ROOMS.items()}


def ask(count: int = 1, **devices: Any) -> Request:
    """Return the request of a pod with this claim."""
    claim = make_claim(count=count, **devices)
    profile = devices.get("migProfile", "")
    resource = f"gpu.scheduling/mig-{profile}" if profile else "gpu.scheduling/gpu"
    request = request_of(make_pod(claim=claim, gpus=count, resource=resource), claim)
    assert isinstance(request, Request)
    return request


requests = st.builds(
    lambda count, devices: ask(count, **devices),
    st.integers(1, 8),
    st.sampled_from(
        [
            {},
            {"policy": "packed"},
            {"policy": "spread"},
            {"policy": "island"},
            {"models": ["nvidia-t4", "nvidia-l40s"]},
            {"models": ["nvidia-l40s", "nvidia-v100", "nvidia-t4"]},
            {"mixedModels": True},
            {"memory": "40Gi"},
            {"migProfile": "3g.40gb"},
            {"interconnect": "nvlink"},
            {"minBandwidthGBps": 50},
        ]
    ),
)
frees = st.lists(st.tuples(st.sampled_from(sorted(DEVICES)), st.integers(0, 2**16 - 1)), min_size=1, max_size=12)


@settings(deadline=None, max_examples=120)
@given(frees, requests, st.sampled_from([PRIOR, EIGHTS]))
def test_gather_says_what_every_node_says_for_itself(
    nodes: list[tuple[str, int]], request: Request, demand: Demand
) -> None:
    """For any mix of machines, models, MIG instances, claims and demands: same fits, same order, same best node."""
    fleet, wanted = Fleet(), {}
    for number, (room, mask) in enumerate(nodes):
        devices = DEVICES[room]
        free = mask & devices.all & devices.usable
        fleet.put(f"n{number}", cell_of(devices.shape, free))
        answer = select(devices, free, request, demand)
        wanted[f"n{number}"] = None if isinstance(answer, Rejection) else (answer.preference, answer.choice.cost)

    rows = fleet.rows_of(list(wanted))
    keys = fleet.keys(fleet.states_of(rows), request, demand)

    told = [np.inf if place is None else place[0] * PREFERENCE + place[1] for place in wanted.values()]
    assert keys.tolist() == told
    if min(told) < np.inf:
        first = min((place, name) for name, place in wanted.items() if place is not None)
        assert fleet.first_by_name(rows[keys == keys.min()]) == first[1]


def test_node_that_is_unknown_or_silent_or_gone_fits_nothing() -> None:
    """Names without a node, and nodes of which nothing new is known, have no key; a new node may take the row."""
    fleet, devices = Fleet(), DEVICES["tray"]
    for name in ("a", "b", "c"):
        fleet.put(name, cell_of(devices.shape, devices.all))
    fleet.silence("b")
    fleet.forget("c")
    fleet.forget("never-there")
    fleet.put("d", cell_of(devices.shape, 0b11))

    keys = fleet.keys(fleet.states_of(fleet.rows_of(["a", "b", "c", "d", "e"])), ask(2), PRIOR)

    assert np.isfinite(keys).tolist() == [True, False, False, True, False]
    assert fleet.cell_of("d").free == 0b11
    with pytest.raises(KeyError):
        fleet.cell_of("b")
    fleet.put("b", cell_of(devices.shape, 0b1111))
    assert fleet.cell_of("b").free == 0b1111


def test_states_are_numbered_anew_before_they_grow_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of sixteen makes a state per mask; past the bound only those of the present count."""
    monkeypatch.setattr(fleet_module, "STATES_MAX", 40)
    fleet, devices = Fleet(), DEVICES["sixteen"]
    fleet.put("steady", cell_of(devices.shape, 0b11))
    for free in range(200):
        fleet.put("busy", cell_of(devices.shape, free))
        keys = fleet.keys(fleet.states_of(fleet.rows_of(["steady", "busy"])), ask(2), PRIOR)
        assert np.isfinite(keys).tolist() == [True, free.bit_count() >= 2]

    assert fleet.states_of(fleet.rows_of(["busy"]))[0] < 60


def test_one_allocation_renews_one_element() -> None:
    """Taking GPUs of one node changes its state and no other."""
    fleet, devices = Fleet(), DEVICES["switch"]
    names = [f"n{number}" for number in range(100)]
    for name in names:
        fleet.put(name, cell_of(devices.shape, devices.all))
    before = fleet.states_of(fleet.rows_of(names))

    fleet.put("n7", cell_of(devices.shape, 0b1111))

    assert np.flatnonzero(before != fleet.states_of(fleet.rows_of(names))).tolist() == [7]


def test_whole_gpus_beside_mig_instances_are_chosen_as_if_alone() -> None:
    """Eleven devices, of which eight are a known machine: they are rated exactly, as on a machine without MIG."""
    plain, divided = make_devices("n1", "l40s-8"), DEVICES["divided"]

    pair = select(divided, 0b00011110, ask(2))
    assert not isinstance(pair, Rejection)
    assert (pair.choice.positions, pair.choice.bounded) == ((1, 2), False)
    assert pair.choice.islands == ("numa-0",)
    alone = select(plain, 0b00011110, ask(2))
    assert not isinstance(alone, Rejection)
    assert alone.choice.ring_gbps == pair.choice.ring_gbps


def test_an_adapter_with_too_few_cells_is_left_out() -> None:
    """Nothing is known of where it is; the others count."""
    told = [{"name": "mlx5_0", "cells": ["PIX"]}, {"name": "mlx5_1", "cells": ["PIX", "SYS", "SYS", "SYS"]}]
    links = {**report_json("n1", "t4-4")["status"]["links"], "nics": told}

    machine = make_devices("n1", "t4-4", status={"links": links}).machine
    assert machine.nics == (("PIX",), ("SYS",), ("SYS",), ("SYS",))
    links["nics"] = told[:1]
    assert make_devices("n1", "t4-4", status={"links": links}).machine.nics is None


def test_mig_instances_are_a_class_of_their_own() -> None:
    """Instances are counted, rated and refused among those of their profile, in the positions of the machine."""
    devices = DEVICES["divided"]

    both = select(devices, devices.all, ask(2, migProfile="3g.40gb"))
    assert not isinstance(both, Rejection)
    assert (both.choice.positions, both.choice.relative_quality) == ((5, 6), 1.0)
    assert select(devices, 0b0100000, ask(2, migProfile="3g.40gb")) == Rejection(str(Reason.TOO_FEW_FREE), Verdict.BUSY)


def test_instances_of_one_card_go_together_and_have_no_nvlink() -> None:
    """Two instances come from one card; what its cards have by NVLink is nothing to them."""
    told = {
        0: {"mig": {"enabled": True}},
        1: {"mig": {"enabled": True}},
        **{2 + i: {"mig": {"profile": "3g.40gb", "parentUuid": f"GPU-n1-000{i // 2}"}} for i in range(4)},
    }
    devices = make_devices("n1", "dgx-h100", devices=told)

    pair = select(devices, 0b111000, ask(2, migProfile="3g.40gb"))
    assert not isinstance(pair, Rejection)
    assert pair.choice.positions == (4, 5)
    assert pair.choice.ring_gbps < 100, "no NVLink"
    single = select(devices, 0b111000, ask(1, migProfile="3g.40gb"))
    assert not isinstance(single, Rejection)
    assert single.choice.positions == (3,), "the card that is in use already"


def test_divided_card_and_its_instances_are_never_given_as_whole_gpus() -> None:
    """Whatever is free, a claim for whole GPUs gets none that is divided and no part of one."""
    devices = DEVICES["divided"]
    for free in range(1 << 8):
        answer = select(devices, free, ask(1))
        assert isinstance(answer, Rejection) or set(answer.choice.positions) <= {1, 2, 3, 4}
        assert isinstance(answer, Rejection) == (free & 0b00011110 == 0)


def test_demand_is_what_pods_have_asked_for() -> None:
    """A thousand pods of eight GPUs turn the demand; a pod that is seen again, or asks for none, counts no more."""
    ledger = Ledger()
    assert ledger.demand == PRIOR
    for number in range(1000):
        pod = make_pod(f"p{number}", gpus=8)
        ledger.put_pod(pod)
        ledger.put_pod(pod)
    after = ledger.demand
    ledger.put_pod(make_pod("none", gpus=None))

    assert dict(after.shares)[8] > 0.85
    assert ledger.demand is after
