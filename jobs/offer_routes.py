"""The route that offers a waiting job a weaker topology in which it fits now."""

from functools import partial
from typing import Annotated, Final

from fastapi import FastAPI, Request
from pydantic import BaseModel, Field

from atoll.jobs.permissions import JobPermission
from atoll.jobs.relaxing import TopologyOffer
from atoll.jobs.states import ENDED, JobState
from atoll.jobs.words import TopologyConstraint
from jobs.asking import OneJob
from jobs.cluster_store import get_cluster, running_jobs
from jobs.offers import OFFER_SECONDS_MAX, offer_to
from jobs.problems import ApiRefusal, documented, problem
from jobs.searching import SearchThread
from jobs.views import job_of

OFFER: Final = "/api/clusters/{cluster}/jobs/{job_id}/topology-offer"


class TopologyOfferView(BaseModel):
    """A weaker topology in which a job fits now; accepted by a change of policy.topology."""

    asked: TopologyConstraint
    suggested: Annotated[TopologyConstraint | None, Field(description="null if there is nothing to offer")]
    reason: Annotated[str, Field(description="why the job waits, or why there is nothing to offer")]
    slower: Annotated[str, Field(description="what the job pays for it")]
    saved_seconds: Annotated[float | None, Field(description="wait that it saves; null if nobody knows its end")]


def add_offer_routes(app: FastAPI) -> None:
    """Add the route to the application."""
    app.state.offers = SearchThread("offers", turns_max=1, seconds_max=OFFER_SECONDS_MAX)
    app.get(OFFER, responses=documented(401, 404, 422, 429, 503))(show_offer)


async def show_offer(asked: OneJob, request: Request) -> TopologyOfferView:
    """Show whether a waiting job would fit now with a weaker topology."""
    record = await asked.allowed(JobPermission.VIEW)
    parts, job, state = asked.parts, job_of(record), JobState(record.state)
    if state is JobState.RUNNING or state in ENDED:
        return _view(TopologyOffer(job.policy.topology, None, f"the job does not wait: it is {state}"))
    cluster, running = await parts.database.read(
        lambda session: (get_cluster(session, record.cluster_id), running_jobs(session, record.cluster_id))
    )
    found, trouble = await parts.chooser.look_at(cluster)
    if found is None:
        told = problem(503, "unavailable", "The cluster does not answer", trouble)
        raise ApiRefusal(told, headers={"Retry-After": "2"})
    offers: SearchThread = request.app.state.offers
    compute = partial(offer_to, record, found, parts.rendering, running=running, now=parts.now())
    async with offers.turn() as search:
        return _view(await search.run(compute))


def _view(offer: TopologyOffer) -> TopologyOfferView:
    return TopologyOfferView(
        asked=offer.asked,
        suggested=offer.suggested,
        reason=offer.reason,
        slower=offer.slower,
        saved_seconds=offer.saved_seconds,
    )
