"""Helpers to render a job and to inspect the objects."""

from typing import Any

from atoll.jobs.model import Job
from atoll.jobs.rendering import Rendered, render
from atoll.jobs.selection import KnownNode
from atoll.jobs.settings import RenderSettings

IMAGE = {"image": "registry.example.com/work:1"}
NOW_SECONDS = 1_900_000_000


def job(**fields: Any) -> Job:
    """Return a job: a batch with an image, unless the fields say something else."""
    defaults = {"name": "work", "job_type": "batch", "container": IMAGE}
    if fields.get("deployment_type", "docker") != "docker":
        del defaults["container"]
    return Job.model_validate(defaults | fields)


def rendered(
    *,
    settings: RenderSettings | None = None,
    nodes: list[KnownNode] | None = None,
    now: float | None = None,
    **fields: Any,
) -> Rendered:
    """Render such a job."""
    return render(job(**fields), settings, nodes=nodes, now_seconds=now)


def look(result: Rendered, path: str) -> Any:
    """Return what stands at KIND.field.field[index]; None where nothing does. POD is the template of the pods."""
    kind, *parts = path.replace("[", ".#").replace("]", "").split(".")
    if kind == "POD":
        value: Any = next(one["spec"]["template"] for one in result.objects if "template" in one["spec"])
    else:
        value = next((one for one in result.objects if one["kind"] == kind), None)
    for part in parts:
        if value is None:
            return None
        if part.startswith("#"):
            value = value[int(part[1:])] if int(part[1:]) < len(value) else None
        else:
            value = value.get(part.replace("~", "."))
    return value


def env(result: Rendered) -> dict[str, str | None]:
    """Return the variables of the container."""
    entries = look(result, "POD.spec.containers[0].env")
    return {entry["name"]: entry.get("value") for entry in entries}
