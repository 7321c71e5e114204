"""Offers of a weaker topology to jobs that wait for theirs: looks at them again and again, and sends each offer once.

What a look leads to is decided in atoll.jobs.relaxing. Only the leader looks. Offer, history and webhooks are written
in one transaction, so none is lost and none is sent twice.
"""

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Final

import structlog
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from atoll.explain.snapshot import ClusterSnapshot
from atoll.jobs.relaxing import WEAKER, TopologyDecision, TopologyOffer, TopologyWait, decide_wait, offer_of
from atoll.jobs.settings import RenderSettings
from atoll.jobs.states import IllegalStep, JobStep
from atoll.kube.clock import Clock
from jobs.chooser import ClusterChooser, expected_ends
from jobs.cluster_store import ClusterState, RunningJob, list_clusters, running_jobs
from jobs.database import Database
from jobs.errors import JobServiceError
from jobs.records import JobRecord, RegisteredCluster
from jobs.searching import SearchThread
from jobs.store import change_job, jobs_without_room, note_change, take_step
from jobs.views import job_of, wait_of
from jobs.webhook_store import OFFERED, queue_event

log = structlog.get_logger(__name__)

LOOK_SECONDS: Final = 60.0
"""How often waiting jobs are looked at."""
OFFER_SECONDS_MAX: Final = 60.0
"""How long an offer may take: it searches the cluster several times."""
OFFER_SENT: Final = "topology offer"


class TopologyOffers:
    """Makes offers; `run` as one task, while this process leads. `seconds_max`: how long a job may wait for its
    topology before it fails; 0 lets it wait."""

    def __init__(
        self,
        database: Database,
        chooser: ClusterChooser,
        rendering: RenderSettings,
        clock: Clock,
        *,
        seconds_max: float,
        wake: Callable[[str], None],
    ) -> None:
        self._database = database
        self._chooser = chooser
        self._rendering = rendering
        self._clock = clock
        self._seconds_max = seconds_max
        self._wake = wake
        self._searches = SearchThread("offers to all jobs", turns_max=1, seconds_max=OFFER_SECONDS_MAX)

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            try:
                await self.look()
            except SQLAlchemyError as error:
                log.warning("Could not read waiting jobs", err=str(error).partition("\n")[0])
            await self._clock.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Look once at every job that waits for machines. Raises SQLAlchemy's errors."""
        for cluster in await self._database.read(list_clusters):
            if cluster.state != ClusterState.ACTIVE:
                continue  # its jobs are to move
            for record in await self._database.read(partial(jobs_without_room, cluster_id=cluster.id)):
                try:
                    await self._look_at(cluster, record)
                except (JobServiceError, IllegalStep) as error:  # it holds up no other job; the next look tries again
                    log.info("Could not look at a waiting job", job=record.id, err=str(error))

    async def _look_at(self, cluster: RegisteredCluster, record: JobRecord) -> None:
        if job_of(record).policy.topology not in WEAKER:
            return
        found, _ = await self._chooser.look_at(cluster)
        if found is None:
            return  # the look after health tells it
        running = await self._database.read(partial(running_jobs, name=cluster.id))
        now = self._clock.now()
        async with self._searches.turn() as search:
            offer = await search.run(partial(offer_to, record, found, self._rendering, running=running, now=now))
        before = wait_of(record)
        decided = decide_wait(before, offer, now=now, seconds_max=self._seconds_max)
        if decided.wait == (before or TopologyWait(asked=offer.asked)) and not decided.failure:
            return
        await self._database.write(lambda session: _note(session, record, decided, now))
        if decided.is_news:
            log.info("Sent a topology offer", job=record.id, asked=offer.asked.value, reason=offer.reason)
        if decided.failure:
            log.info("A job failed for its topology", job=record.id, reason=decided.failure)
            self._wake(record.id)


def offer_to(
    record: JobRecord,
    found: ClusterSnapshot,
    rendering: RenderSettings,
    *,
    running: Sequence[RunningJob],
    now: datetime,
) -> TopologyOffer:
    """Return what a job is offered in its cluster as it is now. `running`: the jobs that run there. Raises
    RecordUnreadable."""
    return offer_of(
        found,
        job_of(record),
        rendering,
        namespace=record.namespace,
        ends=expected_ends(found, running, now),
        now_seconds=now.timestamp(),
    )


def _note(session: Session, record: JobRecord, decided: TopologyDecision, now: datetime) -> None:
    """Record a decision; the offer in the history and for webhooks. Raises JobUnknown, RecordChanged, IllegalStep."""
    wait = decided.wait
    changes = {"topology_wait": wait.model_dump(mode="json")}
    done = change_job(session, record.id, version=record.version, now=now, changes=changes)
    if decided.is_news and wait.offer is not None:
        offer = {"asked": wait.asked.value} | wait.offer.model_dump(mode="json", exclude={"at"})
        saved = "" if wait.offer.saved_seconds is None else f", {wait.offer.saved_seconds:g} s earlier"
        told = f"it fits now with topology {wait.offer.suggested}{saved}, not with {wait.asked}; {wait.offer.slower}"
        note_change(session, done, OFFER_SENT, now=now, actor="", message=told)
        queue_event(session, done, OFFERED, now, more={"offer": offer})
    if decided.failure:
        take_step(session, record.id, JobStep.FAIL, now=now, message=decided.failure, version=done.version)
