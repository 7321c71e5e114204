"""A weaker topology for a job that waits because no machine has room in the one it asks for.

Pure. The offer is the first weaker topology in which the job fits now; the user accepts it by changing policy.topology.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

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
    wait otherwise; None if no expected end of another job makes room."""

    asked: TopologyConstraint
    suggested: TopologyConstraint | None
    reason: str
    slower: str = ""
    saved_seconds: float | None = None


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
    fit = fit_of(found, rendered, namespace=namespace, ends=ends)
    if fit.fits:
        return TopologyOffer(asked, None, fit.reason or f"the job fits with topology {asked}")
    for weaker in WEAKER[asked]:
        policy = job.policy.model_copy(update={"topology": weaker})
        try:
            relaxed = render(job.model_copy(update={"policy": policy}), settings, now_seconds=now_seconds)
        except (JobMistake, NodesUnknown):
            continue
        if fit_of(found, relaxed, namespace=namespace).fits:
            return TopologyOffer(asked, weaker, fit.reason, SLOWER[weaker], fit.wait_seconds)
    return TopologyOffer(asked, None, f"the job does not fit with any topology: {fit.reason}")
