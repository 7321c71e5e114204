"""Answers of short-lived commands without pauses of the garbage collector.

A command reads thousands of objects once, answers and ends: looking for cycles among them is a third of the work, and
frees nothing. In: a block. Out: the block, with the collector off inside it.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Leave the garbage collector off for the block; it is on again afterwards if it was before."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
