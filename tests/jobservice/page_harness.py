"""The job service with its page on a real port, a job of acme that holds GPUs, and one of another tenant beside it."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from atoll.api import job_names
from atoll.cluster.leases import Holder
from atoll.cluster.objects import Lease, Pod
from atoll.explain.snapshot import ClusterSnapshot
from atoll.jobs.states import JobStep
from jobs.database import opened
from jobs.listener import serving
from jobs.store import take_step
from tests.builders import make_allocation, make_lease, make_pod
from tests.explain.situations import situation
from tests.jobservice.service import JobService

NODE = "n1"
TOLD = {JobStep.SUBMIT: "created", JobStep.ADMIT: "has its quota", JobStep.RUN: "all pods run"}


@dataclass
class JobsPage:
    """The service, and where it listens."""

    service: JobService
    port: int
    ids: dict[str, str]

    def url(self, path: str = "/") -> str:
        """Return a URL of the page."""
        return f"http://127.0.0.1:{self.port}{path}"

    async def submit(self, name: str, *, by: str = "ann", **fields: Any) -> str:
        """Submit a job with two GPUs; return its id."""
        job = {"ext_ml_gpu_type": "nvidia-v100", "ext_ml_gpu_count": 2} | fields
        made = (await self.service.submit(name, by=by, **job)).json()
        self.ids[name] = made["id"]
        return str(made["id"])

    async def step(self, name: str, *steps: JobStep, message: str = "") -> None:
        """Let a job take steps."""
        for one in steps:
            now, told = self.service.clock.now(), message or TOLD.get(one, "")
            await self.service.database.write(
                lambda session, one=one, now=now, told=told: take_step(
                    session, self.ids[name], one, now=now, message=told
                )
            )

    def hold(self, **jobs: tuple[str, tuple[int, ...]]) -> None:
        """Let pods of jobs hold GPUs of the machine, by job: the namespace and the device ids."""
        self.service.links.snapshots["local"] = cluster_of(
            *(pod_of(self.ids[name], name, space, ids) for name, (space, ids) in jobs.items())
        )

    @asynccontextmanager
    async def stream(self, by: str) -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
        """Open the stream in somebody's name; yields its events."""
        headers = {"Authorization": f"Bearer {by}"}
        async with (
            httpx.AsyncClient(timeout=30) as client,
            client.stream("GET", self.url("/page/events"), headers=headers) as answer,
        ):
            assert answer.status_code == 200, await answer.aread()
            yield _events(answer)


async def _events(answer: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
    kind = ""
    async for line in answer.aiter_lines():
        name, _, text = line.partition(": ")
        if name == "event":
            kind = text
        elif name == "data":
            yield kind, json.loads(text) if kind == "look" else text


def pod_of(job_id: str, name: str, namespace: str, ids: tuple[int, ...]) -> tuple[Pod, list[Lease]]:
    """Return a pod of a job that holds GPUs, and its Leases."""
    pod = make_pod(
        f"{name}-0",
        namespace=namespace,
        gpus=len(ids),
        node=NODE,
        allocation=make_allocation(NODE, *ids),
        phase="Running",
        labels={job_names.JOB_ID: job_id},
    )
    owner = Holder(namespace, pod.metadata.name, pod.metadata.uid)
    return pod, [make_lease(NODE, number, holder=owner) for number in ids]


def cluster_of(*holders: tuple[Pod, list[Lease]]) -> ClusterSnapshot:
    """Return a cluster of one machine."""
    return situation({NODE: {}, "n2": {}}, holders).snapshot


@asynccontextmanager
async def jobs_page(folder: Path) -> AsyncIterator[JobsPage]:
    """Yield the page with a running job of acme, one that waits, and one of another tenant."""
    database = opened(f"sqlite:///{folder}/jobs.db")
    async with JobService.of(database) as service, serving(service.app, "127.0.0.1", 0) as port:
        page = JobsPage(service, port, {})
        await page.submit("tune", intent={"expected_duration_hint": 3600})
        await page.submit("later")
        await page.submit("secret", by="oto/others", tenant_id="other")
        await page.step("tune", JobStep.SUBMIT, JobStep.ADMIT, JobStep.RUN)
        await page.step("secret", JobStep.SUBMIT, JobStep.ADMIT, JobStep.RUN)
        page.hold(tune=("tenant-acme", (0, 3)), secret=("tenant-other", (1,)))
        service.logs.pods["tune-0"] = [b"step 1\n", b"step 2\n"]
        yield page
    database.close()
