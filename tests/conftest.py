"""Fixtures for all tests."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
from hashlib import sha256
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

ROOT = Path(__file__).parent.parent
TICK_S, STILL_S = 0.2, 3.0


class Watch(threading.Thread):
    """Measures for how long this machine stood still. Virtual machines do, some for 30 s, and what
    waits for another process then gives up without a defect."""

    longest_s = 0.0

    def run(self) -> None:
        while True:
            began = time.monotonic()
            time.sleep(TICK_S)
            self.longest_s = max(self.longest_s, time.monotonic() - began - TICK_S)

    def stood_still(self) -> bool:
        """Return whether the running test was held up by that."""
        return self.longest_s > STILL_S


WATCH = Watch(name="watch", daemon=True)


def pytest_sessionstart() -> None:
    """Python takes a compiled module, however old, before its source."""
    digests = ROOT / "build/compiled.json"
    for name, digest in (json.loads(digests.read_text()) if digests.exists() else {}).items():
        file = ROOT / name
        if not file.exists() or sha256(file.read_bytes()).hexdigest() != digest:
            pytest.exit(f"{name} has changed since it was compiled: run `make install`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that failed while the machine stood still is run once more."""
    if config.pluginmanager.has_plugin("rerunfailures"):
        WATCH.start()
        for item in items:
            item.add_marker(pytest.mark.flaky(reruns=1, condition=WATCH.stood_still))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    WATCH.longest_s = 0.0


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What instances learn in tests is nobody else's."""
    os.environ["TETRI_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def tiny_llama() -> Path:
    """Folder of a random-weight Llama that loads in a moment."""
    return tiny_model()
