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
        from triton import language
        from triton.language.core import dtype, is_builtin
        from triton.runtime import interpreter

        patch_attr, patch_lang = interpreter._patch_attr, interpreter._patch_lang
        np_dtype, scope = interpreter._get_np_dtype, interpreter._LangPatchScope
        assert [*inspect.signature(interpreter._patch_builtin).parameters][:1] == ["pkg"]
    except (ImportError, AttributeError, AssertionError):
        return

    @functools.cache
    def builtins_of(pkg: object) -> list[str]:
        return [name for name, member in inspect.getmembers(pkg) if is_builtin(member)]

    def patch_builtin(pkg: object, *given: Any) -> None:
        for name in builtins_of(pkg):
            member = getattr(pkg, name)
            if is_builtin(member):
                patch_attr(pkg, name, member, *given)

    @functools.cache
    def seen_by(function: Callable[..., Any]) -> frozenset[str]:
        modules = (language, language.core)
        seen = function.__globals__.values()
        return frozenset(each.__name__ for each in modules if any(each is one for one in seen))

    patched: set[str] = set()

    def patch_once(function: Callable[..., Any]) -> Any:
        found = scope()
        if new := seen_by(function) - patched:
            found = patch_lang(function)
            patched.update(new)
            restore = found.restore

            def restore_all() -> None:
                patched.difference_update(new)
                restore()

            found.restore = restore_all
        return found

    known: dict[Any, Any] = {}

    def np_dtype_of(type_: Any) -> Any:
        scalar = type_.scalar
        if type(scalar) is not dtype:  # a pointer, which has no hash
            return np_dtype(type_)
        if scalar not in known:
            known[scalar] = np_dtype(scalar)
        return known[scalar]

    interpreter._patch_builtin, interpreter._patch_lang = patch_builtin, patch_once
    interpreter._get_np_dtype = np_dtype_of
