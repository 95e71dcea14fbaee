"""One demo model for all tests of a session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from sglang_histate.demo import ensure_demo_model

from .runner import Runner


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return ensure_demo_model(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def runner(folder) -> Runner:
    return Runner(folder)


@pytest.fixture(scope="session")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """The model is tiny: on a busy machine threads that wait for each other cost more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
