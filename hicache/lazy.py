"""Packages whose public names are loaded when they are first used (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping

from .errors import MissingPackage, install_hint


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of `package`; `modules` maps its modules to the names, separated by spaces, that each of
    them has. The package names them a second time for type checkers, under `TYPE_CHECKING`.

    The function imports the module of a name. It raises AttributeError for other names, and MissingPackage where the
    module needs PyTorch and that is not installed.
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
        setattr(sys.modules[package], name, value)  # the next use finds it without this function
        return value

    return load
