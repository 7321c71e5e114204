"""Random histories of a gang's members: decisions keep the promises."""

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.api import names
from atoll.api.gangs import GangAssignment
from atoll.cluster.gangs import conditions, lifecycle
from atoll.cluster.gangs.lifecycle import GangAction
from atoll.cluster.gangs.membership import GangMember, MemberStage
from atoll.cluster.gangs.readiness_policy import ReadinessPolicy, Requeuing
from tests.cluster.gangs.builders import Life, make_gang, member

POLICY = ReadinessPolicy(
    enable=True, timeout_seconds=10, recovery_timeout_seconds=5, requeuing=Requeuing(base_seconds=2, limit_count=3)
)
STEPS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.sampled_from(list(MemberStage)), st.booleans()), max_size=6),
        st.integers(min_value=0, max_value=30),
        st.booleans(),
    ),
    max_size=25,
)


def found(rows: list[tuple[MemberStage, bool]]) -> tuple[GangMember, ...]:
    """Return members at these stages; those that ended hold nothing that matters."""
    return tuple(member(number, stage, holds=holds) for number, (stage, holds) in enumerate(rows))


@settings(max_examples=150, deadline=None)
@given(STEPS, st.integers(min_value=1, max_value=4))
def test_any_history_keeps_the_promises(
    steps: list[tuple[list[tuple[MemberStage, bool]], int, bool]], least: int
) -> None:
    """Never admitted and evicted at once, nobody let go unadmitted, one count per eviction, no place without quorum."""
    life = Life(make_gang(4, minMember=least), POLICY)
    for rows, pause, is_active in steps:
        life.set_active(active=is_active)
        was_admitted = conditions.is_true(
            life.gang.status.conditions if life.gang.status else (), names.CONDITION_ADMITTED
        )
        before = life.gang.status.requeue_state.count if life.gang.status and life.gang.status.requeue_state else 0
        decision = life.look(*found(rows), after=pause)
        status = decision.status
        is_admitted = conditions.is_true(status.conditions, names.CONDITION_ADMITTED)

        assert not (is_admitted and conditions.is_true(status.conditions, names.CONDITION_EVICTED))
        assert decision.act is not GangAction.UNGATE or was_admitted
        assert decision.act is not GangAction.UNDO or not is_admitted
        count = status.requeue_state.count if status.requeue_state else 0
        assert count <= before + 1
        assert count == before + 1 or count in {0, before}
        if count > before:
            assert was_admitted
            assert decision.act is GangAction.EVICT
        if decision.act is GangAction.PLACE:
            assert is_active
            assert not was_admitted
            assert sum(stage in {MemberStage.GATED, MemberStage.SUCCEEDED} for stage, _ in rows) >= least
            assert all(one.stage is MemberStage.GATED and not one.holds for one in decision.members)
            admitted = lifecycle.admit(status, now_seconds=life.now, message="")
            life.write(admitted.model_copy(update={"assignment": GangAssignment()}))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(list(MemberStage)), st.booleans()), max_size=6), st.booleans())
def test_the_same_state_gives_the_same_decision(rows: list[tuple[MemberStage, bool]], admitted: bool) -> None:
    """Decisions come from the objects alone: a second leader decides what the first decided."""

    def decide() -> tuple[GangAction, list[str]]:
        life = Life(make_gang(3), POLICY)
        if admitted:
            life.write(lifecycle.admit(life.look().status, now_seconds=life.now, message=""))
        decision = life.look(*found(rows))
        return decision.act, [one.uid for one in decision.members]

    assert decide() == decide()
