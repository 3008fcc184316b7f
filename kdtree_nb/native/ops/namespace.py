"""The loaded operators. `native.<op>` is the torch overload, resolved once; the first use of any loads the kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from kdtree_nb.native import build

Function = TypeVar("Function", bound=Callable)


class Namespace:
    """Attribute access to the native operators: `native.embed(weight, token)` calls torch.ops.<namespace>.embed.

    The first access to a name loads the kernels if need be and stores the overload's entry into the dispatcher as an
    instance attribute, so that later calls cost one attribute look-up: the overload's own __call__ would add 0.2 µs of
    Python to each of the 60 calls of a decode step.
    """

    def __init__(self) -> None:
        self._fakes: dict[str, Callable] = {}
        self._loaded = ""
        self._lock = threading.Lock()

    def load(self) -> str:
        """Load the kernels, register the fake kernels, and return the torch namespace. Raises KernelBuildError."""
        with self._lock:
            if not self._loaded:
                namespace = build.load().namespace
                for name, function in self._fakes.items():
                    torch.library.register_fake(f"{namespace}::{name}", function)
                self._loaded = namespace
        return self._loaded

    def fake(self, function: Function) -> Function:
        """Decorator: `function` computes shapes and dtypes of the operator that has its name, for FakeTensor."""
        name = function.__name__.strip("_").removesuffix("_fake")
        self._fakes[name] = function
        if self._loaded:
            torch.library.register_fake(f"{self._loaded}::{name}", function)
        return function

    def __getattr__(self, name: str):
        if name.startswith("_"):
            raise AttributeError(name)
        operator = getattr(getattr(torch.ops, self.load()), name).default._op
        setattr(self, name, operator)
        return operator


native = Namespace()
"""The operators of this process."""
