"""Completes the template of a Job, so that a quota that counts templates sees the GPUs of its pods.

Queues such as Kueue decide on the template before any pod exists; what the webhook adds to pods comes too late for
them. The template becomes what its pods would become, except for what only a pod has: the uid of the claim. Pure.

Only namespaces that ask for it send their Jobs here, see deploy/webhook.yaml.
"""

from typing import Any, Final

from webhook.mutation import complete
from webhook.pods import AdmittedPod
from webhook.requests import ClaimLookup, Defaults, resolve_request
from webhook.review import Denial, Mutation

TEMPLATE: Final = "/spec/template"


def complete_template(
    template: AdmittedPod, *, namespace: str, claim: ClaimLookup, defaults: Defaults, is_new: bool
) -> Mutation | Denial:
    """Decide about a Job whose template names a claim; nothing can be added to one that is there already."""
    demand = resolve_request(template, namespace=namespace, claim=claim, defaults=defaults)
    if isinstance(demand, Denial):
        return demand
    completed = complete(template, demand=demand, defaults=defaults)
    if isinstance(completed, Denial) or not completed.operations:
        return completed
    if not is_new:
        return Denial(
            f"the template of this Job would lack what GpuClaim {demand.claim_name!r} adds, and a Job's containers "
            "cannot be changed any more: create the Job anew with the annotation in its template"
        )
    return Mutation(operations=tuple(map(_in_template, completed.operations)), warnings=completed.warnings)


def _in_template(operation: dict[str, Any]) -> dict[str, Any]:
    return {**operation, "path": f"{TEMPLATE}{operation['path']}"}
