"""All nodes as arrays, so that thousands of them are judged by one gather.

For a request, each node has a key: the rank of its best set among all nodes, and infinity where none fits. The words:

    row      a node. Row 0 stands for every node that is not known
    state    what a node is now, shape and free positions. State 0 fits nothing; a shape of up to eight devices owns a
             block of states, one per mask, of a larger one each mask has its state once it occurs
    key      of a state, per request: rank of the model x PREFERENCE + cost, as atoll.cluster.selection tells it
    emptying what one more pod pays on a node: most where few hold devices of it, see topology.scores
    cores    free CPU of a node, where it is known: nodes that are alike to topology are told apart by it, see `pick`

An allocation renews one element of the array of states. The keys come from the very tables that bind chooses by.
"""

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from atoll.cluster.host_cpu import (
    ASKS_MIN,
    GPUS_MAX,
    RENEWED_EVERY,
    UNKNOWN,
    CpuRequestCounts,
    price_table,
    requested_cores,
    whole_cores,
)
from atoll.cluster.machines import Cell, NodeShape, cell_of
from atoll.cluster.requests import Request
from atoll.cluster.selection import CellOffer, keys_of, offer
from atoll.cluster.weakness import WEAKER, needs_links, weaknesses
from topology.demand import Demand
from topology.device_requests import DeviceRequest, Policy
from topology.scores import ALIKE, DECIMALS, EMPTYING_BY_PODS, PODS_MAX, RESERVE, RESERVED_ONE_IN, reserves

EAGER_DEVICES_MAX: Final = 8
STATES_MAX: Final = 1 << 18
"""States that are numbered before all numbers are given out anew: shapes of the past are forgotten then."""
REQUESTS_MAX: Final = 64
POORER_MAX: Final = 16
"""Shapes with poorer links that are passed over, before the least key counts without prices."""
NO_CPU: Final = (UNKNOWN, UNKNOWN)

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class _Rows(dict[str, int]):
    """Row by node name; 0 for a name that is not known."""

    def __missing__(self, _name: str) -> int:
        return 0


class Fleet:
    """The arrays. The ledger keeps them; one event loop owns it."""

    def __init__(self) -> None:
        self._row_of: dict[str, int] = {}
        self._index: _Rows | None = None
        self._name_of: list[str] = [""]
        self._cell_of: list[Cell | None] = [None]
        self._spare: list[int] = []
        self._states: Ints = np.zeros(64, dtype=np.int64)
        self._ranks: Ints | None = None
        self._many_whole: dict[NodeShape, tuple[int, int]] = {}
        self._scarce: set[NodeShape] = set()
        self._weak: Mapping[NodeShape, float] = {}
        self._cpu_cores: dict[str, tuple[int, int]] = {}
        """Whole free and allocatable cores by node."""
        self._cores: Ints = np.full(64, UNKNOWN, dtype=np.int64)
        self._allocatable: Ints = np.full(64, UNKNOWN, dtype=np.int64)
        self._devices: Ints = np.full(64, -1, dtype=np.int64)
        """Devices of the machine, whoever holds them; -1 of a node that gives out nothing."""
        self._emptying: Floats = np.zeros(64)
        self._spare_floats: Floats = np.empty(0)
        self.asked = CpuRequestCounts()
        self._priced_asks = 0
        self._prices: Floats | None = None
        self._moves: dict[tuple[int, int], Floats] = {}
        self._forget_numbers()

    def put(self, name: str, cell: Cell, *, pods: int = 0) -> None:
        """Note what a node can give out now, and how many pods hold the rest."""
        if self._size >= STATES_MAX:
            self._number_anew()
        row = self._row_of.get(name) or self._add(name)
        self._replace(row, cell)
        self._states[row] = self.state_of(cell)
        self._emptying[row] = EMPTYING_BY_PODS[min(pods, PODS_MAX)]

    def silence(self, name: str) -> None:
        """Note that a node can give out nothing, because nothing new is known of it."""
        row = self._row_of.get(name, 0)
        self._replace(row, None)
        self._states[row] = 0

    def forget(self, name: str) -> None:
        """Forget a node that is gone."""
        self.silence(name)
        row = self._row_of.pop(name, 0)
        if row:
            self._index = None
            self._spare.append(row)

    def row_of(self, name: str) -> int:
        """Return the row of a node; 0 where it is not known."""
        return self._row_of.get(name, 0)

    def all_rows(self) -> Ints:
        """Return every row but that of unknown nodes, in order: the first is row 1. Rows of nodes that are gone are
        among them, with a state that fits nothing."""
        return np.arange(1, len(self._name_of))

    def put_cpu(self, name: str, *, free_milli: int, allocatable_milli: int) -> None:
        """Note how much CPU a node has, and how much of it no pod asks for; the node may not be known yet."""
        self._cpu_cores[name] = whole_cores(free_milli), whole_cores(allocatable_milli)
        self._take_cpu(name, self._row_of.get(name, 0))

    def forget_cpu(self, name: str) -> None:
        """Forget a node's CPU."""
        self._cpu_cores.pop(name, None)
        self._take_cpu(name, self._row_of.get(name, 0))

    def _take_cpu(self, name: str, row: int) -> None:
        """Write a node's cores into its row; nothing is known in row 0."""
        self._cores[row], self._allocatable[row] = self._cpu_cores.get(name, NO_CPU) if row else NO_CPU

    def count_ask(self, gpus: int, cpu_milli: int) -> None:
        """Count what a pod asks for, once per pod."""
        self.asked.observe(gpus, cpu_milli)

    def rows_of(self, names: Sequence[str]) -> Ints:
        """Return the rows of these nodes; 0 for one that is not known.

        This is most of what judging thousands of nodes costs, and most of that is waiting for memory. So the names are
        looked up in copies that lie in memory in the order in which they are asked for. (Arrays of hashes were slower
        below five thousand names and no faster there.)
        """
        if self._index is None:
            self._index = self._indexed(names) if self._row_of else _Rows()
        return np.fromiter(map(self._index.__getitem__, names), dtype=np.int64, count=len(names))

    def _indexed(self, names: Sequence[str]) -> _Rows:
        known = {name: row for name in names if (row := self._row_of.get(name))} | self._row_of
        copies = "\0".join(known).split("\0")
        return _Rows(zip(copies, np.fromiter(known.values(), dtype=np.int64).tolist(), strict=True))

    def states_of(self, rows: Ints) -> Ints:
        """Return what the nodes of these rows are now."""
        return self._states[rows]

    def state_of(self, cell: Cell) -> int:
        """Return the number of a state. Numbers hold until `put` gives them out anew."""
        first = self._blocks.get(cell.shape)
        if first is not None:
            return first + cell.free
        single = self._singles.get(cell)
        return self._new_state(cell) if single is None else single

    def cell_of(self, name: str) -> Cell:
        """Return what a known node is now. Raises KeyError for another."""
        cell = self._cell_of[self.row_of(name)]
        if cell is None:
            raise KeyError(name)
        return cell

    def cell_at(self, state: int) -> Cell:
        """Return the shape and the free positions of a state other than 0."""
        index = bisect_right(self._firsts, state) - 1
        shape, free = self._entries[index]
        return cell_of(shape, state - self._firsts[index] if free is None else free)

    def keys(self, states: Ints, asked: Request, demand: Demand) -> Floats:
        """Return the key of each state: one gather, once the keys of these states are known.

        asked: a request without what the choice does not depend on, as `selection.plain` gives it.
        """
        known = self._known_keys(asked, demand)
        keys = known[states]
        if math.isnan(keys.min(initial=math.inf)):
            self._learn(known, np.unique(states[np.isnan(keys)]), asked, demand)
            keys = known[states]
        return keys

    def with_node_costs(self, keys: Floats, rows: Ints, states: Ints, ask: DeviceRequest, demand: Demand) -> Floats:
        """Add to the keys what weighs nodes against each other, as `topology.scores` tells it: the price of one more
        pod, and RESERVE on the last whole machines of a shape of up to eight devices. Return them."""
        if ask.policy is Policy.SPREAD:
            return keys
        if len(self._spare_floats) < len(rows):
            self._spare_floats = np.empty(len(rows))
        keys += np.take(self._emptying, rows, out=self._spare_floats[: len(rows)], mode="clip")
        for shape in self._scarce:
            if reserves(shape.machine, ask, demand):
                keys[states == self._blocks[shape] + shape.machine.full] += RESERVE
        return keys

    def pick(self, rows: Ints, keys: Floats, states: Ints, asked: Request, demand: Demand, *, cpu_milli: int) -> str:
        """Return the name of the best node of these rows, of which one at least has a finite key.

        The least key, with the price of the CPU that the pod leaves there or not; then the least free CPU, then the
        name. No price is worth links: a node that would give a poorer set than the least key does is passed over.
        """
        moves = self._moves_of(asked, requested_cores(cpu_milli))
        if moves is None:
            return self.first_by_name(rows[keys <= keys.min() + ALIKE])
        cores = self._cores.take(rows)
        places = self._counts.take(states)
        places *= UNKNOWN + 1
        places += cores
        priced = moves.take(places)
        priced += keys
        least = int(states[keys.argmin()])
        for _ in range(POORER_MAX):
            tied = np.flatnonzero(priced <= priced.min() + ALIKE)
            tied = tied[cores[tied] == cores[tied].min()]
            state = int(states[tied[0]])
            if not self._is_poorer(state, least, asked, demand):
                return self.first_by_name(rows[tied[states[tied] == state]])
            priced[states == state] = np.inf
        return self.first_by_name(rows[keys <= keys.min() + ALIKE])

    def weakness_of(self, shape: NodeShape) -> float:
        """Return the share of its class's best ring that a machine of this shape misses, see atoll.cluster.weakness."""
        return self._weak.get(shape, 0.0)

    def _is_poorer(self, state: int, other: int, asked: Request, demand: Demand) -> bool:
        """Tell whether a state gives a set with worse links than the other: in more islands, or of less quality."""
        if state == other or asked.ask.count == 1:
            return False
        one, two = (offer(self.cell_at(each), asked, demand) for each in (state, other))
        assert isinstance(one, CellOffer)
        assert isinstance(two, CellOffer)
        islands, islands_of_other = len(one.choice.islands), len(two.choice.islands)
        return (-islands, one.choice.relative_quality) < (-islands_of_other, two.choice.relative_quality)

    def _moves_of(self, request: Request, cores: int) -> Floats | None:
        """Return by how much the price of a node changes when the pod comes, by free devices and free cores, flat; None
        where nothing has a price: too little is known, or the pod wants to be spread or takes parts of GPUs."""
        asks = self.asked.seen
        if asks < ASKS_MIN or request.mig_profile or request.ask.policy is Policy.SPREAD:
            return None
        if self._prices is None or asks - self._priced_asks >= RENEWED_EVERY:
            self._priced_asks, self._moves = asks, {}
            self._prices = price_table(self.asked.kinds, *self._known_cpu())
        count = min(request.ask.count, GPUS_MAX)
        moves = self._moves.get((count, cores))
        if moves is None:
            after = np.zeros_like(self._prices)
            columns = np.maximum(np.arange(UNKNOWN) - cores, 0)
            after[count:, :UNKNOWN] = self._prices[: GPUS_MAX + 1 - count, columns]
            moves = after - self._prices
            moves[:count] = 0
            moves = self._moves[count, cores] = np.round(moves, DECIMALS).ravel()
        return moves

    def _known_cpu(self) -> tuple[Ints, Ints]:
        """Devices and allocatable cores of all nodes with known CPU."""
        known = (self._devices >= 0) & (self._allocatable < UNKNOWN)
        return self._devices[known], self._allocatable[known]

    def first_by_name(self, rows: Ints) -> str:
        """Return the name that comes first among these rows."""
        if self._ranks is None:
            order = sorted(range(len(self._name_of)), key=self._name_of.__getitem__)
            self._ranks = np.empty(len(order), dtype=np.int64)
            self._ranks[order] = np.arange(len(order))
        return self._name_of[int(rows[np.argmin(self._ranks[rows])])]

    def _replace(self, row: int, cell: Cell | None) -> None:
        """Note a row's cell, and which shapes have few whole machines left."""
        before, self._cell_of[row] = self._cell_of[row], cell
        self._devices[row] = cell.shape.machine.count if cell is not None else -1
        if before is cell:
            return
        left, come = (one.shape if one is not None else None for one in (before, cell))
        is_new = come is not None and come not in self._many_whole
        for one, step in ((cell, 1), (before, -1)):
            if one is None:
                continue
            many, whole = self._many_whole.get(one.shape, (0, 0))
            many, whole = many + step, whole + step * (one.free == one.shape.machine.full)
            self._many_whole[one.shape] = many, whole
            is_small = one.shape.machine.count <= EAGER_DEVICES_MAX
            if is_small and 0 < whole <= many // RESERVED_ONE_IN:
                self._scarce.add(one.shape)
            else:
                self._scarce.discard(one.shape)
            if not many:
                del self._many_whole[one.shape]
        if is_new or (left is not None and left not in self._many_whole):
            weak = weaknesses(self._many_whole)
            if weak != self._weak:
                self._weak = weak
                self._keys.clear()

    def _add(self, name: str) -> int:
        self._ranks = None
        self._index = None
        if self._spare:
            row = self._spare.pop()
            self._name_of[row] = name
        else:
            row = len(self._name_of)
            self._name_of.append(name)
            self._cell_of.append(None)
            if row == len(self._states):
                self._states = np.concatenate((self._states, np.zeros_like(self._states)))
                self._cores = np.concatenate((self._cores, np.full_like(self._cores, UNKNOWN)))
                self._allocatable = np.concatenate((self._allocatable, np.full_like(self._allocatable, UNKNOWN)))
                self._devices = np.concatenate((self._devices, np.full_like(self._devices, -1)))
                self._emptying = np.concatenate((self._emptying, np.zeros_like(self._emptying)))
        self._row_of[name] = row
        self._take_cpu(name, row)
        return row

    def _forget_numbers(self) -> None:
        self._size = 1
        self._entries: list[tuple[NodeShape, int | None]] = []
        self._firsts: list[int] = []
        self._blocks: dict[NodeShape, int] = {}
        self._singles: dict[Cell, int] = {}
        self._counts: Ints = np.zeros(64, dtype=np.int64)
        self._keys: OrderedDict[tuple[Request, Demand], Floats] = OrderedDict()

    def _number_anew(self) -> None:
        self._forget_numbers()
        for row, cell in enumerate(self._cell_of):
            self._states[row] = self.state_of(cell) if cell is not None else 0

    def _new_state(self, cell: Cell) -> int:
        first, count = self._size, cell.shape.machine.count
        self._firsts.append(first)
        if count <= EAGER_DEVICES_MAX:
            self._entries.append((cell.shape, None))
            self._blocks[cell.shape] = first
            self._note_counts(range(1 << count))
            return first + cell.free
        self._entries.append((cell.shape, cell.free))
        self._singles[cell] = first
        self._note_counts((cell.free,))
        return first

    def _note_counts(self, masks: Sequence[int]) -> None:
        """Number the states of these masks, the next ones, and note how many devices are free in each."""
        first, self._size = self._size, self._size + len(masks)
        if self._size > len(self._counts):
            self._counts = np.concatenate((self._counts, np.zeros(self._size, dtype=np.int64)))
        self._counts[first : self._size] = [min(mask.bit_count(), GPUS_MAX) for mask in masks]

    def _known_keys(self, request: Request, demand: Demand) -> Floats:
        """Return the array of keys of a request, long enough for every state; nan where nothing is known yet."""
        name = (request, demand)
        known = self._keys.get(name)
        if known is None or len(known) < self._size:
            longer = np.full(max(self._size, 2 * len(known) if known is not None else 0), np.nan)
            longer[0] = np.inf
            if known is not None:
                longer[: len(known)] = known
            known = self._keys[name] = longer
        self._keys.move_to_end(name)
        while len(self._keys) > REQUESTS_MAX:
            self._keys.popitem(last=False)
        return known

    def _learn(self, known: Floats, states: Ints, request: Request, demand: Demand) -> None:
        """Compute the keys of these states: whole blocks at once, others by what occurs. WEAKER is part of the key of a
        machine that is weaker than others of its class, for requests that need links."""
        wanted: dict[NodeShape, dict[int, int]] = {}
        for index in np.unique(np.searchsorted(self._firsts, states, side="right") - 1).tolist():
            shape, free = self._entries[index]
            first = self._firsts[index]
            masks = range(1 << shape.machine.count) if free is None else (free,)
            wanted.setdefault(shape, {}).update((first + offset, mask) for offset, mask in enumerate(masks))
        for shape, masks_by_state in wanted.items():
            keys = keys_of(shape, list(masks_by_state.values()), request, demand)
            if shape in self._weak and needs_links(request.ask):
                keys = keys + WEAKER * (1 + self._weak[shape])
            known[list(masks_by_state)] = keys
