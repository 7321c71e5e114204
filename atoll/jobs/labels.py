"""Labels and annotations of everything that a job becomes.

In: a Job and what it needs. Out: maps of text. Separate, because objects, pods and whoever looks for them agree here.
"""

import re
from hashlib import sha256
from typing import Final

from atoll.api import job_names, names
from atoll.jobs.model import Job
from atoll.jobs.needs import Needs
from atoll.jobs.notes import NoteBook
from atoll.jobs.profiles import profile_of
from atoll.jobs.words import DeploymentType, JobType
from atoll.ml.attributes import PREFIX

_LABEL: Final = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?\Z", re.ASCII)
_OTHER: Final = re.compile(r"[^A-Za-z0-9_.-]+", re.ASCII)
DIGEST_LENGTH: Final = 8
