"""The free quota of a tenant, from the file of queues and the records of jobs."""

from sqlalchemy.orm import Session

from atoll.pipelines.sequencing import GpuRoom, room_of
from jobs.errors import RecordUnreadable
from jobs.queue_store import queue_file_of, queues_in
from jobs.store import queue_usage


def gpu_room(session: Session, cluster: str, tenant: str) -> GpuRoom | None:
    """Return the GPUs that a tenant's queues have free; None without quota for it. Jobs that wait count as using."""
    record = queue_file_of(session, cluster)
    try:
        file = queues_in(record)
    except RecordUnreadable:  # its keeper tells the operators
        return None
    found = file.tenant(tenant) if file is not None else None
    if record is None or record.has_kueue is False or file is None or found is None:
        return None
    used = {queue.name: queue_usage(session, cluster, queue.name).gpus for queue in found.queues}
    return room_of(file, found, used)
