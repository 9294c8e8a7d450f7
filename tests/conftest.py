"""Fixtures for all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.tiny_model import tiny_model

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def tiny_llama() -> Path:
    """Folder of a random-weight Llama that loads in a moment."""
    return tiny_model()
