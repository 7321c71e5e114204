"""Runs gang scenarios from another scheduler's tests on Atoll: `python -m bench.peer_cases domain FILE.jsonl`.

In: one JSON object per line: levels, nodes, usage and pod sets, each with what the peer answers (want, want_fail); a
first line with `meta` explains the fields. Out: one JSON line per scenario (id, found, peerFound, valid, domains,
peerDomains, verdict, why) and a summary line. domains: of the requested level, summed over the pod sets.

`--order kueue` answers in the peer's own order (not for balanced requests and repairs).

Verdicts: same (the same places, or both refuse), equal (other places, as many domains), better (fewer domains, or valid
places where the peer gives up), worse (refused, invalid, or more domains), unsupported (several flavors). Exit code 1
when any scenario is worse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from bench import peer_reader
from bench.peer_scenarios import AskedPodSet, Scenario, Unsupported, scenario_of
from topology.gangs.model import Gang, Mode, Order, PlacedMember, PlacementRefusal, PodSet
from topology.gangs.repair import replace_lost
from topology.gangs.search import place
from topology.gangs.snapshot import HostSnapshot

VERDICTS: Final = ("same", "better", "equal", "worse", "unsupported")
Places = dict[str, dict[str, int]]
"""Per pod set, members per place."""


def answers(lines: Iterable[str], order: Order = Order.NEAREST) -> Iterator[dict[str, Any]]:
    """Return one answer per scenario in one of the orders; an unreadable one counts as worse, with the reason."""
    defaults: dict[str, Any] = {}

    def answer(case: Any, name: str) -> dict[str, Any] | None:  # noqa: ANN401 - whatever JSON may hold
        if "meta" in case:
            defaults.clear()
            defaults.update(case.get("gate_defaults") or {})
            return None
        return answer_case({"id": name, **_without_nulls(case)}, defaults, order)

    return peer_reader.answers(lines, answer, lambda name, why: _row(name, "worse", why))


def _without_nulls(value: Any) -> Any:  # noqa: ANN401 - whatever JSON may hold
    """Return the value without null fields."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def answer_case(case: Mapping[str, Any], defaults: Mapping[str, Any], order: Order = Order.NEAREST) -> dict[str, Any]:
    """Answer one scenario and compare."""
    peer_found = all(row.get("want") is not None for row in case["podsets"])
    try:
        scenario = scenario_of(case, defaults)
    except Unsupported as reason:
        return {**_row(str(case["id"]), "unsupported", str(reason)), "peerFound": peer_found}
    places, why = _answer(scenario, order)
    faults = problems(scenario, places) if places is not None else []
    ours = _domains(scenario, places) if places is not None else None
    peers = _domains(scenario, _wanted(scenario)) if peer_found else None
    verdict, reason = _verdict(scenario, places, faults, ours, peers)
    odd = f"; unknown fields: {', '.join(scenario.odd)}" if scenario.odd else ""
    return {
        "id": scenario.id,
        "found": places is not None,
        "peerFound": peer_found,
        "valid": not faults,
        "domains": ours,
        "peerDomains": peers,
        "verdict": verdict,
        "why": "; ".join(text for text in (reason, why, *faults) if text) + odd,
    }


def _row(name: str, verdict: str, why: str) -> dict[str, Any]:
    unknown = dict.fromkeys(("found", "peerFound", "valid", "domains", "peerDomains"))
    return {"id": name, **unknown, "verdict": verdict, "why": why}


def _verdict(
    scenario: Scenario, places: Places | None, faults: list[str], ours: int | None, peers: int | None
) -> tuple[str, str]:
    if faults:
        return "worse", "invalid"
    if places is None:
        return ("worse", "refused") if scenario.peer_found else ("same", "both refuse")
    if peers is None or ours is None:
        return "better", "valid places where the peer gives up"
    if ours != peers:
        return ("better", "fewer domains") if ours < peers else ("worse", "more domains")
    if places == _wanted(scenario):
        return "same", "the same places"
    return "equal", "other places in as many domains"


def _answer(scenario: Scenario, order: Order) -> tuple[Places | None, str]:
    """Places for all pod sets, or None and why."""
    problem = next((asked.problem for asked in _leading(scenario) if asked.problem), "")
    if problem:
        return None, problem
    if scenario.lost and scenario.existing:
        return _repaired(scenario)
    answer = place(Gang(tuple(_grouped(scenario))), scenario.snapshot, order=order)
    if isinstance(answer, PlacementRefusal):
        return None, answer.text
    names = {f"{number}": asked.pod_set.name for number, asked in enumerate(scenario.asked)}
    places = {names[row.pod_set]: dict(Counter(member.host for member in row.members)) for row in answer.assignments}
    return places, ""


def _leading(scenario: Scenario) -> list[AskedPodSet]:
    """Pod sets whose own request counts: a leader is placed by its workers' request."""
    largest: dict[str, AskedPodSet] = {}
    for asked in scenario.asked:
        other = largest.get(asked.group)
        if not asked.group or other is None or asked.pod_set.count > other.pod_set.count:
            largest[asked.group or asked.pod_set.name] = asked
    return list(largest.values())


def _grouped(scenario: Scenario) -> Iterator[PodSet]:
    """Pod sets with numbers as names, because names may be empty or repeated."""
    for number, asked in enumerate(scenario.asked):
        one = asked.pod_set
        yield PodSet(
            name=f"{number}",
            count=one.count,
            needs=one.needs,
            request=one.request,
            excluded=one.excluded,
            preferences=one.preferences,
            group=asked.group,
        )


def _repaired(scenario: Scenario) -> tuple[Places | None, str]:
    """Place lost members anew, the others stay; first beside them, else as if they used nothing."""
    if scenario.resized:
        return _replaced(scenario, _beside_existing(scenario))
    if scenario.kept:
        return {name: dict(rows) for name, rows in scenario.existing.items()}, "kept: its only pod is not moved"
    gone = [
        host
        for rows in scenario.existing.values()
        for host, _ in rows
        if host not in scenario.snapshot.index and host not in scenario.lost
    ]
    if gone:
        return None, f"the assignment names hosts that are no longer there: {', '.join(gone)}"
    counted, why = _replaced(scenario, _beside_existing(scenario))
    uncounted, text = _replaced(scenario, scenario.snapshot)
    if counted is None or uncounted is None:
        return (counted, why) if counted is not None else (uncounted, text)
    nearer = _domains(scenario, counted) <= _domains(scenario, uncounted)
    return (counted, why) if nearer else (uncounted, text)


def _beside_existing(scenario: Scenario) -> HostSnapshot:
    changed = []
    needs = {asked.pod_set.name: asked.pod_set.needs for asked in scenario.asked}
    used: dict[str, Counter[str]] = {}
    for name, rows in scenario.existing.items():
        for host, count in rows:
            if host in scenario.snapshot.index and host not in scenario.lost:
                used.setdefault(host, Counter()).update({key: need * count for key, need in needs[name].items()})
    for host, amounts in used.items():
        before = scenario.snapshot.hosts[scenario.snapshot.index[host]]
        left = {**before.free, **{key: before.free.get(key, 0) - amount for key, amount in amounts.items()}}
        changed.append(type(before)(before.name, before.path, left))
    return scenario.snapshot.with_hosts(changed)


def _replaced(scenario: Scenario, snapshot: HostSnapshot) -> tuple[Places | None, str]:
    places: Places = {}
    for asked in scenario.asked:
        rows = sorted(
            scenario.existing.get(asked.pod_set.name, ()), key=lambda row: scenario.paths.get(row[0], (row[0],))
        )
        hosts = [host for host, count in rows for _ in range(count)]
        members = [PlacedMember(rank, host) for rank, host in enumerate(hosts)]
        repair = replace_lost(asked.pod_set, snapshot, members, scenario.lost)
        if repair.refusals:
            return None, repair.refusals[0].text
        moved = {member.rank: member.host for member in repair.members}
        places[asked.pod_set.name] = dict(Counter(moved.get(rank, host) for rank, host in enumerate(hosts)))
    return places, ""


def _wanted(scenario: Scenario) -> Places:
    host_only = scenario.levels[-1] == "host"
    return {
        asked.pod_set.name: {values[-1] if host_only else "/".join(values): count for values, count in asked.want or ()}
        for asked in scenario.asked
    }


def _domains(scenario: Scenario, places: Places) -> int:
    """Domains of the requested level, summed over the pod sets."""
    return sum(
        len(
            {
                scenario.paths.get(host, (host,))[: asked.level + 1]
                for host, count in places[asked.pod_set.name].items()
                if count
            }
        )
        for asked in scenario.asked
    )


def problems(scenario: Scenario, places: Places) -> list[str]:
    """Constraints of the scenario that a placement violates, checked without the search's code."""
    found: list[str] = []
    if scenario.kept:
        return found
    repaired = bool(scenario.lost and scenario.existing)
    used: dict[str, Counter[str]] = {}
    for asked in scenario.asked:
        one, there = asked.pod_set, places[asked.pod_set.name]
        before = dict(scenario.existing.get(one.name, ())) if repaired else {}
        if sum(there.values()) != (sum(before.values()) if repaired else one.count):
            found.append(f"{one.name}: {sum(there.values())} of {one.count} placed")
        for host, count in there.items():
            kept = before.get(host, 0) if host not in scenario.lost else 0
            if count < kept:
                found.append(f"{one.name}: members were moved from {host}")
            if count > kept:
                used.setdefault(host, Counter()).update({key: need * (count - kept) for key, need in one.needs.items()})
                found += [f"{one.name}: {host} is out: {one.excluded[host]}"] if host in one.excluded else []
        found += _request_problems(scenario, asked, there)
    for host, amounts in used.items():
        free = scenario.snapshot.hosts[scenario.snapshot.index[host]].free
        found += [f"{host}: {key} over capacity" for key, amount in amounts.items() if amount > free.get(key, 0)]
    return found + _group_problems(scenario, places)


def _request_problems(scenario: Scenario, asked: AskedPodSet, there: Mapping[str, int]) -> list[str]:
    found: list[str] = []
    request = asked.pod_set.request
    is_leader = asked not in _leading(scenario)
    if request.mode is Mode.REQUIRED and len({scenario.paths[host][: asked.level + 1] for host in there}) > 1:
        found.append(f"{asked.pod_set.name}: more than one {request.level}")
    for part in () if is_leader else request.slices:
        level = scenario.levels.index(part.level)
        sums: Counter[tuple[str, ...]] = Counter()
        for host, count in there.items():
            sums[scenario.paths[host][: level + 1]] += count
        if any(count % part.size for count in sums.values()):
            found.append(f"{asked.pod_set.name}: a slice of {part.size} is torn over several of {part.level}")
    return found


def _group_problems(scenario: Scenario, places: Places) -> list[str]:
    """Problem if a group's leader is outside the domain that its workers require."""
    found: list[str] = []
    for leading in _leading(scenario):
        if leading.group and leading.pod_set.request.mode is Mode.REQUIRED:
            hosts = {
                host for asked in scenario.asked if asked.group == leading.group for host in places[asked.pod_set.name]
            }
            if len({scenario.paths[host][: leading.level + 1] for host in hosts}) > 1:
                found.append(f"group {leading.group}: more than one {leading.pod_set.request.level}")
    return found
