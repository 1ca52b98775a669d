from pathlib import Path

from setuptools import setup

MODULES = ["radixshmem/_build.py:ffi", "flexkv_radix/_build_copy.py:ffi"]

setup(cffi_modules=[module for module in MODULES if Path(module.split(":")[0]).exists()])
