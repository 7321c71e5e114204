"""What other allocators' own tests expect, asked of ours: never a poorer answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def test_unreadable_case_fails_the_run_but_not_the_others(tmp_path: Path) -> None:
    """A broken line is told as worse, with its number; the cases after it are still answered."""
    code, told = run(tmp_path, ["{", json.dumps({"id": "unknown", "topology": "atlantis"}), json.dumps(CASES[1])])

    assert code == 1
    assert [line["verdict"] for line in told[:-1]] == ["worse", "worse", "same"]
    assert "line 1" in told[0]["why"]
