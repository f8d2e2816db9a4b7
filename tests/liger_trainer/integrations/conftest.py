"""Run the integrations' tests like the trainers' tests: no hub, no GPU, one thread."""

from cpu_only import pytest_collection_finish  # noqa: F401
