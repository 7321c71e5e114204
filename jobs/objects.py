"""The objects of a record: rendered by atoll.jobs, labelled with this service and this attempt. Pure.

Objects are in the order of creation. The one that runs the pods is last, so an interrupted attempt runs nothing.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from atoll.api import job_names, names
from atoll.jobs.rendering import Object, render
from atoll.jobs.settings import RenderSettings
from jobs.records import JobRecord
from jobs.views import job_of

WORKLOADS: Final = ("Job", "Deployment")


def objects_of(record: JobRecord, rendering: RenderSettings, *, service_id: str, now: datetime) -> Sequence[Object]:
    """Return the objects of an attempt. Raises JobMistake if changed settings no longer accept the job."""
    rendered = render(job_of(record), rendering, now_seconds=now.timestamp())
    marks = {job_names.SERVICE_ID: service_id, job_names.ATTEMPT: str(record.attempt)}
    objects = [_marked(one, marks) for one in rendered.objects]
    return sorted(objects, key=lambda one: one["kind"] in WORKLOADS)


def _marked(one: Object, marks: Mapping[str, str]) -> Object:
    metadata = one["metadata"]
    marked = one | {"metadata": metadata | {"labels": metadata.get("labels", {}) | marks}}
    if one["kind"] not in WORKLOADS:
        return marked
    template = one["spec"]["template"]
    of_pods = template["metadata"]
    template = template | {"metadata": of_pods | {"labels": of_pods.get("labels", {}) | marks}}
    spec: dict[str, Any] = one["spec"] | {"template": template}
    if one["kind"] == "Job":
        # The service removes finished objects itself, after it has recorded how they ended.
        spec.pop("ttlSecondsAfterFinished", None)
        is_one = spec["completions"] == 1 or runs_whole(template)
        if is_one and template["spec"]["restartPolicy"] == "Never":
            spec["backoffLimit"] = 0  # one failure ends the attempt; the service decides about the next
    return marked | {"spec": spec}


def runs_whole(template: Mapping[str, Any]) -> bool:
    """Return whether the pods run all together or not at all."""
    return names.GANG in template.get("metadata", {}).get("annotations", {})
