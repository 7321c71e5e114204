"""Settings of the job service, and the access rules: who has which role in which tenant.

Settings that would open the service to everybody are refused here, before anything listens.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self, TypeVar

import yaml
from pydantic import BaseModel, Field, SecretStr, ValidationError, field_validator, model_validator

from atoll.api.forms import message_of
from atoll.jobs.costs.prices import PriceTable
from atoll.jobs.permissions import JobCaller, TenantGrant, TenantRole
from atoll.jobs.settings import RenderSettings
from atoll.ml.policy import MlPolicy
from atoll.ml.uris import refuse_checkpoint_uri
from atoll.service.errors import SettingsError
from atoll.service.http import is_loopback
from atoll.service.settings import Settings

TENANT_PLACE = "{tenant}"
FILE_BYTES_MAX = 1024 * 1024
RULES_MAX = 10_000
TOPOLOGY_WAIT_SECONDS_MIN = 60
"""Waiting jobs are looked at that often."""

M = TypeVar("M", bound=BaseModel)
Tenant = Annotated[str, Field(max_length=49, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
Project = Annotated[str, Field(max_length=63, pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$")]
Subject = Annotated[str, Field(min_length=1, max_length=256)]


class MailTls(StrEnum):
    """How the connection to the mail server is encrypted."""

    STARTTLS = "starttls"
    TLS = "tls"
    NONE = "none"


class JobServiceSettings(Settings):
    """Records jobs, submits them to the cluster, and tracks their state."""

    kubeconfig: Path | None = None
    """Kubeconfig of the cluster; the pod's own account when absent."""
    cluster: Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")] = "local"
    """Name of the cluster in the paths of the API."""
    kubeconfig_folder: Path | None = None
    """Folder with the kubeconfigs of other clusters, which are registered by the name of a file in it."""
    database: SecretStr = SecretStr("sqlite:///atoll-jobs.db")
    """Database of the records: sqlite:///FILE, or postgresql://USER:PASSWORD@HOST/NAME."""
    namespace: str = "tenant-{tenant}"
    """Namespace of a tenant's jobs; it must exist. Must contain {tenant}, unless there is only one tenant."""
    access: Path | None = None
    """YAML file with the access rules: who has which role in which tenant."""
    insecure_local: bool = False
    """Require no token and let everybody who can connect do everything; only on loopback, for trying it out."""
    audience: str = ""
    """Required audience of tokens; empty means the API server's own audience."""
    oidc_issuer: str = ""
    """URL of an OpenID Connect issuer whose ID tokens are taken as well; empty means none."""
    oidc_audience: str = ""
    """Required audience of these tokens: the client id of this service at the issuer."""
    oidc_user_claim: str = "email"
    """Claim with the user's name."""
    oidc_groups_claim: str = "groups"
    """Claim with the user's groups."""
    oidc_prefix: Annotated[str, Field(min_length=1, max_length=32)] = "oidc:"
    """Stands before the names and groups of these tokens in the access file."""
    requests_per_second: Annotated[float, Field(gt=0, le=10_000)] = 20.0
    """Requests that one user may send, on average."""
    requests_burst: Annotated[int, Field(ge=1, le=100_000)] = 200
    """Requests that one user may send at once."""
    gpu_jobs_per_second: Annotated[float, Field(gt=0, le=10_000)] = 50.0
    """Jobs with GPUs that one queue takes, on average."""
    gpu_jobs_burst: Annotated[int, Field(ge=1, le=100_000)] = 1000
    """Jobs with GPUs that one queue takes at once."""
    render: Path | None = None
    """YAML file that says how jobs become objects, as `atoll job --settings` takes it."""
    prices: Path | None = None
    """YAML file with the prices of GPUs; without it nothing has a price, and GPU time is recorded all the same."""
    secret_key: Path | None = None
    """File with the key that encrypts the secrets of webhooks; without it there are no webhooks."""
    webhook_hosts: tuple[str, ...] = ()
    """Hosts that webhooks may lead to although they are not public."""
    host: str = "127.0.0.1"
    """Address of the API; beyond loopback it needs a certificate."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 8090
    """Port of the API."""
    certificate: Path | None = None
    """PEM file with the certificate of the API."""
    key: Path | None = None
    """PEM file with its key."""
    health_host: str = "127.0.0.1"
    """Address of /livez, /readyz and /metrics, plain HTTP; `*` means every address, IPv4 and IPv6."""
    health_port: Annotated[int, Field(ge=0, le=65_535)] = 8091
    """Port of /livez, /readyz and /metrics."""
    resync_seconds: Annotated[float, Field(ge=1, le=86_400)] = 300.0
    """How often every active job is reconciled without a change."""
    workers: Annotated[int, Field(ge=1, le=64)] = 4
    """Jobs that are reconciled at a time."""
    topology_wait_seconds: Annotated[float, Field(ge=0, le=31_536_000)] = 0.0
    """Seconds after which a job that waits for its `policy.topology` fails; 0 lets it wait. At least 60."""
    log_archive: Annotated[str, Field(max_length=1024)] = ""
    """Where the logs of pods are kept when they end, such as s3://logs/{tenant}/; empty keeps none. Credentials come
    from the variables of the store's own tools, such as AWS_ACCESS_KEY_ID."""
    log_archive_bytes: Annotated[int, Field(ge=1024, le=64 * 1024 * 1024)] = 4 * 1024 * 1024
    """Bytes of a pod's log that are kept, from its end."""
    runners: Path | None = None
    """YAML file that says what runs each type of envelope: a job without name by type, for workflows as pipelines."""
    usecase_templates: Path | None = None
    """Folder with templates of use cases, as NAME.yaml, beside those that Atoll brings."""
    secrets: Path | None = None
    """Folder with secrets for steps of pipelines, as TENANT/NAME; steps name them in secret_headers."""
    outgoing_hosts: Annotated[tuple[str, ...], Field(max_length=256)] = ()
    """Hosts with private addresses that steps of pipelines may call; others must be public."""
    keep_runs_days: Annotated[int, Field(ge=0, le=36_500)] = 90
    """Days after which ended runs of pipelines are removed; 0 keeps them for ever."""
    mail_host: Annotated[str, Field(max_length=253)] = ""
    """Mail server (SMTP) of notification steps of pipelines; without it they send no mail."""
    mail_port: Annotated[int, Field(ge=1, le=65_535)] = 587
    """Port of the mail server."""
    mail_tls: MailTls = MailTls.STARTTLS
    """starttls, tls, or none for a server on the same machine or network."""
    mail_ca: Path | None = None
    """PEM file with the authority of the mail server's certificate; the system's own when absent."""
    mail_user: str = ""
    """Name at the mail server; needs mail_password."""
    mail_password: Path | None = None
    """File with the password at the mail server; read for each mail."""
    mail_from: Annotated[str, Field(max_length=320, pattern=r"^([^\s@]+@[^\s@]+)?$")] = ""
    """Address that mails are from."""
    mail_domains: Annotated[tuple[str, ...], Field(max_length=256)] = ()
    """Domains that mails may be sent to; `*` means every domain."""
    log_level: str = "info"
    """debug, info, warning or error."""

    @model_validator(mode="after")
    def check(self) -> Self:
        """Refuse settings that would open the service to everybody or to nobody."""
        if not is_loopback(self.host) and (self.certificate is None or self.key is None):
            raise ValueError(f"host {self.host} is no loopback address: give certificate and key as well")
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key belong together: give both or none")
        if self.insecure_local and not is_loopback(self.host):
            raise ValueError(f"insecure_local is for loopback alone, and host is {self.host}")
        if self.insecure_local == (self.access is not None):
            raise ValueError("give access, a file with rules, or insecure_local to try it out alone; one of both")
        if self.oidc_issuer and not (self.oidc_issuer.startswith("https://") and self.oidc_audience):
            raise ValueError("oidc_issuer must be an https URL, and needs oidc_audience")
        if self.mail_host and not (self.mail_from and self.mail_domains):
            raise ValueError("mail_host needs mail_from and mail_domains")
        if bool(self.mail_user) != (self.mail_password is not None):
            raise ValueError("mail_user and mail_password belong together: give both or none")
        if self.mail_user and self.mail_tls is MailTls.NONE:
            raise ValueError("mail_tls none would send the password in clear: use starttls or tls")
        if self.namespace.count(TENANT_PLACE) > 1 or "{" in self.namespace.replace(TENANT_PLACE, ""):
            raise ValueError("namespace may have {tenant} in it once, and no other braces")
        return self

    @model_validator(mode="after")
    def check_times(self) -> Self:
        """Refuse times that the service cannot keep."""
        if 0 < self.topology_wait_seconds < TOPOLOGY_WAIT_SECONDS_MIN:
            told = f"topology_wait_seconds is {self.topology_wait_seconds:g}"
            raise ValueError(f"{told}: write 0 to let jobs wait, or at least {TOPOLOGY_WAIT_SECONDS_MIN}")
        return self

    @field_validator("log_archive")
    @classmethod
    def check_archive(cls, given: str) -> str:
        """Refuse a place that is none, or that tenants would share."""
        if not given:
            return given
        before, found, after = given.partition(TENANT_PLACE)
        if not found or "{" in before + after:
            raise ValueError(f"log_archive {given} must have {TENANT_PLACE} in it once, and no other braces")
        refused = refuse_checkpoint_uri(given.replace(TENANT_PLACE, "tenant"), MlPolicy())
        if refused is not None:
            raise ValueError(f"log_archive {given} {refused.limit}; {refused.hint}")
        return given

    def namespace_of(self, tenant: str) -> str:
        """Return the namespace of a tenant's jobs."""
        return self.namespace.replace(TENANT_PLACE, tenant)

    def tenant_of(self, namespace: str) -> str:
        """Return the tenant whose jobs are in a namespace; empty for a namespace of nobody."""
        before, place, after = self.namespace.partition(TENANT_PLACE)
        is_fitting = place and namespace.startswith(before) and namespace.endswith(after)
        tenant = namespace[len(before) : len(namespace) - len(after)] if is_fitting else ""
        return tenant if tenant and self.namespace_of(tenant) == namespace else ""


class AccessRule(Settings):
    """Gives a group or a user a role in a tenant or in one of its projects."""

    group: Subject | None = None
    user: Subject | None = None
    role: TenantRole
    tenant: Tenant | None = None
    project: Project | None = None

    @model_validator(mode="after")
    def check(self) -> Self:
        """Refuse a rule without a subject, with two subjects, or without a tenant."""
        if (self.group is None) == (self.user is None):
            raise ValueError("give group or user, one of both")
        if (self.role is TenantRole.OPERATOR) != (self.tenant is None):
            raise ValueError("an operator has every tenant; every other role needs one")
        if self.project is not None and self.tenant is None:
            raise ValueError("a project is one of a tenant: give tenant as well")
        return self

    def grant(self) -> TenantGrant:
        """Return what the rule grants."""
        return TenantGrant(self.role, self.tenant or "", self.project)


class AccessRules(Settings):
    """Who has which role in which tenant."""

    rules: Annotated[tuple[AccessRule, ...], Field(max_length=RULES_MAX)]

    def caller(self, name: str, groups: tuple[str, ...]) -> JobCaller:
        """Return a user with the grants of their name and groups."""
        mine = (rule for rule in self.rules if rule.user == name or (rule.group is not None and rule.group in groups))
        return JobCaller(name, tuple(dict.fromkeys(rule.grant() for rule in mine)))


EVERYTHING = AccessRules(rules=(AccessRule(user="local", role=TenantRole.OPERATOR),))
"""The rules without authentication."""


def access_rules(file: Path) -> AccessRules:
    """Read the access file. Raises SettingsError."""
    return _read(file, AccessRules, "access file")


def render_settings(file: Path | None) -> RenderSettings:
    """Read the render settings. Raises SettingsError."""
    return RenderSettings() if file is None else _read(file, RenderSettings, "render file")


def price_table(file: Path | None) -> PriceTable:
    """Read the price table. Raises SettingsError."""
    return PriceTable() if file is None else _read(file, PriceTable, "price table")


def _read(file: Path, model: type[M], what: str) -> M:
    try:
        if file.stat().st_size > FILE_BYTES_MAX:
            raise SettingsError(f"{what} {file} is larger than {FILE_BYTES_MAX} bytes")
        return model.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"cannot read {what} {file}: {error}") from error
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, one['loc']))}: {message_of(one)}" for one in error.errors())
        raise SettingsError(f"bad {what} {file}: {faults}") from error
