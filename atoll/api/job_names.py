"""Every label, annotation and environment variable on the objects that a job becomes.

In: nothing. Out: constants. Beside atoll.api.names, because they mean nothing to the scheduler: whoever keeps records
of jobs reads them, and so do containers.
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
PREEMPTIBLE: Final = "job.gpu.scheduling/preemptible"
PRIORITY: Final = "job.gpu.scheduling/priority"
RESOURCE_PROFILE: Final = "job.gpu.scheduling/resource-profile"
MODEL_ID: Final = "job.gpu.scheduling/model-id"
MODEL_VERSION: Final = "job.gpu.scheduling/model-version"
APP: Final = "app"

# Annotations of the object that runs the pods.
DEADLINE: Final = "job.gpu.scheduling/deadline"
SCHEDULED_START: Final = "job.gpu.scheduling/scheduled-start"
ML_ANNOTATION_PREFIX: Final = "ml.gpu.scheduling/"
"""With the name of an attribute, its underscores as dashes: what the job says, word for word."""
RESERVATION: Final = "gpu.scheduling/reservation"
"""Annotation of a pod: the reservation outside of which it never runs."""

# What others look for.
QUEUE_NAME: Final = "kueue.x-k8s.io/queue-name"
QUEUE_PRIORITY: Final = "kueue.x-k8s.io/priority-class"

# Variables of containers.
ML_VARIABLE_PREFIX: Final = "ML_"
"""With the name of an attribute in capitals: ML_MODEL_ID, ML_CHECKPOINT_STORAGE_URI."""
JOB_NAME_VARIABLE: Final = "ML_JOB_NAME"
JOB_ID_VARIABLE: Final = "ML_JOB_ID"
WORKERS_VARIABLE: Final = "ML_WORKERS"
"""How many pods work as one; the rank of a pod is in JOB_COMPLETION_INDEX, as Kubernetes sets it."""
GPUS_VARIABLE: Final = "ML_GPUS_PER_WORKER"
MASTER_ADDRESS: Final = "MASTER_ADDR"
MASTER_PORT: Final = "MASTER_PORT"
MASTER_PORT_NUMBER: Final = 29_500
"""Where the pods of a training meet: the name of the first one, at PyTorch's usual port."""
TORCHRUN_VARIABLES: Final = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
"""What torchrun reads in place of its options --nnodes, --nproc-per-node, --node-rank, --master-addr, --master-port."""
