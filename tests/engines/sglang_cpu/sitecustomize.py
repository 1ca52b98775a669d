"""Lets SGLang start without an accelerator; goes into the site-packages of its test environment.

- `sgl_kernel`, the accelerator kernels: a stand-in whose functions say so when called.  The CPU paths import
  their names but call none of them.
- `torchvision`: its wheel is built against an accelerator's torch, so its own operators do not load.  The two
  that it registers shapes for are declared, which lets the rest import.
- `torch.cuda.Stream`: SGLang's FlexKV hook makes streams; without an accelerator there is nothing to order.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn


class _Missing:
    """A name of sgl_kernel: a function, or an object that has such names."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "_Missing":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{self._name} needs an accelerator")


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")


class _StandInLoader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = _StandIn(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


class _NoStream:
    """Work is done when it returns."""

    def synchronize(self) -> None:
        """Nothing is under way."""

    def __enter__(self) -> "_NoStream":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to leave."""


class _TorchLoader(importlib.abc.Loader):
    """Loads torch as ever, then puts _NoStream where streams would be."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if not module.cuda.is_available():
            module.cuda.Stream = _NoStream
            module.cuda.stream = lambda stream: _NoStream()


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self._operators: object = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] == "sgl_kernel":
            return importlib.machinery.ModuleSpec(fullname, _StandInLoader(), is_package=True)
        if fullname == "torch":
            return self._torch_spec(fullname, path)
        if fullname == "torchvision" and self._operators is None:
            self._operators = _declare_torchvision_operators()
        return None

    def _torch_spec(self, fullname: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _TorchLoader(spec.loader)
        return spec


def _declare_torchvision_operators() -> object:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


sys.meta_path.insert(0, _Finder())
