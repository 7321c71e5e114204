"""Bodies of writes, each with its preconditions. Pure.

A merge patch that carries metadata.uid and metadata.resourceVersion is refused with 409 when either differs.
"""

from __future__ import annotations

from collections.abc import Mapping

MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"


def merge_patch(
    *,
    uid: str = "",
    resource_version: str = "",
    annotations: Mapping[str, str | None] | None = None,
    labels: Mapping[str, str | None] | None = None,
    **sections: object,
) -> dict[str, object]:
    """Merge patch of `sections` (spec=..., status=...), fenced by uid and resourceVersion if given.

    A value of None deletes the key, as merge patches do.
    """
    metadata: dict[str, object] = {}
    if uid:
        metadata["uid"] = uid
    if resource_version:
        metadata["resourceVersion"] = resource_version
    if annotations is not None:
        metadata["annotations"] = dict(annotations)
    if labels is not None:
        metadata["labels"] = dict(labels)
    return {"metadata": metadata, **sections} if metadata else dict(sections)


def add_op(pointer: str, value: object) -> dict[str, object]:
    return {"op": "add", "path": pointer, "value": value}


def remove_op(pointer: str) -> dict[str, object]:
    return {"op": "remove", "path": pointer}


def pointer(*segments: str | int) -> str:
    """JSON pointer with `~` and `/` escaped: pointer("metadata", "annotations", "a/b")."""
    return "".join("/" + str(segment).replace("~", "~0").replace("/", "~1") for segment in segments)


def delete_options(
    *, uid: str = "", resource_version: str = "", grace_period_seconds: int | None = None, propagation: str = ""
) -> dict[str, object]:
    """DeleteOptions that delete only the object with this uid and resourceVersion."""
    options: dict[str, object] = {"kind": "DeleteOptions", "apiVersion": "v1"}
    preconditions = {key: value for key, value in (("uid", uid), ("resourceVersion", resource_version)) if value}
    if preconditions:
        options["preconditions"] = preconditions
    if grace_period_seconds is not None:
        options["gracePeriodSeconds"] = grace_period_seconds
    if propagation:
        options["propagationPolicy"] = propagation
    return options


def eviction(namespace: str, name: str, *, uid: str, dry_run: bool = False) -> dict[str, object]:
    """Eviction of the pod with this uid, to be created under `paths.eviction`; with `dry_run` it is only checked."""
    options = delete_options(uid=uid) | ({"dryRun": ["All"]} if dry_run else {})
    return {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": namespace},
        "deleteOptions": options,
    }
