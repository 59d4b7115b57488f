"""Triton's interpreter, which runs kernels where there is no GPU, made faster for tests."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def speed_up() -> None:
    """Do once what the interpreter does at every call of a kernel or of a function in one.

    It then looks up which members of Triton's language are builtins, replaces these also where they
    are replaced, and makes a table of numpy's types. No-op without Triton, or with a version that
    lacks these functions.
    """
    try:
        from triton.runtime import interpreter

        assert [*inspect.signature(interpreter._patch_builtin).parameters][:1] == ["pkg"]
        faster = {
            "_patch_builtin": _patch_builtin(interpreter._patch_attr),
            "_patch_lang": _patch_lang(interpreter._patch_lang, interpreter._LangPatchScope),
            "_get_np_dtype": _np_dtype(interpreter._get_np_dtype),
        }
    except (ImportError, AttributeError, AssertionError):
        return
    for name, function in faster.items():
        setattr(interpreter, name, function)


def _patch_builtin(patch_attr: Callable[..., None]) -> Callable[..., None]:
    from triton.language.core import is_builtin

    @functools.cache
    def builtins_of(pkg: object) -> list[str]:
        return [name for name, member in inspect.getmembers(pkg) if is_builtin(member)]

    def patch(pkg: object, *given: Any) -> None:
        for name in builtins_of(pkg):
            member = getattr(pkg, name)
            if is_builtin(member):
                patch_attr(pkg, name, member, *given)

    return patch


def _patch_lang(patch_lang: Callable[..., Any], scope: Callable[[], Any]) -> Callable[..., Any]:
    from triton import language

    patched: set[str] = set()

    @functools.cache
    def seen_by(function: Callable[..., Any]) -> frozenset[str]:
        modules, seen = (language, language.core), function.__globals__.values()
        return frozenset(each.__name__ for each in modules if any(each is one for one in seen))

    def patch(function: Callable[..., Any]) -> Any:
        new = seen_by(function) - patched
        if not new:
            return scope()
        found = patch_lang(function)
        patched.update(new)
        restore = found.restore

        def restore_all() -> None:
            patched.difference_update(new)
            restore()

        found.restore = restore_all
        return found

    return patch


def _np_dtype(np_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    from triton.language.core import dtype

    known: dict[Any, Any] = {}

    def find(type_: Any) -> Any:
        scalar = type_.scalar
        if type(scalar) is not dtype:  # a pointer, which has no hash
            return np_dtype(type_)
        if scalar not in known:
            known[scalar] = np_dtype(scalar)
        return known[scalar]

    return find
