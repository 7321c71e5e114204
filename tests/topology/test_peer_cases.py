"""Cases of other allocators' tests: our answers are never worse."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.peer_cases import answers
from tests.oracles import placement as reference
from topology.profiles import profile

ROOT = Path(__file__).resolve().parents[2]
ALL8 = list(range(8))
CASES: list[dict[str, Any]] = [
    {
        "id": "pair",
        "policy": "besteffort",
        "topology": "dgx1-v100",
        "available": [0, 2, 4, 5],
        "required": [],
        "size": 2,
        "want": [4, 5],
    },
    {
        "id": "partner",
        "policy": "besteffort",
        "topology": "dgx1-v100",
        "available": ALL8,
        "required": [4],
        "size": 2,
        "want": [4, 7],
    },
    {
        "id": "impossible",
        "policy": "besteffort",
        "topology": "dgx1-v100",
        "available": [4, 5],
        "required": [0],
        "size": 1,
        "want": [],
    },
    {
        "id": "fixed-list",
        "policy": "static-dgx1-volta",
        "topology": "dgx1-v100",
        "available": ALL8,
        "required": [],
        "size": 3,
        "want": [],
    },
    {
        "id": "first-come",
        "policy": "simple",
        "topology": "dgx1-v100",
        "available": ALL8,
        "required": [],
        "size": 6,
        "want": [0, 1, 2, 3, 4, 5],
    },
    {
        "id": "in-turn",
        "policy": "besteffort",
        "topology": "rtx8000x4-bridged",
        "start": [0, 1, 2, 3],
        "sequence": [{"size": 2, "want": [0, 3]}, {"size": 2, "want": [1, 2]}, {"size": 1, "want": []}],
    },
    {
        "id": "own-matrix",
        "policy": "binpack",
        "links": [["X", "NV4"], ["NV4", "X"]],
        "available": [0, 1],
        "size": 2,
        "want": [0, 1],
    },
    {"id": "zero", "policy": "besteffort", "topology": "dgx1-v100", "available": ALL8, "size": 0, "want": []},
]


MESH: list[list[str]] = [["X", "NV2", "SYS"], ["NV2", "X", "NV1"], ["SYS", "NV1", "X"]]
TWENTY = [
    ["X" if row == column else "PIX" if row // 2 == column // 2 else "SYS" for column in range(20)] for row in range(20)
]

OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    # other machines
    "bridged-pair": ({"topology": "h100-nvl-8", "available": [0, 1, 2, 5], "size": 2, "want": [0, 1]}, "same"),
    "bridge-across-sockets": (
        {
            "topology": "h100-pcie-8-crossbridge",
            "available": [0, 1, 2, 3, 4, 5],
            "size": 2,
            "required": [0],
            "want": [0, 5],
        },
        "same",
    ),
    "pair-sum-on-a-mesh": ({"topology": "mi250x-8gcd", "available": ALL8, "size": 4, "want": [0, 1, 4, 5]}, "better"),
    "quad-plus-one": ({"topology": "dgx1-v100", "available": ALL8, "size": 5, "want": [0, 1, 2, 3, 4]}, "better"),
    "any-three-behind-a-switch": ({"topology": "dgx-h100", "available": ALL8, "size": 3, "want": [5, 6, 7]}, "equal"),
    "sixteen": ({"topology": "dgx2-v100", "size": 16, "want": list(range(16))}, "same"),
    "seventeen-of-sixteen": ({"topology": "dgx2-v100", "size": 17, "want": []}, "same"),
    "nine-behind-a-switch": ({"topology": "dgx2-v100", "size": 9, "want": list(range(7, 16))}, "equal"),
    "sixteen-dies": ({"topology": "mi250-16gcd", "size": 8, "want": [0, 1, 2, 3, 4, 5, 6, 7]}, "same"),
    "three-cards-two-bridged": ({"topology": "nv4-partial-3gpu", "size": 2, "want": [0, 2]}, "better"),
    "all-far": (
        {"topology": "pcie8-allsys-4090", "available": [0, 4, 5], "size": 2, "want": [4, 5]},
        "same",
    ),
    "tray": ({"topology": "gb200-tray", "available": [1, 2, 3], "size": 2, "want": [2, 3]}, "same"),
    "twenty-slots": ({"links": TWENTY, "size": 2, "available": [3, 4, 5], "want": [4, 5]}, "same"),
    # policies
    "fill": ({"policy": "packed", "topology": "l40s-8", "available": [1, 4, 5, 6], "size": 1, "want": [1]}, "same"),
    "fill-a-poorer-ring": (
        {"policy": "binpack", "topology": "l40s-8", "available": [0, 1, 2, 4, 5], "size": 2, "want": [0, 4]},
        "better",
    ),
    "apart": ({"policy": "spread", "topology": "l40s-8", "available": ALL8, "size": 2, "want": [0, 4]}, "same"),
    "apart-means-no-ring": (
        {"policy": "spread", "topology": "h100-nvl-8", "available": ALL8, "size": 2, "want": [0, 1]},
        "equal",
    ),
    "one-island": (
        {"policy": "restricted", "topology": "h100-nvl-8", "available": ALL8, "size": 4, "want": []},
        "same",
    ),
    "one-island-or-not": (
        {"policy": "Guaranteed", "topology": "h100-nvl-8", "available": ALL8, "size": 4, "want": [0, 1, 2, 3]},
        "same",
    ),
    "fixed-lists-have-no-three": ({"policy": "static-dgx2", "topology": "dgx2-v100", "size": 3, "want": []}, "better"),
    "unheard-of": ({"policy": "lunar-phase", "topology": "t4-4", "size": 2, "want": [0, 1]}, "same"),
    "own-word": (
        {"policy": "island", "topology": "dgx1-v100", "size": 2, "available": [0, 1, 3], "want": [0, 3]},
        "same",
    ),
    # odd requests
    "nothing-asked": ({"topology": "t4-4", "size": 0, "want": []}, "same"),
    "less-than-nothing": ({"topology": "t4-4", "size": -2, "want": []}, "same"),
    "more-than-any-machine": ({"topology": "t4-4", "size": 10**9, "want": []}, "same"),
    "nothing-free": ({"topology": "t4-4", "available": [], "size": 1, "want": []}, "same"),
    "more-required-than-asked": ({"topology": "t4-4", "required": [0, 1, 2], "size": 2, "want": []}, "same"),
    "required-is-no-gpu": ({"topology": "t4-4", "required": [77], "size": 1, "want": []}, "same"),
    "required-is-not-free": ({"topology": "t4-4", "available": [1], "required": [0], "size": 1, "want": []}, "same"),
    "free-is-no-gpu": ({"topology": "t4-4", "available": [0, 1, 99, 10**12, -1], "size": 2, "want": [0, 1]}, "same"),
    "named-twice": ({"topology": "t4-4", "available": [1, 1, 0, 0], "size": 2, "want": [0, 1]}, "same"),
    "order-of-the-wanted": ({"topology": "t4-4", "available": [0, 1], "size": 2, "want": [1, 0]}, "same"),
    "want-is-no-gpu": ({"topology": "t4-4", "size": 2, "want": [0, 9]}, "better"),
    "want-is-too-large": ({"topology": "dgx1-v100", "size": 2, "want": [0, 1, 2, 3]}, "equal"),
    # missing fields
    "no-size": ({"topology": "dgx1-v100", "available": [0, 3], "want": [0, 3]}, "same"),
    "no-want": ({"topology": "dgx1-v100", "size": 2}, "equal"),
    "no-free": ({"topology": "dgx1-v100", "size": 8, "want": ALL8}, "same"),
    "nulls": (
        {"topology": "t4-4", "available": None, "required": None, "policy": None, "size": 4, "want": [0, 1, 2, 3]},
        "same",
    ),
    "several-wanted": ({"topology": "dgx1-v100", "size": 2, "available": [4, 7], "want": [[0, 3], [4, 7]]}, "same"),
    "empty-sequence": ({"topology": "t4-4", "start": [0], "sequence": []}, "equal"),
    # machines of one's own, and spellings
    "inline": ({"topology": {"links": MESH, "nvlink_gen": 3}, "size": 2, "want": [0, 1]}, "same"),
    "ragged-links": ({"links": [["X"], ["NV1", "X"]], "size": 2, "want": [0, 1]}, "same"),
    "nonsense-cells": ({"links": [["X", 7], [None, "X"]], "size": 2, "want": [0, 1]}, "same"),
    "spelled-in-capitals": ({"topology": "DGX1_V100", "size": 2, "available": [0, 3], "want": [0, 3]}, "same"),
    "twice-a-pair": (
        {
            "topology": "h100-nvl-8",
            "start": ALL8,
            "sequence": [{"size": 2, "want": [0, 1]}, {"size": 2, "want": [2, 3]}],
        },
        "same",
    ),
    "gpus-as-text": (
        {"topology": "dgx1-v100", "available": ["0", "GPU3", "gpu-1"], "size": "2", "want": "0,3"},
        "same",
    ),
    "want-as-text": ({"topology": "dgx1-v100", "available": "0 1 3", "size": 2, "want": ["GPU0", "GPU3"]}, "same"),
    "required-as-text": ({"topology": "dgx1-v100", "required": "4", "size": 2, "want": [4, 7]}, "same"),
    "required-null": ({"topology": "t4-4", "required": None, "size": 1, "want": [3]}, "equal"),
    "count-for-size": ({"topology": "dgx1-v100", "count": 2, "available": [0, 3], "want": [0, 3]}, "same"),
    "size-as-float": ({"topology": "t4-4", "size": 2.0, "want": [0, 1]}, "same"),
    "free-is-null": (
        {"topology": "t4-4", "available": None, "start": [2, 3], "size": 2, "want": [2, 3]},
        "same",
    ),
    "several-wanted-and-none": ({"topology": "t4-4", "size": 1, "available": [3], "want": [[0], [3]]}, "same"),
    "wanted-is-empty-set": ({"topology": "t4-4", "size": 5, "want": [[]]}, "same"),
    # machines that are spelled otherwise, or that nobody knows
    "part-of-a-name": ({"topology": "p4d.24xlarge", "size": 8, "want": ALL8}, "same"),
    "more-than-a-name": ({"topology": "nvidia-dgx-b200", "size": 3, "want": [0, 1, 2]}, "same"),
    "nobody-knows": ({"topology": "atlantis", "available": [0, 1, 2, 3], "size": 2, "want": [2, 3]}, "equal"),
    "nobody-knows-all": ({"topology": "atlantis", "size": 4, "want": [0, 1, 2, 3]}, "same"),
    "nobody-knows-too-many": ({"topology": "atlantis", "available": [0, 1], "size": 4, "want": []}, "same"),
    "nobody-knows-sequence": (
        {"topology": "atlantis", "sequence": [{"size": 2, "want": [0, 1]}, {"size": 1, "want": [2]}]},
        "same",
    ),
    "several-of-one-family": ({"topology": "dgx1", "available": [0, 1], "size": 2, "want": [0, 1]}, "same"),
    # what has no word is named and not weighed
    "mig": ({"topology": "dgx-a100", "mig": "3g.20gb", "size": 1, "available": [5], "want": [5]}, "same"),
    "models": (
        {"topology": "t4-4", "models": ["a", "a", "b", "b"], "size": 2, "available": [2, 3], "want": [2, 3]},
        "same",
    ),
    "shared-gpus": ({"topology": "t4-4", "replicas": 4, "size": 1, "available": [1], "want": [1]}, "same"),
    "policy-is-a-list": ({"topology": "t4-4", "policy": ["a", "b"], "size": 2, "want": [0, 1]}, "same"),
    "policy-is-a-number": ({"topology": "t4-4", "policy": 7, "size": 2, "want": [0, 1]}, "same"),
    "policy-in-capitals": ({"topology": "l40s-8", "policy": "SPREAD", "size": 2, "want": [0, 4]}, "same"),
    "policy-with-dashes": ({"topology": "t4-4", "policy": "Best-Effort", "size": 4, "want": [0, 1, 2, 3]}, "same"),
    "aligned-partition": ({"topology": "dgx-h100", "policy": "Honor", "size": 4, "want": [0, 1, 2, 3]}, "same"),
    "partition-of-three": ({"topology": "dgx-h100", "policy": "Prefer", "size": 3, "want": []}, "better"),
    # one machine of every kind
    "hamis-worst-card": ({"topology": "h100-pcie-8-crossbridge", "size": 1, "want": [0]}, "same"),
    "cube": ({"topology": "gfx90a-8p-cube", "size": 5, "want": [0, 4, 5, 6, 7]}, "better"),
    "six-dies": ({"topology": "mi250x-8gcd", "size": 6, "want": [0, 1, 2, 3, 4, 5]}, "better"),
    "four-hives": ({"topology": "mi60-2x4ring", "size": 4, "want": [0, 1, 2, 3]}, "same"),
    "six-of-a-vm": ({"topology": "h100-vm-6gpu", "size": 6, "want": [0, 1, 2, 3, 4, 5]}, "same"),
    "uneven-switch": ({"topology": "pcie8-uneven-switch", "size": 8, "want": ALL8}, "same"),
    "numa-tells-nothing": ({"topology": "a100-vm-flat-numa", "size": 1, "available": [2], "want": [2]}, "same"),
    "dead-link": (
        {"links": [["X", "NV4", "SYS"], ["SYS", "X", "NV4"], ["SYS", "NV4", "X"]], "size": 2, "want": [0, 1]},
        "better",
    ),
    "wants-what-is-taken": (
        {"topology": "dgx1-v100", "available": [0, 1], "size": 2, "want": [0, 3]},
        "equal",
    ),
    "wants-fewer-than-asked": (
        {"topology": "dgx1-v100", "available": [0, 1, 3], "size": 3, "want": [0, 3]},
        "equal",
    ),
    "wants-what-is-required-but-taken": (
        {"topology": "dgx1-v100", "available": [1, 2], "required": [0], "size": 2, "want": [0, 1]},
        "equal",
    ),
    "one-gpu": ({"links": [["X"]], "size": 1, "want": [0]}, "same"),
    "xgmi": ({"links": [["X", "XGMI1"], ["XGMI1", "X"]], "vendor": "amd", "size": 2, "want": [0, 1]}, "same"),
    "numa-alone": (
        {
            "links": [["X" if a == b else "SYS" for b in range(4)] for a in range(4)],
            "numa": [0, 1, 0, 1],
            "size": 2,
            "want": [0, 2],
        },
        "same",
    ),
    "rows-as-topology": ({"topology": [["X", "NV1"], ["NV1", "X"]], "size": 2, "want": [0, 1]}, "same"),
    "rows-as-matrix": ({"matrix": [["X", "NV1"], ["NV1", "X"]], "size": 2, "want": [0, 1]}, "same"),
    "machine-by-gpus-alone": ({"topology": {"gpus": 8}, "available": "0-7", "size": 2, "want": [0, 1]}, "same"),
    "no-machine-but-gpus": ({"available": [0, 1, 2, 3], "size": 2, "want": [0, 1]}, "same"),
    "replicas": ({"topology": "dgx1-v100", "available": ["0::1", "3::0"], "size": 2, "want": ["0::1", "3::0"]}, "same"),
    "sequence-beyond-the-end": (
        {"topology": "t4-4", "sequence": [{"size": 3, "want": [0, 1, 2]}, {"size": 2, "want": []}, {"size": 1}]},
        "same",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_machines_policies_and_odd_requests_are_answered(name: str) -> None:
    """Whatever a case asks, it has an answer, by the nearest policy, with both qualities between 0 and 1."""
    case, verdict = OTHERS[name]
    (answer,) = answers([json.dumps({"id": name, **case})])

    assert (answer["id"], answer["verdict"]) == (name, verdict), answer
    assert set(answer) == {"id", "wanted", "chosen", "wantedQuality", "chosenQuality", "verdict", "why"}
    assert 0 <= answer["wantedQuality"] <= 1
    assert 0 <= answer["chosenQuality"] <= 1
    assert answer["why"]


@pytest.mark.parametrize(
    "line",
    [
        "null",
        "[]",
        "7",
        '"text"',
        "{}",
        '{"topology": null}',
        '{"topology": "t4-4", "size": "many", "want": []}',
        '{"topology": "t4-4", "size": 1.5}',
        '{"topology": "t4-4", "size": true}',
        '{"topology": "t4-4", "size": 1e999}',
        '{"topology": "t4-4", "size": NaN}',
        '{"topology": "t4-4", "available": 7, "size": 1}',
        '{"topology": "t4-4", "want": {"a": 1}, "size": 1}',
        '{"topology": "t4-4", "sequence": [7]}',
        '{"links": "NV4", "size": 1}',
        '{"links": [], "size": 1}',
        '{"links": [["X", "NV4"], 7], "size": 1}',
        "[" * 5000,
    ],
)
def test_line_that_cannot_be_read_is_told_and_never_crashes(line: str) -> None:
    """Each broken line has an answer of its own that says what is wrong, and counts as worse."""
    first, second = answers([line, json.dumps(CASES[1])])

    assert (first["id"], first["verdict"]) == ("line-1", "worse")
    assert "cannot be read" in first["why"]
    assert second["verdict"] == "same"


@settings(deadline=None, max_examples=150)
@given(
    topology=st.sampled_from(("dgx1-v100", "h100-nvl-8", "l40s-8", "mi250x-8gcd", "gb200-tray")),
    policy=st.sampled_from(("besteffort", "simple", "packed", "spread", "restricted", "static-x", "own")),
    free=st.sets(st.integers(0, 7)),
    size=st.integers(0, 9),
)
def test_first_come_is_never_better_than_ours(topology: str, policy: str, free: set[int], size: int) -> None:
    """Against an allocator that takes the lowest numbers, no answer is worse, on any machine, by any policy."""
    known = [position for position in sorted(free) if position < profile(topology).machine.count]
    want = known[:size] if len(known) >= size else []
    case = {"id": "x", "topology": topology, "policy": policy, "available": sorted(free), "size": size, "want": want}
    (answer,) = answers([json.dumps(case)])

    assert answer["verdict"] != "worse", answer


SHAPES = ("dgx1-v100", "dgx1-p100", "mi250x-8gcd", "h100-nvl-8", "rtx8000x4-bridged", "pcie8-pix-pxb", "gb200-tray")
rng = random.Random(31)
NEIGHBOURS: list[tuple[str, list[int], list[int], int]] = []
for shape in SHAPES * 10:
    count = profile(shape).machine.count
    free = rng.sample(range(count), rng.randint(2, min(count, 6)))
    NEIGHBOURS.append((shape, free, rng.sample(free, rng.choice((0, 0, 1, 2))), rng.randint(1, len(free))))


@pytest.mark.parametrize("number", range(len(NEIGHBOURS)))
def test_neighbours_of_the_cases_get_the_best_set_there_is(number: int) -> None:
    """Seventy asks like the peers' own, on machines like theirs: by brute force no set that is free and holds what is
    required has more ring bandwidth, so whatever a peer wants, the verdict is not worse."""
    shape, free, required, size = NEIGHBOURS[number]
    subject = profile(shape).machine
    sets = [one for one in itertools.combinations(sorted(free), size) if set(required) <= set(one)]
    best = max(sets, key=lambda one: reference.ring_gbps(subject, one), default=())
    case = {"id": shape, "topology": shape, "available": free, "required": required, "size": size, "want": list(best)}
    (answer,) = answers([json.dumps(case)])

    assert answer["verdict"] in ("same", "equal"), answer
    assert bool(answer["chosen"]) == bool(sets)
    if len(best) > 1:
        given = reference.ring_gbps(subject, tuple(sorted(answer["chosen"])))
        assert given == pytest.approx(reference.ring_gbps(subject, best))


def run(tmp_path: Path, lines: list[str]) -> tuple[int, list[dict[str, Any]]]:
    """Run a file of cases as a user would."""
    file = tmp_path / "cases.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    command = [sys.executable, "-m", "bench.peer_cases", "device", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def test_cases_are_answered_and_summed_up(tmp_path: Path) -> None:
    """Every case has a verdict, none is worse, and the last line counts them."""
    code, told = run(tmp_path, [json.dumps(case) for case in CASES])
    verdicts = {line["id"]: line["verdict"] for line in told[:-1]}

    assert code == 0
    assert verdicts == {
        "pair": "better",
        "partner": "same",
        "impossible": "same",
        "fixed-list": "better",
        "first-come": "better",
        "in-turn": "same",
        "own-matrix": "same",
        "zero": "same",
    }
    assert told[-1] == {"cases": 8, "same": 5, "better": 3, "equal": 0, "worse": 0}
    assert all(set(line) == set(told[0]) for line in told[:-1])


def test_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    """A missing file is an error with its name and no traceback; a byte order mark and stray bytes are no error."""
    file = tmp_path / "cases.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(CASES[1]).encode() + b"\n\xff\n")
    command = [sys.executable, "-m", "bench.peer_cases", "device"]
    done = subprocess.run([*command, str(file)], cwd=ROOT, capture_output=True, text=True, check=False)
    missing = subprocess.run([*command, "nowhere"], cwd=ROOT, capture_output=True, text=True, check=False)

    assert [json.loads(line)["verdict"] for line in done.stdout.splitlines()[:-1]] == ["same", "worse"]
    assert missing.returncode == 2
    assert missing.stderr.startswith("no cases can be read:")


def test_unreadable_case_fails_the_run_but_not_the_others(tmp_path: Path) -> None:
    """A broken line is told as worse, with its number; the cases after it are still answered."""
    code, told = run(tmp_path, ["{", json.dumps({"id": "unknown", "topology": "atlantis"}), json.dumps(CASES[1])])

    assert code == 1
    assert [line["verdict"] for line in told[:-1]] == ["worse", "worse", "same"]
    assert "line 1" in told[0]["why"]
