"""The tests of the integrations run as those of the trainers do: no hub, no GPU, one thread."""

from cpu_only import pytest_collection_finish  # noqa: F401
