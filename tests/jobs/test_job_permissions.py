"""Access: every permission for every role, for own and others' jobs; other tenants are invisible."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.jobs.permissions import (
    REACH,
    AccessAnswer,
    JobCaller,
    JobOwnership,
    JobPermission,
    TenantGrant,
    TenantRole,
    decide,
    seen_scopes,
)

WORDS = {
    "view": "viewer member admin operator",
    "list": "viewer member admin operator",
    "metrics": "viewer member admin operator",
    "logs": "viewer=own member admin operator",
    "create": "member admin operator",
    "cancel": "viewer=own member=own admin operator",
    "delete": "viewer=own member=own admin operator",
    "retry": "viewer=own member=own admin operator",
    "exec": "viewer=own member=own admin operator",
    "priority": "viewer=own member=own admin operator",
    "critical": "admin operator",
}
"""Who may, said a second time: a changed permission has to be meant."""
CASES = list(itertools.product(JobPermission, TenantRole, (True, False)))


def expected(permission: JobPermission, role: TenantRole, *, own: bool) -> AccessAnswer:
    """Return what the words say of a job in the caller's tenant."""
    words = WORDS[permission].split()
    return AccessAnswer.ALLOWED if role in words or (own and f"{role}=own" in words) else AccessAnswer.REFUSED


@pytest.mark.parametrize(("permission", "role", "own"), CASES, ids=lambda value: str(value))
def test_every_permission_of_every_role(permission: JobPermission, role: TenantRole, own: bool) -> None:
    """AUT-6: in the tenant and in the granted project the table decides; elsewhere a job is hidden from all but
    operators."""
    creator = "ann" if own else "bob"
    far = AccessAnswer.ALLOWED if role is TenantRole.OPERATOR else AccessAnswer.HIDDEN
    near = expected(permission, role, own=own)
    for grant, tenant, project, answer in (
        (TenantGrant(role, "acme"), "acme", None, near),
        (TenantGrant(role, "acme"), "acme", "vision", near),
        (TenantGrant(role, "acme", "vision"), "acme", "vision", near),
        (TenantGrant(role, "acme", "vision"), "acme", "speech", far),
        (TenantGrant(role, "acme", "vision"), "acme", None, far),
        (TenantGrant(role, "acme"), "other", None, far),
        (TenantGrant(role, "acme", "vision"), "other", "vision", far),
    ):
        told = decide(JobCaller("ann", (grant,)), permission, JobOwnership(tenant, project, creator))

        assert told is answer, (grant, tenant, project)


def test_the_table_says_something_of_every_pair() -> None:
    """AUT-2: no role is without an answer for a permission."""
    assert set(REACH) == set(itertools.product(TenantRole, JobPermission))


def test_without_a_grant_everything_is_hidden() -> None:
    """Whoever is known and has no part in a tenant sees nothing, also not what bears their name."""
    for permission in JobPermission:
        assert decide(JobCaller("ann", ()), permission, JobOwnership("acme", None, "ann")) is AccessAnswer.HIDDEN
    assert seen_scopes(JobCaller("ann", ())) == ()


@pytest.mark.parametrize(
    ("grants", "scopes"),
    [
        pytest.param([TenantGrant(TenantRole.OPERATOR)], None, id="operators see every tenant"),
        pytest.param([TenantGrant(TenantRole.VIEWER, "acme")], (("acme", None),), id="a tenant"),
        pytest.param(
            [TenantGrant(TenantRole.VIEWER, "acme", "vision"), TenantGrant(TenantRole.MEMBER, "acme", "speech")],
            (("acme", "speech"), ("acme", "vision")),
            id="two projects",
        ),
        pytest.param(
            [TenantGrant(TenantRole.VIEWER, "acme"), TenantGrant(TenantRole.ADMIN, "acme", "vision")],
            (("acme", None),),
            id="the tenant holds its project",
        ),
    ],
)
def test_lists_show_what_was_granted(
    grants: list[TenantGrant], scopes: tuple[tuple[str, str | None], ...] | None
) -> None:
    """What a list is bounded by follows from the grants."""
    assert seen_scopes(JobCaller("ann", tuple(grants))) == scopes


GRANTS = st.builds(
    TenantGrant,
    st.sampled_from([TenantRole.VIEWER, TenantRole.MEMBER, TenantRole.ADMIN]),
    st.sampled_from(["acme", "other"]),
    st.sampled_from([None, "vision", "speech"]),
)
OWNERS = st.builds(
    JobOwnership,
    st.sampled_from(["acme", "other", "third"]),
    st.sampled_from([None, "vision", "speech"]),
    st.sampled_from(["ann", "bob"]),
)


@given(grants=st.lists(GRANTS, max_size=4), whose=OWNERS)
def test_a_list_shows_exactly_what_may_be_viewed(grants: list[TenantGrant], whose: JobOwnership) -> None:
    """AUT-5: a job is in somebody's list if and only if they may view it."""
    caller = JobCaller("ann", tuple(grants))
    scopes = seen_scopes(caller)
    assert scopes is not None

    listed = any(tenant == whose.tenant and project in (None, whose.project) for tenant, project in scopes)

    assert listed == (decide(caller, JobPermission.VIEW, whose) is AccessAnswer.ALLOWED)


def test_only_those_who_may_create_name_a_tenant() -> None:
    """The tenants among which a new job's is chosen are those in which the caller may create."""
    caller = JobCaller(
        "ann", (TenantGrant(TenantRole.VIEWER, "acme"), TenantGrant(TenantRole.MEMBER, "other", "vision"))
    )

    assert caller.tenants(JobPermission.CREATE) == ("other",)
    assert caller.tenants(JobPermission.VIEW) == ("acme", "other")
