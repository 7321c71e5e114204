"""Who may do what: the matrix of roles against the service, the audit of each decision, limits, and OpenID Connect."""

import itertools
from collections.abc import AsyncIterator, Mapping
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from atoll.jobs.permissions import REACH, JobPermission, Reach, TenantRole
from atoll.jobs.states import JobStep
from atoll.jobs.words import SourceType
from jobs.authentication import Identity, NotIdentified
from jobs.database import Database, opened
from jobs.oidc import FETCH_SECONDS, OidcIssuer, OidcTokens
from jobs.settings import JobServiceSettings
from jobs.store import take_step
from tests.jobservice.made import NOW
from tests.jobservice.service import JOBS, JobService

ROLES = {"vic": TenantRole.VIEWER, "two": TenantRole.MEMBER, "amy": TenantRole.ADMIN, "ops": TenantRole.OPERATOR}
CALLS: Mapping[JobPermission, tuple[str, str, Any]] = {
    JobPermission.VIEW: ("GET", "", None),
    JobPermission.LOGS: ("GET", "/logs", None),
    JobPermission.EXEC: ("POST", "/exec", {"command": ["true"]}),
    JobPermission.CANCEL: ("DELETE", "", None),
    JobPermission.RETRY: ("POST", "/retry", None),
    JobPermission.PRIORITY: ("PATCH", "", {"policy": {"priority_class": "low"}}),
    JobPermission.CRITICAL: ("PATCH", "", {"policy": {"priority_class": "critical"}}),
}
MATRIX = list(itertools.product(ROLES, CALLS, SourceType))


@pytest.fixture
async def service(tmp_path: Any) -> AsyncIterator[JobService]:
    """A service without jobs."""
    database = opened(f"sqlite:///{tmp_path}/jobs.db")
    async with JobService.of(database) as service:
        yield service
    database.close()


async def waiting_job(service: JobService, permission: JobPermission, source: SourceType) -> str:
    """Submit a job of ann in a state in which the permission can be used, and return its id."""
    made = (await service.submit(source_type=source.value)).json()
    if permission is JobPermission.RETRY:
        await service.database.write(lambda session: take_step(session, made["id"], JobStep.FAIL, now=NOW))
    service.logs.pods["tune-x"] = [b"hello\n"]
    return str(made["id"])


@pytest.mark.parametrize(
    ("by", "permission", "source"), MATRIX, ids=[f"{ROLES[by]}-{one}-{source}" for by, one, source in MATRIX]
)
async def test_every_role_has_its_permissions_on_jobs_of_every_source(
    service: JobService, by: str, permission: JobPermission, source: SourceType
) -> None:
    """AUT-3, AUT-4: on somebody else's job, exactly what the table gives to all; nothing at all in another tenant."""
    job_id = await waiting_job(service, permission, source)
    method, suffix, body = CALLS[permission]
    reach = REACH[ROLES[by], permission]
    stranger = await service.call(method, f"{JOBS}/{job_id}{suffix}", by="zoe/others", json=body)
    answer = await service.call(method, f"{JOBS}/{job_id}{suffix}", by=by, json=body)

    assert stranger.status_code == 404
    assert (answer.status_code < 300) == (reach is Reach.ALL), answer.text
    if reach is not Reach.ALL:
        assert answer.json()["type"] == "urn:atoll:not-allowed"


@pytest.mark.parametrize("permission", [one for one in CALLS if one is not JobPermission.CRITICAL])
async def test_whoever_created_a_job_keeps_their_rights_on_it(service: JobService, permission: JobPermission) -> None:
    """A member may do with their own jobs everything but give them the priority that nothing preempts."""
    job_id = await waiting_job(service, permission, SourceType.DIRECT)
    method, suffix, body = CALLS[permission]

    assert (await service.call(method, f"{JOBS}/{job_id}{suffix}", json=body)).status_code < 300


async def test_critical_jobs_are_for_those_who_may(service: JobService) -> None:
    """Neither at submission nor afterwards, and not by the class of an ML job either."""
    critical = {"policy": {"priority_class": "critical"}}
    refused = await service.submit("a", **critical)
    allowed = await service.submit("b", by="amy", tenant_id="acme", **critical)
    own = (await service.submit("c")).json()["id"]
    changed = await service.call("PATCH", f"{JOBS}/{own}", json=critical)

    assert (refused.status_code, refused.json()["detail"]) == (
        403,
        "ann may not give jobs of tenant acme the priority critical: take high",
    )
    assert allowed.status_code == 201
    assert changed.status_code == 403


async def test_every_decision_is_in_the_audit(service: JobService) -> None:
    """AUD-1: allowed, refused and hidden, with who, what and which job; admins see their tenant's, others nothing."""
    made = (await service.submit(project_id="vision", source_type="pipeline", source_id="p-1")).json()
    service.logs.pods["tune-x"] = [b"hello\n"]
    for method, suffix, by in (
        ("GET", "", "ann"),
        ("GET", "/logs", "vic"),
        ("DELETE", "", "two"),
        ("DELETE", "", "zoe/others"),
        ("DELETE", "", "ann"),
    ):
        await service.call(method, f"{JOBS}/{made['id']}{suffix}", by=by)
    audit = "/api/clusters/local/audit"
    found = (await service.call("GET", audit, by="amy")).json()
    theirs = (await service.call("GET", audit, by="zoe/others")).json()
    refused = await service.call("GET", audit, by="ann")

    assert [(one["user"], one["action"], one["answer"]) for one in reversed(found["items"])] == [
        ("ann", "job:create", "allowed"),
        ("ann", "job:view", "allowed"),
        ("vic", "job:logs_access", "refused"),
        ("two", "job:cancel", "refused"),
        ("zoe", "job:cancel", "hidden"),
        ("ann", "job:cancel", "allowed"),
    ]
    first = found["items"][-1]
    assert (first["resource_id"], first["project_id"], first["source_type"]) == (made["id"], "vision", "pipeline")
    assert (first["source_id"], first["job_type"]) == ("p-1", "batch")
    assert theirs["total"] == 0
    assert refused.status_code == 403


async def test_what_cannot_be_audited_does_not_happen(service: JobService, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancel whose decision cannot be stored is refused, and the job goes on."""
    from sqlalchemy.exc import OperationalError

    job_id = (await service.submit()).json()["id"]

    async def gone(_work: Any) -> None:
        raise OperationalError("", {}, Exception("gone"))

    with monkeypatch.context() as patched:
        patched.setattr(Database, "write", lambda _self, work: gone(work))
        refused = await service.call("DELETE", f"{JOBS}/{job_id}")
    shown = (await service.call("GET", f"{JOBS}/{job_id}")).json()

    assert refused.status_code == 503
    assert shown["cancel_requested_at"] is None


async def test_a_user_who_sends_too_much_is_slowed_down_alone(tmp_path: Any) -> None:
    """Each user has their own limit, and it refills."""
    settings = JobServiceSettings.model_validate({"access": "/nowhere", "requests_per_second": 1, "requests_burst": 3})
    database = opened(f"sqlite:///{tmp_path}/jobs.db")
    async with JobService.of(database, settings=settings) as service:
        statuses = [(await service.call("GET", JOBS)).status_code for _ in range(4)]
        refused = await service.call("GET", JOBS)
        other = await service.call("GET", JOBS, by="amy")
        await service.clock.advance(1)
        later = await service.call("GET", JOBS)
    database.close()

    assert statuses == [200, 200, 200, 429]
    assert (refused.json()["type"], refused.headers["Retry-After"]) == ("urn:atoll:too-many", "1")
    assert (other.status_code, later.status_code) == (200, 200)


# OpenID Connect

ISSUER = OidcIssuer("https://login.example.com", "atoll", "email", "groups", "oidc:")
KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OTHER_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)


class Issuer:
    """An identity provider, and the API server that reviews every other token."""

    def __init__(self) -> None:
        self.now = 0.0
        self.fetched: list[str] = []
        self.fails = False
        self.kids = ["k1"]
        self.tokens = OidcTokens(ISSUER, self, fetch=self.fetch, now=lambda: self.now)

    async def identify(self, authorization: str) -> Identity | NotIdentified:
        """Review a token that is not the issuer's."""
        return Identity("reviewed") if authorization else NotIdentified(401, "")

    async def fetch(self, url: str) -> Mapping[str, Any]:
        """Return what the provider publishes."""
        self.fetched.append(url)
        if self.fails:
            raise OSError("unreachable")
        if url.endswith("openid-configuration"):
            return {"issuer": ISSUER.issuer, "jwks_uri": "https://login.example.com/keys"}
        public = jwt.algorithms.RSAAlgorithm.to_jwk(KEY.public_key(), as_dict=True)
        return {"keys": [public | {"kid": kid, "alg": "RS256", "use": "sig"} for kid in self.kids]}

    async def told(self, *, key: Any = KEY, algorithm: str = "RS256", kid: str = "k1", **claims: Any) -> Any:
        """Return who a token with these claims is."""
        good = {
            "iss": ISSUER.issuer,
            "aud": "atoll",
            "exp": 4102444800,
            "email": "ann@example.com",
            "email_verified": True,
            "groups": ["team"],
        }
        merged = {name: value for name, value in (good | claims).items() if value is not None}
        token = jwt.encode(merged, key, algorithm=algorithm, headers={"kid": kid})
        return await self.tokens.identify(f"Bearer {token}")


async def test_a_token_of_the_identity_provider_is_somebody() -> None:
    """With a prefix, so that no claim can name a ServiceAccount; any other token goes to the API server."""
    issuer = Issuer()

    assert await issuer.told() == Identity("oidc:ann@example.com", ("oidc:team",))
    assert await issuer.told(email="system:admin", groups=["system:masters"]) == Identity(
        "oidc:system:admin", ("oidc:system:masters",)
    )
    assert await issuer.told(iss="https://kubernetes.default.svc") == Identity("reviewed")
    assert await issuer.tokens.identify("Bearer opaque") == Identity("reviewed")
    assert len(issuer.fetched) == 2


@pytest.mark.parametrize(
    "claims",
    [
        pytest.param({"exp": 1}, id="expired"),
        pytest.param({"exp": None}, id="without an end"),
        pytest.param({"aud": "other"}, id="for somebody else"),
        pytest.param({"aud": None}, id="for nobody"),
        pytest.param({"key": OTHER_KEY}, id="signed by another key"),
        pytest.param({"key": "a shared secret of thirty-two letters", "algorithm": "HS256"}, id="a shared secret"),
        pytest.param({"key": None, "algorithm": "none"}, id="not signed"),
        pytest.param({"email": None}, id="without a name"),
        pytest.param({"email": "a\nb"}, id="a name with a line break"),
        pytest.param({"email_verified": False}, id="an address that nobody verified"),
        pytest.param({"kid": "k9"}, id="an unknown key"),
    ],
)
async def test_a_token_that_is_not_good_is_nobody(claims: dict[str, Any]) -> None:
    """Each with its reason, as 401."""
    found = await Issuer().told(**claims)

    assert isinstance(found, NotIdentified)
    assert found.status == 401


async def test_keys_are_fetched_again_when_they_change_and_not_for_everybody_who_asks() -> None:
    """A new key is known after a while; many unknown keys cause one fetch; a provider that is away is told."""
    issuer = Issuer()
    await issuer.told()
    issuer.kids = ["k2"]
    early = [await issuer.told(kid="k2") for _ in range(3)]
    issuer.now = FETCH_SECONDS
    late = await issuer.told(kid="k2")
    issuer.now, issuer.fails = 2 * FETCH_SECONDS, True
    away = await issuer.told(kid="k3")

    assert all(isinstance(one, NotIdentified) for one in early)
    assert isinstance(late, Identity)
    assert isinstance(away, NotIdentified)
    assert (away.status, len(issuer.fetched)) == (503, 5)
