"""Rendered objects of jobs: one row per field of a job, with its effect on an object."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from atoll.api import job_names, names
from atoll.api.claims import GpuClaim
from atoll.api.gangs import GpuGang
from atoll.jobs.errors import JobMistake
from atoll.jobs.settings import RenderSettings
from tests.jobs.render import NOW_SECONDS, env, look, rendered


@dataclass(frozen=True)
class RenderCase:
    """A job, and what stands where in its objects."""

    says: Mapping[str, Any]
    want: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


SPOT = {"key": "kubernetes.azure.com/scalesetpriority", "operator": "Equal", "value": "spot", "effect": "NoSchedule"}
EIGHT = {"ext_ml_gpu_type": "nvidia-h100", "ext_ml_gpu_count": 8}
SIXTEEN = {"job_type": "training", "ext_ml_gpu_count": 16, "ext_ml_distributed_strategy": "fsdp"}
CHECKPOINTS = {"job_type": "training", "intent": {"checkpoint_config": {}}}
PORT = {"image": "web:1", "ports": [{"port": 8080, "name": "http"}]}
SERVICE = {"job_type": "service", "container": PORT}
GOOD = "GpuClaim.spec.devices"
MEMORY = "POD.spec.containers[0].resources"
HOST = "kubernetes.io/hostname"
PREEMPTIBLE = names.PREEMPTIBLE.replace(".", "~")
SPOT_ELIGIBLE = job_names.SPOT_ELIGIBLE.replace(".", "~")
QUEUE = job_names.QUEUE_NAME.replace(".", "~")

CLAIMS = {
    "a-count-alone-is-a-claim-of-one-pod": RenderCase({"ext_ml_gpu_count": 2}, {f"{GOOD}.count": 2, "GpuGang": None}),
    "a-type-alone-is-one-gpu": RenderCase(
        {"ext_ml_gpu_type": "nvidia-l4"}, {f"{GOOD}.count": 1, f"{GOOD}.models": ["nvidia-l4"]}
    ),
    "the-platforms-short-name-means-the-same": RenderCase(
        {"resources": {"gpu_type": "A100", "gpu_count": 4}}, {f"{GOOD}.count": 4, f"{GOOD}.models": ["nvidia-a100"]}
    ),
    "gigabytes-are-decimal": RenderCase({"ext_ml_gpu_memory_gb": 80}, {f"{GOOD}.memory": "80G"}),
    "part-of-a-gigabyte-is-megabytes": RenderCase({"ext_ml_gpu_memory_gb": 23.5}, {f"{GOOD}.memory": "23500M"}),
    "a-card-of-two-gpus-is-asked-for-its-half": RenderCase(
        {"ext_ml_gpu_type": "amd-mi250", "ext_ml_gpu_memory_gb": 128},
        {
            f"{GOOD}.memory": "64G",
            f"{GOOD}.vendor": "amd",
            f"{GOOD}.models": ["amd-instinct-mi250", "amd-instinct-mi250x"],
        },
    ),
    "capability-is-compared-as-it-is": RenderCase(
        {"ext_ml_gpu_compute_capability": "10.0"}, {f"{GOOD}.computeCapability": "10.0"}
    ),
    "precision-tells-the-least-capability": RenderCase(
        {"ext_ml_gpu_count": 1, "ext_ml_precision": "fp8"}, {f"{GOOD}.computeCapability": "8.9"}
    ),
    "capabilities-are-nvidias": RenderCase(
        {"ext_ml_gpu_type": "amd-mi300x", "ext_ml_precision": "bf16"}, {f"{GOOD}.computeCapability": None}
    ),
    "nvlink-joins-all-gpus-of-the-pod": RenderCase(
        {"ext_ml_gpu_count": 4, "ext_ml_gpu_interconnect": "nvlink"}, {f"{GOOD}.interconnect": "nvlink"}
    ),
    "tensor-parallel-wants-nvlink": RenderCase(
        {"ext_ml_gpu_count": 4, "ext_ml_distributed_strategy": "tensor_parallel"}, {f"{GOOD}.interconnect": "nvlink"}
    ),
    "one-gpu-is-joined-with-none": RenderCase({"ext_ml_gpu_interconnect": "nvlink"}, {f"{GOOD}.interconnect": None}),
    "a-topology-of-nvlink-is-a-claim": RenderCase(
        {"ext_ml_gpu_count": 4, "policy": {"topology": "nvlink"}}, {f"{GOOD}.interconnect": "nvlink"}
    ),
    "the-template-shows-gpus-claim-and-scheduler": RenderCase(
        EIGHT,
        {
            f"{MEMORY}.limits": {"memory": "8Gi", "cpu": "2", "gpu.scheduling/gpu": "8"},
            "POD.metadata.annotations.gpu~scheduling/claim": "work",
            "POD.spec.schedulerName": "gpu-scheduler",
        },
    ),
    "no-gpus-no-claim": RenderCase({"ext_ml_accelerator": "cpu"}, {"GpuClaim": None, "POD.spec.schedulerName": None}),
    "a-count-of-none-is-no-claim": RenderCase({"ext_ml_gpu_count": 0}, {"GpuClaim": None}),
}
HOSTS = {
    "cores-are-requested": RenderCase(
        {"ext_ml_cpu_cores": 16}, {f"{MEMORY}.requests.cpu": "16", f"{MEMORY}.limits.cpu": None}
    ),
    "memory-is-requested-and-limited": RenderCase(
        {"ext_ml_memory_gb": 64}, {f"{MEMORY}.requests.memory": "64G", f"{MEMORY}.limits.memory": "64G"}
    ),
    "shared-memory-is-memory-and-counts": RenderCase(
        {"ext_ml_memory_gb": 64, "ext_ml_shm_size_gb": 16},
        {
            f"{MEMORY}.limits.memory": "80G",
            "POD.spec.volumes[0].emptyDir": {"medium": "Memory", "sizeLimit": "16G"},
            "POD.spec.containers[0].volumeMounts[0].mountPath": "/dev/shm",
        },
    ),
    "scratch-is-a-volume-that-is-requested": RenderCase(
        {"ext_ml_storage_gb": 500},
        {
            f"{MEMORY}.requests.ephemeral-storage": "500G",
            "POD.spec.volumes[0].emptyDir": {"sizeLimit": "500G"},
            "POD.spec.containers[0].volumeMounts[0].mountPath": "/scratch",
        },
    ),
    "whoever-says-nothing-has-the-defaults": RenderCase(
        {}, {f"{MEMORY}.requests": {"cpu": "1", "memory": "4Gi"}, f"{MEMORY}.limits": {"memory": "8Gi", "cpu": "2"}}
    ),
    "the-platforms-resources-are-taken-as-they-are": RenderCase(
        {"resources": {"cpu_request": 4, "cpu_limit": "8", "memory_request": "16Gi", "memory_limit": "32Gi"}},
        {f"{MEMORY}.requests": {"cpu": "4", "memory": "16Gi"}, f"{MEMORY}.limits": {"cpu": "8", "memory": "32Gi"}},
    ),
    "a-request-beyond-the-default-limit-raises-it": RenderCase(
        {"resources": {"memory_request": "64Gi"}}, {f"{MEMORY}.limits.memory": "64Gi"}
    ),
}
TIMES = {
    "a-timeout-ends-the-job": RenderCase({"ext_ml_timeout_seconds": 60}, {"Job.spec.activeDeadlineSeconds": 60}),
    "a-timeout-replaces-the-longest-run": RenderCase(
        {"ext_ml_timeout_seconds": 60, "policy": {"max_runtime": 30}}, {"Job.spec.activeDeadlineSeconds": 60}
    ),
    "the-longest-run-ends-the-job": RenderCase(
        {"policy": {"max_runtime": 28800}}, {"Job.spec.activeDeadlineSeconds": 28800}
    ),
    "a-deadline-counts-from-the-planned-start": RenderCase(
        {"policy": {"scheduled_start": "2030-01-01T00:00:00Z", "deadline": "2030-01-01T01:00:00Z"}},
        {
            "Job.spec.activeDeadlineSeconds": 3600,
            "Job.metadata.annotations.job~gpu~scheduling/deadline": "2030-01-01T01:00:00+00:00",
            "Job.metadata.annotations.job~gpu~scheduling/scheduled-start": "2030-01-01T00:00:00+00:00",
        },
    ),
    "nobody-ends-a-service": RenderCase(
        SERVICE | {"ext_ml_timeout_seconds": 60},
        {"Deployment.spec.activeDeadlineSeconds": None, "POD.spec.activeDeadlineSeconds": None},
        {"ML_TIMEOUT_SECONDS": "60"},
    ),
    "grace-is-half-a-minute": RenderCase(
        {}, {"POD.spec.terminationGracePeriodSeconds": 30}, {"ATOLL_GRACE_SECONDS": "30"}
    ),
    "grace-is-as-asked": RenderCase(
        {"policy": {"preemption_grace_period": 90}}, {"POD.spec.terminationGracePeriodSeconds": 90}
    ),
    "the-attribute-wins-over-the-policy": RenderCase(
        {"ext_ml_preemption_grace_period_s": 60, "policy": {"preemption_grace_period": 90}},
        {"POD.spec.terminationGracePeriodSeconds": 60},
    ),
    "a-checkpoint-needs-its-time": RenderCase(
        {
            "job_type": "training",
            "ext_ml_preemption_grace_period_s": 60,
            "ext_ml_checkpoint_enabled": True,
            "ext_ml_checkpoint_on_preempt": True,
        },
        {"POD.spec.terminationGracePeriodSeconds": 300},
    ),
    "whoever-keeps-checkpoints-has-time-for-one": RenderCase(
        {"job_type": "training", "ext_ml_checkpoint_enabled": True}, {"POD.spec.terminationGracePeriodSeconds": 300}
    ),
    "unless-it-says-how-long-it-needs": RenderCase(
        {"job_type": "training", "ext_ml_checkpoint_enabled": True, "ext_ml_preemption_grace_period_s": 60},
        {"POD.spec.terminationGracePeriodSeconds": 60},
    ),
    "or-that-it-saves-none-then": RenderCase(
        {"job_type": "training", "ext_ml_checkpoint_enabled": True, "ext_ml_checkpoint_on_preempt": False},
        {"POD.spec.terminationGracePeriodSeconds": 30},
    ),
    "grace-is-bounded-by-the-cluster": RenderCase(
        {"policy": {"preemption_grace_period": 7200}}, {"POD.spec.terminationGracePeriodSeconds": 600}
    ),
    "a-finished-job-stays-a-day": RenderCase({}, {"Job.spec.ttlSecondsAfterFinished": 86400}),
}
TYPES = {
    "a-batch-runs-once-and-never-restarts-in-place": RenderCase(
        {},
        {
            "POD.spec.restartPolicy": "Never",
            "Job.spec.backoffLimit": 3,
            "Job.spec.completions": 1,
            "Job.spec.parallelism": 1,
            "Job.spec.podFailurePolicy.rules[0]": {
                "action": "Ignore",
                "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
            },
            "PersistentVolumeClaim": None,
        },
    ),
    "a-batch-of-many-pods-numbers-them": RenderCase(
        {"parallelism": 4, "completions": 10},
        {"Job.spec.parallelism": 4, "Job.spec.completions": 10, "Job.spec.completionMode": "Indexed"},
    ),
    "a-training-that-nobody-preempts-restarts-in-place": RenderCase(
        {"job_type": "training", "ext_ml_preemptible": False},
        {"POD.spec.restartPolicy": "OnFailure", "Job.spec.podFailurePolicy": None},
    ),
    "a-training-that-may-be-preempted-loses-no-try-by-it": RenderCase(
        {"job_type": "training", "policy": {"max_retries": 5}},
        {
            "POD.spec.restartPolicy": "Never",
            "Job.spec.backoffLimit": 5,
            "Job.spec.podFailurePolicy.rules[0].action": "Ignore",
        },
    ),
    "whoever-wants-no-retry-fails-when-preempted": RenderCase(
        {"policy": {"retry_on_preemption": False}}, {"Job.spec.podFailurePolicy.rules[0].action": "FailJob"}
    ),
    "a-training-has-a-volume-where-it-saves": RenderCase(
        CHECKPOINTS,
        {
            "PersistentVolumeClaim.metadata.name": "work-ckpt",
            "PersistentVolumeClaim.spec": {
                "accessModes": ["ReadWriteOnce"],
                "storageClassName": "standard",
                "resources": {"requests": {"storage": "100Gi"}},
            },
            "POD.spec.containers[0].volumeMounts[0].mountPath": "/checkpoints",
            "POD.spec.volumes[0].persistentVolumeClaim.claimName": "work-ckpt",
            "POD.spec.volumes[1].downwardAPI.items[0].path": "preemption-notice",
            "POD.spec.terminationGracePeriodSeconds": 300,
        },
        {"ATOLL_CHECKPOINT_URI": "file:///checkpoints/", "ATOLL_CHECKPOINT_INTERVAL_SECONDS": "3600"},
    ),
    "attributes-win-over-the-config": RenderCase(
        CHECKPOINTS | {"ext_ml_checkpoint_interval_s": 600, "ext_ml_checkpoint_storage_uri": "s3://bucket/a/"},
        {"PersistentVolumeClaim": None},
        {
            "ATOLL_CHECKPOINT_URI": "s3://bucket/a/",
            "ATOLL_CHECKPOINT_INTERVAL_SECONDS": "600",
            "ATOLL_CHECKPOINT_MAX_COUNT": "3",
        },
    ),
    "a-file-uri-is-a-volume": RenderCase(
        {"job_type": "training", "ext_ml_checkpoint_enabled": True, "ext_ml_checkpoint_storage_uri": "file:///ckpt/a/"},
        {"POD.spec.containers[0].volumeMounts[0].mountPath": "/ckpt/a"},
        {"ATOLL_CHECKPOINT_INTERVAL_SECONDS": "300", "ATOLL_CHECKPOINT_ON_PREEMPTION": "false"},
    ),
    "a-volume-of-the-users-own-is-enough": RenderCase(
        {
            "job_type": "training",
            "container": {"image": "a:1", "volumes": [{"name": "data", "mount_path": "/checkpoints", "claim": "mine"}]},
            "ext_ml_checkpoint_enabled": True,
        },
        {"PersistentVolumeClaim": None},
    ),
    "a-service-is-a-deployment-behind-a-name": RenderCase(
        SERVICE,
        {
            "Deployment.spec.replicas": 1,
            "Deployment.spec.selector.matchLabels": {job_names.JOB_NAME: "work"},
            "POD.metadata.labels.app": "work",
            "POD.spec.containers[0].readinessProbe.tcpSocket.port": 8080,
            "POD.spec.containers[0].lifecycle.preStop.sleep.seconds": 5,
            "Service.spec.ports[0]": {"name": "http", "port": 8080, "targetPort": "http"},
            "HorizontalPodAutoscaler": None,
            "Job": None,
        },
    ),
    "a-service-with-gpus-needs-no-spare-ones-to-roll-out": RenderCase(
        SERVICE | {"ext_ml_gpu_count": 1},
        {"Deployment.spec.strategy.rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
    ),
    "replicas-between-two-numbers-are-an-autoscaler": RenderCase(
        SERVICE | {"policy": {"min_replicas": 2, "max_replicas": 5}},
        {
            "HorizontalPodAutoscaler.spec.minReplicas": 2,
            "HorizontalPodAutoscaler.spec.maxReplicas": 5,
            "Deployment.spec.replicas": None,
        },
    ),
    "the-first-request-starts-a-serverless-service": RenderCase(
        SERVICE | {"policy": {"scale_to_zero": True, "max_replicas": 3}},
        {
            "HTTPScaledObject.spec.replicas": {"min": 0, "max": 3},
            "HTTPScaledObject.spec.scaleTargetRef.service": "work",
            "HTTPScaledObject.spec.scaleTargetRef.port": 8080,
        },
    ),
    "a-model-brings-its-server": RenderCase(
        {
            "job_type": "service",
            "deployment_type": "model",
            "model_id": "org/model",
            "ext_ml_runtime": "vllm",
            "ext_ml_gpu_count": 2,
            "ext_ml_precision": "bf16",
        },
        {
            "POD.spec.containers[0].image": "vllm/vllm-openai:v0.11.0",
            "POD.spec.containers[0].args": [
                "--model=org/model",
                "--tensor-parallel-size=2",
                "--dtype=bfloat16",
                "--port=8000",
            ],
            "POD.spec.containers[0].readinessProbe.httpGet": {"path": "/health", "port": 8000},
            "Service.spec.ports[0].port": 8000,
        },
        {"ML_MODEL_ID": "org/model"},
    ),
    "a-model-keeps-its-server-beside-options-of-the-user": RenderCase(
        {
            "job_type": "service",
            "deployment_type": "model",
            "ext_ml_model_id": "llama",
            "ext_ml_model_registry_uri": "hf://org/llama@v2",
            "ext_ml_runtime": "vllm",
            "ext_ml_gpu_count": 4,
            "ext_ml_distributed_strategy": "pipeline_parallel",
            "container": {
                "args": ["--enable-lora", "--dtype=half", "--port=9000"],
                "ports": [{"port": 9000, "name": "http"}],
            },
            "ext_ml_precision": "bf16",
        },
        {
            "POD.spec.containers[0].args": [
                "--model=org/llama",
                "--revision=v2",
                "--pipeline-parallel-size=4",
                "--enable-lora",
                "--dtype=half",
                "--port=9000",
            ],
        },
    ),
    "one-machine-has-a-process-of-torchrun-per-gpu": RenderCase(
        {"job_type": "training", "ext_ml_gpu_count": 8, "ext_ml_runtime": "pytorch"},
        {},
        {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "8"},
    ),
    "a-service-that-is-given-no-time-does-not-drain": RenderCase(
        SERVICE | {"ext_ml_preemption_grace_period_s": 0},
        {"POD.spec.terminationGracePeriodSeconds": 0, "POD.spec.containers[0].lifecycle": None},
    ),
}
GANGS = {
    "more-gpus-than-a-machine-has-are-pods-that-work-as-one": RenderCase(
        SIXTEEN | {"ext_ml_runtime": "pytorch"},
        {
            f"{GOOD}.count": 8,
            "GpuClaim.spec.gangRef": "work",
            "GpuGang.spec.podSets": [{"name": "main", "count": 2}],
            "Job.spec.completions": 2,
            "Job.spec.parallelism": 2,
            "Job.spec.completionMode": "Indexed",
            "POD.metadata.annotations.gpu~scheduling/gang": "work",
            "POD.spec.schedulingGates": [{"name": names.GANG_GATE}],
            "POD.spec.subdomain": "work",
            "Service.spec.clusterIP": "None",
            "Service.spec.publishNotReadyAddresses": True,
        },
        {
            "MASTER_ADDR": "work-0.work",
            "MASTER_PORT": "29500",
            "ATOLL_WORKERS": "2",
            "ATOLL_GPUS_PER_WORKER": "8",
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "8",
        },
    ),
    "workers-share-the-gpus-evenly": RenderCase(
        {"job_type": "training", "ext_ml_gpu_count": 12, "workers": 3},
        {f"{GOOD}.count": 4, "GpuGang.spec.podSets": [{"name": "main", "count": 3}]},
    ),
    "an-odd-count-is-shared-by-as-few-pods-as-can-be": RenderCase(
        {"job_type": "training", "ext_ml_gpu_count": 15, "ext_ml_distributed_strategy": "deepspeed"},
        {f"{GOOD}.count": 5, "Job.spec.completions": 3},
    ),
    "one-node-for-all-members": RenderCase(
        {"job_type": "training", "ext_ml_gpu_count": 8, "workers": 2, "policy": {"topology": "same_node"}},
        {"GpuGang.spec.topology": {"mode": "required", "level": HOST}},
    ),
    "one-node-for-pods-on-their-own": RenderCase(
        {"parallelism": 2, "policy": {"topology": "same_node"}},
        {
            "GpuGang": None,
            "POD.spec.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey": HOST,
        },
    ),
    "nvlink-between-all-gpus-is-one-fabric": RenderCase(
        SIXTEEN | {"ext_ml_gpu_interconnect": "nvlink"},
        {"GpuGang.spec.topology": {"mode": "required", "level": names.FABRIC_LEVEL}, f"{GOOD}.interconnect": "nvlink"},
    ),
    "a-topology-of-nvlink-joins-the-gpus-of-each-pod": RenderCase(
        SIXTEEN | {"policy": {"topology": "nvlink"}}, {"GpuGang.spec.topology": None, f"{GOOD}.interconnect": "nvlink"}
    ),
    "pods-spread-over-nodes": RenderCase(
        {"parallelism": 3, "policy": {"topology": "spread"}},
        {
            "POD.spec.affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution[0]": {
                "labelSelector": {"matchLabels": {job_names.JOB_NAME: "work"}},
                "topologyKey": HOST,
            }
        },
    ),
    "pods-on-several-nodes-write-one-volume": RenderCase(
        SIXTEEN | {"intent": {"checkpoint_config": {}}}, {"PersistentVolumeClaim.spec.accessModes": ["ReadWriteMany"]}
    ),
    "workers-without-gpus-start-together-as-well": RenderCase(
        {"job_type": "training", "workers": 4, "policy": {"topology": "same_node"}},
        {
            "GpuClaim": None,
            "GpuGang.spec": {
                "podSets": [{"name": "main", "count": 4}],
                "topology": {"mode": "required", "level": HOST},
            },
            "Job.spec.completions": 4,
            "POD.spec.schedulingGates": [{"name": names.GANG_GATE}],
            "POD.spec.affinity": None,
        },
    ),
}
ORDER = {
    "a-service-is-important-by-itself": RenderCase(SERVICE, {"POD.spec.priorityClassName": "high"}),
    "a-batch-is-not": RenderCase({}, {"POD.spec.priorityClassName": "normal"}),
    "reserved-is-high": RenderCase({"ext_ml_priority_class": "reserved"}, {"POD.spec.priorityClassName": "high"}),
    "reserved-and-critical-agree": RenderCase(
        {"ext_ml_priority_class": "reserved", "policy": {"priority_class": "critical"}},
        {
            "POD.spec.priorityClassName": "critical",
            f"POD.metadata.labels.{PREEMPTIBLE}": "false",
        },
    ),
    "on-demand-is-normal": RenderCase({"ext_ml_priority_class": "on-demand"}, {"POD.spec.priorityClassName": "normal"}),
    "spot-is-low-and-goes-where-machines-may-go": RenderCase(
        {"ext_ml_priority_class": "spot"},
        {
            "POD.spec.priorityClassName": "low",
            "POD.spec.tolerations[0]": SPOT,
            f"POD.metadata.labels.{SPOT_ELIGIBLE}": "true",
            f"POD.metadata.labels.{PREEMPTIBLE}": "true",
        },
    ),
    "spot-eligible-is-no-priority": RenderCase(
        {"intent": {"spot_eligible": True}}, {"POD.spec.priorityClassName": "normal", "POD.spec.tolerations[0]": SPOT}
    ),
    "a-queue-of-its-own": RenderCase(
        {"policy": {"queue_name": "teams"}},
        {
            f"Job.metadata.labels.{QUEUE}": "teams",
            f"Job.metadata.labels.{job_names.QUEUE_PRIORITY.replace('.', '~')}": "normal",
        },
    ),
    "the-queue-of-the-tenant": RenderCase({"tenant_id": "acme"}, {f"Job.metadata.labels.{QUEUE}": "tenant-acme-queue"}),
    "no-queue-no-label": RenderCase({}, {f"Job.metadata.labels.{QUEUE}": None}),
    "a-reservation-is-named-by-the-pods": RenderCase(
        {"ext_ml_gpu_count": 1, "ext_ml_reservation_id": "nightly"},
        {"POD.metadata.annotations.gpu~scheduling/reservation": "nightly"},
    ),
    "tolerations-of-the-users": RenderCase(
        {"policy": {"tolerations": [{"key": "team", "operator": "Exists"}]}},
        {"POD.spec.tolerations[0]": {"key": "team", "operator": "Exists"}},
    ),
}
MODELS = {
    "what-is-said-of-a-model-reaches-the-container": RenderCase(
        {
            "ext_ml_model_id": "llama-3.1-70b",
            "ext_ml_model_version": "v2.1",
            "ext_ml_runtime": "vllm",
            "ext_ml_max_tokens": 4096,
            "ext_ml_max_batch_size": 32,
            "ext_ml_precision": "fp16",
            "ext_ml_distributed_strategy": "none",
        },
        {
            "POD.metadata.annotations.ml~gpu~scheduling/model-id": "llama-3.1-70b",
            "POD.metadata.annotations.ml~gpu~scheduling/model-version": "v2.1",
            f"POD.metadata.labels.{job_names.MODEL_ID.replace('.', '~')}": "llama-3.1-70b",
        },
        {
            "ML_MODEL_ID": "llama-3.1-70b",
            "ML_MODEL_VERSION": "v2.1",
            "ML_RUNTIME": "vllm",
            "ML_MAX_TOKENS": "4096",
            "ML_MAX_BATCH_SIZE": "32",
            "ML_PRECISION": "fp16",
            "ML_DISTRIBUTED_STRATEGY": "none",
        },
    ),
    "a-value-is-no-reference-to-a-variable": RenderCase(
        {"ext_ml_model_id": "a$(HOME)b"}, variables={"ML_MODEL_ID": "a$$(HOME)b"}
    ),
    "variables-of-the-user-win": RenderCase(
        {"container": {"image": "a:1", "env": [{"name": "ATOLL_JOB_NAME", "value": "mine"}]}},
        variables={"ATOLL_JOB_NAME": "mine"},
    ),
}
TPUS = {
    "one-host-of-a-small-slice": RenderCase(
        {"ext_ml_tpu_type": "v4", "ext_ml_tpu_topology": "2x2x1"},
        {
            "POD.spec.nodeSelector": {
                "cloud.google.com/gke-tpu-accelerator": "tpu-v4-podslice",
                "cloud.google.com/gke-tpu-topology": "2x2x1",
            },
            f"{MEMORY}.limits.google~com/tpu": "4",
            "POD.spec.affinity": None,
            "GpuClaim": None,
        },
    ),
    "a-slice-of-several-hosts-is-a-gang-in-one-pool": RenderCase(
        {"job_type": "training", "ext_ml_tpu_type": "v5p", "ext_ml_tpu_topology": "2x2x4"},
        {
            "Job.spec.completions": 4,
            "Job.spec.completionMode": "Indexed",
            "GpuClaim": None,
            "GpuGang.spec": {
                "podSets": [{"name": "main", "count": 4}],
                "topology": {"mode": "required", "level": "cloud.google.com/gke-nodepool"},
            },
            f"{MEMORY}.requests.google~com/tpu": "4",
            "POD.metadata.annotations.gpu~scheduling/gang": "work",
            "POD.metadata.annotations.gpu~scheduling/claim": None,
            "POD.spec.nodeSelector": {
                "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
                "cloud.google.com/gke-tpu-topology": "2x2x4",
            },
            "POD.spec.schedulingGates": [{"name": names.GANG_GATE}],
            "POD.spec.schedulerName": names.SCHEDULER_NAME,
            "POD.spec.affinity": None,
        },
    ),
}
ALL = CLAIMS | HOSTS | TIMES | TYPES | GANGS | ORDER | MODELS | TPUS


@pytest.mark.parametrize("case", ALL.values(), ids=ALL)
def test_what_a_job_says_stands_in_its_objects(case: RenderCase) -> None:
    """Every wish of a job stands where Kubernetes, Atoll, Kueue or the container looks for it."""
    result = rendered(**case.says)

    assert {path: look(result, path) for path in case.want} == case.want
    variables = env(result)
    assert {name: variables.get(name) for name in case.variables} == case.variables


def test_a_deadline_counts_from_now_where_no_start_is_planned() -> None:
    """The time is an argument, so that the same question has the same answer."""
    policy = {"deadline": "2030-03-17T18:03:20Z"}  # NOW_SECONDS + 1000

    assert look(rendered(policy=policy, now=NOW_SECONDS), "Job.spec.activeDeadlineSeconds") == 1000
    assert look(rendered(policy=policy), "Job.spec.activeDeadlineSeconds") is None
    assert look(rendered(policy=policy, now=NOW_SECONDS + 9999), "Job.spec.activeDeadlineSeconds") == 1


@pytest.mark.parametrize(("seconds", "has_passed"), [(1, False), (0.5, False), (-0.5, True), (-9999, True)], ids=str)
def test_a_deadline_has_passed_only_when_it_has(seconds: float, has_passed: bool) -> None:
    """A job may have one second left."""
    policy = {"deadline": "2030-03-17T18:03:20Z"}

    result = rendered(policy=policy, now=NOW_SECONDS + 1000 - seconds)

    assert look(result, "Job.spec.activeDeadlineSeconds") == 1
    assert ("it has passed" in " ".join(map(str, result.notes))) is has_passed


@pytest.mark.parametrize(
    ("gpu_type", "hint"),
    [
        ("nvidia-h1000", "not a known type, and only cards of that name match; did you mean nvidia-h100?"),
        ("nvidia-a100-mig-1g.5gb", "not a known type"),
        ("nvidia-a100", ""),
        ("amd-mi300x", ""),
        ("nvidia-a100-sxm4-80gb", ""),
        ("amd-instinct-mi250x", ""),
    ],
)
def test_a_type_that_may_be_misspelt_is_told(gpu_type: str, hint: str) -> None:
    """It is taken, since new cards appear; but the job would wait for ever if no card has the name."""
    told = [str(note) for note in rendered(ext_ml_gpu_type=gpu_type).notes if "known type" in note.text]

    assert len(told) == (1 if hint else 0)
    assert all(hint in one for one in told)


def test_a_deadline_beyond_all_machines_is_refused() -> None:
    """Kubernetes would count it in nanoseconds, overflow, and end the job at once."""
    with pytest.raises(JobMistake) as caught:
        rendered(policy={"deadline": "9999-12-31T23:59:59Z"}, now=NOW_SECONDS)

    assert caught.value.problem.attribute == "policy.deadline"


def test_the_machines_of_the_cluster_decide_how_gpus_are_shared() -> None:
    """A cluster of large machines takes in one pod what another shares out."""
    large = RenderSettings(gpus_per_pod_max=16)

    assert look(rendered(settings=large, **SIXTEEN), "GpuClaim.spec.devices.count") == 16
    assert look(rendered(settings=large, **SIXTEEN), "GpuGang") is None


def test_labels_say_what_kind_of_job_it_is() -> None:
    """Whoever looks for jobs of a kind finds object and pods by the same labels."""
    says = {
        "id": "6f1c3a52-6e0c-4d2f-9a55-1f6e1f1a7c11",
        "project_id": "p1",
        "tenant_id": "acme",
        "source_type": "pipeline",
        "labels": {"team": "vision"},
        "intent": {"optimization_goal": "cost", "workload_class": "research"},
    }
    want = {
        "app": "work",
        "team": "vision",
        job_names.JOB_ID: says["id"],
        job_names.JOB_TYPE: "batch",
        job_names.DEPLOYMENT_TYPE: "docker",
        job_names.SOURCE_TYPE: "pipeline",
        job_names.TENANT_ID: "acme",
        job_names.PROJECT_ID: "p1",
        job_names.OPTIMIZATION_GOAL: "cost",
        job_names.WORKLOAD_CLASS: "research",
        job_names.SPOT_ELIGIBLE: "false",
    }
    result = rendered(**says)

    assert want.items() <= look(result, "Job.metadata.labels").items()
    assert want.items() <= look(result, "POD.metadata.labels").items()


def test_a_chart_is_told_what_its_pods_need() -> None:
    """The claim is an object; Helm is told the rest, and what the user says to the chart stays."""
    result = rendered(
        job_type="service",
        deployment_type="helm",
        helm={"chart": "example/app", "version": "1.2.3", "values": {"replicas": 3, "podLabels": {"a": "b"}}},
        ext_ml_gpu_count=2,
    )

    assert [one["kind"] for one in result.objects] == ["GpuClaim"]
    assert result.helm is not None
    assert (result.helm.chart, result.helm.version) == ("example/app", "1.2.3")
    assert result.helm.values["replicas"] == 3
    assert result.helm.values["podAnnotations"][names.CLAIM] == "work"
    assert result.helm.values["podLabels"]["a"] == "b"
    assert result.helm.values["resources"]["limits"][names.GPU_RESOURCE] == "2"


def test_a_charts_own_resources_keep_the_devices() -> None:
    """What the user gives for CPU and memory stays; what Atoll gives out is as the job asks for it. Both are noted."""
    given = {"limits": {"memory": "1Gi", names.GPU_RESOURCE: "9"}, "claims": []}
    values = {"resources": given, "schedulerName": "other"}
    says: dict[str, Any] = {"job_type": "service", "deployment_type": "helm", "ext_ml_gpu_count": 2}
    result = rendered(**says, helm={"chart": "example/app", "values": values})
    odd = rendered(**says, helm={"chart": "example/app", "values": {"resources": None}})
    notes = {note.source: note.text for note in result.notes}

    assert result.helm is not None
    assert odd.helm is not None
    assert result.helm.values["resources"] == {
        "limits": {"memory": "1Gi", names.GPU_RESOURCE: "2"},
        "requests": {names.GPU_RESOURCE: "2"},
        "claims": [],
    }
    assert odd.helm.values["resources"]["limits"][names.GPU_RESOURCE] == "2"
    assert notes["helm.values.resources"].startswith("note that it replaces CPU and memory")
    assert notes["helm.values.schedulerName"] == "note that it replaces what Atoll would set"


MODEL = {"job_type": "service", "deployment_type": "model", "model_id": "a/b", "ext_ml_gpu_count": 2}


@pytest.mark.parametrize(
    ("says", "source", "text"),
    [
        ({"ext_ml_runtime": "vllm", "ext_ml_precision": "int4"}, "ext_ml_precision", "from the model's files"),
        ({"ext_ml_runtime": "tgi", "ext_ml_precision": "fp32"}, "ext_ml_precision", "from the model's files"),
        ({"ext_ml_runtime": "vllm", "ext_ml_model_format": "gguf"}, "ext_ml_model_format", "a tokenizer"),
        (
            {"ext_ml_runtime": "tgi", "ext_ml_distributed_strategy": "pipeline_parallel"},
            "ext_ml_distributed_strategy",
            "knows no pipelines",
        ),
        (
            {"ext_ml_runtime": "vllm", "container": {"liveness": {"port": 8000}}},
            "container.liveness",
            "restarts the server after 30 s",
        ),
        (
            {"ext_ml_runtime": "vllm", "container": {"startup": {"port": 8000, "failure_threshold": 9}}},
            "container.startup",
            "restarts the server after 90 s",
        ),
        ({"ext_ml_runtime": "vllm", "ext_ml_precision": "fp8"}, "ext_ml_precision", None),
        ({"ext_ml_runtime": "vllm", "ext_ml_precision": "fp32"}, "ext_ml_precision", None),
        (
            {"ext_ml_runtime": "vllm", "container": {"startup": {"port": 8000, "failure_threshold": 60}}},
            "container.startup",
            None,
        ),
    ],
)
def test_what_a_models_server_does_not_take_is_noted(says: dict[str, Any], source: str, text: str | None) -> None:
    """Each with what to do; what it takes has no such note."""
    hints = [note.text for note in rendered(**MODEL, **says).notes if note.source == source and note.is_hint]

    assert any(text in hint for hint in hints) if text is not None else hints == []


@pytest.mark.parametrize("says", [{"policy": {"topology": "nvlink"}}, {"ext_ml_gpu_interconnect": "nvlink"}])
def test_nvlink_of_cards_that_have_none_is_noted(says: dict[str, Any]) -> None:
    """The job would wait for ever; other cards, and one GPU, have no such note."""

    def hints(gpu: str, count: int) -> list[str]:
        notes = rendered(ext_ml_gpu_type=gpu, ext_ml_gpu_count=count, **says).notes
        return [note.text for note in notes if "has NVLink" in note.text]

    assert len(hints("nvidia-t4", 2)) == len(hints("nvidia-l4", 2)) == 1
    assert hints("nvidia-a100", 2) == hints("nvidia-t4", 1) == []


REFUSED = {
    "a-selector-that-contradicts-the-slice": (
        {
            "ext_ml_tpu_type": "v5e",
            "ext_ml_tpu_topology": "2x2",
            "policy": {"node_selector": {"cloud.google.com/gke-tpu-accelerator": "tpu-v4-podslice"}},
        },
        "policy.node_selector.cloud.google.com/gke-tpu-accelerator",
    ),
    "a-selector-that-contradicts-the-shape": (
        {
            "ext_ml_tpu_type": "v5e",
            "ext_ml_tpu_topology": "2x2",
            "ext_ml_node_selector": {"cloud.google.com/gke-tpu-topology": "4x4"},
        },
        "ext_ml_node_selector.cloud.google.com/gke-tpu-topology",
    ),
    "gpus-that-no-machine-has": ({"ext_ml_gpu_count": 16}, "ext_ml_gpu_count"),
    "a-service-larger-than-a-machine": ({**SERVICE, "ext_ml_gpu_count": 16}, "ext_ml_gpu_count"),
    "a-node-that-cannot-hold-all-workers": (
        {"job_type": "training", "workers": 2, "ext_ml_gpu_count": 16, "policy": {"topology": "same_node"}},
        "ext_ml_gpu_count",
    ),
    "chips-that-no-host-has": ({"ext_ml_tpu_chip_count": 3}, "ext_ml_tpu_chip_count"),
    "a-slice-of-chips-that-no-host-has": ({"ext_ml_tpu_topology": "1x3"}, "ext_ml_tpu_topology"),
    "more-hosts-than-workers": (
        {"job_type": "training", "ext_ml_tpu_type": "v5p", "ext_ml_tpu_topology": "16x16x16"},
        "ext_ml_tpu_topology",
    ),
    "a-node-that-cannot-hold-all": ({**SIXTEEN, "policy": {"topology": "same_node"}}, "ext_ml_gpu_count"),
    "workers-that-cannot-share": ({"job_type": "training", "ext_ml_gpu_count": 8, "workers": 3}, "workers"),
    "workers-larger-than-a-machine": ({"job_type": "training", "ext_ml_gpu_count": 32, "workers": 2}, "workers"),
    "a-vendor-that-nobody-gives-out": ({"ext_ml_gpu_type": "intel-gaudi3"}, "ext_ml_gpu_type"),
    "an-accelerator-that-nobody-gives-out": ({"ext_ml_accelerator": "fpga"}, "ext_ml_accelerator"),
    "nvlink-over-pcie": (
        {"ext_ml_gpu_count": 2, "ext_ml_gpu_interconnect": "pcie", "policy": {"topology": "nvlink"}},
        "policy.topology",
    ),
    "low-and-reserved": (
        {"ext_ml_priority_class": "reserved", "policy": {"priority_class": "low"}},
        "policy.priority_class",
    ),
    "a-service-with-checkpoints": ({**SERVICE, "ext_ml_checkpoint_enabled": True}, "ext_ml_checkpoint_enabled"),
    "checkpoints-up-and-away": (
        {"ext_ml_checkpoint_enabled": True, "ext_ml_checkpoint_storage_uri": "file:///a/../etc/"},
        "ext_ml_checkpoint_storage_uri",
    ),
    "checkpoints-over-the-kernels": (
        {"ext_ml_checkpoint_enabled": True, "ext_ml_checkpoint_storage_uri": "file:///proc/"},
        "ext_ml_checkpoint_storage_uri",
    ),
    "a-limit-below-the-cores": ({"ext_ml_cpu_cores": 4, "resources": {"cpu_limit": "2"}}, "resources.cpu_limit"),
    "a-slice-without-a-shape": ({"ext_ml_accelerator": "tpu", "ext_ml_tpu_type": "v4"}, "ext_ml_tpu_topology"),
    "many-chips-without-a-shape": ({"ext_ml_tpu_chip_count": 16}, "ext_ml_tpu_chip_count"),
    "a-part-of-a-host": ({"ext_ml_tpu_topology": "3x3"}, "ext_ml_tpu_topology"),
    "a-reservation-without-gpus": ({"ext_ml_cpu_cores": 1, "ext_ml_reservation_id": "r"}, "ext_ml_reservation_id"),
    "a-reservation-of-tpus": (
        {"job_type": "training", "ext_ml_tpu_topology": "4x4", "ext_ml_reservation_id": "r"},
        "ext_ml_reservation_id",
    ),
    "other-workers-than-hosts": (
        {"job_type": "training", "ext_ml_tpu_topology": "4x4", "workers": 2},
        "workers",
    ),
    "a-service-on-several-hosts": ({"job_type": "service", "ext_ml_tpu_topology": "4x4"}, "ext_ml_tpu_topology"),
    "one-node-for-a-slice-of-several": (
        {"job_type": "training", "ext_ml_tpu_topology": "4x4", "policy": {"topology": "same_node"}},
        "policy.topology",
    ),
    "a-server-on-a-port-that-nobody-finds": (
        {
            "deployment_type": "model",
            "model_id": "a",
            "ext_ml_runtime": "vllm",
            "container": {"args": ["--port=9000"]},
        },
        "container.args",
    ),
    "a-server-that-nobody-knows": (
        {"deployment_type": "model", "model_id": "a", "ext_ml_runtime": "triton"},
        "ext_ml_runtime",
    ),
    "two-things-mounted-at-one-place": (
        {
            "ext_ml_storage_gb": 1,
            "container": {"image": "a:1", "volumes": [{"name": "s", "mount_path": "/scratch", "claim": "mine"}]},
        },
        "container.volumes",
    ),
    "two-volumes-of-one-name": (
        {
            "ext_ml_storage_gb": 1,
            "container": {"image": "a:1", "volumes": [{"name": "scratch", "mount_path": "/a", "claim": "mine"}]},
        },
        "container.volumes",
    ),
}


@pytest.mark.parametrize(("says", "field"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_by_its_name(says: Mapping[str, Any], field: str) -> None:
    """A wish that no object can hold is refused: which field, its value, the limit, what to do."""
    with pytest.raises(JobMistake) as caught:
        rendered(**says)

    problem = caught.value.problem
    assert problem.attribute == field
    assert problem.limit
    assert problem.hint
    assert "<" not in problem.value, "a value is shown as it is written, and not as Python holds it"


def test_claims_and_gangs_are_what_our_own_models_take() -> None:
    """What is rendered for Atoll is read by Atoll."""
    result = rendered(**SIXTEEN)
    claim = GpuClaim.model_validate(result.objects[0])
    gang = GpuGang.model_validate(result.objects[1])

    assert claim.spec.devices.count == 8
    assert gang.spec.quorum == gang.spec.size == 2


def test_the_worker_finds_the_hosts_of_models_inside() -> None:
    """A job that names a model's registry is told which hosts its administrators list."""
    settings = RenderSettings(registry_hosts=("models.internal", "10.0.0.1:8080"))
    found = env(rendered(settings=settings, ext_ml_model_registry_uri="https://models.internal/m.bin"))

    assert found["ATOLL_MODEL_HOSTS"] == "models.internal 10.0.0.1:8080"
    assert "ATOLL_MODEL_HOSTS" not in env(rendered(settings=settings))
    assert "ATOLL_MODEL_HOSTS" not in env(rendered(ext_ml_model_registry_uri="hf://org/name"))


def test_the_worker_finds_its_settings() -> None:
    """What a training imports reads where, how often and how many checkpoints it saves; administrators say where."""
    says = CHECKPOINTS | {"ext_ml_checkpoint_storage_uri": "s3://bucket/a/"}
    found = env(rendered(settings=RenderSettings(checkpoint_prefixes=("s3://bucket/", "file:///data/")), **says))

    assert found["ATOLL_JOB_ID"] == "work"
    assert found["ATOLL_CHECKPOINT_PREFIXES"] == "s3://bucket/ file:///data/"
    assert env(rendered(**says))["ATOLL_CHECKPOINT_PREFIXES"] == "s3://bucket/a/"
    own = env(rendered(settings=RenderSettings(checkpoint_prefixes=("s3://bucket/",)), **CHECKPOINTS))
    assert own["ATOLL_CHECKPOINT_PREFIXES"] == "s3://bucket/ file:///checkpoints/"
