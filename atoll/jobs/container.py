"""The container of a job's pods: image, command, variables, volumes, ports, probes, secrets.

A job has one container; a pod template, which Atoll accepts as well, may have more.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Self

from pydantic import Field, ValidationInfo, model_validator

from atoll.api.job_names import USER_VARIABLES, VARIABLE_PREFIX
from atoll.api.names import VISIBLE_DEVICES_VARIABLES
from atoll.jobs.base import NO_NUL, ByteQuantity, Flag, JobPart, ObjectName, ShortName, is_new

WORDS_MAX = 256
VARIABLES_MAX = 256
VOLUMES_MAX = 32
PORTS_MAX = 16

Word = Annotated[str, Field(max_length=16_384, pattern=NO_NUL)]
_OF_KERNEL: Final = ("/proc/", "/sys/")
FilePath = Annotated[str, Field(max_length=512, pattern=r"^(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+$")]
"""Absolute, without dot segments."""
PortNumber = Annotated[int, Field(strict=True, ge=1, le=65_535)]
PortName = Annotated[str, Field(max_length=15, pattern=r"^([a-z0-9]+-)*[a-z0-9]*[a-z][a-z0-9]*(-[a-z0-9]+)*$")]
SecretKey = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9_-][-A-Za-z0-9._]*$")]


class SecretEntry(JobPart):
    """One entry of a Secret."""

    name: ObjectName
    key: SecretKey


class JobVariable(JobPart):
    """An environment variable: a value, or an entry of a Secret."""

    name: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    value: Word | None = None
    secret: SecretEntry | None = None

    @model_validator(mode="after")
    def check(self, info: ValidationInfo) -> Self:
        """Refuse two values, no value, and variables that Atoll sets."""
        if (self.value is None) == (self.secret is None):
            raise ValueError("a variable has a value or a secret, one of both")
        if self.name in VISIBLE_DEVICES_VARIABLES:
            raise ValueError(f"{self.name} is set by Atoll, to the GPUs that the pod gets; remove it")
        if is_new(info) and self.name.startswith(VARIABLE_PREFIX) and self.name not in USER_VARIABLES:
            raise ValueError(f"{self.name} is one of Atoll's, which it sets itself; choose a name without ATOLL_")
        return self

    def manifest(self) -> dict[str, Any]:
        """Return the entry of a container's env."""
        if self.secret is not None:
            return {
                "name": self.name,
                "valueFrom": {"secretKeyRef": {"name": self.secret.name, "key": self.secret.key}},
            }
        return {"name": self.name, "value": self.value}


class JobVolume(JobPart):
    """A mounted folder: of a PersistentVolumeClaim, Secret or ConfigMap, or an empty one of a given size."""

    name: ShortName
    mount_path: FilePath
    claim: Annotated[ObjectName | None, Field(description="an existing PersistentVolumeClaim")] = None
    secret: ObjectName | None = None
    config_map: ObjectName | None = None
    empty_size: Annotated[ByteQuantity | None, Field(description="an empty folder of at most this size")] = None
    read_only: Flag = False

    @model_validator(mode="after")
    def check(self) -> Self:
        """Refuse a volume without a source, or with two."""
        if sum(one is not None for one in (self.claim, self.secret, self.config_map, self.empty_size)) != 1:
            raise ValueError("a volume has one source: claim, secret, config_map or empty_size")
        return self

    def manifest(self) -> dict[str, Any]:
        """Return the entry of a pod's volumes."""
        if self.claim is not None:
            return {"name": self.name, "persistentVolumeClaim": {"claimName": self.claim}}
        if self.secret is not None:
            return {"name": self.name, "secret": {"secretName": self.secret}}
        if self.config_map is not None:
            return {"name": self.name, "configMap": {"name": self.config_map}}
        return {"name": self.name, "emptyDir": {"sizeLimit": self.empty_size}}

    def mount(self) -> dict[str, Any]:
        """Return the entry of a container's volumeMounts."""
        return {"name": self.name, "mountPath": self.mount_path} | ({"readOnly": True} if self.read_only else {})


def is_of_kernel(path: str) -> bool:
    """Return whether a folder is the kernel's: no container starts with a volume there."""
    return f"{path}/".startswith(_OF_KERNEL)


class Port(JobPart):
    """A port of the container; a service's ports are reachable by its name."""

    port: PortNumber
    name: PortName


class JobProbe(JobPart):
    """A probe of the kubelet: over HTTP by `path`, by `command`, or by connecting to `port`."""

    port: PortNumber | None = None
    path: Annotated[str | None, Field(max_length=512, pattern=r"^/[^\s\x00]*$")] = None
    command: Annotated[tuple[Word, ...], Field(max_length=WORDS_MAX)] = ()
    initial_delay_seconds: Annotated[int, Field(strict=True, ge=0, le=86_400)] = 0
    period_seconds: Annotated[int, Field(strict=True, ge=1, le=3600)] = 10
    timeout_seconds: Annotated[int, Field(strict=True, ge=1, le=3600)] = 1
    failure_threshold: Annotated[int, Field(strict=True, ge=1, le=10_000)] = 3

    @model_validator(mode="after")
    def check(self) -> Self:
        """Refuse a probe without a check, or with two."""
        if bool(self.command) == (self.port is not None):
            raise ValueError("a probe checks a port or runs a command; give one of both")
        if self.path is not None and self.port is None:
            raise ValueError("path needs the port that answers it")
        return self

    def manifest(self) -> dict[str, Any]:
        """Return the probe of a container."""
        action: dict[str, Any] = {"tcpSocket": {"port": self.port}}
        if self.command:
            action = {"exec": {"command": list(self.command)}}
        elif self.path is not None:
            action = {"httpGet": {"path": self.path, "port": self.port}}
        return action | {
            "initialDelaySeconds": self.initial_delay_seconds,
            "periodSeconds": self.period_seconds,
            "timeoutSeconds": self.timeout_seconds,
            "failureThreshold": self.failure_threshold,
        }


class JobContainer(JobPart):
    """The container of a job's pods."""

    image: Annotated[str | None, Field(min_length=1, max_length=512, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$")] = None
    command: Annotated[tuple[Word, ...], Field(max_length=WORDS_MAX)] = ()
    args: Annotated[tuple[Word, ...], Field(max_length=WORDS_MAX)] = ()
    working_dir: FilePath | None = None
    env: Annotated[tuple[JobVariable, ...], Field(max_length=VARIABLES_MAX)] = ()
    env_secrets: Annotated[
        tuple[ObjectName, ...], Field(max_length=16, description="Secrets whose entries all become variables")
    ] = ()
    volumes: Annotated[tuple[JobVolume, ...], Field(max_length=VOLUMES_MAX)] = ()
    ports: Annotated[tuple[Port, ...], Field(max_length=PORTS_MAX)] = ()
    readiness: Annotated[JobProbe | None, Field(description="readiness: whether the pod gets requests")] = None
    liveness: Annotated[JobProbe | None, Field(description="liveness: whether the container is restarted")] = None
    startup: Annotated[JobProbe | None, Field(description="startup: the others begin after it succeeds")] = None
    image_pull_secrets: Annotated[tuple[ObjectName, ...], Field(max_length=16)] = ()
    service_account_name: ObjectName | None = None

    @model_validator(mode="after")
    def check(self) -> Self:
        """Refuse duplicates."""
        named: tuple[tuple[str, Sequence[object]], ...] = (
            ("variable", [one.name for one in self.env]),
            ("volume", [one.name for one in self.volumes]),
            ("mount_path", [one.mount_path for one in self.volumes]),
            ("port", [one.port for one in self.ports]),
            ("port name", [one.name for one in self.ports]),
        )
        for what, values in named:
            twice = next((value for value in values if values.count(value) > 1), None)
            if twice is not None:
                raise ValueError(f"{what} {twice} appears twice")
        return self
