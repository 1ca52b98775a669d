"""Answers to the import names of FlexKV, so that the engines' own FlexKV hooks run on this package unchanged.

`flexkv/` below is laid out like FlexKV's package, one file per name the engines import, without logic.
install() makes it importable as `flexkv`; where a real FlexKV is installed, that one is left alone.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path

logger = logging.getLogger(__name__)

_PACKAGE_DIR = Path(__file__).parent / "flexkv"


def install() -> bool:
    """Make `import flexkv` mean this package.  False if a FlexKV is there already; repeating does nothing."""
    if "flexkv" in sys.modules or importlib.util.find_spec("flexkv") is not None:
        return is_installed()
    spec = importlib.util.spec_from_file_location(
        "flexkv", _PACKAGE_DIR / "__init__.py", submodule_search_locations=[str(_PACKAGE_DIR)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["flexkv"] = module
    spec.loader.exec_module(module)
    return True


def is_installed() -> bool:
    """Whether `import flexkv` means this package."""
    module = sys.modules.get("flexkv")
    return module is not None and list(getattr(module, "__path__", [])) == [str(_PACKAGE_DIR)]
