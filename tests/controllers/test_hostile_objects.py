"""The controllers' loops among the worst objects that the API server stores: they act on none, and go on for others."""

import copy
from pathlib import Path
from typing import Any

import pytest

from atoll.api import names
from tests.builders import claim_json, pod_json
from tests.controllers.gang_harness import GANGS, GATES, cluster, settled, term
from tests.controllers.harness import PODS, strip_version
from tests.worst_inputs import PODS as WORST

pytestmark = pytest.mark.asyncio

CLAIMS = "/apis/gpu.scheduling/v1/namespaces/team/gpuclaims"
UNREADABLE: dict[str, Any] = {"podSets": [{"name": "w", "count": "many"}], "topology": {"mode": 7}}


async def test_loops_act_on_no_hostile_object_and_go_on_for_others(tmp_path: Path) -> None:
    """Waiting pods with GPUs that abuse each field, gated members of a gang of nonsense, and a claim of nonsense."""
    async with cluster("n1") as made:
        written = {}
        for number, parts in enumerate(WORST.values()):
            for gang in ("", "nonsense"):
                name = f"hostile-{number}-{gang or 'single'}"
                gates = {"schedulingGates": GATES} if gang else {}
                notes = {names.GANG: gang} if gang else {names.CLAIM: "nonsense"}
                body = strip_version(pod_json(name, gpus=64, annotations=notes, **gates))
                for section, fields in copy.deepcopy(parts).items():
                    for key, value in fields.items():
                        merged = {**value, **notes} if key == "annotations" else value
                        body.setdefault(section, {})[key] = merged
                written[name] = made.server.put(f"{PODS}/{name}", body)["metadata"]["resourceVersion"]
        made.server.put(f"{GANGS}/nonsense", {"metadata": {"name": "nonsense"}, "spec": UNREADABLE})
        made.server.put(f"{CLAIMS}/nonsense", {**claim_json("nonsense"), "spec": {"devices": {"count": -1}}})
        async with term(made, tmp_path) as running:
            made.add_gang("g", 2)
            for number in range(2):
                made.add_member("g", number)
            await settled(running, lambda: made.held() == 8 and not made.is_gated("g-0") and not made.is_gated("g-1"))
            running.resync()
            await settled(running, lambda: made.held() == 8)

        assert {name: made.pod(name)["metadata"]["resourceVersion"] for name in written} == written
        assert made.gang("nonsense")["spec"] == UNREADABLE
