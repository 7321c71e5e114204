"""Traces of whole clusters: files are read or refused with a reason, and no rule gives GPUs that do not exist."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench import traces
from bench.baselines_fgd import FgdPodKind
from bench.trace_files import TraceNode, TracePod, arrivals, read_nodes, read_pods
from bench.trace_rules import MILLI, Atoll, Gradient, TraceCapacity, rules

EXAMPLES = Path(traces.__file__).parent / "examples"
NODES = read_nodes(EXAMPLES / "nodes.csv")
PODS = read_pods(EXAMPLES / "pods.csv")
GPUS = sum(node.gpus for node in NODES)


def test_example_is_played_under_every_rule(capsys: pytest.CaptureFixture[str]) -> None:
    """A line per rule, shares between 0 and 1, whole pods and the full trace with fractions treated in two ways."""
    files = ["--pods", str(EXAMPLES / "pods.csv"), "--nodes", str(EXAMPLES / "nodes.csv")]
    code = traces.main([*files, "--play", "both", "--json", "--seeds", "1"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert code == 0
    assert [row["rule"] for row in rows] == [
        *("by-chance", "first-fit", "best-fit", "fgd", "atoll", "atoll, blind"),
        *("by-chance", "first-fit", "best-fit", "fgd", "atoll, share", "atoll, round-up"),
    ]
    assert all(0 < row["allocated_100"] <= row["allocated_130"] <= 1 for row in rows)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("name,cpu_milli,memory_mib,num_gpu,gpu_milli\na,1,1,x,1000\n", "num_gpu needs a whole number, not 'x'"),
        ("name,cpu_milli,memory_mib,num_gpu,gpu_milli\na,1,1,1,1001\n", "gpu_milli must be 0 to 1000, not 1001"),
        ("name,cpu_milli,memory_mib,gpu_milli\na,1,1,1000\n", "num_gpu needs a whole number, not None"),
        ("name,cpu_milli,memory_mib,num_gpu,gpu_milli\na,1,1,0,0\n", "no pod asks for a GPU"),
    ],
    ids=["no number", "more than a GPU", "column missing", "no GPU asked"],
)
def test_file_that_is_no_trace_is_refused(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and the line, the column and the value that are wrong."""
    file = tmp_path / "pods.csv"
    file.write_text(text, encoding="utf-8")

    code = traces.main(["--pods", str(file), "--nodes", str(EXAMPLES / "nodes.csv"), "--play", "full", "--seeds", "1"])

    assert code == 2
    assert told in capsys.readouterr().err


def test_missing_file_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is not there is an error with its name, no traceback."""
    assert traces.main(["--pods", "nowhere.csv", "--nodes", str(EXAMPLES / "nodes.csv")]) == 2
    assert "nowhere.csv" in capsys.readouterr().err


def test_arrivals_ask_for_a_third_more_than_there_is() -> None:
    """Pods are drawn until they ask for 130 % of the GPUs, the same ones for the same seed."""
    come = arrivals(PODS, GPUS, seed=42)

    asked = sum(pod.milli for pod in come)
    assert 1.3 * GPUS * MILLI <= asked < 1.3 * GPUS * MILLI + 8 * MILLI
    assert come == arrivals(PODS, GPUS, seed=42) != arrivals(PODS, GPUS, seed=43)


@pytest.mark.parametrize("name", ["by-chance", "first-fit", "best-fit", "fgd", "atoll, share", "atoll, round-up"])
def test_no_rule_gives_what_is_not_there(name: str) -> None:
    """Every place has enough CPU, memory and GPUs of an allowed model, and a pod is refused only by a full cluster or,
    where fractions are rounded up, by one without a whole GPU."""
    rule = rules(NODES, PODS, seed=1, full=True)[name]
    room = TraceCapacity(NODES)
    for pod in arrivals(PODS, GPUS, seed=1):
        fits = room.fitting(pod)
        place = rule(room, pod)
        if place is None:
            assert not len(fits) or (name == "atoll, round-up" and not pod.whole)
            continue
        assert place[0] in fits
        assert len(set(place[1])) == pod.kind.gpus
        room.take(place[0], pod, place[1])


def test_gradient_takes_the_node_that_loses_least() -> None:
    """Where all pods ask for pairs, one that asks for one GPU breaks no pair."""
    nodes = [TraceNode(64_000, 1 << 20, 2, "A"), TraceNode(64_000, 1 << 20, 3, "A")]
    pods = [TracePod(FgdPodKind(1000, 2), 1)] * 9 + [TracePod(FgdPodKind(1000, 1), 1)]

    assert Gradient(nodes, pods)(TraceCapacity(nodes), TracePod(FgdPodKind(1000, 1), 1)) == (1, (0,))


def test_shared_gpus_fill_up_before_a_new_one_is_opened() -> None:
    """A fraction goes to the fullest GPU that holds it; only then Atoll is asked for a whole one."""
    nodes = [TraceNode(64_000, 1 << 20, 2, "T4")]
    half = TracePod(FgdPodKind(1000, 1, 500), 1)
    rule, room = Atoll(nodes, [half], shares=True), TraceCapacity(nodes)
    for _ in range(2):
        place = rule(room, half)
        assert place is not None
        room.take(place[0], half, place[1])

    assert sorted(room.gpu_milli[0]) == [0, MILLI]


def test_fragments_count_no_gpus_that_a_node_lacks() -> None:
    """Nodes narrower than the widest have nothing in their empty columns."""
    room = TraceCapacity([TraceNode(1000, 1, 1, "A"), TraceNode(1000, 1, 4, "A")])

    assert room.capacity == 5 * MILLI
    assert list(np.count_nonzero(room.gpu_milli, axis=1)) == [1, 4]
