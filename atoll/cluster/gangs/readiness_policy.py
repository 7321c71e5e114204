"""What is demanded of admitted gangs, and what happens to those that fall short: `waitForPodsReady`.

The administrator sets a policy with bounds; a gang may choose inside the bounds. A choice outside is reported, never
cut to the bound in silence. docs/gangs.md describes these rules.
"""

from dataclasses import dataclass, field, replace

from atoll.api.gangs import RequeueTimestamp, RequeuingStrategy, WaitForPodsReady, duration_seconds


@dataclass(frozen=True, slots=True)
class Requeuing:
    """The n-th pause is base x 2^(n-1), at most `max_seconds`; `limit_count` None never deactivates."""

    timestamp: RequeueTimestamp = RequeueTimestamp.EVICTION
    base_seconds: float = 60.0
    max_seconds: float = 3600.0
    limit_count: int | None = None


@dataclass(frozen=True, slots=True)
class ReadinessPolicy:
    """The policy of one gang. Without `enable`, nothing waits for pods to become ready.

    `recovery_limit_count`: how often the gang may lose ready members in one admission; None for no limit.
    """

    enable: bool = False
    timeout_seconds: float = 300.0
    recovery_timeout_seconds: float | None = None
    block_admission: bool = False
    recovery_limit_count: int | None = None
    requeuing: Requeuing = field(default_factory=Requeuing)


@dataclass(frozen=True, slots=True)
class PolicyBounds:
    """Between which values a gang may choose for itself; `may_enable` and `may_disable`: its choice to wait at all."""

    may_enable: bool = True
    may_disable: bool = True
    timeout_seconds_min: float = 1.0
    timeout_seconds_max: float = 86_400.0
    backoff_seconds_max: float = 86_400.0
    limit_count_max: int = 1000


@dataclass(frozen=True, slots=True)
class OutOfBounds:
    """A wish that the administrator does not allow."""

    message: str


JITTER_SHARE = 0.1


def policy_for(
    administrator: ReadinessPolicy, bounds: PolicyBounds, wishes: WaitForPodsReady | None
) -> ReadinessPolicy | OutOfBounds:
    """Return the policy of one gang."""
    if wishes is None:
        return administrator
    refused = _refuse_enable(administrator, bounds, wishes.enable)
    if refused:
        return OutOfBounds(refused)
    policy = administrator if wishes.enable is None else replace(administrator, enable=wishes.enable)
    for name, text, default in (
        ("timeout", wishes.timeout, administrator.timeout_seconds),
        ("recoveryTimeout", wishes.recovery_timeout, administrator.recovery_timeout_seconds),
    ):
        if text is None:
            continue
        seconds = float(duration_seconds(text))
        most = _longest(administrator, bounds, default)
        if not bounds.timeout_seconds_min <= seconds <= most:
            return OutOfBounds(
                f"waitForPodsReady.{name} is {text}; the administrator allows {bounds.timeout_seconds_min:g} to "
                f"{most:g} seconds"
            )
        policy = (
            replace(policy, timeout_seconds=seconds)
            if name == "timeout"
            else replace(policy, recovery_timeout_seconds=seconds)
        )
    if wishes.recovery_limit_count is not None:
        if wishes.recovery_limit_count > bounds.limit_count_max:
            return OutOfBounds(
                f"waitForPodsReady.recoveryLimitCount is {wishes.recovery_limit_count}; the administrator allows up to "
                f"{bounds.limit_count_max}"
            )
        policy = replace(policy, recovery_limit_count=wishes.recovery_limit_count)
    requeuing = _requeuing(policy.requeuing, bounds, wishes.requeuing_strategy)
    return requeuing if isinstance(requeuing, OutOfBounds) else replace(policy, requeuing=requeuing)


def _longest(administrator: ReadinessPolicy, bounds: PolicyBounds, default: float | None) -> float:
    """Return the longest timeout that a gang may choose: where it keeps others waiting, no longer than the default."""
    if administrator.block_admission and default is not None:
        return min(default, bounds.timeout_seconds_max)
    return bounds.timeout_seconds_max


def _refuse_enable(administrator: ReadinessPolicy, bounds: PolicyBounds, wish: bool | None) -> str:  # noqa: FBT001
    if wish is True and not administrator.enable and not bounds.may_enable:
        return "waitForPodsReady.enable is true; the administrator does not allow gangs to wait for ready pods"
    if wish is False and administrator.enable and not bounds.may_disable:
        return "waitForPodsReady.enable is false; the administrator demands ready pods of every gang"
    return ""


def _requeuing(default: Requeuing, bounds: PolicyBounds, wishes: RequeuingStrategy | None) -> Requeuing | OutOfBounds:
    if wishes is None:
        return default
    for name, value, most in (
        ("backoffBaseSeconds", wishes.backoff_base_seconds, bounds.backoff_seconds_max),
        ("backoffMaxSeconds", wishes.backoff_max_seconds, bounds.backoff_seconds_max),
        ("backoffLimitCount", wishes.backoff_limit_count, bounds.limit_count_max),
    ):
        if value is not None and value > most:
            return OutOfBounds(
                f"waitForPodsReady.requeuingStrategy.{name} is {value}; the administrator allows up to {most:g}"
            )
    limit = default.limit_count if wishes.backoff_limit_count is None else wishes.backoff_limit_count
    return Requeuing(
        timestamp=wishes.timestamp or default.timestamp,
        base_seconds=default.base_seconds if wishes.backoff_base_seconds is None else wishes.backoff_base_seconds,
        max_seconds=default.max_seconds if wishes.backoff_max_seconds is None else wishes.backoff_max_seconds,
        limit_count=limit,
    )


def pause_seconds(requeuing: Requeuing, count: int, *, jitter: float) -> float:
    """Return the pause after eviction number `count` (1 first); `jitter` from 0 to 1 adds up to a tenth, to the cap."""
    doubled = requeuing.base_seconds * 2.0 ** min(count - 1, 40)
    return min(requeuing.max_seconds, doubled * (1.0 + JITTER_SHARE * jitter))


def exceeds_limit(requeuing: Requeuing, count: int) -> bool:
    """Tell whether so many evictions deactivate the gang: more than the limit, not as many."""
    return requeuing.limit_count is not None and count > requeuing.limit_count


def loses_too_often(policy: ReadinessPolicy, losses: int) -> bool:
    """Return whether the losses of ready members exceed the limit, which ends the admission."""
    return policy.recovery_limit_count is not None and losses > policy.recovery_limit_count
