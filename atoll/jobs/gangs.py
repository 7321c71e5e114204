"""How near the pods of a job are that start together: on one machine, in one NVLink fabric, in one TPU slice."""

from typing import Final

from atoll.api.claims import InterconnectKind
from atoll.api.gangs import GangTopologyRequest, TopologyMode
from atoll.api.names import FABRIC_LEVEL
from atoll.jobs.errors import JobMistake
from atoll.jobs.model import Job
from atoll.jobs.notes import NoteBook
from atoll.jobs.settings import RenderSettings
from atoll.jobs.words import TopologyConstraint
from atoll.ml.attributes import PREFIX

SAME_NODE: Final = TopologyConstraint.SAME_NODE


def together_of(job: Job, *, on_tpus: bool, settings: RenderSettings, book: NoteBook) -> GangTopologyRequest | None:
    """Return the placement of a gang's pods; None for anywhere. Raises JobMistake.

    Requirements on all GPUs of a job apply across its pods. A TPU slice is contiguous: its pods never share two.
    """
    level, of = "", f"GpuGang/{job.name}"
    if on_tpus:
        if job.policy.topology is SAME_NODE:
            limit, hint = "the slice lies on several hosts", "remove it, or choose a smaller slice"
            raise JobMistake("policy.topology", SAME_NODE, limit, hint)
        level = settings.slice_level
        text = f"all members in one domain of {level}, which is one slice"
        book.tell(f"{PREFIX}tpu_topology", job.attributes.tpu_topology, text, of)
    elif job.policy.topology is SAME_NODE:
        level = settings.host_level
        book.tell("policy.topology", "same_node", f"all members in one domain of {level}", of)
    elif job.attributes.gpu_interconnect is InterconnectKind.NVLINK:
        level = FABRIC_LEVEL
        text = f"all members in one domain of {level}: NVLink joins all GPUs of the job"
        book.tell(f"{PREFIX}gpu_interconnect", "nvlink", text, of)
    return GangTopologyRequest(mode=TopologyMode.REQUIRED, level=level) if level else None
