"""What `up` shows of its instances until they are ready."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path

import pytest

from tests.eventually import eventually
from vllm_tetri.launch.display import Display

INFO = "(EngineCore pid=7) INFO 01-01 00:00:00 [x.py:1] "
START = (  # lines of vLLM, and what is shown of an instance after each
    (INFO + "Starting to load model some/model...", "loading weights"),
    ("Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01,  1.0s/it]",
     "loading weights 1/2"),
    (INFO + "Loading weights took 2.00 seconds", "preparing KV cache"),
    (INFO + "Starting torch.compile", "compiling"),
    (INFO + "GPU KV cache size: 1,000 tokens, ...", "warming up"),
    ("Capturing CUDA graphs (decode, FULL):   9%|9         | 3/35 [00:00<00:02, 12.0it/s]",
     "capturing CUDA graphs 3/35"),
    (INFO + "init engine (profile, create kv cache, warmup model) took 9.00 s", "starting server"),
)  # fmt: skip


def test_a_terminal_shows_what_an_instance_does_and_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    display = Display(["decode-0"], verbose=False)
    try:
        for line, shown in START:
            display.line("decode-0", line)
            eventually(lambda shown=shown: f"{shown} " in capsys.readouterr().err, what=shown)
        display.phase("decode-0", "ready")
        eventually(lambda: "ready" in capsys.readouterr().err)
    finally:
        display.show_from(logging.CRITICAL)


def test_elsewhere_each_phase_is_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    display = Display(["decode-0"], verbose=False)
    for line, _ in START:
        display.line("decode-0", line)
    logged = [record.getMessage().partition(" (")[0] for record in caplog.records]
    phases = [shown.rstrip("0123456789/ ") for _, shown in START]
    assert logged == [f"decode-0: {phase}" for phase in dict.fromkeys(phases)]


@pytest.mark.parametrize("is_full", [True, False], ids=["full disk", "no reader"])
def test_what_cannot_be_shown_is_lost(monkeypatch: pytest.MonkeyPatch, is_full: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    with contextlib.suppress(OSError), os.fdopen(full if is_full else writer, "w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        display = Display(["decode-0"], verbose=True)
        for _ in range(1000):
            display.line("decode-0", INFO + "goes on")
        monkeypatch.undo()
    os.close(writer if is_full else full)


def test_lines_are_in_a_file_until_it_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    display = Display(["decode-0"], verbose=False, log_dir=tmp_path)
    display.line("decode-0", INFO + "says something")
    path = display.log_file("decode-0")
    assert path is not None
    assert path.read_text() == INFO + "says something\n"
    path.rename(tmp_path / "decode-0.log.1")
    display.line("decode-0", INFO + "goes on")
    assert path.read_text() == INFO + "goes on\n"
    display.end("stopped")
    full = Display(["decode-0"], verbose=False, log_dir=tmp_path / "gone")
    for _ in range(3):
        full.line("decode-0", INFO + "goes on")
    assert caplog.text.count("lines are lost that belong into --log-dir") == 1
    monkeypatch.setattr("vllm_tetri.launch.display._LOG_AGAIN_S", 0.0)
    (tmp_path / "gone").mkdir()
    monkeypatch.setattr("time.monotonic", lambda: 1e12)
    full.line("decode-0", INFO + "is back")
    path = full.log_file("decode-0")
    assert path is not None
    assert path.read_text() == INFO + "is back\n"
    full.end("stopped")
