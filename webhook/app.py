"""The admission endpoint: POST /mutate from the API server.

Answers HTTP 200 with an AdmissionReview, 400 for anything that is none, 413 for a body beyond the limit. It decodes,
looks the claim up, lets `mutate` decide, and encodes. It writes nothing, so a dry run needs no care.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Protocol

import structlog
from aiohttp import web

from atoll.service.http import application
from webhook.errors import WebhookError
from webhook.jobs import complete_template
from webhook.metrics import WebhookMetrics
from webhook.mutation import is_mirror, mutate
from webhook.pods import AdmittedPod
from webhook.requests import ClaimLookup, Defaults, claim_name_of, concerns_atoll
from webhook.review import BODY_BYTES_MAX, OBJECT_BYTES_MAX, Denial, Mutation, Review, decode_review, encode_answer

log = structlog.get_logger(__name__)

MUTATE_PATH: Final = "/mutate"
TOO_LARGE: Final = Denial(
    f"a pod or Job that asks Atoll for GPUs has at most {OBJECT_BYTES_MAX} bytes as JSON, with its managed fields; "
    "move large values to a ConfigMap",
    400,
)


class ClaimSource(Protocol):
    """What is needed of the claim lookup."""

    async def find(self, namespace: str, name: str) -> ClaimLookup: ...


class DeviceSource(Protocol):
    """The lookup of other devices that the webhook needs."""

    async def refusal(self, namespace: str, pod: AdmittedPod) -> Denial | None: ...


class GroupSource(Protocol):
    """The lookup of PodGroups that the webhook needs."""

    async def gang_of(self, namespace: str, pod: AdmittedPod) -> str | Denial: ...


@dataclass(frozen=True, slots=True)
class Lookups:
    """What the webhook asks the API server for."""

    claims: ClaimSource
    devices: DeviceSource
    groups: GroupSource


def webhook_application(*, lookups: Lookups, defaults: Defaults, metrics: WebhookMetrics) -> web.Application:
    """Return the application that answers reviews; health and metrics live on another port."""
    app = application(body_bytes_max=BODY_BYTES_MAX)
    app.router.add_post(MUTATE_PATH, _handler(lookups=lookups, defaults=defaults, metrics=metrics))
    return app


async def decide(review: Review, *, lookups: Lookups, defaults: Defaults) -> Mutation | Denial:
    """Answer one review; raises MalformedPod."""
    if review.is_too_large:
        return TOO_LARGE
    if review.writes_job:
        return await _decide_job(review, lookups=lookups, defaults=defaults)
    if not review.creates_pod:
        return Mutation()
    pod = review.pod()
    if is_mirror(pod, user=review.user):
        return mutate(pod, namespace=review.namespace, user=review.user, claim=None, defaults=defaults)
    name = claim_name_of(pod)
    if isinstance(name, Denial):
        return name
    claim = None if name is None else await lookups.claims.find(review.namespace, name)
    group = await lookups.groups.gang_of(review.namespace, pod) if concerns_atoll(pod) else ""
    if isinstance(group, Denial):
        return group
    decision = mutate(
        pod, namespace=review.namespace, user=review.user, claim=claim, defaults=defaults, pod_group=group
    )
    if isinstance(decision, Denial) or not concerns_atoll(pod):
        return decision
    return await lookups.devices.refusal(review.namespace, pod) or decision


async def _decide_job(review: Review, *, lookups: Lookups, defaults: Defaults) -> Mutation | Denial:
    template = review.template()
    name = claim_name_of(template)
    if name is None or isinstance(name, Denial):
        return name or Mutation()
    claim = await lookups.claims.find(review.namespace, name)
    is_new = review.operation == "CREATE"
    decision = complete_template(template, namespace=review.namespace, claim=claim, defaults=defaults, is_new=is_new)
    if isinstance(decision, Denial):
        return decision
    return await lookups.devices.refusal(review.namespace, template) or decision


def _handler(
    *, lookups: Lookups, defaults: Defaults, metrics: WebhookMetrics
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        with metrics.seconds.time():
            try:
                review = decode_review(await request.read())
                decision = await decide(review, lookups=lookups, defaults=defaults)
            except WebhookError as error:
                metrics.reviews.labels("malformed").inc()
                log.warning("Refused a malformed review", err=str(error))
                return web.Response(status=400, text=f"{error}\n")
        _note(review, decision, metrics)
        return web.Response(body=encode_answer(review.uid, decision), content_type="application/json")

    return handle


def _note(review: Review, decision: Mutation | Denial, metrics: WebhookMetrics) -> None:
    if isinstance(decision, Denial):
        metrics.reviews.labels("denied").inc()
        log.info(
            "Denied a request",
            resource=review.resource.resource,
            namespace=review.namespace,
            user=review.user.username,
            err=decision.message,
        )
        return
    answer = "changed" if decision.operations else "unchanged" if review.creates_pod or review.writes_job else "ignored"
    metrics.reviews.labels(answer).inc()
