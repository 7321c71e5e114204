"""Cost of CPU: free GPUs keep CPU if another node is as good by links; links come first."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll.cluster.fleet import Fleet
from atoll.cluster.host_cpu import (
    ASKS_MIN,
    FADE,
    KINDS_MAX,
    STRANDED,
    UNKNOWN,
    CpuRequestCounts,
    CpuRequestKind,
    price_table,
    requested_cores,
)
from atoll.cluster.machines import NodeDevices, cell_of, shape_of
from atoll.cluster.requests import Rejection, Request, request_of
from atoll.cluster.selection import Candidate, select
from tests.builders import make_claim, make_devices, make_pod
from topology.demand import PRIOR

CARDS = make_devices("cards", profile="l40s-8")
SWITCH = make_devices("switch", profile="dgx-h100")
MESH = make_devices("mesh", profile="dgx1-v100")
TELLING_NODES = st.one_of(
    st.tuples(st.just(MESH), st.sampled_from([0b11, 0b1001, 0b1111, 0b10111, 0b111100, 0b11111, 0b1111110, MESH.all])),
    st.tuples(st.just(CARDS), st.sampled_from([0b11, 0b10001, 0b111, 0b110001, 0b1111, CARDS.all])),
    st.tuples(st.just(SWITCH), st.sampled_from([0b1, 0b11, 0b1111, SWITCH.all])),
    st.tuples(st.sampled_from([CARDS, SWITCH, MESH]), st.integers(1, 255)),
)
"""Free positions that give the same ask sets of different worth, and any others."""
TELLING_CORES = st.sampled_from([0, 8, 16, 40, 64, 128, 300, None])
"""Around what the asks want: too little for the free GPUs, just enough, plenty, unknown."""


def ask(count: int = 1, **devices: Any) -> Request:
    """Return the request of a pod with this claim."""
    claim = make_claim(count=count, **devices)
    request = request_of(make_pod(claim=claim, gpus=count), claim)
    assert isinstance(request, Request)
    return request


def fleet_of(
    nodes: dict[str, tuple[NodeDevices, int, int | None]], *, asks: tuple[tuple[int, int], ...] = ((1, 8),)
) -> Fleet:
    """Return nodes with free positions and free cores (None: unknown), after many asks for (GPUs, cores)."""
    fleet = Fleet()
    for name, (devices, free, cores) in nodes.items():
        fleet.put(name, cell_of(devices.shape, free))
        if cores is not None:
            fleet.put_cpu(name, free_milli=1000 * cores, allocatable_milli=1000 * cores)
    for gpus, cores in asks * ASKS_MIN:
        fleet.count_ask(gpus, 1000 * cores)
    return fleet


def picked(fleet: Fleet, names: list[str], request: Request, cores: int) -> str:
    """Return the node that a pod with so many cores gets."""
    rows = fleet.rows_of(names)
    states = fleet.states_of(rows)
    keys = fleet.keys(states, request, PRIOR)
    return fleet.pick(rows, keys, states, request, PRIOR, cpu_milli=1000 * cores)


def test_cpu_heavy_pod_leaves_the_node_whose_gpus_need_the_cpu() -> None:
    """Four GPUs with 16 cores would lose two more by a pod of 16 cores; four with 64 cores lose none. A light pod is
    welcome where CPU is short."""
    fleet = fleet_of({"n1": (CARDS, 0b1111, 16), "n2": (CARDS, 0b1111, 64)})

    assert picked(fleet, ["n1", "n2"], ask(1), 16) == "n2"
    assert picked(fleet, ["n1", "n2"], ask(1), 1) == "n1"


def test_few_machines_with_the_cpu_of_large_asks_stay_whole() -> None:
    """Where asks of eight GPUs want 120 cores and one machine of twelve has them, four GPUs are taken elsewhere."""
    nodes = {"a": (SWITCH, SWITCH.all, 128), **{f"n{i:02}": (SWITCH, SWITCH.all, 96) for i in range(11)}}
    fleet = fleet_of(nodes, asks=((8, 120), (8, 64), (4, 60), (1, 12)))

    assert picked(fleet, list(nodes), ask(4), 60) == "n00"
    assert picked(fleet, ["a"], ask(8), 120) == "a"


def test_of_equal_nodes_the_one_with_least_free_cpu_and_then_the_first_name() -> None:
    """What a price does not tell apart is packed by CPU, then by name."""
    nodes = {name: (CARDS, 0b1111, cores) for name, cores in (("a", 96), ("c", 64), ("b", 64))}

    assert picked(fleet_of(nodes), list(nodes), ask(1), 8) == "b"


@pytest.mark.parametrize(
    ("request_", "asks"),
    [(ask(1), ()), (ask(1, policy="spread"), ((1, 8),)), (ask(1), ((1, 0),))],
    ids=["too few asks", "spread", "pods that want no CPU"],
)
def test_without_a_price_the_name_decides_among_equal_nodes(
    request_: Request, asks: tuple[tuple[int, int], ...]
) -> None:
    """Nothing is guessed from a few pods, and a pod that wants to be spread is not packed."""
    nodes: dict[str, tuple[NodeDevices, int, int | None]] = {"a": (CARDS, 0b1111, 16), "b": (CARDS, 0b1111, 16)}

    assert picked(fleet_of(nodes, asks=asks), ["b", "a"], request_, 16) == "a"


def test_cpu_may_be_told_before_the_node_and_is_forgotten_with_it() -> None:
    """Reports and nodes come in any order; a node that took a spare row has its own CPU or none."""
    fleet = fleet_of({"n1": (CARDS, 0b1111, None), "n2": (CARDS, 0b1111, None)})
    fleet.put_cpu("n3", free_milli=1000, allocatable_milli=96_000)
    fleet.forget("n1")
    fleet.put("n3", cell_of(CARDS.shape, 0b1111))

    assert picked(fleet, ["n2", "n3"], ask(1), 1) == "n3"
    fleet.forget_cpu("a node that never reported")
    assert picked(fleet, ["n2", "n3"], ask(1), 1) == "n3"
    fleet.forget_cpu("n3")
    assert picked(fleet, ["n2", "n3"], ask(1), 1) == "n2"


def test_pair_of_double_links_is_given_although_cpu_is_dear_there() -> None:
    """Two GPUs with 40 cores would strand three others on the whole mesh; the pair elsewhere has half the links."""
    fleet = fleet_of({"poor": (MESH, 0b11, 40), "whole": (MESH, MESH.all, 64)})

    assert picked(fleet, ["poor", "whole"], ask(2), 40) == "whole"


def test_of_nodes_with_double_links_the_one_is_given_where_cpu_is_cheaper() -> None:
    """A poorer pair where CPU is cheapest changes nothing about that."""
    nodes = {"poor": (MESH, 0b11, 40), "a": (MESH, MESH.all, 64), "b": (MESH, MESH.all, 80)}
    fleet = fleet_of(dict(nodes))

    assert picked(fleet, list(nodes), ask(2), 40) == "b"


def test_pair_in_one_island_is_given_although_cpu_is_dear_there() -> None:
    """Between fast sockets a pair that spans islands has the ring of any other; the one in an island is given all the
    same, on the only machine with the CPU for large asks."""
    geometry = replace(CARDS.machine, pcie_generation=3, inter_socket_gbps=40.0)
    fast = replace(CARDS, shape=shape_of(geometry, CARDS.shape.cards))
    fleet = fleet_of(
        {"rare": (fast, fast.all, 128), **{f"torn{number}": (fast, 0b10001, 16) for number in range(30)}},
        asks=((8, 120),),
    )
    whole, torn = (select(fast, free, ask(2)) for free in (fast.all, 0b10001))
    assert isinstance(whole, Candidate)
    assert isinstance(torn, Candidate)
    assert whole.choice.relative_quality == torn.choice.relative_quality
    assert len(whole.choice.islands) < len(torn.choice.islands)

    assert picked(fleet, ["rare", "torn0"], ask(2), 16) == "rare"


@settings(deadline=None, max_examples=40)
@example([(MESH, 0b11, 40), (MESH, MESH.all, 64)], [(1, 8)], 2, {}, 40)
@example([(CARDS, CARDS.all, 128), *[(CARDS, 0b10001, 16)] * 30], [(8, 120)], 2, {}, 16)
@example([(CARDS, 0b1111, 40), (SWITCH, 0b1111, 300)], [(1, 8)], 1, {"models": ["nvidia-l40s", "nvidia-h100"]}, 40)
@given(
    st.lists(st.tuples(TELLING_NODES, TELLING_CORES), min_size=2, max_size=6).map(
        lambda nodes: [(devices, free, cores) for (devices, free), cores in nodes]
    ),
    st.lists(st.sampled_from([(1, 8), (1, 24), (2, 40), (4, 60), (8, 120)]), min_size=1, max_size=3),
    st.integers(1, 8),
    st.sampled_from([{}, {"policy": "island"}, {"policy": "packed"}, {"models": ["nvidia-l40s", "nvidia-h100"]}]),
    st.sampled_from([1, 8, 16, 40, 64, 130]),
)
def test_price_of_cpu_never_costs_links_or_a_preferred_model(
    nodes: list[tuple[NodeDevices, int, int | None]],
    asks: list[tuple[int, int]],
    count: int,
    devices: dict[str, Any],
    cores: int,
) -> None:
    """Whatever CPU there is: the node fits, its model is as preferred and its set as well linked as without a price."""
    named = {f"n{number}": node for number, node in enumerate(nodes)}
    fleet, request = fleet_of(named, asks=tuple(asks)), ask(count, **devices)
    answers = {name: select(node[0], node[1], request) for name, node in named.items()}
    fitting = {name: answer for name, answer in answers.items() if isinstance(answer, Candidate)}
    if not fitting:
        assert all(isinstance(answer, Rejection) for answer in answers.values())
        return

    name = picked(fleet, list(named), request, cores)

    plain = min(fitting.values(), key=lambda one: (one.preference, one.choice.cost))
    assert fitting[name].preference == plain.preference
    if count > 1:
        assert len(fitting[name].choice.islands) <= len(plain.choice.islands)
    if len(fitting[name].choice.islands) == len(plain.choice.islands):
        assert fitting[name].choice.relative_quality >= plain.choice.relative_quality


def test_prices_are_what_is_left_without_cpu() -> None:
    """Worked out by hand: asks of 2 GPUs with 20 cores want 10 cores per GPU; 4 GPUs with 15 cores lose 2.5."""
    prices = price_table([CpuRequestKind(2, 20, 1.0)], np.array([8]), np.array([96]))

    assert prices[4, 15] == pytest.approx(STRANDED * 2.5)
    assert prices[4, 40] == prices[0, 0] == prices[8, UNKNOWN] == 0


def test_cpu_is_not_scarce_where_three_of_eight_gpus_have_the_core_that_a_pod_wants() -> None:
    """A GPU without its core is lost, and costs no more than that."""
    prices = price_table([CpuRequestKind(1, 1, 1.0)], np.array([8]), np.array([3]))

    assert prices[4, 3] == pytest.approx(STRANDED)


def test_newer_asks_weigh_a_little_more() -> None:
    """The first of its kind counts as much as any later one."""
    asks = CpuRequestCounts()
    for gpus in (1, 2, 2):
        asks.observe(gpus, 4000)

    assert [kind.weight for kind in asks.kinds] == pytest.approx([FADE**2, FADE + 1.0])
    assert asks.seen == 3


def test_rarest_kind_is_forgotten_and_huge_asks_are_cut() -> None:
    """The counts are bounded whatever pods ask for."""
    asks = CpuRequestCounts()
    for cores in range(3 * KINDS_MAX):
        asks.observe(10**6, 1000 * cores)
        asks.observe(1, 10**15)

    assert len(asks.kinds) == KINDS_MAX
    heaviest = max(asks.kinds, key=lambda kind: kind.weight)
    assert (heaviest.gpus, heaviest.cores) == (1, requested_cores(10**15))
