"""Plots: valid SVG from the engine's results; plots in the docs are up to date."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from bench import plots
from bench.churn import ChurnResult, Moment

PICTURES = Path(plots.__file__).parents[1] / "docs" / "pictures"
SVG = "{http://www.w3.org/2000/svg}"


def texts(picture: str) -> list[str]:
    """All words of a picture; fails when it is no SVG."""
    root = ET.fromstring(picture)
    assert root.tag == f"{SVG}svg"
    assert root.find(f"{SVG}title") is not None
    return [element.text or "" for element in root.iter(f"{SVG}text")]


@pytest.mark.parametrize(
    ("name", "drawn"), [("placement-sets.svg", plots.sets_picture), ("placement-loss.svg", plots.loss_picture)]
)
def test_pictures_of_the_documents_are_up_to_date(name: str, drawn: object) -> None:
    """`python -m bench.plots docs/pictures` would change nothing."""
    assert callable(drawn)
    assert (PICTURES / name).read_text(encoding="utf-8") == drawn()


def test_sets_picture_tells_both_rings() -> None:
    """The quad and one more carries 40 GB/s, the chosen set 60."""
    words = " ".join(texts(plots.sets_picture()))

    assert "40 GB/s, relative quality 0.67" in words
    assert "60 GB/s, relative quality 1.00" in words


def test_loss_picture_has_a_filled_gpu_in_every_row() -> None:
    """Each of the four rows shows the GPU that is given."""
    root = ET.fromstring(plots.loss_picture())

    filled = [circle for circle in root.iter(f"{SVG}circle") if circle.get("fill") == plots.STRONG]
    assert len(filled) == 4


def test_churn_picture_has_two_curves_per_rule() -> None:
    """Quality above, fragmentation below; the legend names the rules, and awkward names do not break the file."""
    moments = tuple(Moment(float(at), 0.5 + at / 10, at / 20) for at in range(4))
    results = [ChurnResult(rule, 0.9, 0.1, 0.1, 0.9, moments) for rule in ("best-fit", "a<b & c")]

    picture = plots.churn_picture(results, shape="some machine")

    assert {"best-fit", "a<b & c"} <= set(texts(picture))
    assert len(list(ET.fromstring(picture).iter(f"{SVG}polyline"))) == 4


def test_command_writes_the_pictures(tmp_path: Path) -> None:
    """Two pictures, and one more for a churn."""
    assert plots.main([str(tmp_path / "new"), "--churn", "gb200-tray", "--arrivals", "500"]) == 0

    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert names == ["churn-gb200-tray.svg", "placement-loss.svg", "placement-sets.svg"]
    assert "atoll" in texts((tmp_path / "new" / "churn-gb200-tray.svg").read_text(encoding="utf-8"))
