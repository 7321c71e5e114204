"""Every label, annotation and environment variable on the objects that a job becomes.

Beside atoll.api.names, because containers and systems that track jobs read them; the controllers read one.
"""

from typing import Final

PREFIX: Final = "job.gpu.scheduling/"

# Labels of every object and pod of a job.
JOB_NAME: Final = "job.gpu.scheduling/name"
JOB_ID: Final = "job.gpu.scheduling/job-id"
JOB_TYPE: Final = "job.gpu.scheduling/job-type"
DEPLOYMENT_TYPE: Final = "job.gpu.scheduling/deployment-type"
SOURCE_TYPE: Final = "job.gpu.scheduling/source-type"
TENANT_ID: Final = "job.gpu.scheduling/tenant-id"
PROJECT_ID: Final = "job.gpu.scheduling/project-id"
OPTIMIZATION_GOAL: Final = "job.gpu.scheduling/optimization-goal"
WORKLOAD_CLASS: Final = "job.gpu.scheduling/workload-class"
SPOT_ELIGIBLE: Final = "job.gpu.scheduling/spot-eligible"
PRIORITY: Final = "job.gpu.scheduling/priority"
RESOURCE_PROFILE: Final = "job.gpu.scheduling/resource-profile"
MODEL_ID: Final = "job.gpu.scheduling/model-id"
MODEL_VERSION: Final = "job.gpu.scheduling/model-version"
APP: Final = "app"

# Labels on the objects of the job service.
SERVICE_ID: Final = "job.gpu.scheduling/service-id"
"""Id of the service that created the object: each service only manages its own."""
ATTEMPT: Final = "job.gpu.scheduling/attempt"
"""Number of the job's attempt that it belongs to, from 1."""

# Annotations of the object that runs the pods.
DEADLINE: Final = "job.gpu.scheduling/deadline"
SCHEDULED_START: Final = "job.gpu.scheduling/scheduled-start"
ML_ANNOTATION_PREFIX: Final = "ml.gpu.scheduling/"
"""With the name of an attribute, its underscores as dashes: the job's own value."""
RESERVATION_TIMEOUT: Final = "ml.gpu.scheduling/reservation-timeout-s"
"""One of these: seconds for which a GpuReservation is kept after the pod, for the next one."""

# What others look for.
QUEUE_NAME: Final = "kueue.x-k8s.io/queue-name"
QUEUE_PRIORITY: Final = "kueue.x-k8s.io/priority-class"

# Variables of containers.
VARIABLE_PREFIX: Final = "ATOLL_"
USER_VARIABLES: Final = frozenset(
    {"ATOLL_META", "ATOLL_ARGS", "ATOLL_CHECKPOINT_KEY_FILE", "ATOLL_MODEL_CACHE", "ATOLL_TERMINATION_LOG"}
)
"""Those that a job's own description may set; all others of the prefix are Atoll's."""
ML_VARIABLE_PREFIX: Final = "ML_"
"""With the name of an attribute in capitals: ML_MODEL_ID, ML_MAX_TOKENS."""
JOB_NAME_VARIABLE: Final = "ATOLL_JOB_NAME"
JOB_ID_VARIABLE: Final = "ATOLL_JOB_ID"
"""The id of the job, or its name if it has none."""
GRACE_VARIABLE: Final = "ATOLL_GRACE_SECONDS"
WORKERS_VARIABLE: Final = "ATOLL_WORKERS"
"""Number of pods that work together; a pod's rank is in JOB_COMPLETION_INDEX, set by Kubernetes."""
GPUS_VARIABLE: Final = "ATOLL_GPUS_PER_WORKER"
CHECKPOINT_URI: Final = "ATOLL_CHECKPOINT_URI"
CHECKPOINT_PREFIXES: Final = "ATOLL_CHECKPOINT_PREFIXES"
MODEL_HOSTS: Final = "ATOLL_MODEL_HOSTS"
"""Allowed places of checkpoints: URIs separated by spaces."""
CHECKPOINT_INTERVAL: Final = "ATOLL_CHECKPOINT_INTERVAL_SECONDS"
CHECKPOINT_COUNT: Final = "ATOLL_CHECKPOINT_MAX_COUNT"
CHECKPOINT_ON_PREEMPTION: Final = "ATOLL_CHECKPOINT_ON_PREEMPTION"
"""true or false: a checkpoint is saved when the pod is ended."""
NOTICE_FOLDER: Final = "/etc/atoll"
NOTICE_FILE: Final = "preemption-notice"
MASTER_ADDRESS: Final = "MASTER_ADDR"
MASTER_PORT: Final = "MASTER_PORT"
MASTER_PORT_NUMBER: Final = 29_500
"""Rendezvous of a training's pods: the name of the first one, at PyTorch's usual port."""
TORCHRUN_VARIABLES: Final = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
"""Variables that torchrun reads in place of its options --nnodes, --nproc-per-node, --node-rank, --master-addr,
--master-port."""
