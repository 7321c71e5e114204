"""The free quota of a tenant, from the file of queues and the records of jobs."""

from sqlalchemy.orm import Session

from atoll.jobs.queue_file import QueueFile
from atoll.pipelines.sequencing import GpuRoom, room_of
from jobs.queue_store import queue_file_of
from jobs.store import queue_usage


def gpu_room(session: Session, cluster: str, tenant: str) -> GpuRoom | None:
    """Return the GPUs that a tenant's queues have free; None without quota for it. Jobs that wait count as using."""
    record = queue_file_of(session, cluster)
    if record is None or record.has_kueue is False:
        return None
    file = QueueFile.model_validate(record.document)
    found = file.tenant(tenant)
    if found is None:
        return None
    used = {queue.name: queue_usage(session, cluster, queue.name).gpus for queue in found.queues}
    return room_of(file, found, used)
