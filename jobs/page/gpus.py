"""The GPUs of one job: the machines on which its pods hold some, island by island.

Of other pods nothing is named: a caller sees that a GPU is held, not by whom.
"""

from functools import partial
from typing import Annotated, Final

from fastapi import FastAPI, Request
from pydantic import BaseModel, Field

from atoll.api import job_names
from atoll.explain.decision import index_snapshot
from atoll.explain.overview import Gpu, NodeLine, node_lines
from atoll.explain.simulation import without_nodes
from atoll.explain.snapshot import ClusterSnapshot
from atoll.jobs.permissions import JobPermission
from jobs.asking import OneJob
from jobs.cluster_store import get_cluster
from jobs.problems import ApiRefusal, documented, problem
from jobs.searching import SearchThread

JOB_GPUS: Final = "/api/clusters/{cluster}/jobs/{job_id}/gpus"
NODES_MAX: Final = 64
TURNS_MAX, SECONDS_MAX = 16, 20.0
"""How many callers have GPUs looked up at a time, and for how long."""


class JobGpu(BaseModel):
    """One GPU of a machine."""

    id: int
    model: str
    state: Annotated[str, Field(description="held, free, in foreign use, or why it is not given out")]
    reason: str
    holders: Annotated[list[str], Field(description="pods of the job that hold it")]


class JobIsland(BaseModel):
    """GPUs of a machine that are joined."""

    name: str
    kind: str
    gpus: list[JobGpu]


class JobNode(BaseModel):
    """One machine."""

    name: str
    models: str
    silent: Annotated[str, Field(description="why its report does not count; empty if it does")]
    closed: Annotated[str, Field(description="why no pod is placed there; empty if pods are")]
    islands: list[JobIsland]


class JobGpusView(BaseModel):
    """Machines on which pods of a job hold GPUs, by name."""

    nodes: list[JobNode]
    total: Annotated[int, Field(description="count of machines; at most 64 are listed")]


def add_gpu_routes(app: FastAPI) -> None:
    """Add the route to the application."""
    app.state.gpu_lists = SearchThread("lists of GPUs", turns_max=TURNS_MAX, seconds_max=SECONDS_MAX)
    app.get(JOB_GPUS, responses=documented(401, 404, 422, 429, 503))(show_gpus)


async def show_gpus(asked: OneJob, request: Request) -> JobGpusView:
    """Show the machines on which the pods of a job hold GPUs, and which ones."""
    record = await asked.allowed(JobPermission.VIEW)
    parts = asked.parts
    cluster = await parts.database.read(lambda session: get_cluster(session, record.cluster_id))
    found, trouble = await parts.chooser.look_at(cluster)
    if found is None:
        raise ApiRefusal(
            problem(503, "unavailable", "The cluster does not answer", trouble), headers={"Retry-After": "2"}
        )
    lists: SearchThread = request.app.state.gpu_lists
    async with lists.turn() as search:
        return await search.run(partial(gpus_of_job, found, record.id, record.namespace))


def gpus_of_job(snapshot: ClusterSnapshot, job_id: str, namespace: str) -> JobGpusView:
    """Return the machines of a job's pods."""
    pods = [
        pod
        for pod in snapshot.pods
        if pod.metadata.namespace == namespace and pod.metadata.labels.get(job_names.JOB_ID) == job_id
    ]
    mine, theirs = frozenset(f"{namespace}/{pod.metadata.name}" for pod in pods), {pod.spec.node_name for pod in pods}
    others = {node.metadata.name for node in snapshot.nodes} - theirs
    lines = node_lines(index_snapshot(without_nodes(snapshot, others)), namespace=namespace)
    held = [line for line in lines if any(mine & {*gpu.holders} for gpu in line.gpus)]
    return JobGpusView(nodes=[_node(line, mine) for line in held[:NODES_MAX]], total=len(held))


def _node(line: NodeLine, mine: frozenset[str]) -> JobNode:
    def gpu(one: Gpu) -> JobGpu:
        holders = [holder for holder in one.holders if holder in mine]
        return JobGpu(id=one.id, model=one.model, state=one.state, reason=one.reason, holders=holders)

    islands = [JobIsland(name=one.name, kind=one.kind, gpus=[gpu(each) for each in one.gpus]) for one in line.islands]
    return JobNode(name=line.node, models=line.models, silent=line.silence, closed=line.closed, islands=islands)
