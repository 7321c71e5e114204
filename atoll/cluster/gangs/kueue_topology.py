"""Topology requests in Kueue's annotations, for pods that Kueue does not place itself.

Returns a frozen KueueTopologyRequest per member, or the problem as text. A GpuGang that is created for pods takes over
the request; an existing GpuGang must not contradict it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from atoll.api.forms import message_of
from atoll.api.gangs import GangTopologyRequest, GpuGangSpec, TopologyMode
from atoll.api.kept import KUEUE_PODSET, KUEUE_WORKLOAD
from atoll.api.topologies import HOSTNAME
from atoll.cluster.objects import Pod

PREFIX: Final = KUEUE_PODSET
MODES: Final = {f"{PREFIX}{mode}-topology": mode for mode in ("required", "preferred", "unconstrained")}
SLICE_LEVEL: Final = f"{PREFIX}slice-required-topology"
SLICE_SIZE: Final = f"{PREFIX}slice-size"
GROUP: Final = f"{PREFIX}group-name"
LEVELS: Final = (f"{PREFIX}required-topology", f"{PREFIX}preferred-topology", SLICE_LEVEL)
"""Annotations whose value is a topology level."""
KUEUE_ANNOTATIONS: Final = (*MODES, SLICE_LEVEL, SLICE_SIZE, GROUP)
"""Annotations of a pod that request a topology for its pod set."""
_MANAGED: Final = ("kueue.x-k8s.io/managed", "kueue.x-k8s.io/podset")


@dataclass(frozen=True, slots=True)
class KueueTopologyRequest:
    """The topology and group that the pods of a pod set ask for; None and empty if they ask for none."""

    topology: GangTopologyRequest | None = None
    group: str = ""

    def fields(self) -> dict[str, Any]:
        """Return the equivalent fields of a GpuGang's pod set."""
        topology = self.topology.model_dump(mode="json", by_alias=True, exclude_defaults=True) if self.topology else {}
        asked = {"topology": {"mode": self.topology.mode.value, **topology}} if self.topology is not None else {}
        return {**asked, **({"group": self.group} if self.group else {})}


def is_placed_by_kueue(pod: Pod) -> bool:
    """Return whether Kueue manages the pod or has chosen its host: then Kueue handles the annotations."""
    return (
        any(label in pod.metadata.labels for label in _MANAGED)
        or KUEUE_WORKLOAD in pod.metadata.annotations
        or HOSTNAME in (pod.spec.node_selector or {})
    )


def kueue_request_of(pod: Pod) -> KueueTopologyRequest | str:
    """Return the pod's topology request, or the problem with its annotations."""
    asked = {key: value for key in KUEUE_ANNOTATIONS if (value := pod.metadata.annotations.get(key)) is not None}
    if not asked or is_placed_by_kueue(pod):
        return KueueTopologyRequest()
    modes = [key for key in MODES if key in asked and not (MODES[key] == "unconstrained" and asked[key] != "true")]
    if len(modes) > 1:
        return f"annotations {modes[0]} and {modes[1]} contradict each other; keep one"
    if (SLICE_LEVEL in asked) != (SLICE_SIZE in asked):
        return f"annotations {SLICE_LEVEL} and {SLICE_SIZE} belong together; set both or neither"
    try:
        return KueueTopologyRequest(_topology(asked, modes), asked.get(GROUP, ""))
    except ValidationError as error:
        (first, *_) = error.errors(include_url=False)
        return f"annotations {', '.join(sorted(asked))} cannot be read: {message_of(first)[:200]}"


def contradiction(pod: Pod, spec: GpuGangSpec, name: str) -> str:
    """Return how the pod's annotations differ from its pod set in the GpuGang; empty if they agree."""
    wish = kueue_request_of(pod)
    if isinstance(wish, str):
        return f"pod {pod.metadata.name}: {wish}"
    pod_set = next((one for one in spec.pod_sets if one.name == name), None)
    if pod_set is None or wish == KueueTopologyRequest():
        return ""
    alone = spec.topology if len(spec.pod_sets) == 1 else None
    said = KueueTopologyRequest(spec.topology_of(pod_set) or alone, pod_set.group or "")
    if _placed_alike(wish, said, is_led=pod_set.group is not None and pod_set.count == 1):
        return ""
    return (
        f"pod {pod.metadata.name} asks in Kueue's annotations for {words(wish)}, and pod set {name} of the GpuGang for "
        f"{words(said)}; remove the annotations, or set the same in the GpuGang"
    )


def words(wish: KueueTopologyRequest) -> str:
    """Return a wish as short text: required example.com/rack, slices of 4 at kubernetes.io/hostname, group a."""
    asked = wish.topology
    parts = [f"{asked.mode.value} {asked.level or ''}".strip()] if asked is not None else ["no topology"]
    if asked is not None:
        parts += ["balanced"] if asked.balanced else []
        parts += [f"slices of {part.size} at {part.level}" for part in asked.slices]
    return ", ".join([*parts, *([f"group {wish.group}"] if wish.group else [])])


def _topology(asked: Mapping[str, str], modes: list[str]) -> GangTopologyRequest | None:
    if not modes and SLICE_LEVEL not in asked:
        return None
    mode = MODES[modes[0]] if modes else TopologyMode.UNCONSTRAINED.value
    return GangTopologyRequest.model_validate(
        {
            "mode": mode,
            "level": asked[modes[0]] if mode != TopologyMode.UNCONSTRAINED.value else None,
            "slices": [{"level": asked[SLICE_LEVEL], "size": asked[SLICE_SIZE]}] if SLICE_LEVEL in asked else [],
        }
    )


def _placed_alike(wish: KueueTopologyRequest, said: KueueTopologyRequest, *, is_led: bool) -> bool:
    """Return whether the GpuGang says at least what the annotations ask for. A leader has no slices."""
    asked, known = wish.topology, said.topology
    if wish.group not in ("", said.group):
        return False
    if asked is None or (asked.mode is TopologyMode.UNCONSTRAINED and not asked.slices):
        return True
    if known is None or (asked.level is not None and (asked.mode, asked.level) != (known.mode, known.level)):
        return False
    return is_led or not asked.slices or asked.slices[0] in known.slices
