"""The places of a tenant in object stores, below prefixes such as `s3://checkpoints/{tenant}/`.

A job's checkpoints stay below those of its tenant, and it loads no model from those of another one.
"""

import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import unquote

from atoll.jobs.errors import JobMistake
from atoll.jobs.model import Job
from atoll.jobs.settings import TENANT, RenderSettings
from atoll.ml.attributes import PREFIX

FILE: Final = "file://"
_NAME: Final = "(?P<tenant>[a-z0-9]([-a-z0-9]*[a-z0-9])?)"


def prefixes_of(settings: RenderSettings, tenant: str | None) -> tuple[str, ...]:
    """Return where a tenant's jobs may save: its own prefixes, and those that the administrators share."""
    own = (one.replace(TENANT, tenant) for one in settings.tenant_prefixes) if tenant is not None else ()
    return (*settings.checkpoint_prefixes, *own)


def check_places(job: Job, settings: RenderSettings) -> None:
    """Refuse a place that is not the tenant's own. Raises JobMistake."""
    if not settings.tenant_prefixes:
        return
    allowed = prefixes_of(settings, job.tenant_id)
    said = job.attributes
    for name, uri in (
        ("checkpoint_storage_uri", said.checkpoint_storage_uri),
        ("model_registry_uri", said.model_registry_uri),
    ):
        if uri is None or uri.startswith(allowed):
            continue
        other = _tenant_in(uri, settings.tenant_prefixes)
        is_place = name == "checkpoint_storage_uri" and not (uri.startswith(FILE) and not settings.checkpoint_prefixes)
        if other is not None or is_place:
            whose = f"belongs to tenant {other}" if other is not None else "belongs to no tenant"
            own = (
                f"this job is of tenant {job.tenant_id}" if job.tenant_id is not None else "this job names no tenant_id"
            )
            raise JobMistake(f"{PREFIX}{name}", uri, f"{whose}, and {own}", _hint(allowed))


def _tenant_in(uri: str, templates: Iterable[str]) -> str | None:
    """Return whose place a URI leads to; None for nobody's."""
    for template in templates:
        before, _, after = template.partition(TENANT)
        found = re.match(re.escape(before) + _NAME + re.escape(after), unquote(uri))
        if found is not None:
            return found["tenant"]
    return None


def _hint(allowed: tuple[str, ...]) -> str:
    return f"name a place below {' or '.join(allowed)}" if allowed else "say whose job it is: write tenant_id"
