"""Validation against the schemas of Kubernetes, each read once: the package reads two long files per object."""

from functools import cache

from kubernetes_validate import utils, validate

utils.schema_contents = cache(utils.schema_contents)

__all__ = ["validate"]
