"""Switches the garbage collector off while a large answer is built.

A search for cycles among thousands of new objects finds nothing, but is a third of a command's work; in a thread beside
an event loop each pause stops the loop too, for a second on a large cluster.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Turn the garbage collector off for the block, and restore its state afterwards."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
