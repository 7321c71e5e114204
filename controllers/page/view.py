"""What the page shows, as JSON that changes only where the cluster does.

Each node is encoded once. A watcher who has the last view is sent only the nodes that differ.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from atoll.cluster.gangs.membership import gang_key
from atoll.cluster.gangs.times import seconds_of
from atoll.cluster.objects import Pod
from atoll.explain.decision import IndexedSnapshot
from atoll.explain.explanation import explain
from atoll.explain.gang_explanation import explain_gang
from atoll.explain.gang_index import index_gangs
from atoll.explain.gang_wording import domain_text, gang_json
from atoll.explain.overview import Gpu, IslandLine, NodeLine, Overview, WaitingLine
from atoll.explain.wording import explanation_json, group_text

WAITING_MAX: Final = 200
"""Waiting pods that are shown, the longest first; the others are counted."""
GROUPS_MAX: Final = 12
NODES_NAMED_MAX: Final = 4
PROPOSALS_MAX: Final = 24


@dataclass(frozen=True, slots=True)
class PageView:
    """One overview, encoded. nodes: JSON by name; waiting: JSON of the list; counts: GPUs by state."""

    taken_at: str
    nodes: Mapping[str, bytes] = field(default_factory=dict)
    waiting: bytes = b"[]"
    waiting_count: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)


def view_of(seen: Overview) -> PageView:
    """Encode an overview."""
    counts = Counter(gpu.state for node in seen.nodes for gpu in node.gpus)
    taken = seconds_of(seen.taken_at) or 0.0
    return PageView(
        taken_at=seen.taken_at,
        nodes={node.node: msgspec.json.encode(_node(node)) for node in seen.nodes},
        waiting=msgspec.json.encode([_waiting(row, taken) for row in seen.waiting[:WAITING_MAX]]),
        waiting_count=len(seen.waiting),
        counts=dict(sorted(counts.items())),
    )


def view_changes(before: PageView | None, now: PageView) -> bytes | None:
    """Return what to tell somebody who was told `before`: all of it after nothing, None where they are equal."""
    old: Mapping[str, bytes] = before.nodes if before is not None else {}
    changed = [text for name, text in now.nodes.items() if old.get(name) != text]
    gone = [name for name in old if name not in now.nodes]
    is_same_list = before is not None and (before.waiting, before.waiting_count) == (now.waiting, now.waiting_count)
    if before is not None and is_same_list and not changed and not gone:
        return None
    told: dict[str, Any] = {
        "takenAt": now.taken_at,
        "whole": before is None,
        "counts": now.counts,
        "nodes": [msgspec.Raw(text) for text in changed],
        "gone": gone,
    }
    if not is_same_list:
        told |= {"waiting": msgspec.Raw(now.waiting), "waitingCount": now.waiting_count}
    return msgspec.json.encode(told)


def explanation_of(scene: IndexedSnapshot, pod: Pod) -> bytes:
    """Return why a pod waits and what would help, of its gang where it belongs to one, cut to what people read."""
    key = gang_key(pod)
    gang = scene.snapshot.gang(*key) if key is not None else None
    if gang is not None:
        told = explain_gang(index_gangs(scene), gang)
        plain = gang_json(told, scene)
        groups = [{"text": domain_text(fit), "nodes": []} for fit in told.domains]
    else:
        plain = explanation_json(explain(scene, pod), scene, pod)
        groups = [_group(group) for group in plain["groups"]]
    return msgspec.json.encode(
        {
            "subject": f"gang {plain['gang']}" if gang is not None else f"pod {plain['pod']}",
            "state": plain["state"],
            "headline": plain["headline"],
            "asked": plain.get("asked", ""),
            "groups": groups[:GROUPS_MAX],
            "groupsLeftOut": max(0, len(groups) - GROUPS_MAX),
            "proposals": [_proposal(one) for one in plain["proposals"][:PROPOSALS_MAX]],
            "helpless": list(plain["helpless"].values()),
            "cut": plain["searchCut"],
        }
    )


def _proposal(plain: Mapping[str, Any]) -> dict[str, Any]:
    """A pod's proposal says on which GPUs it would lie; a gang's names many nodes in its text."""
    return {"text": plain["text"], "node": plain.get("node", ""), "deviceIds": plain.get("deviceIds", [])}


def _group(plain: Mapping[str, Any]) -> dict[str, Any]:
    nodes = plain["nodes"]
    more = f"and {len(nodes) - NODES_NAMED_MAX} more" if len(nodes) > NODES_NAMED_MAX else ""
    named = [f"{one['node']}: {one['detail']}" if one["detail"] else one["node"] for one in nodes[:NODES_NAMED_MAX]]
    return {
        "text": group_text(len(nodes), plain["standing"], plain["reason"], plain["others"]),
        "nodes": [*named, more] if more else named,
    }


def _node(node: NodeLine) -> dict[str, Any]:
    return {
        "name": node.node,
        "models": node.models,
        "silent": node.silence,
        "closed": node.closed,
        "islands": [_island(island) for island in node.islands],
    }


def _island(island: IslandLine) -> dict[str, Any]:
    return {"name": island.name, "kind": island.kind, "gpus": [_gpu(gpu) for gpu in island.gpus]}


def _gpu(gpu: Gpu) -> dict[str, Any]:
    told: dict[str, Any] = {"id": gpu.id, "model": gpu.model, "state": gpu.state}
    if gpu.reason:
        told["reason"] = gpu.reason
    if gpu.holders:
        told["holders"] = gpu.holders
    return told


def _waiting(row: WaitingLine, taken_seconds: float) -> dict[str, Any]:
    """Since when instead of how long: that does not change between views."""
    since = round(taken_seconds - row.waits_seconds) if math.isfinite(row.waits_seconds) else None
    return {"pod": row.pod, "asked": row.asked, "since": since, "reason": row.reason}
