"""Pipelines of the job service: records, durable runs, triggers and routes."""
