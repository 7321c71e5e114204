"""The route that offers a waiting job a weaker topology in which it fits now."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Annotated, Final

from fastapi import FastAPI, Request
from pydantic import BaseModel, Field

from atoll.jobs.permissions import JobPermission
from atoll.jobs.relaxing import TopologyOffer, offer_of
from atoll.jobs.states import ENDED, JobState
from atoll.jobs.words import TopologyConstraint
from jobs.asking import OneJob
from jobs.chooser import expected_ends
from jobs.cluster_store import get_cluster, running_jobs
from jobs.problems import ApiRefusal, documented, problem
from jobs.views import job_of

OFFER: Final = "/api/clusters/{cluster}/jobs/{job_id}/topology-offer"


class TopologyOfferView(BaseModel):
    """A weaker topology in which a job fits now; accepted by a change of policy.topology."""

    asked: TopologyConstraint
    suggested: Annotated[TopologyConstraint | None, Field(description="null if there is nothing to offer")]
    reason: Annotated[str, Field(description="why the job waits, or why there is nothing to offer")]
    slower: Annotated[str, Field(description="what the job pays for it")]
    saved_seconds: Annotated[float | None, Field(description="wait that it saves; null if nobody knows its end")]


class OfferThread:
    """Computes one offer at a time, which takes seconds, beside the threads on which the service reads its database."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="offers")
        self._current: Future[TopologyOffer] | None = None

    async def run(self, compute: Callable[[], TopologyOffer]) -> TopologyOffer:
        """Return the offer. Raises ApiRefusal while another one is computed, also for a caller who went away."""
        if self._current is not None and not self._current.done():
            told = problem(429, "too-many", "Too many offers at a time", "another offer is computed: try again later")
            raise ApiRefusal(told, headers={"Retry-After": "5"})
        self._current = self._threads.submit(compute)
        return await asyncio.wrap_future(self._current)


def add_offer_routes(app: FastAPI) -> None:
    """Add the route to the application."""
    app.state.offers = OfferThread()
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
    now = parts.now()
    offers: OfferThread = request.app.state.offers
    compute = partial(
        offer_of,
        found,
        job,
        parts.rendering,
        namespace=record.namespace,
        ends=expected_ends(found, running, now),
        now_seconds=now.timestamp(),
    )
    return _view(await offers.run(compute))


def _view(offer: TopologyOffer) -> TopologyOfferView:
    return TopologyOfferView(
        asked=offer.asked,
        suggested=offer.suggested,
        reason=offer.reason,
        slower=offer.slower,
        saved_seconds=offer.saved_seconds,
    )
