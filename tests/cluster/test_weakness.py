"""A machine with damaged links is the last choice for pods that need links, and no worse for others."""

from typing import Any

import pytest

from atoll.cluster.ledger import Ledger
from atoll.cluster.requests import Request, request_of
from atoll.cluster.verdicts import FilterInput, judge_nodes
from atoll.cluster.weakness import weaknesses
from tests.builders import make_claim, make_devices, make_pod, make_report
from topology.profiles import profile

LINKS = [list(row) for row in profile("dgx-h100").machine.links]


def halved(*cards: int) -> dict[str, Any]:
    """Return the links of a machine of which some cards run at half their links, as fields of a report."""
    rows = [["NV9" if cell == "NV18" and {row, column} & set(cards) else cell for column, cell in enumerate(cells)]
            for row, cells in enumerate(LINKS)]  # fmt: skip
    known = profile("dgx-h100").machine
    return {"links": {"nvlink": rows, "pcie": known.pcie or (), "nvswitch": known.nvswitch,
                      "nvlinkGeneration": known.nvlink_generation, "linkGBps": known.link_gbps,
                      "pcieGeneration": known.pcie_generation}}  # fmt: skip


def ask(count: int, policy: str = "contiguous") -> Request:
    """Return the request of a pod with such a claim."""
    claim = make_claim(count=count, policy=policy)
    request = request_of(make_pod(claim=claim, gpus=count), claim)
    assert isinstance(request, Request)
    return request


def best(request: Request, **reports: Any) -> str:
    """Return the node that prioritize names among machines with these reports."""
    ledger = Ledger()
    for name, report in reports.items():
        ledger.put_report(report)
        ledger.put_heartbeat(name, 0.0, 1e9)
    verdicts = judge_nodes(list(reports), FilterInput("u", request, now_seconds=0.0), ledger)
    assert verdicts.best is not None
    return verdicts.best.node


@pytest.mark.parametrize("damaged", [pytest.param((3,), id="one card"), pytest.param(range(8), id="every card")])
@pytest.mark.parametrize("count", [2, 4, 7, 8])
@pytest.mark.parametrize("policy", ["contiguous", "island"])
def test_a_sound_machine_goes_before_a_damaged_one(policy: str, count: int, damaged: Any) -> None:
    """Whatever the names, the numbers of free GPUs and the fragmentation say."""
    weak = make_report("a", "dgx-h100", status=halved(*damaged))
    sound = make_report("b", "dgx-h100")

    assert best(ask(count, policy), a=weak, b=sound) == "b"


def test_a_damaged_machine_serves_when_it_is_the_only_one() -> None:
    """The last choice is a choice."""
    weak = make_report("a", "dgx-h100", status=halved(3))

    assert best(ask(8), a=weak, b=make_report("b", "l40s-8", sick=range(8))) == "a"


@pytest.mark.parametrize("request_", [ask(1), ask(2, "packed")])
def test_pods_that_need_no_links_do_not_mind(request_: Request) -> None:
    """Equal but for the links, the first name wins."""
    weak = make_report("a", "dgx-h100", status=halved(*range(8)))

    assert best(request_, a=weak, b=make_report("b", "dgx-h100")) == "a"


def test_machines_of_another_class_are_no_measure() -> None:
    """Fewer cards or another model are by design what they are; only a twin tells that links are missing."""
    shapes = {name: make_devices(name, name).shape for name in ("dgx-h100", "dgx1-v100", "l40s-8")}
    weak = make_devices("weak", "dgx-h100", status=halved(3)).shape

    assert not weaknesses(shapes.values())
    assert weaknesses([*shapes.values(), weak]) == {weak: pytest.approx(0.5)}


def test_the_measure_goes_with_the_machine_that_set_it() -> None:
    """The only sound machine is deleted: the one that is left is not weaker than anybody, and no worse than machines of
    another class."""
    ledger = Ledger()
    damaged, sound, other = make_report("a", "dgx-h100", status=halved(3)), make_report("b", "dgx-h100"), "dgx1-v100"
    for name, report in (("a", damaged), ("b", sound), ("c", make_report("c", other))):
        ledger.put_report(report)
        ledger.put_heartbeat(name, 0.0, 1e9)
    asked = FilterInput("u", ask(2), now_seconds=0.0)
    found = [judge_nodes(["a", "c"], asked, ledger).best]
    ledger.drop_report("b")
    found.append(judge_nodes(["a", "c"], asked, ledger).best)

    assert [best.node for best in found if best is not None] == ["c", "a"]
