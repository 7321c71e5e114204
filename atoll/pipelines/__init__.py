"""Pipelines, without I/O: the document, its checks, expressions, and the decision what happens next in a run."""
