"""Every test of this directory needs a GPU, whether its file says so or not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "unit" / "transfer"))  # shared_engine
sys.path.insert(0, str(HERE))  # gpu_engine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
