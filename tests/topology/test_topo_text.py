"""Parsing saved matrices: every unusual format from real machines, with our own values."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topology.choice import Choice, choose
from topology.device_requests import DeviceRequest
from topology.errors import TopologyTextError
from topology.islands import islands
from topology.model import Machine, machine
from topology.profiles import profile, profile_names
from topology.topo_text import TopologyText, looks_switched, machine_of, read_topology

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""


def printed(
    links: tuple[tuple[str, ...], ...],
    *,
    nics: int = 0,
    nic_name: str = "NIC",
    separator: str = "\t",
    trailer: tuple[str, ...] = (),
    titles: str = "CPU Affinity\tNUMA Affinity",
    lead: str = "\t",
    underline: bool = False,
) -> str:
    """A matrix as the tool might print it; `trailer` holds what follows the cells of each GPU row."""
    names = [f"GPU{index}" for index in range(len(links))] + [f"{nic_name}{index}" for index in range(nics)]
    head = lead + separator.join(names) + "\t" + titles
    lines = [f"\x1b[4m{head}\x1b[0m" if underline else head]
    for index, row in enumerate(links):
        cells = separator.join([*row, *["NODE"] * nics])
        lines.append(f"GPU{index}\t{cells}\t{trailer[index] if trailer else ''}")
    lines += [f"{nic_name}{index}\t" + separator.join(["SYS"] * len(names)) for index in range(nics)]
    return "\n".join(lines) + "\n" + LEGEND


PAIRS = (
    ("X", "NV12", "SYS", "SYS"),
    ("NV12", "X", "SYS", "SYS"),
    ("SYS", "SYS", "X", "NV12"),
    ("SYS", "SYS", "NV12", "X"),
)
CPUS = ("0-15", "0-15", "16-31", "16-31")
FULL = tuple(f"{cpus}\t{node}\t\tN/A" for cpus, node in zip(CPUS, (0, 0, 1, 1), strict=True))
TITLES = "CPU Affinity\tNUMA Affinity\tGPU NUMA ID"


@pytest.mark.parametrize(
    ("text", "numa"),
    [
        pytest.param(printed(PAIRS, trailer=FULL, titles=TITLES), (0, 0, 1, 1), id="plain"),
        pytest.param(printed(PAIRS, trailer=FULL, titles=TITLES, underline=True), (0, 0, 1, 1), id="terminal-codes"),
        pytest.param(printed(PAIRS, trailer=FULL, titles=TITLES, lead=""), (0, 0, 1, 1), id="header-without-blank"),
        pytest.param(printed(PAIRS, trailer=FULL, titles=TITLES, separator="   "), (0, 0, 1, 1), id="spaces-for-tabs"),
        pytest.param(
            printed(PAIRS, trailer=FULL, titles=TITLES, separator=""), (0, 0, 1, 1), id="columns-run-together"
        ),
        pytest.param(printed(PAIRS, trailer=FULL, titles=TITLES, nics=10), (0, 0, 1, 1), id="ten-nics"),
        pytest.param(
            printed(PAIRS, trailer=FULL, titles=TITLES, nics=12, separator=""), (0, 0, 1, 1), id="glued-with-nics"
        ),
        pytest.param(
            printed(PAIRS, trailer=FULL, titles=TITLES, nics=2, nic_name="mlx5_"),
            (0, 0, 1, 1),
            id="nics-by-driver-name",
        ),
        pytest.param(
            printed(PAIRS, trailer=tuple(f"{cpus}\tN/A" for cpus in CPUS)), (None,) * 4, id="numa-not-available"
        ),
        pytest.param(printed(PAIRS, trailer=tuple(f"{cpus}\t0-1" for cpus in CPUS)), (None,) * 4, id="numa-is-a-range"),
        pytest.param(
            printed(PAIRS, trailer=("0-55,112-167\t0", "6,14,22,30\t3", "56-111,168-223\t1", "0-3\t1")),
            (0, 3, 1, 1),
            id="cpu-lists-with-commas",
        ),
        pytest.param(printed(PAIRS, trailer=CPUS, titles="CPU Affinity"), (0, 0, 1, 1), id="numa-from-cpu-lists"),
        pytest.param(
            printed(PAIRS, trailer=("0-63",) * 4, titles="CPU Affinity"), (None,) * 4, id="one-cpu-list-for-all"
        ),
        pytest.param(printed(PAIRS, titles=""), (None,) * 4, id="no-trailing-columns"),
        pytest.param(
            printed(PAIRS, trailer=FULL, titles=TITLES).replace("SYS\t", "SOC\t"), (0, 0, 1, 1), id="old-word-soc"
        ),
        pytest.param("\n".join(printed(PAIRS, trailer=FULL).splitlines()[1:]), (0, 0, 1, 1), id="header-missing"),
        pytest.param(printed(PAIRS, trailer=FULL, titles=TITLES) * 2, (0, 0, 1, 1), id="printed-twice"),
        pytest.param(
            printed(PAIRS, trailer=FULL, titles=TITLES, nics=3, nic_name="mlx5_bond_"), (0, 0, 1, 1), id="bonded-nics"
        ),
        pytest.param(
            printed(PAIRS, trailer=FULL, titles=TITLES, nics=3, nic_name="rocep12s"), (0, 0, 1, 1), id="renamed-nics"
        ),
        pytest.param(
            printed(PAIRS, trailer=FULL, titles=TITLES).replace("NV12", "NV12*"), (0, 0, 1, 1), id="cells-with-a-mark"
        ),
        pytest.param(
            "$ nvidia-smi topo -m\n" + printed(PAIRS, trailer=FULL, titles=TITLES) + "$ exit\n",
            (0, 0, 1, 1),
            id="with-the-prompt",
        ),
        pytest.param(
            printed(PAIRS, trailer=FULL, titles=TITLES).replace("\n", "\r\n"), (0, 0, 1, 1), id="line-ends-of-windows"
        ),
        pytest.param("\ufeff" + printed(PAIRS, trailer=FULL, titles=TITLES), (0, 0, 1, 1), id="byte-order-mark"),
    ],
)
def test_odd_forms_read_alike(text: str, numa: tuple[int | None, ...]) -> None:
    """However it was printed, two bridged pairs are two islands of two."""
    matrix = read_topology(text)

    assert matrix.links == PAIRS
    assert matrix.numa == numa
    assert [island.positions for island in islands(machine_of(matrix)) if island.kind == "nvlink"] == [(0, 1), (2, 3)]


def test_nics_are_no_gpus() -> None:
    """Sixteen GPUs and ten adapters: adapters are told apart and keep their relation to every GPU."""
    links = profile("dgx2-v100").machine.links
    matrix = read_topology(printed(links, nics=10))

    assert len(matrix.labels) == 16
    assert [nic.name for nic in matrix.nics] == [f"NIC{index}" for index in range(10)]
    assert {nic.cells for nic in matrix.nics} == {("NODE",) * 16}


def _behind_a_switch(adapters: list[str]) -> TopologyText:
    """Eight GPUs of one socket behind an NVSwitch; one column per adapter, one character per GPU: x near, . far."""
    names = [f"GPU{index}" for index in range(8)] + [f"mlx5_{index}" for index in range(len(adapters))]
    rows = [
        [f"GPU{row}", *("X" if row == column else "NV18" for column in range(8))]
        + ["PXB" if adapter[row] == "x" else "NODE" for adapter in adapters]
        + ["0-63", "0"]
        for row in range(8)
    ]
    head = "\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity"
    return read_topology("\n".join([head, *("\t".join(row) for row in rows)]))


@pytest.mark.parametrize(
    ("adapters", "free", "chosen"),
    [
        pytest.param(["xx......", "..xx....", "....xx..", "......xx"], 0b00011110, (2, 3), id="neighbours-share"),
        pytest.param(["x...x...", ".x...x..", "..x...x.", "...x...x"], 0b00110011, (0, 4), id="distant-numbers-share"),
        pytest.param(["x...x...", ".x...x..", "..x...x.", "...x...x"], 0b00100111, (1, 5), id="the-only-sharing-pair"),
        pytest.param(["xxxxxxxx"], 0b00110010, (1, 4), id="one-adapter-for-all-decides-nothing"),
        pytest.param(["........"], 0b00110010, (1, 4), id="far-adapters-decide-nothing"),
    ],
)
def test_shared_adapter_breaks_the_tie_behind_a_switch(adapters: list[str], free: int, chosen: tuple[int, ...]) -> None:
    """Where links and NUMA nodes are all equal, a pair that shares a network adapter goes together."""
    answer = choose(machine_of(_behind_a_switch(adapters)), free, DeviceRequest(2))

    assert isinstance(answer, Choice)
    assert answer.positions == chosen


def test_single_gpu_leaves_pairs_that_share_an_adapter_whole() -> None:
    """One GPU is taken from the pair whose other half is in use."""
    subject = machine_of(_behind_a_switch(["xx......", "..xx....", "....xx..", "......xx"]))
    answer = choose(subject, 0b11101100, DeviceRequest(1))

    assert isinstance(answer, Choice)
    assert answer.positions == (5,)


def test_adapters_decide_nothing_against_links() -> None:
    """A bridge outweighs a shared adapter."""
    near = [["PIX"], ["NODE"], ["PIX"], ["NODE"]]
    subject = machine(PAIRS, numa=(0, 0, 0, 0), nvlink_generation=4, nics=near)
    answer = choose(subject, 0b0111, DeviceRequest(2))

    assert isinstance(answer, Choice)
    assert answer.positions == (0, 1)


def test_disagreeing_ends_degrade_to_the_weaker() -> None:
    """NV4 one way and SYS the other is SYS, and the pair is reported."""
    text = printed((("X", "NV4", "PIX"), ("SYS", "X", "NV4"), ("PIX", "NV4", "X")))
    matrix = read_topology(text)

    assert matrix.asymmetric == ((0, 1),)
    assert machine_of(matrix).links[0][1] == "SYS"
    assert machine_of(matrix).links[1][2] == "NV4"


def test_words_not_known_count_as_worst() -> None:
    """A word that no version prints does not crash and promises nothing."""
    text = printed((("X", "WARP9", "NV4"), ("WARP9", "X", "NV4"), ("NV4", "NV4", "X")))

    assert machine_of(read_topology(text)).links[0] == ("X", "SYS", "NV4")
    assert read_topology(text).strange == ("WARP9",)


def test_gpu_without_a_row_is_told() -> None:
    """A matrix cut off at its end leaves out a GPU, and says which."""
    matrix = read_topology("\tGPU0\tGPU1\tGPU2\nGPU0\tX\tNV4\tNV4\nGPU1\tNV4\tX\tNV4\n")

    assert (matrix.labels, matrix.rowless) == (("GPU0", "GPU1"), ("GPU2",))


def test_short_rows_count_as_worst() -> None:
    """A row cut off by a narrow terminal leaves its missing relations unknown."""
    text = "\tGPU0\tGPU1\tGPU2\nGPU0\tX\tNV4\nGPU1\tNV4\tX\tNV4\nGPU2\tNV4\tNV4\tX\n"

    assert machine_of(read_topology(text)).links[0] == ("X", "NV4", "SYS")


def test_pcie_matrix_tells_what_nvlink_hides() -> None:
    """With `-mp` beside it, a switch machine's pairs are chosen by PCIe switch."""
    known = profile("dgx-a100").machine
    assert known.pcie is not None
    subject = machine_of(read_topology(printed(known.links)), pcie=read_topology(printed(known.pcie)))
    answer = choose(subject, 0b00011110, DeviceRequest(2))

    assert subject.pcie == known.pcie
    assert subject.nvswitch
    assert isinstance(answer, Choice)
    assert answer.positions == (2, 3)


@pytest.mark.parametrize("name", profile_names())
def test_switch_is_recognised_by_cells(name: str) -> None:
    """Link counts alone tell a switch from a mesh on every known NVIDIA machine."""
    known = profile(name)
    if known.machine.vendor == "nvidia":
        assert looks_switched(known.machine.links) == known.machine.nvswitch


@pytest.mark.parametrize("text", ["", "\n\n", "command not found", "GPU", "NIC0\tSYS", LEGEND], ids=range(6))
def test_text_without_gpus_is_a_fault(text: str) -> None:
    """Something else entirely is refused in plain words."""
    with pytest.raises(TopologyTextError, match="no row begins with a GPU"):
        read_topology(text)


def test_more_gpus_than_a_machine_has_is_a_fault() -> None:
    """The reader is bounded."""
    cells = tuple(tuple("X" if row == column else "SYS" for column in range(65)) for row in range(65))
    with pytest.raises(TopologyTextError, match="more than 64 GPUs"):
        read_topology(printed(cells))


@settings(deadline=None, max_examples=100)
@given(
    name=st.sampled_from([name for name in profile_names() if profile(name).machine.vendor == "nvidia"]),
    separator=st.sampled_from(("\t", "  ", "")),
    nics=st.integers(0, 12),
    underline=st.booleans(),
)
def test_known_machines_survive_a_round_trip(name: str, separator: str, nics: int, *, underline: bool) -> None:
    """Printed and read again, every known matrix is the same."""
    known: Machine = profile(name).machine
    trailer = tuple("0-7\tN/A" if node is None else f"0-7\t{node}" for node in known.numa)
    text = printed(known.links, separator=separator, nics=nics, underline=underline, trailer=trailer)
    matrix = read_topology(text)

    assert matrix.links == known.links
    assert matrix.numa == known.numa
    assert len(matrix.nics) == nics


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet="GPU01NVSXYI\t\n -,9", max_size=200))
def test_nonsense_never_crashes(text: str) -> None:
    """Any text is read or refused, never a crash, and what is read makes a machine."""
    try:
        matrix = read_topology(text)
    except TopologyTextError:
        return
    assert isinstance(matrix, TopologyText)
    assert all(len(row) == len(matrix.labels) for row in matrix.links)
    machine_of(matrix)
    assert len(list(itertools.chain(*matrix.links))) == len(matrix.labels) ** 2
