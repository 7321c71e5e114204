"""What a job that waits for its topology is offered."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from atoll.api import job_names
from atoll.jobs.documents import parse_job
from atoll.jobs.fitting import ExpectedEnd
from atoll.jobs.model import Job
from atoll.jobs.relaxing import TopologyOffer, TopologyWait, decide_wait, offer_of
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


@pytest.mark.parametrize(
    ("topology", "gpus", "is_impossible", "is_why"),
    [(NVLINK, 2, False, True), (NVLINK, 3, True, True), (SAME_NODE, 3, False, False), (SAME_NODE, 5, True, True)],
)
def test_a_job_waits_for_its_topology_or_for_gpus(
    topology: TopologyConstraint, gpus: int, is_impossible: bool, is_why: bool
) -> None:
    """EDGE-7: scattered GPUs and hardware without such an island are the topology's fault, GPUs that others hold are
    not."""
    offer = offer_of(SCATTERED, job(topology, gpus), RenderSettings(), namespace="team", ends=(), now_seconds=0)

    assert (offer.is_impossible, offer.is_why) == (is_impossible, is_why)


def test_what_the_jobs_own_pods_hold_is_no_reason_for_an_offer() -> None:
    """A job whose pods have their GPUs and load their image waits for no topology; for any other job there is no room
    left."""
    own = job(NVLINK, 2).model_copy(update={"id": "one"})
    found = situation({"n1": {"profile": "azure-nc96ads-a100-v4"}}, [holder("tune", "n1", 0, 1), holder("b", "n1", 2)])
    pods = [
        msgspec.structs.replace(pod, metadata=msgspec.structs.replace(pod.metadata, labels={job_names.JOB_ID: "one"}))
        if pod.metadata.name == "tune"
        else pod
        for pod in found.snapshot.pods
    ]
    snapshot = replace(found.snapshot, pods=tuple(pods))

    def reason(asking: Job) -> str:
        return offer_of(snapshot, asking, RenderSettings(), namespace="team", ends=(), now_seconds=0).reason

    assert reason(own) == "the job fits with topology nvlink"
    assert "does not fit with any topology" in reason(own.model_copy(update={"id": "two"}))


START = datetime(2026, 1, 31, 12, tzinfo=UTC)
WEAKER = TopologyOffer(NVLINK, SAME_NODE, "scattered", "slow", 600)
IMPOSSIBLE = TopologyOffer(NVLINK, None, "no such island", is_impossible=True)
BUSY = TopologyOffer(NVLINK, None, "the job does not fit with any topology")


def test_an_offer_is_sent_once_until_something_else_is_asked_or_suggested() -> None:
    """Also after the job fitted for a while; a job that asks for another topology waits anew."""
    looks = [WEAKER, WEAKER, BUSY, WEAKER, replace(WEAKER, suggested=NONE), TopologyOffer(SAME_NODE, NONE, "", "")]
    wait: TopologyWait | None = None
    news, since = [], []
    for number, offer in enumerate(looks):
        decided = decide_wait(wait, offer, now=START + timedelta(minutes=number), seconds_max=0)
        wait = TopologyWait.model_validate(decided.wait.model_dump(mode="json"))  # as it is stored
        news.append(decided.is_news)
        since.append(None if wait.since is None else (wait.since - START).total_seconds() / 60)
        assert decided.failure == ""

    assert news == [True, False, False, False, True, True]
    assert since == [0, 0, None, 3, 3, 5]


@pytest.mark.parametrize(
    ("first", "last", "seconds_max", "seconds", "failure"),
    [
        (WEAKER, WEAKER, 0, 1e6, ""),
        (WEAKER, WEAKER, 600, 599, ""),
        (
            WEAKER,
            WEAKER,
            600,
            600,
            "its topology nvlink cannot be met: scattered; nobody took the offer of topology same_node within 600 s",
        ),
        (
            IMPOSSIBLE,
            IMPOSSIBLE,
            600,
            600,
            "its topology nvlink cannot be met, not even if the cluster were idle: no such island; it waited for 600 s",
        ),
        (WEAKER, BUSY, 600, 1e6, ""),
        (BUSY, WEAKER, 600, 1e6, ""),
    ],
)
def test_a_job_fails_that_waited_too_long_for_its_topology_alone(
    first: TopologyOffer, last: TopologyOffer, seconds_max: float, seconds: float, failure: str
) -> None:
    """EDGE-7: without the setting it waits; a job that waits for busy GPUs waits on, and the time begins anew."""
    before = decide_wait(None, first, now=START, seconds_max=seconds_max).wait
    decided = decide_wait(before, last, now=START + timedelta(seconds=seconds), seconds_max=seconds_max)

    advice = ": submit it again with policy.topology same_node" if first is WEAKER else ": ask for other GPUs"
    assert decided.failure == (failure + advice if failure else "")
