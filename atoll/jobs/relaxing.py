"""A weaker topology for a job that waits because no machine has room in the one it asks for.

Pure. The offer is the first weaker topology in which the job fits now; the user accepts it by changing policy.topology.
A job waits for its topology if there is an offer, or if even an idle cluster would have no room for it as it asks; a
job that waits for GPUs which others hold does not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from pydantic import BaseModel, ConfigDict

from atoll.api import job_names
from atoll.explain.changes import without_pods
from atoll.explain.snapshot import ClusterSnapshot
from atoll.jobs.errors import JobMistake, NodesUnknown
from atoll.jobs.fitting import ExpectedEnd, fit_of, pods_at_once
from atoll.jobs.model import Job
from atoll.jobs.rendering import render
from atoll.jobs.settings import RenderSettings
from atoll.jobs.words import TopologyConstraint

WEAKER: Final[Mapping[TopologyConstraint, tuple[TopologyConstraint, ...]]] = {
    TopologyConstraint.NVLINK: (TopologyConstraint.SAME_NODE, TopologyConstraint.NONE),
    TopologyConstraint.SAME_NODE: (TopologyConstraint.NONE,),
}
SLOWER: Final[Mapping[TopologyConstraint, str]] = {
    TopologyConstraint.SAME_NODE: "GPUs without NVLink between them exchange data 20 to 30 times slower, over PCIe",
    TopologyConstraint.NONE: "pods on several machines exchange data over the network",
}
"""What a job pays for a weaker topology."""
PODS_MAX: Final = 64
"""Pods at a time of a job that gets an offer: each is placed on its own, which takes long in a large cluster."""


@dataclass(frozen=True, slots=True)
class TopologyOffer:
    """`suggested`: None without an offer, and `reason` says why. `saved_seconds`: for how long the job is expected to
    wait otherwise; None if no expected end of another job makes room. `is_impossible`: an idle cluster has no room."""

    asked: TopologyConstraint
    suggested: TopologyConstraint | None
    reason: str
    slower: str = ""
    saved_seconds: float | None = None
    is_impossible: bool = False

    @property
    def is_why(self) -> bool:
        """Return whether the topology is what the job waits for."""
        return self.suggested is not None or self.is_impossible


class SentOffer(BaseModel):
    """An offer that the tenant was told."""

    model_config = ConfigDict(frozen=True)

    suggested: TopologyConstraint
    reason: str
    slower: str
    saved_seconds: float | None
    at: datetime


class TopologyWait(BaseModel):
    """What is recorded of a job that waits. `since`: when it was first seen to wait for its topology; None if it does
    not at present. `offer`: what was sent last for this topology."""

    model_config = ConfigDict(frozen=True)

    asked: TopologyConstraint
    since: datetime | None = None
    offer: SentOffer | None = None


@dataclass(frozen=True, slots=True)
class TopologyDecision:
    """What to record after a look at a job, and what to do. `is_news`: the offer is to be sent. `failure`: why the job
    fails; empty if it goes on waiting."""

    wait: TopologyWait
    is_news: bool = False
    failure: str = ""


def offer_of(
    found: ClusterSnapshot,
    job: Job,
    settings: RenderSettings,
    *,
    namespace: str,
    ends: Sequence[ExpectedEnd],
    now_seconds: float,
) -> TopologyOffer:
    """Return the weaker topology in which a job fits now, if the one that it asks for is what it waits for."""
    asked = job.policy.topology
    if asked not in WEAKER:
        return TopologyOffer(asked, None, f"topology {asked} cannot be relaxed")
    try:
        rendered = render(job, settings, now_seconds=now_seconds)
    except (JobMistake, NodesUnknown) as mistake:
        return TopologyOffer(asked, None, f"the job can no longer be rendered: {mistake}")
    if (pods := pods_at_once(rendered)) > PODS_MAX:
        return TopologyOffer(asked, None, f"the job has {pods} pods at a time: offers are for at most {PODS_MAX}")
    found = _without_own(found, job)
    fit = fit_of(found, rendered, namespace=namespace, ends=ends)
    if fit.fits:
        return TopologyOffer(asked, None, fit.reason or f"the job fits with topology {asked}")
    idle = without_pods(found, {pod.metadata.uid for pod in found.pods})
    is_impossible = not fit_of(idle, rendered, namespace=namespace).fits
    for weaker in WEAKER[asked]:
        policy = job.policy.model_copy(update={"topology": weaker})
        try:
            relaxed = render(job.model_copy(update={"policy": policy}), settings, now_seconds=now_seconds)
        except (JobMistake, NodesUnknown):
            continue
        if fit_of(found, relaxed, namespace=namespace).fits:
            return TopologyOffer(asked, weaker, fit.reason, SLOWER[weaker], fit.wait_seconds, is_impossible)
    told = f"the job does not fit with any topology: {fit.reason}"
    return TopologyOffer(asked, None, told, is_impossible=is_impossible)


def _without_own(found: ClusterSnapshot, job: Job) -> ClusterSnapshot:
    """Return the cluster without the job's own pods: what they hold already is no reason why it waits."""
    own = {pod.metadata.uid for pod in found.pods if job.id and pod.metadata.labels.get(job_names.JOB_ID) == job.id}
    return without_pods(found, own) if own else found


def decide_wait(
    before: TopologyWait | None, offer: TopologyOffer, *, now: datetime, seconds_max: float
) -> TopologyDecision:
    """Decide what a look at a waiting job leads to. `seconds_max`: after which a job that waits for its topology fails;
    0 lets it wait. An offer is sent once, until another topology is asked for or suggested."""
    known = before if before is not None and before.asked is offer.asked else TopologyWait(asked=offer.asked)
    if not offer.is_why:
        return TopologyDecision(known.model_copy(update={"since": None}))
    since, sent = known.since or now, known.offer
    is_news = offer.suggested is not None and (sent is None or sent.suggested is not offer.suggested)
    if offer.suggested is not None and is_news:
        sent = SentOffer(
            suggested=offer.suggested,
            reason=offer.reason,
            slower=offer.slower,
            saved_seconds=offer.saved_seconds,
            at=now,
        )
    is_over = seconds_max > 0 and (now - since).total_seconds() >= seconds_max
    failure = _failure(offer, sent, seconds_max) if is_over else ""
    return TopologyDecision(TopologyWait(asked=offer.asked, since=since, offer=sent), is_news, failure)


def _failure(offer: TopologyOffer, sent: SentOffer | None, seconds_max: float) -> str:
    """Return why a job fails for its topology, and what to do."""
    idle = ", not even if the cluster were idle" if offer.is_impossible else ""
    told = f"its topology {offer.asked} cannot be met{idle}: {offer.reason}"
    if sent is None:
        return f"{told}; it waited for {seconds_max:g} s: ask for other GPUs"
    taken = f"nobody took the offer of topology {sent.suggested}"
    return f"{told}; {taken} within {seconds_max:g} s: submit it again with policy.topology {sent.suggested}"
