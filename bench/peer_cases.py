"""Runs cases from other allocators' tests on Atoll: `python -m bench.peer_cases device FILE.jsonl`.

For gangs, `python -m bench.peer_cases domain FILE.jsonl`: see bench.peer_domains. For devices:

In: one JSON object per line: topology (a known machine, rows of cells, or an object with `links`), or links beside it;
available, required, size and want; or start and a sequence of {size, want}. Defaults: all GPUs are available, none
required, the size is that of `want`; without `want` nothing is compared. `want` may list several sets.
Out: one JSON line per case (id, wanted, chosen, wantedQuality, chosenQuality, verdict, why) and a summary line.

Verdicts: same (the same set), equal (another set of equal ring bandwidth), better (more bandwidth, or served where the
peer gives up), worse. For a policy that does not ask for bandwidth (packed, spread), a poorer ring is equal if the set
serves the policy's own goal at least as well as the wanted one. Exit code 1 if any case is worse.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bench import peer_domains, peer_reader
from topology.choice import Choice, choose
from topology.device_requests import DeviceRequest, Policy
from topology.gangs.model import Order
from topology.model import DEVICES_MAX, Machine, machine, mask_of, positions_of
from topology.policies import POLICIES
from topology.profiles import profile, profile_names
from topology.quality import rate

NEAREST: Final[dict[str, tuple[Policy, str]]] = {
    "besteffort": (Policy.CONTIGUOUS, "best effort is contiguous"),
    "simple": (Policy.CONTIGUOUS, "no word for first-come order; contiguous is never poorer"),
    "topologyaware": (Policy.CONTIGUOUS, "topology-aware is contiguous"),
    "prefer": (Policy.CONTIGUOUS, "preferring a partition is contiguous"),
    "preferred": (Policy.CONTIGUOUS, "preferring a partition is contiguous"),
    "binpack": (Policy.PACKED, "binpack is packed"),
    "pack": (Policy.PACKED, "pack is packed"),
    "distributed": (Policy.SPREAD, "distributed is spread"),
    "restricted": (Policy.ISLAND, "restricted is island"),
    "guaranteed": (Policy.ISLAND, "guaranteed is island"),
    "honor": (Policy.ISLAND, "honouring partitions is island"),
    "required": (Policy.ISLAND, "required is island"),
}
VERDICTS: Final = ("same", "better", "equal", "worse")
SLACK: Final = 1e-6
WORDS: Final = frozenset(
    (
        *("id", "src", "note", "comment", "policy", "topology", "vendor", "available", "start", "required", "size"),
        *("count", "want", "sequence", "links", "pcie", "pci_only", "numa", "nvlink_generation", "nvlink_gen"),
        *("matrix", "nvswitch", "pcie_generation", "pcie_gen", "smp_GBps"),
    )
)
"""Fields of a case that are evaluated or can be ignored."""
_NUMBERED: Final = re.compile(
    r"(?:gpu|cuda|nvidia|device)?[-_: ]*([0-9]{1,4})(?:::[0-9]{1,4}|-([0-9]{1,4}))?", re.ASCII | re.IGNORECASE
)
"""A GPU by its number, a replica of one (3::0), or a range of them (0-7)."""


@dataclass(frozen=True, slots=True)
class CaseStep:
    """One request of a case: the free GPUs before it, the required ones, the size, and the sets that the peer may give.

    foreign: a required GPU is not one of the machine's. wants: None if the case names none."""

    free: int
    required: int
    foreign: bool
    size: int
    wants: tuple[tuple[int, ...], ...] | None


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    """Atoll's answer to a step, with both qualities (0 for nothing); serves: as well as the wanted set by the policy's
    own measure; note: why nothing was given, or why by another policy; givable: the wanted set is free, of the
    requested size and has all required GPUs (not checked in a sequence: the peer left other GPUs)."""

    want: tuple[int, ...] | None
    chosen: tuple[int, ...]
    wanted_quality: float
    chosen_quality: float
    serves: bool
    note: str
    givable: bool = True


def main(arguments: list[str]) -> int:
    """Run a file of cases; return 1 if any case is worse, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.peer_cases", description=__doc__)
    parser.add_argument("kind", choices=["device", "domain"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--order", choices=list(Order), default=Order.NEAREST, help="of right placements of a gang")
    options = parser.parse_args(arguments)
    try:
        lines = peer_reader.read_lines(options.file)
    except OSError as error:
        parser.exit(2, f"no cases can be read: {error}\n")
    if options.kind == "domain":
        rows = peer_domains.answers(lines, Order(options.order))
        return peer_reader.report(rows, noun="scenarios", verdicts=peer_domains.VERDICTS)
    return peer_reader.report(answers(lines), noun="cases", verdicts=VERDICTS)


def answers(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Return one answer per case; a case that cannot be read counts as worse, with the reason."""
    return peer_reader.answers(lines, lambda case, name: answer_case(case, name=name), _unreadable)


def _unreadable(name: str, why: str) -> dict[str, Any]:
    fields = ("wanted", "chosen", "wantedQuality", "chosenQuality")
    return {"id": name, **dict.fromkeys(fields), "verdict": "worse", "why": why}


def answer_case(case: dict[str, Any], *, name: str) -> dict[str, Any]:
    """Answer one case, a single request or a sequence. name: for a case without an id."""
    if not isinstance(case, dict):
        raise TypeError(f"a case is an object, not {type(case).__name__}")
    subject, named = _machine(case)
    policy, words = _policy(str(case.get("policy") or "besteffort"))
    unheard = ", ".join(sorted(set(case) - WORDS))
    words = "; ".join(filter(None, (words, named, f"not weighed: {unheard}" if unheard else "")))
    many = case.get("sequence") is not None
    outcomes = list(_play(subject, case, policy=policy) if many else [_single(subject, case, policy=policy)])
    verdict, reason = _verdict(outcomes, policy=policy)
    if verdict == "worse" and not all(one.givable for one in outcomes):
        verdict = "equal"
        reason = f"the wanted set is not free, of another size or without what is required; {reason}"
    wanted = [None if one.want is None else list(one.want) for one in outcomes]
    chosen = [list(one.chosen) for one in outcomes]
    count = max(len(outcomes), 1)
    return {
        "id": case.get("id", name),
        "wanted": wanted if many else wanted[0],
        "chosen": chosen if many else chosen[0],
        "wantedQuality": round(sum(one.wanted_quality for one in outcomes) / count, 4),
        "chosenQuality": round(sum(one.chosen_quality for one in outcomes) / count, 4),
        "verdict": verdict,
        "why": f"{words}; {reason}",
    }


def _machine(case: dict[str, Any]) -> tuple[Machine, str]:
    """The machine of a case, and a note if another replaces it."""
    topology = case.get("topology")
    told = topology if isinstance(topology, dict) else case
    links = topology if isinstance(topology, list) else _first_told(told, "links", "matrix")
    if links is None:
        if topology is None and not _gpus_named(case):
            raise ValueError("a case names its topology, its links or its GPUs")
        return _known_machine(case, str(topology or "without a name"))
    if not isinstance(links, list):
        raise TypeError(f"{links!r} is no list of rows of cells")
    given = machine(
        links,
        pcie=told.get("pcie", told.get("pci_only")),
        numa=told.get("numa"),
        nvlink_generation=told.get("nvlink_generation", told.get("nvlink_gen")),
        nvswitch=told.get("nvswitch", False),
        pcie_generation=told.get("pcie_generation", told.get("pcie_gen")),
        inter_socket_gbps=told.get("smp_GBps"),
        vendor=told.get("vendor", "nvidia"),
    )
    return given, ""


def _known_machine(case: dict[str, Any], name: str) -> tuple[Machine, str]:
    """The known machine of that name in any spelling, or the only one whose name contains it or is contained in it;
    else one with as many GPUs as the case names."""
    wanted = _letters(name)
    known = [one for one in profile_names() if _letters(one) == wanted]
    near = [one for one in profile_names() if wanted and (wanted in _letters(one) or _letters(one) in wanted)]
    if known or len(near) == 1:
        found = (known or near)[0]
        return profile(found).machine, "" if known else f"{name} is taken for {found}"
    count = min(_gpus_named(case), DEVICES_MAX)
    if not count:
        return profile(name).machine, ""
    cells = [["X" if row == column else "SYS" for column in range(count)] for row in range(count)]
    return machine(cells), f"no machine {name} is known; {count} GPUs joined alike stand for it"


def _gpus_named(case: dict[str, Any]) -> int:
    """Number of GPUs that a machine needs for all that a case names."""
    steps = [step for step in [case, *(case.get("sequence") or ())] if isinstance(step, dict)]
    lists = [_members(step.get(key)) for step in steps for key in ("available", "start", "required")]
    lists += [list(members) for step in steps for members in _wants(step.get("want")) or ()]
    highest = max((one for members in lists for one in members if isinstance(one, int)), default=-1)
    return max([highest + 1, *(_size(step) or 0 for step in steps)])


def _letters(text: str) -> str:
    return "".join(character for character in text.lower() if character.isalnum())


def _policy(name: str) -> tuple[Policy, str]:
    word = _letters(name)
    if word in NEAREST:
        return NEAREST[word]
    if word in list(Policy):
        return Policy(word), word
    if word.startswith("static"):
        return (
            Policy.CONTIGUOUS,
            "no word for fixed lists of sets; contiguous finds the same sets and serves more sizes",
        )
    return Policy.CONTIGUOUS, f"no word for {name}; nearest is contiguous"


def _single(subject: Machine, case: dict[str, Any], *, policy: Policy) -> CaseOutcome:
    free = _first_told(case, "available", "start")
    step = _step(subject, case, free=subject.full if free is None else _mask(subject, free))
    outcome = _outcome(subject, step, policy)
    if not outcome.want:
        return outcome
    mask = _mask(subject, outcome.want)
    whole = len(set(outcome.want)) == mask.bit_count() == step.size
    givable = whole and not mask & ~step.free and not step.required & ~mask and not step.foreign
    return replace(outcome, givable=givable)


def _play(subject: Machine, case: dict[str, Any], *, policy: Policy) -> Iterator[CaseOutcome]:
    """A sequence on one machine: each request sees what Atoll itself has left."""
    start = _first_told(case, "start", "available")
    free = subject.full if start is None else _mask(subject, start)
    for ask in case["sequence"]:
        outcome = _outcome(subject, _step(subject, ask, free=free), policy)
        free &= ~mask_of(outcome.chosen)
        yield outcome


def _step(subject: Machine, told: dict[str, Any], *, free: int) -> CaseStep:
    required = _members(told.get("required"))
    wants = _wants(told.get("want"))
    size = _size(told)
    return CaseStep(
        free=free,
        required=_mask(subject, required),
        foreign=not all(_is_position(subject, one) for one in required),
        size=size if size is not None else len(wants[0]) if wants else 0,
        wants=wants,
    )


def _first_told(case: dict[str, Any], *keys: str) -> object:
    return next((case[key] for key in keys if case.get(key) is not None), None)


def _size(told: dict[str, Any]) -> int | None:
    size = told["size"] if told.get("size") is not None else told.get("count")
    if size is None:
        return None
    if isinstance(size, bool) or int(size) != float(size):
        raise ValueError(f"a size is a whole number, not {size!r}")
    return int(size)


def _wants(told: object) -> tuple[tuple[int, ...], ...] | None:
    if told is None:
        return None
    sets = told if told and isinstance(told, list) and all(isinstance(one, list) for one in told) else [told]
    return tuple(tuple(map(int, _members(one))) for one in sets)


def _members(told: object) -> list[Any]:
    """GPUs as numbers, from 3, "3" or "GPU3", or several in one text; other values stay unchanged."""
    if told is None:
        return []
    parts = told.replace(",", " ").split() if isinstance(told, str) else told
    if not isinstance(parts, (list, tuple)):
        raise TypeError(f"{told!r} is no list of GPUs")
    found = [(part, _NUMBERED.fullmatch(part) if isinstance(part, str) else None) for part in parts]
    return [one for part, match in found for one in (_numbers(match) if match else (part,))]


def _numbers(match: re.Match[str]) -> range:
    first, last = int(match[1]), int(match[2] or match[1])
    return range(first, last + 1)


def _is_position(subject: Machine, told: object) -> bool:
    return isinstance(told, int) and 0 <= told < subject.count


def _mask(subject: Machine, told: object) -> int:
    """Mask of those that are GPUs of the machine."""
    return mask_of([one for one in _members(told) if _is_position(subject, one)])


def _outcome(subject: Machine, step: CaseStep, policy: Policy) -> CaseOutcome:
    chosen, note = _chosen(subject, step, policy)
    if not chosen and step.wants is not None and any(step.wants) and POLICIES[policy].one_island:
        chosen, _ = _chosen(subject, step, Policy.CONTIGUOUS)
        note = f"{note}, so by contiguous"
    want = _nearest_want(step.wants, chosen)
    qualities = _quality(subject, want or ()), _quality(subject, chosen)
    return CaseOutcome(want, chosen, *qualities, _serves(subject, step, policy, want=want, chosen=chosen), note)


def _nearest_want(wants: tuple[tuple[int, ...], ...] | None, chosen: tuple[int, ...]) -> tuple[int, ...] | None:
    if wants is None:
        return None
    return next((want for want in wants if sorted(want) == sorted(chosen)), wants[0])


def _chosen(subject: Machine, step: CaseStep, policy: Policy) -> tuple[tuple[int, ...], str]:
    if not 1 <= step.size <= DEVICES_MAX:
        return (), f"a set of {step.size} is no ask"
    if step.foreign:
        return (), "a required GPU is none of the machine's"
    answer = choose(subject, step.free, DeviceRequest(step.size, policy), required=step.required)
    return (answer.positions, "") if isinstance(answer, Choice) else ((), str(answer.reason))


def _serves(
    subject: Machine, step: CaseStep, policy: Policy, *, want: tuple[int, ...] | None, chosen: tuple[int, ...]
) -> bool:
    """True if the chosen set is no worse than the wanted one by the policy's own cost, if that is not bandwidth."""
    if POLICIES[policy].ranks_quality or not want or not chosen or len(set(want)) != step.size:
        return False
    costs = [
        choose(subject, step.free, DeviceRequest(step.size, policy), required=_mask(subject, members))
        for members in (want, chosen)
    ]
    return all(isinstance(one, Choice) for one in costs) and _cost(costs[1]) <= _cost(costs[0])


def _cost(answer: object) -> float:
    return answer.cost if isinstance(answer, Choice) else float("inf")


def _quality(subject: Machine, members: tuple[int, ...]) -> float:
    """Ring bandwidth relative to the best set of that size on the empty machine; 0 for a set that cannot be given."""
    inside = positions_of(_mask(subject, members))
    if len(inside) != len(set(members)):
        return 0.0
    if len(inside) < 2:
        return float(len(inside))
    best = choose(subject, subject.full, DeviceRequest(len(inside)))
    whole = rate(subject, best.positions).ring_gbps if isinstance(best, Choice) else 0.0
    return min(rate(subject, inside).ring_gbps / whole, 1.0) if whole else 0.0


def _verdict(outcomes: list[CaseOutcome], *, policy: Policy) -> tuple[str, str]:
    """Worse if a request was not served or the sum of qualities fell; better if it rose or more was served."""
    told = [one for one in outcomes if one.want is not None]
    note = next((one.note for one in outcomes if one.note), "")
    refused = next((one for one in told if one.want and not one.chosen), None)
    if refused is not None:
        return "worse", f"refused: {refused.note}"
    if not told:
        return "equal", f"no set is wanted{'; ' + note if note else ''}"
    if all(sorted(one.want or ()) == sorted(one.chosen) for one in told):
        return "same", f"both refuse: {note}" if note and not any(
            one.chosen for one in told
        ) else note or "the same set"
    if any(one.chosen and not one.want for one in told):
        return "better", "serves what the peer gives up on"
    gain = sum(one.chosen_quality - one.wanted_quality for one in told)
    if gain > SLACK:
        return "better", "more ring bandwidth"
    if gain >= -SLACK:
        return "equal", "equal ring bandwidth; what stays free decides"
    if all(one.serves or one.chosen_quality >= one.wanted_quality - SLACK for one in told):
        return "equal", f"{policy} does not ask for bandwidth, and the set serves its end as well"
    return "worse", "less ring bandwidth"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
