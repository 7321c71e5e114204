"""`atoll topo`: drawings of nodes, saved matrices and known machines."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from atoll.api.node_status import Nic
from atoll.kube import paths
from atollctl.__main__ import app
from atollctl.drawing import machine_json, machine_lines, machine_svg
from atollctl.topo_source import (
    LINE_LENGTH_MAX,
    InputError,
    MachineSource,
    ranges,
    read_node,
    read_text,
    source_of_profile,
    source_of_report,
    source_of_text,
)
from tests.atollctl.matrices import saved
from tests.builders import make_report, report_json
from tests.fakes.api_server import FakeApiServer, answering
from tests.fakes.listening import kubeconfig
from topology.model import machine
from topology.profiles import profile_names
from topology.topo_text import TEXT_MAX

RUNNER = CliRunner()
SVG = "{http://www.w3.org/2000/svg}"


def drawn(source: MachineSource) -> str:
    """Return the drawing as plain text."""
    return "\n".join("".join(text for text, _style in line) for line in machine_lines(source))


BRIDGED = """\
topo.txt: 4 GPUs, NVIDIA A100 80GB PCIe

          0     1     2     3  NUMA  Island
GPU 0     -  NV12   SYS   SYS     0  nvlink-group-0
GPU 1  NV12     -   SYS   SYS     0  nvlink-group-0
GPU 2   SYS   SYS     -  NV12     1  nvlink-group-1
GPU 3   SYS   SYS  NV12     -     1  nvlink-group-1

Islands
  nvlink-group-0  GPUs 0, 1  NVLink, 12 links per joined pair  ring 240 GB/s
  nvlink-group-1  GPUs 2, 3  NVLink, 12 links per joined pair  ring 240 GB/s

Traffic between sockets counts at the slowest known rate, because a saved matrix does not show its speed.
"""


def test_a_saved_matrix_of_bridged_pairs(tmp_path: Path) -> None:
    """The drawing shows links, islands and bandwidths; it is plain where standard output is no terminal."""
    file = tmp_path / "topo.txt"
    file.write_text(saved("a100-pcie4-bridged"))

    result = RUNNER.invoke(app, ["topo", "--from", str(file), "--model", "A100 80GB PCIe"])

    assert result.exit_code == 0
    assert result.stdout == BRIDGED


def test_a_matrix_from_standard_input_without_a_model() -> None:
    """Without the generation bandwidths are relative, and the drawing says so."""
    result = RUNNER.invoke(app, ["topo", "--from", "-"], input=saved("dgx1-v100"))

    assert result.exit_code == 0
    assert "standard input: 8 GPUs\n" in result.stdout
    assert "NVLink, 1 to 2 links per joined pair  ring 3 x the best pair" in result.stdout
    assert "(0-3)  (4-7)" in result.stdout
    assert "unknown, so bandwidths are relative; give --model" in result.stdout
    assert "GB/s" not in result.stdout


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        pytest.param(
            "dgx-h100",
            ["nvlink-group-0  GPUs 0-7  NVSwitch, 18 links per GPU  ring 370.8 GB/s"],
            id="a-switch-makes-one-island",
        ),
        pytest.param(
            "pcie8-allsys-4090",
            ["numa-0  GPUs 0-3  PCIe  ring 16 GB/s", "numa-1  GPUs 4-7  PCIe  ring 16 GB/s"],
            id="all-sys-falls-back-to-numa",
        ),
        pytest.param(
            "nv4-partial-3gpu",
            ["nvlink-group-0  GPUs 0, 1  NVLink, 4 links per joined pair  ring 48 GB/s", "GPU 2      a GPU on its own"],
            id="a-gpu-without-its-bridge",
        ),
        pytest.param("mi300x-8", ["GPUs 0-7  xGMI, 1 link per joined pair  ring"], id="xgmi"),
        pytest.param("mi250-16gcd", ["ring at least 72 GB/s"], id="a-bound-is-said"),
    ],
)
def test_islands_of_known_machines(name: str, rows: list[str]) -> None:
    """Each kind of machine shows its islands in the words that people use."""
    text = drawn(source_of_profile(name))

    assert [row for row in rows if row not in text] == []


def test_a_node_shows_its_own_gpu_numbers_and_what_is_not_given_out() -> None:
    """Device ids are those of the report; sick and cordoned GPUs are marked."""
    source = source_of_report(make_report("n1", "a100-pcie4-bridged", ids=(3, 5, 8, 9), sick=(5,), cordoned=(9,)))

    text = drawn(source)

    assert "n1: 4 GPUs, NVIDIA A100 80GB PCIe" in text
    assert "GPUs 3, 5" in text
    assert [line.split()[1] for line in text.splitlines() if line.endswith("not given out")] == ["5", "9"]
    assert [gpu["usable"] for gpu in machine_json(source)["gpus"]] == [True, False, True, False]


@pytest.fixture
async def server() -> AsyncIterator[FakeApiServer]:
    """An API server with the report of node n1."""
    fake = FakeApiServer()
    fake.put(paths.gpunodestatuses("n1"), report_json("n1", "h100-nvl-8"))
    async with fake.running():
        yield fake


async def test_the_report_of_a_node_is_read_through_the_api(server: FakeApiServer, tmp_path: Path) -> None:
    """One GET, and the node's machine."""
    source = await read_node("n1", kubeconfig(tmp_path, server.url), None)

    assert source.name == "n1"
    assert source.machine == source_of_profile("h100-nvl-8").machine


@pytest.mark.parametrize(
    ("node", "status", "sentence"),
    [
        pytest.param("n2", 0, "there is no GPU report of node n2; does its agent run?", id="no-report"),
        pytest.param("n1", 403, "the report of node n1 could not be read: ", id="forbidden"),
        pytest.param("..", 0, "'..' is not a node name", id="a-path-instead-of-a-name"),
        pytest.param("", 0, "'' is not a node name", id="empty-name"),
    ],
)
async def test_a_report_that_cannot_be_read_is_one_sentence(
    server: FakeApiServer, tmp_path: Path, node: str, status: int, sentence: str
) -> None:
    """The user reads which node, and what the server said."""
    if status:
        server.fail(answering(status, "Forbidden"))

    with pytest.raises(InputError) as caught:
        await read_node(node, kubeconfig(tmp_path, server.url), None)

    assert str(caught.value).startswith(sentence)


async def test_a_report_that_is_nonsense_is_one_sentence(server: FakeApiServer, tmp_path: Path) -> None:
    """Whatever stands in the object, the command does not crash."""
    server.put(paths.gpunodestatuses("n3"), {"metadata": {"name": "n3"}, "status": {"devices": "many"}})
    server.put(paths.gpunodestatuses("n4"), {"metadata": {"name": "n4"}})

    for node, sentence in (("n3", "is not what an agent writes"), ("n4", "shows no GPUs that can be drawn")):
        with pytest.raises(InputError, match=sentence):
            await read_node(node, kubeconfig(tmp_path, server.url), None)


@pytest.mark.parametrize("name", profile_names())
def test_the_picture_of_every_known_machine_is_well_formed_and_loads_nothing(name: str) -> None:
    """The SVG parses, has a title and a description, shows every GPU once and refers to nothing outside."""
    source = source_of_profile(name)
    picture = machine_svg(source)
    root = ET.fromstring(picture)

    assert root.tag == f"{SVG}svg"
    assert (root.findtext(f"{SVG}title") or "").startswith(f"{name}: ")
    assert "nvlink-group" in picture or "numa" in picture or "pcie-group" in picture
    assert root.findtext(f"{SVG}desc")
    assert len(root.findall(f".//{SVG}circle")) == source.machine.count
    assert {element.tag for element in root.iter()} <= {
        f"{SVG}{tag}" for tag in ("svg", "title", "desc", "rect", "text", "path", "line", "circle", "g")
    }
    assert "href" not in picture
    assert "url(" not in picture


def test_line_width_follows_the_links() -> None:
    """A double link is drawn twice as wide as a single one; a pair without links gets no solid line."""
    rows = (("X", "NV1", "SYS"), ("NV1", "X", "NV2"), ("SYS", "NV2", "X"))
    root = ET.fromstring(machine_svg(MachineSource("three", machine(rows), (0, 1, 2))))

    widths = sorted(float(line.attrib["stroke-width"]) for line in root.iter(f"{SVG}line"))

    assert len(widths) == 2
    assert widths[1] == 2 * widths[0]


HOSTILE = "</svg><script>&\x00\x1b[31m\u202e\ufffe\ud800"


def test_names_cannot_break_out_of_the_picture_or_the_terminal() -> None:
    """What a file or node is called is text: never markup, never a control sequence."""
    source = source_of_text(saved("l40s-4"), name=HOSTILE)
    picture = machine_svg(source)

    ET.fromstring(picture)
    assert "<script>" not in picture
    assert drawn(source).replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param([], "no machine is named", id="nothing-named"),
        pytest.param(["--from", "missing.txt"], "cannot read missing.txt: No such file", id="no-file"),
        pytest.param(["--from", "."], "cannot read .: Is a directory", id="a-folder"),
        pytest.param(["--from", "/dev/zero"], "/dev/zero is larger than", id="endless-file"),
        pytest.param(["--profile", "dgx-9000"], "no profile named 'dgx-9000'", id="unknown-machine"),
        pytest.param(["--profile", "l4-8", "--model", "l4"], "leave out --from and --model", id="model-of-profile"),
        pytest.param(["n1", "--profile", "l4-8"], "leave out --from, --profile and --model", id="node-and-profile"),
        pytest.param(["n1", "--kubeconfig", "missing.yaml"], "could not be read: no such kubeconfig", id="no-cluster"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str) -> None:
    """Status 2, one line on standard error, no traceback, nothing on standard output."""
    result = RUNNER.invoke(app, ["topo", *arguments])

    assert result.exit_code == 2
    assert result.stdout == ""
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1


def test_answer_that_cannot_be_written_is_one_sentence() -> None:
    """A full disk under standard output ends the command with a status and no traceback."""
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "atollctl", "topo", "--profile", "t4-4"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)

    assert (done.returncode, done.stderr) == (2, "cannot write the answer: No space left on device\n")


def test_closed_standard_input_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell may close standard input: there is no stream then, and no machine."""
    monkeypatch.setattr(sys, "stdin", None)

    with pytest.raises(InputError, match="standard input is closed"):
        read_text(Path("-"))


def test_matrix_that_powershell_saved_is_read(tmp_path: Path) -> None:
    """PowerShell writes text as UTF-16 with a mark in front."""
    (tmp_path / "topo.txt").write_text(saved("h100-nvl-8"), encoding="utf-16")
    (tmp_path / "plain.txt").write_text(saved("h100-nvl-8"), encoding="utf-8")

    assert read_text(tmp_path / "topo.txt") == read_text(tmp_path / "plain.txt")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        pytest.param("", "no row begins with a GPU", id="empty"),
        pytest.param("\x00\xff\x1b[2J" * 100, "no row begins with a GPU", id="binary"),
        pytest.param("GPU0 X " + "NIC" * LINE_LENGTH_MAX, "has a line of more than", id="endless-line"),
        pytest.param(f"GPU{'9' * 900} X", "is no number of a GPU", id="endless-number"),
        pytest.param("GPU0 X SYS\nGPU00 SYS X", "two GPUs have the same number", id="one-number-twice"),
        pytest.param("\n".join(f"GPU{number} X" for number in range(65)), "more than 64 GPUs", id="too-many-gpus"),
        pytest.param("x" * (TEXT_MAX + 1), "is larger than", id="too-large"),
    ],
)
def test_text_that_is_no_matrix_is_one_sentence(text: str, sentence: str) -> None:
    """Files that hold something else are refused with the reason and what to save instead."""
    result = RUNNER.invoke(app, ["topo", "--from", "-"], input=text)

    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "nvidia-smi topo -m" in result.stderr
    assert result.stderr.count("\n") == 1


CELLS = st.sampled_from(
    ["X", "NV1", "NV12", "SYS", "NODE", "PIX", "XGMI2", "GPU0", "GPU1", "N/A", "0-7", "3", "\t", "Ω"]
)


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(st.lists(CELLS, max_size=9).map(" ".join), max_size=9), lead=st.booleans())
def test_whatever_a_file_holds_is_drawn_or_refused(rows: list[str], *, lead: bool) -> None:
    """No text crashes the reader, the drawing or the picture."""
    lines = [f"GPU{number} {row}" if lead else row for number, row in enumerate(rows)]
    try:
        source = source_of_text("\n".join(lines), name="f")
    except InputError:
        return

    ET.fromstring(machine_svg(source))
    assert drawn(source).startswith("f: ")
    assert json.loads(json.dumps(machine_json(source)))["ratesKnown"] == source.rates_known


def test_two_ends_that_disagree_are_named() -> None:
    """The weaker side counts, and the drawing says for which pair."""
    text = "\tGPU0\tGPU1\nGPU0\tX\tNV4\nGPU1\tNV2\tX\n"

    assert "GPUs 0 and 1 disagree about their link; the weaker side counts." in drawn(source_of_text(text, name="f"))


@pytest.mark.parametrize(
    ("ids", "text"), [((), ""), ((4,), "4"), ((1, 2), "1, 2"), ((0, 1, 2, 5), "0-2, 5"), ((9, 7, 8), "7-9")]
)
def test_numbers_are_written_as_ranges(ids: tuple[int, ...], text: str) -> None:
    """Three or more in a row become a range."""
    assert ranges(ids) == text


@pytest.mark.parametrize(
    ("environment", "styled"),
    [
        pytest.param({"FORCE_COLOR": "1"}, True, id="a-terminal"),
        pytest.param({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, id="a-terminal-without-colour"),
        pytest.param({}, False, id="a-pipe"),
    ],
)
def test_styles_are_only_for_terminals_that_want_them(environment: dict[str, str], *, styled: bool) -> None:
    """Scripts and people who set NO_COLOR read plain text."""
    unset = dict.fromkeys(("FORCE_COLOR", "NO_COLOR"))
    result = RUNNER.invoke(app, ["topo", "--profile", "l4-8"], env={**unset, "TERM": "xterm-256color", **environment})

    assert ("\x1b[" in result.stdout) == styled


ADAPTERS = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity
GPU0\tX\tPIX\tSYS\tSYS\tPXB\tSYS\t0-7\t0
GPU1\tPIX\tX\tSYS\tSYS\tPXB\tSYS\t0-7\t0
GPU2\tSYS\tSYS\tX\tPIX\tSYS\tPIX\t8-15\t1
GPU3\tSYS\tSYS\tPIX\tX\tSYS\tNODE\t8-15\t1

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""


def test_adapters_are_drawn_by_the_gpus_that_are_nearest_to_them() -> None:
    """Of a saved matrix under the names of its legend, of a node under those of its report; none where none is told."""
    text = drawn(source_of_text(ADAPTERS, name="topo.txt"))
    status = make_report("n1", "a100-pcie4-bridged", ids=(3, 5, 8, 9))
    assert status.status is not None
    nics = [
        Nic(name="mlx5_1", cells=("SYS", "SYS", "PXB", "PXB")),
        Nic(name="mlx5_2", cells=("SYS", "SYS", "PXB", "PXB")),
    ]
    links = status.status.links.model_copy(update={"nics": tuple(nics)})
    report = status.status.model_copy(update={"links": links})
    node = source_of_report(status.model_copy(update={"status": report}))

    assert [line.split() for line in text.splitlines() if "mlx5" in line] == [
        ["GPUs", "0,", "1", "PXB", "mlx5_0"],
        ["GPU", "2", "PIX", "mlx5_1"],
    ]
    assert [line.split() for line in drawn(node).splitlines() if "mlx5" in line] == [
        ["GPUs", "8,", "9", "PXB", "mlx5_1,", "mlx5_2"]
    ]
    assert machine_json(node)["adapters"][0] == {
        "name": "mlx5_1",
        "cells": ["SYS", "SYS", "PXB", "PXB"],
        "nearest": [8, 9],
    }
    assert "adapters" not in drawn(source_of_profile("dgx-h100"))


def test_json_for_programs() -> None:
    """Every fact of the drawing, with bandwidths in GB/s."""
    result = RUNNER.invoke(app, ["topo", "--profile", "a100-pcie4-bridged", "-o", "json"])

    facts = json.loads(result.stdout)
    assert facts["links"][0] == ["X", "NV12", "SYS", "SYS"]
    assert facts["islands"][1] == {
        "name": "nvlink-group-1",
        "kind": "nvlink",
        "gpus": [2, 3],
        "numaNodes": [1],
        "ringGBps": 240.0,
        "relativeRing": 1.0,
        "bounded": False,
    }
