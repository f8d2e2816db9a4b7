"""The trainer tests run with no hub, no GPU and one thread."""

from cpu_only import pytest_collection_finish  # noqa: F401
