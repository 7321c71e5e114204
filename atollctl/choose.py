"""`atoll choose`: the GPUs of a machine that Atoll would give, their quality, and the best possible set.

Needs no cluster. Status 1 if no set fits, 2 and one sentence for invalid input. topology.choice decides, as in the
extender.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from atollctl.drawing import HEADING, REMARK, Line, print_lines
from atollctl.output import TableOption
from atollctl.topo import STATUS_BAD_INPUT, FromFile, Model, ProfileName
from atollctl.topo_source import InputError, MachineSource, read_offline
from topology.choice import Choice, ChoiceRefusal, choose, would_ever_fit
from topology.device_requests import DeviceRequest, Interconnect, Policy, gpus
from topology.errors import DeviceRequestError
from topology.model import DEVICES_MAX, mask_of
from topology.quality import rate

STATUS_REFUSED = 1


def choose_gpus(
    count: Annotated[int, typer.Option(help="Number of GPUs.")],
    from_file: FromFile = None,
    profile_name: ProfileName = None,
    model: Model = "",
    free: Annotated[str | None, typer.Option(help="Free GPUs, such as 0,1,3; all by default.")] = None,
    required: Annotated[str, typer.Option(help="GPUs that the set must contain, such as 4.")] = "",
    policy: Annotated[Policy, typer.Option(help="Arrangement of the GPUs.")] = Policy.CONTIGUOUS,
    interconnect: Annotated[Interconnect, typer.Option(help="Links that must join every pair.")] = Interconnect.ANY,
    min_bandwidth: Annotated[float, typer.Option(help="Ring bandwidth that the set must reach, in GB/s.")] = 0.0,
    output: TableOption = "table",
) -> None:
    """Show the GPUs of a machine that Atoll would give, and why."""
    try:
        ask = ask_of(count, policy=policy, interconnect=interconnect, min_bandwidth_gbps=min_bandwidth)
        must_hold = gpu_numbers(required, option="--required")
        source = read_offline(from_file, profile_name, model)
        given = source.ids if free is None else gpu_numbers(free, option="--free")
        found = answer(source, ask, free=given, required=must_hold)
    except InputError as error:
        typer.echo(f"cannot choose: {error}", err=True)
        raise typer.Exit(STATUS_BAD_INPUT) from error
    if output == "json":
        typer.echo(json.dumps(found.as_json(), indent=2))
    else:
        print_lines((*answer_lines(found), *(((remark, REMARK),) for remark in source.remarks)))
    if not found.devices:
        raise typer.Exit(STATUS_REFUSED)


NUMBERS_LENGTH_MAX: Final = 1024
GOALS: Final[dict[Policy, str]] = {
    Policy.CONTIGUOUS: "the best-connected set that is free",
    Policy.ISLAND: "the best-connected set that is free inside one island",
    Policy.PACKED: "links do not count; what stays free is worth the most",
    Policy.SPREAD: "the set that is spread widest over islands and NUMA nodes",
}


@dataclass(frozen=True, slots=True)
class ChooseAnswer:
    """devices: GPU numbers, none if refused; ring_gbps: None if the generation is unknown; relative_quality: 0 to 1
    against the best set of that size on the empty machine, None if refused; best: that set, for people."""

    devices: tuple[int, ...]
    ring_gbps: float | None
    relative_quality: float | None
    bounded: bool
    why: str
    ring: str = ""
    best: str = ""

    def as_json(self) -> dict[str, Any]:
        """The fields for programs."""
        return {
            "devices": list(self.devices),
            "ringGBps": self.ring_gbps,
            "relativeQuality": self.relative_quality,
            "bounded": self.bounded,
            "why": self.why,
        }


def answer(
    source: MachineSource, ask: DeviceRequest, *, free: tuple[int, ...], required: tuple[int, ...] = ()
) -> ChooseAnswer:
    """Choose and explain. free, required: GPU numbers. Raises InputError."""
    if missing := [number for number in required if number not in free]:
        raise InputError(f"GPU {missing[0]} is required and not free; add it to --free")
    if len(required) > ask.count:
        raise InputError(f"{len(required)} GPUs are required and only {ask.count} asked for; raise --count")
    if ask.count > 1 and ask.min_bandwidth_gbps and not source.rates_known:
        raise InputError("GB/s cannot be judged while the generation of the links is unknown; name the GPUs by --model")
    positions = {number: position for position, number in enumerate(source.ids)}
    if strange := [number for number in free if number not in positions]:
        raise InputError(f"the machine has no GPU {strange[0]}; it has {_list(source.ids)}")
    mask = mask_of([positions[number] for number in free])
    chosen = choose(source.machine, mask, ask, required=mask_of([positions[number] for number in required]))
    if isinstance(chosen, ChoiceRefusal):
        return ChooseAnswer(
            (), None, None, bounded=False, why=_refused(source, ask, chosen, free=free, required=required)
        )
    return _described(source, ask, chosen, required=required)


def gpu_numbers(text: str, *, option: str) -> tuple[int, ...]:
    """GPU numbers from `0,1,3`. Raises InputError."""
    if len(text) > NUMBERS_LENGTH_MAX:
        raise InputError(f"{option} is longer than {NUMBERS_LENGTH_MAX} characters")
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    if odd := [word for word in words if not (word.isascii() and word.isdigit())]:
        raise InputError(f"{option} needs GPU numbers with commas between them, such as 0,1,3, got {odd[0]!r}")
    numbers = tuple(int(word) for word in words)
    if twice := [number for number in numbers if numbers.count(number) > 1]:
        raise InputError(f"{option} names GPU {twice[0]} twice")
    return numbers


def ask_of(count: int, *, policy: Policy, interconnect: Interconnect, min_bandwidth_gbps: float) -> DeviceRequest:
    """The request from the options. Raises InputError."""
    if not 1 <= count <= DEVICES_MAX:
        raise InputError(f"--count must be 1 to {DEVICES_MAX}, got {count}")
    try:
        return DeviceRequest(count, policy=policy, interconnect=interconnect, min_bandwidth_gbps=min_bandwidth_gbps)
    except DeviceRequestError as error:
        raise InputError(f"--min-bandwidth must be a number of GB/s, zero or more, got {min_bandwidth_gbps}") from error


def answer_lines(found: ChooseAnswer) -> tuple[Line, ...]:
    """The answer for people."""
    if not found.devices:
        return (((f"No set fits: {found.why}", REMARK),),)
    rows = [("GPU" if len(found.devices) == 1 else "GPUs", ", ".join(map(str, found.devices)))]
    if found.ring:
        rows += [("Ring", found.ring), ("Quality", f"{found.relative_quality:.0%} of the best set of that size")]
        rows.append(("Best", f"{found.best}, when all are free"))
    rows.append(("Why", found.why))
    return tuple(((f"{name:<9}", HEADING), (text, "")) for name, text in rows)


def _described(source: MachineSource, ask: DeviceRequest, chosen: Choice, *, required: tuple[int, ...]) -> ChooseAnswer:
    best = choose(source.machine, source.machine.full, DeviceRequest(ask.count))
    assert isinstance(best, Choice)
    several = ask.count > 1
    return ChooseAnswer(
        devices=source.ids_of(chosen.positions),
        ring_gbps=round(chosen.ring_gbps, 3) if source.rates_known else None,
        relative_quality=chosen.relative_quality,
        bounded=chosen.bounded,
        why=_reasons(source, ask, chosen, best, required=required),
        ring=source.bandwidth(chosen.ring_gbps) if several else "",
        best=_set_text(source, best) if several else "",
    )


def _reasons(
    source: MachineSource, ask: DeviceRequest, chosen: Choice, best: Choice, *, required: tuple[int, ...]
) -> str:
    goal = GOALS[ask.policy]
    if ask.count == 1 and ask.policy is not Policy.SPREAD:
        goal = "one GPU needs no links, so the one whose loss harms later pods least"
    parts = [goal + (f" and holds {_gpus(required)}" if required else "")]
    inside = "inside" if len(chosen.islands) == 1 else "across"
    parts.append(f"it lies {inside} {_list(chosen.islands)}")
    if ask.count > 1:
        linked = rate(source.machine, chosen.positions).linked
        parts.append("its ring runs over NVLink or xGMI alone" if linked else "its ring needs PCIe")
        if chosen.relative_quality >= 1:
            parts.append("no set of that size is better even on the empty machine")
        else:
            parts.append(f"on the empty machine the best would be {_set_text(source, best)}")
    if chosen.bounded:
        parts.append("a limit of the search was hit, so a better set may exist")
    if not source.rates_known:
        parts.append("the generation of the links is unknown, so bandwidths are only relative")
    return "; ".join(parts)


def _refused(
    source: MachineSource,
    ask: DeviceRequest,
    refusal: ChoiceRefusal,
    *,
    free: tuple[int, ...],
    required: tuple[int, ...],
) -> str:
    holding = f" with {_gpus(required)}" if required else ""
    facts = f"{refusal.reason}: asked for {gpus(ask.count)}{holding}, {len(free)} of {source.machine.count} free"
    if would_ever_fit(source.machine, ask) is not None:
        return f"{facts}; it would not fit the empty machine either"
    best = choose(source.machine, source.machine.full, ask)
    assert isinstance(best, Choice)
    return f"{facts}; the empty machine would give {_set_text(source, best)}"


def _set_text(source: MachineSource, chosen: Choice) -> str:
    ring = f" with a ring of {source.bandwidth(chosen.ring_gbps)}" if len(chosen.positions) > 1 else ""
    return f"{_gpus(source.ids_of(chosen.positions))}{ring}"


def _gpus(numbers: tuple[int, ...]) -> str:
    return f"GPU{'s' if len(numbers) > 1 else ''} {_list(numbers)}"


def _list(items: tuple[int, ...] | tuple[str, ...]) -> str:
    return ", ".join(str(item) for item in items)
