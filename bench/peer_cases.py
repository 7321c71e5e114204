"""Cases that other allocators' tests expect, put to Atoll: `python -m bench.peer_cases device FILE.jsonl`.

For gangs, `python -m bench.peer_cases domain FILE.jsonl`: see bench.peer_domains. For devices:

In: one JSON object per line: topology (a known machine, or rows of cells in `links`), available, required, size and
want; or start and a sequence of {size, want}. Out: one JSON line per case (id, wanted, chosen, wantedQuality,
chosenQuality, verdict, why) and a summary line. Verdicts: same (the same set), equal (another set of equal ring
bandwidth), better (more bandwidth, or served where the peer gives up), worse. Exit code 1 when any case is worse.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench import peer_domains
from topology.asks import Ask, Policy
from topology.choice import Choice, choose
from topology.errors import TopologyError
from topology.fragmentation import relative_qualities
from topology.model import DEVICES_MAX, Machine, machine, mask_of
from topology.profiles import profile

NEAREST: Final[dict[str, tuple[Policy, str]]] = {
    "besteffort": (Policy.CONTIGUOUS, "best effort is contiguous"),
    "simple": (Policy.CONTIGUOUS, "no word for first-come order; contiguous is never poorer"),
    "topology-aware": (Policy.CONTIGUOUS, "topology-aware is contiguous"),
    "binpack": (Policy.PACKED, "binpack is packed"),
    "packed": (Policy.PACKED, "packed"),
    "spread": (Policy.SPREAD, "spread"),
    "restricted": (Policy.ISLAND, "restricted is island"),
}
SLACK: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Step:
    """One ask of a case: what is free before it, what is required, how many, and what the peer gives."""

    free: int
    required: int
    size: int
    want: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What Atoll gives for a step, with both qualities (0 for nothing)."""

    want: tuple[int, ...]
    chosen: tuple[int, ...]
    wanted_quality: float
    chosen_quality: float
    why: str


def main(arguments: list[str]) -> int:
    """Run a file of cases; 0 unless a case is worse."""
    parser = argparse.ArgumentParser(prog="python -m bench.peer_cases", description=__doc__)
    parser.add_argument("kind", choices=["device", "domain"])
    parser.add_argument("file", type=Path)
    options = parser.parse_args(arguments)
    if options.kind == "domain":
        return peer_domains.run(options.file)
    verdicts: Counter[str] = Counter()
    with options.file.open(encoding="utf-8") as lines:
        for answer in answers(lines):
            verdicts[answer["verdict"]] += 1
            print(json.dumps(answer))
    print(
        json.dumps(
            {"cases": verdicts.total(), **{name: verdicts[name] for name in ("same", "better", "equal", "worse")}}
        )
    )
    return 1 if verdicts["worse"] else 0


def answers(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """One answer per case; a case that cannot be read is told as worse, with the reason."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield answer_case(json.loads(line))
        except (TopologyError, KeyError, TypeError, ValueError) as error:
            why = f"line {number} cannot be read: {type(error).__name__}: {error}"
            yield {
                "id": f"line-{number}",
                "wanted": None,
                "chosen": None,
                "wantedQuality": None,
                "chosenQuality": None,
                "verdict": "worse",
                "why": why,
            }


def answer_case(case: dict[str, Any]) -> dict[str, Any]:
    """Answer one case, a single ask or a sequence of them."""
    subject = _machine(case)
    policy, words = _policy(str(case.get("policy", "besteffort")))
    if "sequence" in case:
        outcomes = list(_play(subject, case, policy=policy))
    else:
        free = case.get("available", range(subject.count))
        step = Step(mask_of(free), mask_of(case.get("required", [])), case["size"], tuple(case["want"]))
        outcomes = [_outcome(subject, step, policy=policy)]
    many = "sequence" in case
    verdict, reason = _verdict(outcomes)
    return {
        "id": case["id"],
        "wanted": [list(one.want) for one in outcomes] if many else list(outcomes[0].want),
        "chosen": [list(one.chosen) for one in outcomes] if many else list(outcomes[0].chosen),
        "wantedQuality": round(sum(one.wanted_quality for one in outcomes) / len(outcomes), 4),
        "chosenQuality": round(sum(one.chosen_quality for one in outcomes) / len(outcomes), 4),
        "verdict": verdict,
        "why": f"{words}; {reason}",
    }


def _machine(case: dict[str, Any]) -> Machine:
    if "links" not in case:
        return profile(str(case["topology"])).machine
    return machine(
        case["links"],
        pcie=case.get("pcie"),
        numa=case.get("numa"),
        nvlink_generation=case.get("nvlink_generation"),
        nvswitch=case.get("nvswitch", False),
        pcie_generation=case.get("pcie_generation"),
        vendor=case.get("vendor", "nvidia"),
    )


def _policy(name: str) -> tuple[Policy, str]:
    if name in NEAREST:
        return NEAREST[name]
    if name in list(Policy):
        return Policy(name), name
    if name.startswith("static"):
        return (
            Policy.CONTIGUOUS,
            "no word for fixed lists of sets; contiguous finds the same sets and serves more sizes",
        )
    return Policy.CONTIGUOUS, f"no word for {name}; nearest is contiguous"


def _play(subject: Machine, case: dict[str, Any], *, policy: Policy) -> Iterator[Outcome]:
    """A sequence on one machine: each ask meets what Atoll itself has left."""
    free = mask_of(case.get("start", range(subject.count)))
    for ask in case["sequence"]:
        required = mask_of(ask.get("required", []))
        outcome = _outcome(subject, Step(free, required, ask["size"], tuple(ask["want"])), policy=policy)
        free &= ~mask_of(outcome.chosen)
        yield outcome


def _outcome(subject: Machine, step: Step, *, policy: Policy) -> Outcome:
    chosen, why = _chosen(subject, step, policy=policy)
    return Outcome(step.want, chosen, _quality(subject, step.want), _quality(subject, chosen), why)


def _chosen(subject: Machine, step: Step, *, policy: Policy) -> tuple[tuple[int, ...], str]:
    if not 1 <= step.size <= DEVICES_MAX:
        return (), f"a set of {step.size} is no ask"
    answer = choose(subject, step.free & subject.full, Ask(step.size, policy), required=step.required & subject.full)
    if isinstance(answer, Choice):
        return answer.positions, ""
    return (), str(answer.reason)


def _quality(subject: Machine, members: tuple[int, ...]) -> float:
    return float(relative_qualities(subject)[mask_of(members)]) if members else 0.0


def _verdict(outcomes: list[Outcome]) -> tuple[str, str]:
    """Worse when one ask went unserved or the sum of qualities fell; better when it rose or more was served."""
    refused = next((one for one in outcomes if one.want and not one.chosen), None)
    if refused is not None:
        return "worse", f"refused: {refused.why}"
    if all(sorted(one.want) == sorted(one.chosen) for one in outcomes):
        return "same", next((f"both refuse: {one.why}" for one in outcomes if one.why), "the same set")
    if any(one.chosen and not one.want for one in outcomes):
        return "better", "serves what the peer gives up on"
    gain = sum(one.chosen_quality - one.wanted_quality for one in outcomes)
    if gain > SLACK:
        return "better", "more ring bandwidth"
    if gain < -SLACK:
        return "worse", "less ring bandwidth"
    return "equal", "equal ring bandwidth; what stays free decides"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
