"""The picture at the top of README: two of four free GPUs, chosen by count and by links.

The figures come from the functions that choose in a cluster. `python -m atollctl.reference` writes the file.
"""

from collections.abc import Iterator
from typing import Final
from xml.sax.saxutils import escape

from topology.choice import Choice, choose
from topology.device_requests import DeviceRequest
from topology.links import direct_links
from topology.model import Machine, mask_of
from topology.profiles import profile
from topology.quality import rate

PROFILE: Final = "h100-nvl-8"
FREE: Final = (1, 2, 3, 5)
INK, GREY, BLUE, RED = "#1a1a1a", "#c8ccd2", "#0b5fa5", "#b5532a"
DESCRIPTION: Final = "A pod asks for two GPUs on a machine with four free: bandwidth of each choice"


def pair_picture() -> str:
    """Return the picture as SVG."""
    known = profile(PROFILE)
    chosen = choose(known.machine, mask_of(FREE), DeviceRequest(2))
    assert isinstance(chosen, Choice)
    body = [
        *_row(known.machine, FREE[:2], y=92, heading="By count: the first two free GPUs"),
        *_row(known.machine, chosen.positions, y=212, heading="By links: Atoll chooses one island"),
        _text(
            24,
            276,
            f"{known.product_name}, 8 GPUs. Coloured: given. White: free. Grey: in use. Thick bars: NVLink bridges.",
            13,
        ),
    ]
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 292" role="img" font-family="sans-serif">',
            f"<title>{escape(DESCRIPTION)}</title>",
            '<rect width="760" height="292" fill="#ffffff"/>',
            *body,
            "</svg>\n",
        ]
    )


def _row(machine: Machine, given: tuple[int, ...], *, y: int, heading: str) -> Iterator[str]:
    first, second = given
    rating = rate(machine, given)
    colour, kind = (BLUE, "over NVLink") if rating.linked else (RED, "over PCIe")
    yield _text(24, y - 44, heading, 16, bold=True)
    for position in range(machine.count - 1):
        if direct_links(machine.links[position][position + 1]):
            yield _line(position, position + 1, y, GREY, 8)
    yield _line(first, second, y, colour, 8 if rating.linked else 3)
    for position in range(machine.count):
        fill = colour if position in given else "#ffffff" if position in FREE else GREY
        ink = "#ffffff" if position in given else INK
        yield f'<circle cx="{_x(position)}" cy="{y}" r="18" fill="{fill}" stroke="{INK}"/>'
        yield _text(_x(position), y + 5, str(position), 14, colour=ink, anchor="middle", bold=True)
    yield _text(530, y - 4, f"{rating.ring_gbps:.0f} GB/s", 24, colour=colour, bold=True)
    yield _text(530, y + 18, f"{kind}, GPUs {first} and {second}", 14)


def _x(position: int) -> int:
    return 48 + 60 * position


def _line(first: int, second: int, y: int, colour: str, width: int) -> str:
    ends = f'x1="{_x(first)}" y1="{y}" x2="{_x(second)}" y2="{y}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"/>'


def _text(
    x: int, y: int, words: str, size: int, *, colour: str = INK, anchor: str = "start", bold: bool = False
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    place = f'x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text {place} fill="{colour}"{weight}>{escape(words)}</text>'
