"""What a job that waits for its topology is offered."""

import json
from typing import Any

import pytest

from atoll.jobs.documents import parse_job
from atoll.jobs.fitting import ExpectedEnd
from atoll.jobs.model import Job
from atoll.jobs.relaxing import offer_of
from atoll.jobs.settings import RenderSettings
from atoll.jobs.words import TopologyConstraint
from tests.explain.situations import holder, situation

NVLINK, SAME_NODE, NONE = TopologyConstraint.NVLINK, TopologyConstraint.SAME_NODE, TopologyConstraint.NONE


def job(topology: TopologyConstraint, gpus: int, **fields: Any) -> Job:
    """Return a training that asks for a topology."""
    document = {
        "name": "tune",
        "job_type": "training",
        "namespace": "team",
        "ext_ml_gpu_count": gpus,
        "container": {"image": "busybox:1"},
        "policy": {"topology": topology},
    }
    parsed = parse_job(json.dumps(document | fields).encode())
    assert parsed.job is not None, parsed.problems
    return parsed.job


SCATTERED = situation(
    {"n1": {"profile": "azure-nc96ads-a100-v4"}}, [holder("a", "n1", 0), holder("b", "n1", 2)]
).snapshot
"""Two pairs of GPUs joined by NVLink, and one of each pair is held."""
ENDS = [ExpectedEnd(600, frozenset(pod.metadata.uid for pod in SCATTERED.pods))]


@pytest.mark.parametrize(
    ("topology", "gpus", "suggested", "saved_seconds", "reason"),
    [
        (NVLINK, 1, None, None, "the job fits with topology nvlink"),
        (NVLINK, 2, SAME_NODE, 600, "waits for GPUs that others hold"),
        (SAME_NODE, 2, None, None, "the job fits with topology same_node"),
        (NVLINK, 3, None, None, "the job does not fit with any topology"),
        (SAME_NODE, 3, None, None, "the job does not fit with any topology"),
        (NONE, 2, None, None, "topology none cannot be relaxed"),
    ],
)
def test_a_weaker_topology_is_offered_if_the_job_fits_in_it_now(
    topology: TopologyConstraint, gpus: int, suggested: TopologyConstraint | None, saved_seconds: int, reason: str
) -> None:
    """EDGE-7: same_node before none; with what it costs, and the wait that it saves."""
    settings = RenderSettings()
    offer = offer_of(SCATTERED, job(topology, gpus), settings, namespace="team", ends=ENDS, now_seconds=0)

    assert (offer.asked, offer.suggested, offer.saved_seconds) == (topology, suggested, saved_seconds)
    assert reason in offer.reason
    assert bool(offer.slower) is (suggested is not None)


def test_a_job_recorded_before_a_rule_was_tightened_is_offered_nothing() -> None:
    """The reason says what is wrong with it; the question does not fail."""
    older = job(NVLINK, 2)
    saves = older.attributes.model_copy(
        update={"checkpoint_enabled": True, "checkpoint_storage_uri": "file:///proc/", "checkpoint_interval_s": 60}
    )
    offer = offer_of(
        SCATTERED,
        older.model_copy(update={"attributes": saves}),
        RenderSettings(),
        namespace="team",
        ends=(),
        now_seconds=0,
    )

    assert offer.suggested is None
    assert "the job can no longer be rendered: ext_ml_checkpoint_storage_uri" in offer.reason


def test_pods_of_several_machines_are_offered_last() -> None:
    """Two pods of one GPU each that must share a machine fit on two."""
    found = situation({name: {} for name in ("n1", "n2")}, [holder(name, name, *range(7)) for name in ("n1", "n2")])
    gang = job(SAME_NODE, 2, workers=2, ext_ml_distributed_strategy="fsdp")
    offer = offer_of(found.snapshot, gang, RenderSettings(), namespace="team", ends=(), now_seconds=0)

    assert (offer.suggested, offer.saved_seconds) == (NONE, None)
    assert "over the network" in offer.slower


def test_a_job_of_very_many_pods_gets_no_offer() -> None:
    """Pods on their own are placed one by one, so the bound is on their number; just within it there is an offer."""
    found = situation({name: {} for name in ("n1", "n2")}, [holder("a", "n1", *range(7))]).snapshot

    def reason(pods: int) -> str:
        many = job(NVLINK, 2, job_type="batch", parallelism=pods, completions=pods)
        return offer_of(found, many, RenderSettings(), namespace="team", ends=(), now_seconds=0).reason

    assert reason(65) == "the job has 65 pods at a time: offers are for at most 64"
    assert "does not fit with any topology" in reason(64)
