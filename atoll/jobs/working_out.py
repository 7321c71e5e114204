"""One set of attributes for a job: what it says as attributes, what it says elsewhere, and what follows from both.

In: a Job. Out: MlAttributes without gaps that matter to its objects. Separate, because fields and attributes of one
meaning meet here and nowhere else.
"""

from atoll.jobs.model import Job
from atoll.jobs.notes import HINT, NoteBook
from atoll.ml.attributes import PREFIX, MlAttributes
from atoll.ml.infer import complete


def given_attributes(job: Job) -> MlAttributes:
    """Return what the job says, wherever it says it: resources and model_id count as attributes."""
    said = {
        "gpu_type": job.resources.gpu_type,
        "gpu_count": job.resources.gpu_count,
        "model_id": job.model_id,
    }
    more = {name: value for name, value in said.items() if value is not None and getattr(job.attributes, name) is None}
    return job.attributes.model_copy(update=more)


def attributes_of(job: Job, book: NoteBook) -> MlAttributes:
    """Return the attributes with what follows from them; each conclusion is noted, mere defaults are not."""
    done = complete(given_attributes(job))
    for note in done.notes:
        if note.reason != "default" and note.attribute != f"{PREFIX}preemptible":
            book.tell(note.attribute, None, f"{note.value}: {note.reason}")
    for warning in done.warnings:
        book.tell(warning.attribute, warning.value, HINT + warning.reason)
    return done.attributes
