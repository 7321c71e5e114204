"""Faults of the webhook. A pod that may not be created is no fault: that is a `Denial` value.

WebhookError
├── MalformedReview   the caller sent something that is no AdmissionReview; answered with HTTP 400
└── MalformedPod      the review holds something that is no Pod; answered with HTTP 400
"""


class WebhookError(Exception):
    """Base of everything that this package raises."""


class MalformedReview(WebhookError):
    """The body is no AdmissionReview; `detail` names the first field that is wrong."""

    def __init__(self, detail: str) -> None:
        self.detail = detail[:200]
        super().__init__(f"malformed AdmissionReview: {self.detail}; send admission.k8s.io/v1 as the API server does")


class MalformedPod(WebhookError):
    """The object of the review is no Pod; `detail` names the first field that is wrong."""

    def __init__(self, detail: str) -> None:
        self.detail = detail[:200]
        super().__init__(f"malformed Pod in the review: {self.detail}; send the object as the API server encodes it")
