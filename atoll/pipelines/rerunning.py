"""A run that begins again where an ended one failed or was cancelled."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace

from atoll.pipelines.deciding import RunSnapshot, StepRun, new_run
from atoll.pipelines.graph import step_of
from atoll.pipelines.words import StepState, StepType


def rerun(run: RunSnapshot, run_id: str, *, lost: AbstractSet[str] = frozenset()) -> RunSnapshot:
    """Return a new run that keeps what succeeded in an ended one; everything else runs again, failed loops whole.

    `lost`: steps that succeeded, and whose work is gone since, such as a service that was cancelled.
    """
    done = {key: one for key, one in run.steps.items() if one.state is StepState.SUCCEEDED and key not in lost}
    kept = {key: one for key, one in done.items() if _is_whole(run, key, done, lost)}
    steps = {key: one for key, one in kept.items() if _loop_of(run, key) in (None, *kept)}
    fresh = new_run(run.graph, run_id, run.inputs)
    return replace(fresh, steps={**fresh.steps, **steps})


def _is_whole(run: RunSnapshot, key: str, done: Mapping[str, StepRun], lost: AbstractSet[str]) -> bool:
    """Return whether nothing that a step contains must run again: once it has ended, it would never begin."""
    step, _ = step_of(run.graph, key)
    if step.step_type is StepType.PARALLEL:
        branches = run.graph.settings[step.name].branches
        return all(one in done and _is_whole(run, one, done, lost) for one in branches)
    return step.step_type is not StepType.LOOP or all(_loop_of(run, one) != step.name for one in lost)


def _loop_of(run: RunSnapshot, key: str) -> str | None:
    """Return the loop whose body a step is, or None."""
    loop = run.graph.owner(step_of(run.graph, key)[0].name, StepType.LOOP)
    return loop.name if loop is not None else None
