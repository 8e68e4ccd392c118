"""Packages that load their public names at the first use (PEP 562), and functions that a build may lack."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from .errors import MissingPackage, install_hint


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of `package`. `modules` maps each module to its names, separated by spaces. The package
    also imports the names under `TYPE_CHECKING`, for type checkers.

    The returned function imports the module of a name. It raises AttributeError for other names, and MissingPackage if
    the module needs PyTorch and PyTorch is not installed.
    """
    home = {name: module for module, names in modules.items() for name in names.split()}

    def load(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value: object = getattr(importlib.import_module(f"{package}.{home[name]}"), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise MissingPackage(f"{package}.{name} needs PyTorch; {install_hint('torch')}") from error
        setattr(sys.modules[package], name, value)  # later uses do not call this function
        return value

    return load


def native(name: str) -> Any:
    """Return a function of the optional native helper; None without the helper, or if an older build lacks it."""
    try:
        return getattr(importlib.import_module("hicache._native"), name, None)
    except ImportError:
        return None


# Takes an object from the garbage collector, see `radix.PrefixTree`. Without the helper, `id` does nothing to it.
untrack: Callable[[object], object] = native("untrack") or id
