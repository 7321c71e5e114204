"""Place and interval of a job's checkpoints, and their volume.

None for a job that saves none. Attributes override `intent.checkpoint_config`; a volume is a place at a `file://` URI.
"""

from dataclasses import dataclass
from typing import Final

from atoll.jobs.container import is_of_kernel
from atoll.jobs.errors import JobMistake
from atoll.jobs.model import Job
from atoll.jobs.notes import NO_EFFECT, NoteBook
from atoll.jobs.policy import CheckpointConfig
from atoll.jobs.words import JobType
from atoll.ml.attributes import PREFIX, MlAttributes

INTERVAL_SECONDS: Final = 300
KEPT: Final = 3
FILE: Final = "file://"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`mount_path`: of the volume created for it; empty without one. Times are seconds."""

    uri: str
    interval_seconds: int
    kept: int
    on_preemption: bool
    mount_path: str
    storage_class: str
    storage_size: str


def checkpoint_of(job: Job, book: NoteBook) -> Checkpoint | None:
    """Return the job's checkpoint configuration. Raises JobMistake."""
    config = job.intent.checkpoint_config
    enabled = job.attributes.checkpoint_enabled
    if enabled is None:
        enabled = config is not None and config.enabled
    if not enabled:
        _tell_disabled(job.attributes, book)
        return None
    if job.job_type is JobType.SERVICE:
        raise JobMistake(
            f"{PREFIX}checkpoint_enabled", value="true", limit="a service has no end to save for", hint="remove it"
        )
    place = config or CheckpointConfig()
    uri = job.attributes.checkpoint_storage_uri or f"{FILE}{place.checkpoint_path}/"
    _tell(job.attributes, config, uri, book)
    said = job.attributes  # inference without a value would override the config
    on_preemption = said.checkpoint_on_preempt
    return Checkpoint(
        uri=uri,
        interval_seconds=said.checkpoint_interval_s or (config.checkpoint_interval if config else INTERVAL_SECONDS),
        kept=said.checkpoint_max_count or (config.max_checkpoints if config else KEPT),
        on_preemption=config is not None if on_preemption is None else on_preemption,
        mount_path=_mount_path(job, uri),
        storage_class=place.storage_class,
        storage_size=place.storage_size,
    )


def _mount_path(job: Job, uri: str) -> str:
    """Return the mount path of a volume for a `file://` URI; empty if the user's own volume is there, and for other
    places."""
    if not uri.startswith(FILE):
        return ""
    path = uri.removeprefix(FILE).rstrip("/")
    parts = path.split("/")[1:]
    if (
        is_of_kernel(path)
        or not path.startswith("/")
        or not all(parts)
        or any(part in (".", "..") for part in parts)
        or ":" in path
    ):
        raise JobMistake(
            f"{PREFIX}checkpoint_storage_uri",
            uri,
            "a file:// URI names a folder by its whole path, and none of the kernel's",
            "write file:///checkpoints/",
        )
    volumes = job.container.volumes if job.container is not None else ()
    is_mounted = any(f"{path}/".startswith(f"{one.mount_path}/") for one in volumes if not one.read_only)
    return "" if is_mounted else path


def _tell_disabled(attributes: MlAttributes, book: NoteBook) -> None:
    if attributes.checkpoint_enabled is not None:
        book.tell(f"{PREFIX}checkpoint_enabled", value=False, text="no checkpoint is saved")
    for name in ("interval_s", "storage_uri", "max_count", "on_preempt"):
        value = getattr(attributes, f"checkpoint_{name}")
        if value is not None:
            book.tell(f"{PREFIX}checkpoint_{name}", value, f"{NO_EFFECT}{PREFIX}checkpoint_enabled is not true")


def _tell(attributes: MlAttributes, config: CheckpointConfig | None, uri: str, book: NoteBook) -> None:
    for name, field in (("checkpoint_interval_s", "checkpoint_interval"), ("checkpoint_max_count", "max_checkpoints")):
        if config is not None and getattr(attributes, name) is not None and field in config.model_fields_set:
            text = f"{NO_EFFECT}{PREFIX}{name} wins"
            book.tell(f"intent.checkpoint_config.{field}", getattr(config, field), text)
    if config is not None and attributes.checkpoint_storage_uri is not None:
        book.tell("intent.checkpoint_config.checkpoint_path", config.checkpoint_path, f"{NO_EFFECT}saved to {uri}")
