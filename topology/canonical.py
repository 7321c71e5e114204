"""One canonical form for all machines that differ only in the numbering of their GPUs.

Renumbers a Machine, its NUMA nodes by first occurrence, and returns the order used. Ring bandwidths and tables are
computed for canonical machines only, so that all isomorphic machines of a cluster share them.

Method: colours are refined by what a GPU sees of each colour until nothing changes. If several GPUs keep one colour,
each is marked in turn; of GPUs that can be swapped without a change, one is enough. The least matrix of all orders
found this way is canonical (McKay and Piperno, individualisation and refinement). Bounded: after LEAVES_MAX orders the
least of these is taken. Two isomorphic machines may then go unrecognised; different machines are never taken for
isomorphic.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from topology.model import Machine, near_nics

LEAVES_MAX: Final = 400
"""Limit of orders compared. Four equal pairs in two sockets have eight, a random machine has one."""

Ints = npt.NDArray[np.int64]
Pairs = tuple[tuple[int, ...], ...]
"""One number per pair, for all facts of the pair."""
Colours = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Canonical:
    """order: for each position of the canonical machine, the position in the given one."""

    machine: Machine
    order: tuple[int, ...]

    def there(self, masks: Ints) -> Ints:
        """Translate masks over the given machine to the canonical one."""
        found = np.zeros_like(masks)
        for index, position in enumerate(self.order):
            found |= (masks >> position & 1) << index
        return found

    def here(self, masks: Ints) -> Ints:
        """Translate masks over the canonical machine to the given one."""
        found = np.zeros_like(masks)
        for index, position in enumerate(self.order):
            found |= (masks >> index & 1) << position
        return found


@lru_cache(maxsize=1024)
def canonical(machine: Machine) -> Canonical:
    """The canonical form; equal for isomorphic machines; the machine itself if it is canonical already."""
    pairs = _pairs(machine)
    orders = itertools.islice(_orders(pairs, _refined(pairs, (0,) * machine.count)), LEAVES_MAX)
    forms = (Canonical(renumbered(machine, order), order) for order in orders)
    return min(forms, key=lambda form: _sorting(form.machine))


def renumbered(machine: Machine, order: Sequence[int]) -> Machine:
    """The machine with its GPUs in another order and its NUMA nodes numbered by first occurrence."""
    nodes = dict.fromkeys(machine.numa[position] for position in order)
    number = {node: index for index, node in enumerate(node for node in nodes if node is not None)}
    return replace(
        machine,
        links=_permuted(machine.links, order),
        pcie=_permuted(machine.pcie, order) if machine.pcie is not None else None,
        numa=tuple(number.get(node) if (node := machine.numa[position]) is not None else None for position in order),
        nics=near_nics([machine.nics[position] for position in order], count=machine.count) if machine.nics else None,
    )


def _sorting(machine: Machine) -> tuple[Any, ...]:
    numa = tuple(-1 if node is None else node for node in machine.numa)
    return machine.links, machine.pcie or (), numa, machine.nics or ()


def _permuted(rows: Sequence[Sequence[str]], order: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(rows[row][column] for column in order) for row in order)


def _pairs(machine: Machine) -> Pairs:
    """Pair numbers that do not depend on the numbering of the GPUs."""
    devices = range(machine.count)

    nics = machine.nics or ((),) * machine.count

    def facts(row: int, column: int) -> tuple[Any, ...]:
        known = machine.numa[row] is not None
        near = (2 if machine.numa[row] == machine.numa[column] else 1) if known else 0
        common = tuple(sorted(zip(nics[row], nics[column], strict=True)))
        return machine.links[row][column], machine.pcie[row][column] if machine.pcie else "", near, common

    told = [[facts(row, column) for column in devices] for row in devices]
    ranks = {fact: rank for rank, fact in enumerate(sorted({fact for row in told for fact in row}))}
    return tuple(tuple(ranks[fact] for fact in row) for row in told)


def _refined(pairs: Pairs, colours: Sequence[object]) -> Colours:
    """Colours as ranks, split by what each GPU sees until no colour splits further."""
    ranks = _ranks(colours)
    while True:
        seen = [
            (ranks[one], pairs[one][one], *sorted((pair, ranks[other]) for other, pair in enumerate(pairs[one])))
            for one in range(len(pairs))
        ]
        finer = _ranks(seen)
        if max(finer) == max(ranks):
            return finer
        ranks = finer


def _ranks(colours: Sequence[Any]) -> Colours:
    rank = {colour: index for index, colour in enumerate(sorted(set(colours)))}
    return tuple(rank[colour] for colour in colours)


def _orders(pairs: Pairs, colours: Colours) -> Iterator[tuple[int, ...]]:
    """Orders reached by marking each of several equal GPUs in turn."""
    shared = next((colour for colour in range(max(colours) + 1) if colours.count(colour) > 1), None)
    if shared is None:
        yield tuple(sorted(range(len(colours)), key=colours.__getitem__))
        return
    marked: list[int] = []
    for one in (device for device, colour in enumerate(colours) if colour == shared):
        if not any(_twins(pairs, one, other) for other in marked):
            marked.append(one)
            yield from _orders(pairs, _refined(pairs, [(colour, dev != one) for dev, colour in enumerate(colours)]))


def _twins(pairs: Pairs, first: int, second: int) -> bool:
    """True if swapping two GPUs changes nothing."""
    alike = pairs[first][first] == pairs[second][second] and pairs[first][second] == pairs[second][first]
    return alike and all(
        pairs[first][other] == pairs[second][other] for other in range(len(pairs)) if other not in (first, second)
    )
