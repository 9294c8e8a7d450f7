"""Fixtures for all tests."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from tests.tiny_model import tiny_model

# No time limit for an example: a busy machine is no defect.
settings.register_profile("calm", deadline=None)
settings.load_profile("calm")

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# vLLM's modules and all tests are millions of objects that stay: a quarter of the time in which
# tests are collected went into looking for garbage among them.
gc.set_threshold(50_000, 20, 100)

# A shell starts its background jobs without it, and what tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What instances learn in tests is nobody else's."""
    os.environ["TETRI_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def tiny_llama() -> Path:
    """Folder of a random-weight Llama that loads in a moment."""
    return tiny_model()
