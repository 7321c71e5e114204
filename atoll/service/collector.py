"""Large answers without pauses of the garbage collector.

Whoever builds thousands of objects for one answer gains nothing by looking for cycles among them meanwhile: for a
command that is a third of the work, in a thread beside an event loop each pause stops the loop too, for a second on a
large cluster. In: a block. Out: the block, with the collector off inside it.
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
