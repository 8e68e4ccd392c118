"""The examples in the docstrings of what a user types run, and print what they show."""

from __future__ import annotations

import doctest
import inspect
import sys
from pathlib import Path

import pytest

import hicache
from hicache.backends.verbs import Verbs

SHOWN = [
    hicache.HiCacheConfig, hicache.KVGeometry, hicache.Namespace, hicache.RadixKey, hicache.create_cache,
    hicache.create_host_cache, hicache.open_storage, Verbs,
]


@pytest.mark.parametrize("shown", SHOWN, ids=lambda one: one.__name__)
def test_its_example_prints_what_it_shows(shown: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    docstring = inspect.getdoc(shown) or ""
    names = dict(vars(sys.modules[shown.__module__]))
    test = doctest.DocTestParser().get_doctest(docstring, names, shown.__name__, None, None)
    assert test.examples
    printed: list[str] = []
    doctest.DocTestRunner().run(test, out=printed.append)
    assert not printed, "".join(printed)
