"""One set of attributes for a job: its attributes, fields of the same meaning, and what follows from both."""

from atoll.jobs.model import Job
from atoll.jobs.notes import HINT, NoteBook
from atoll.ml.attributes import PREFIX, MlAttributes
from atoll.ml.infer import complete


def given_attributes(job: Job) -> MlAttributes:
    """Return the job's attributes from all its fields: resources and model_id count as attributes."""
    said = {
        "gpu_type": job.resources.gpu_type,
        "gpu_count": job.resources.gpu_count,
        "model_id": job.model_id,
    }
    more = {name: value for name, value in said.items() if value is not None and getattr(job.attributes, name) is None}
    return job.attributes.model_copy(update=more)


def attributes_of(job: Job, book: NoteBook) -> MlAttributes:
    """Return the attributes with what follows from them; each inference is noted, defaults are not."""
    done = complete(given_attributes(job))
    for note in done.notes:
        if note.reason != "default" and note.attribute != f"{PREFIX}preemptible":
            book.tell(note.attribute, None, f"{note.value}: {note.reason}")
    for warning in done.warnings:
        if warning.attribute == f"{PREFIX}checkpoint_on_preempt":
            continue  # the job's checkpoints say it, which intent.checkpoint_config may enable too
        book.tell(warning.attribute, warning.value, HINT + warning.reason)
    return done.attributes
