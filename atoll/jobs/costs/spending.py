"""Budgets of jobs: what follows when a job has cost as much as it may."""

from dataclasses import dataclass

from atoll.jobs.costs.prices import MICROS
from atoll.jobs.policy import JobIntent
from atoll.jobs.words import BudgetAction


@dataclass(frozen=True, slots=True)
class BudgetDecision:
    """What to do about a spent budget. `mark`: recorded beside the job, so that one budget acts once."""

    action: BudgetAction
    message: str
    mark: str


def budget_mark(intent: JobIntent) -> str:
    """Return what tells one budget from the next: its cap and its action; empty without one."""
    return "" if intent.budget_cap is None else f"{intent.budget_action} {intent.budget_cap.normalize():f}"


def is_spent(intent: JobIntent, cost_micros: float) -> bool:
    """Return whether a job has cost as much as it may, or more."""
    return intent.budget_cap is not None and cost_micros >= intent.budget_cap * MICROS


def decide_budget(intent: JobIntent, cost_micros: float, *, mark: str) -> BudgetDecision | None:
    """Return what follows from a cost so far, in millionths of a dollar; None if nothing does. `mark`: of the budget
    that acted last."""
    if not is_spent(intent, cost_micros) or mark == budget_mark(intent):
        return None
    action = intent.budget_action
    told = {
        BudgetAction.WARN: "the job goes on",
        BudgetAction.PAUSE: "the job is paused: raise intent.budget_cap, then resume it",
        BudgetAction.CANCEL: "the job is cancelled",
    }[action]
    message = f"its cost of {cost_micros / MICROS:.2f} USD reached the budget of {intent.budget_cap} USD: {told}"
    return BudgetDecision(action, message, budget_mark(intent))
