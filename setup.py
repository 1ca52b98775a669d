from setuptools import setup

setup(cffi_modules=["radixshmem/_build.py:ffi", "flexkv_radix/_build_copy.py:ffi"])
