"""Checks under test: progress in memory, a short time limit where a test waits for it."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[1] / "wrong_answers"))


@pytest.fixture(autouse=True)
def in_memory(monkeypatch):
    from lessons_lib.checks import logbook

    monkeypatch.setenv("LESSONS_PROGRESS", "")
    logbook._memory.clear()
    logbook._told.clear()
    yield
    logbook._memory.clear()


@pytest.fixture
def short_limit(monkeypatch):
    monkeypatch.setenv("LESSONS_CHECK_SECONDS", "1")
