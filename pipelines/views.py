"""Response models of pipelines and runs."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

from pydantic import BaseModel, Field

from atoll.pipelines.words import RunState, SkipCause, StepState, StepType
from pipelines.notifying import MessageState
from pipelines.records import MessageRecord, PipelineRecord, RunRecord, StepRecord, graph_in


class PipelineView(BaseModel):
    """A pipeline."""

    id: str
    name: str
    tenant_id: str
    project_id: str | None
    created_by: str
    created_at: datetime
    updated_at: datetime
    runs_begun: int
    pipeline: Annotated[dict[str, Any], Field(description="the applied document, word for word")]


class PipelineListView(BaseModel):
    """One page of pipelines, by name."""

    items: list[PipelineView]
    page: int
    page_size: int
    total: Annotated[int, Field(description="count over all pages")]


class StepView(BaseModel):
    """One step of a run."""

    name: Annotated[str, Field(description="name of the step; the body of a loop as body[0], body[1]")]
    status: StepState
    job_id: str | None
    attempt: Annotated[int, Field(description="tries begun")]
    output: dict[str, Any]
    error: str
    skipped_because: SkipCause | None
    started_at: datetime | None
    ended_at: datetime | None
    duration_seconds: float | None


class GraphStepView(BaseModel):
    """One step of the document."""

    name: str
    step_type: StepType
    depends_on: list[str]
    owners: Annotated[list[str], Field(description="condition, parallel and loop steps that name it")]


class RunView(BaseModel):
    """One run, and its steps unless it is one of a list."""

    execution_id: str
    number: int
    status: RunState
    message: str
    cause: Annotated[str, Field(description="who or what began it")]
    created_by: str
    inputs: dict[str, Any]
    notes: Annotated[list[str], Field(description="what was noticed about the envelopes of a workflow")]
    rerun_of: str | None
    cancel_requested_at: datetime | None
    created_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    steps: list[StepView]
    graph: Annotated[list[GraphStepView], Field(description="the steps as the pipeline had them; empty in a list")]


class MessageView(BaseModel):
    """What a notification step sent to one recipient."""

    step: str
    channel: str
    recipient: str
    status: Annotated[MessageState, Field(description="how the last attempt ended")]
    attempt: Annotated[int, Field(description="try of the step that it was")]
    error: str
    at: datetime


class MessageListView(BaseModel):
    """What the notification steps of a run sent."""

    items: list[MessageView]


class RunListView(BaseModel):
    """One page of runs, newest first."""

    items: list[RunView]
    page: int
    page_size: int
    total: Annotated[int, Field(description="count over all pages")]


def pipeline_view(record: PipelineRecord) -> PipelineView:
    """Return the response for a pipeline."""
    return PipelineView(
        id=record.id,
        name=record.name,
        tenant_id=record.tenant_id,
        project_id=record.project_id,
        created_by=record.created_by,
        created_at=record.created_at,
        updated_at=record.updated_at,
        runs_begun=record.runs_begun,
        pipeline=record.document,
    )


def run_view(record: RunRecord, steps: Sequence[StepRecord] = ()) -> RunView:
    """Return the response for a run."""
    return RunView(
        execution_id=record.id,
        number=record.number,
        status=RunState(record.state),
        message=record.message,
        cause=record.cause,
        created_by=record.created_by,
        inputs=record.inputs,
        notes=record.document.get("notes", []),
        rerun_of=record.rerun_of,
        cancel_requested_at=record.cancel_requested_at,
        created_at=record.created_at,
        started_at=record.started_at,
        completed_at=record.ended_at,
        steps=[_step_view(one) for one in steps],
        graph=_graph_view(record) if steps else [],
    )


def _graph_view(record: RunRecord) -> list[GraphStepView]:
    graph = graph_in(record.document, f"the pipeline of run {record.number}")
    return [
        GraphStepView(
            name=one.name,
            step_type=one.step_type,
            depends_on=list(one.depends_on),
            owners=[owner.name for owner in graph.owners.get(one.name, ())],
        )
        for one in graph.pipeline.steps
    ]


def message_view(record: MessageRecord) -> MessageView:
    """Return the response for a message."""
    return MessageView(
        step=record.key,
        channel=record.channel,
        recipient=record.recipient,
        status=MessageState(record.state),
        attempt=record.attempt,
        error=record.error,
        at=record.at,
    )


def _step_view(record: StepRecord) -> StepView:
    return StepView(
        name=record.key,
        status=StepState(record.state),
        job_id=record.job_id,
        attempt=record.attempt,
        output=record.output,
        error=record.error,
        skipped_because=SkipCause(record.skip_cause) if record.skip_cause is not None else None,
        started_at=record.started_at,
        ended_at=record.ended_at,
        duration_seconds=(record.ended_at - record.started_at).total_seconds()
        if record.started_at is not None and record.ended_at is not None
        else None,
    )
