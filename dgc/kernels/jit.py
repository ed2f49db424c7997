"""Compiling with numba, where what one process has compiled is kept for the next.

numba numbers the files that it keeps, by an index that is read, changed and written with no lock. Where two processes
compile a function at once, for two signatures, or for the processors of two machines that share a file system, both may
take the same number; a third process then runs the code of one with the arguments of the other. Here a file is named
after what is in it, and says so.
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Callable
from typing import Any

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile

if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
    raise ImportError("NUMBA_DISABLE_JIT is set, and these loops run compiled only")


class _Files(IndexDataCacheFile):
    """One file for each signature and processor, and no index."""

    def load(self, key: Any) -> Any:
        try:
            stamp, of, data = self._load_data(self._name(key))
        except Exception:  # there is none, or it is damaged, which may raise anything: it is compiled and written again
            return None
        return data if (stamp, of) == (self._source_stamp, key) else None

    def save(self, key: Any, data: Any) -> None:
        self._save_data(self._name(key), (self._source_stamp, key, data))

    def _name(self, key: Any) -> str:
        signature, processor, _ = key  # what is left is the function's code, and is compared when it is loaded
        digest = hashlib.sha256(repr((self._version, signature, processor)).encode()).hexdigest()
        return self._data_name_pattern.replace("{number:d}", digest[:16])


class _Cache(FunctionCache):
    def __init__(self, function: Callable[..., Any]):
        super().__init__(function)
        self._cache_file = _Files(self.cache_path, self._impl.filename_base, self._impl.locator.get_source_stamp())

    def save_overload(self, signature: Any, compiled: Any) -> None:
        with contextlib.suppress(OSError):  # a full disk, say: this process goes on with what it has compiled
            super().save_overload(signature, compiled)


def jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """As ``numba.njit(cache=True, **options)``, for processes that compile at the same time.

    Warns where there is no folder to keep anything in: every process then compiles for itself.
    """
    def compiled(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(**options)(function)
        try:
            dispatcher._cache = _Cache(function)
        except RuntimeError:  # what numba raises where it finds no folder
            warnings.warn("neither the folder of dgc nor the user's cache can be written, so every process compiles "
                          "the kernels for itself, for about a minute; NUMBA_CACHE_DIR may name a folder to keep them "
                          "in", stacklevel=1)
        return dispatcher

    return compiled
