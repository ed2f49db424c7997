"""Compiling with numba, where what one process has compiled is kept for the next.

numba numbers the files that it keeps, by an index that is read, changed and written with no lock. Where two processes
compile a function at once, for two signatures, or for the processors of two machines that share a file system, both may
take the same number; a third process then runs the code of one with the arguments of the other. Here a file is named
after what is in it, and says so.

numba also reads no folder that it cannot write to. Here the package's own one is read in any case: an image or a shared
installation may bring it along, filled by ``dgc doctor``.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import pickle
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core import caching
from numba.core.registry import cpu_target

if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
    raise ImportError("NUMBA_DISABLE_JIT is set, and these loops run compiled only")

PACKAGE = Path(__file__).parents[2]
# From which the loops have their functions and constants, which numba compiles in.
SOURCES = (*sorted((PACKAGE / "compression").rglob("*.py")),)

_names = vars(caching)
_InTree: Any = _names.get("InTreeCacheLocator") or _names["_InTreeCacheLocator"]  # as it was called before


class _Unwritable(_InTree):
    """The package's own folder where no folder can be written: what is there may be read."""

    def ensure_cache_path(self) -> None:
        """There is nothing to ensure."""


class _Impl(caching.CompileResultCacheImpl):
    _locator_classes = [*caching.CompileResultCacheImpl._locator_classes, _Unwritable]  # noqa: RUF012


class _Files(caching.IndexDataCacheFile):
    """One file for each signature and processor, and no index."""

    def __init__(self, folders: list[Path], base: str, stamp: Any):
        super().__init__(str(folders[0]), base, stamp)
        self._folders = folders

    def load(self, key: Any) -> Any:
        for folder in self._folders:
            # There may be none, or it is damaged, which may raise anything: it is compiled and written again.
            with contextlib.suppress(Exception):
                stamp, of, data = pickle.loads((folder / self._name(key)).read_bytes())
                if (stamp, of) == (self._source_stamp, key):
                    return data
        return None

    def save(self, key: Any, data: Any) -> None:
        self._save_data(self._name(key), (self._source_stamp, key, data))

    def _name(self, key: Any) -> str:
        signature, processor, _ = key  # what is left is the function's code, and is compared when it is loaded
        digest = hashlib.sha256(repr((self._version, signature, processor)).encode()).hexdigest()
        return self._data_name_pattern.replace("{number:d}", digest[:16])


class _Cache(caching.FunctionCache):
    _impl_class = _Impl

    def __init__(self, function: Callable[..., Any], sources: tuple[Path, ...]):
        super().__init__(function)
        self.writable = not isinstance(self._impl.locator, _Unwritable)
        own = Path(inspect.getfile(function)).parent / "__pycache__"
        self.folders = list(dict.fromkeys([Path(self.cache_path), own]))  # written is the first
        stamp = _digest(tuple(dict.fromkeys((*sources, Path(inspect.getfile(function))))))  # once for all of a package
        self._cache_file = _Files(self.folders, self._impl.filename_base, stamp)
        processor = cpu_target.target_context.codegen().magic_tuple()
        self.digest = hashlib.sha256(repr((numba.__version__, sys.version_info[:2], stamp, processor)).encode(
            )).hexdigest()[:16]  # of all that makes what was compiled fit, but for the signature

    def save_overload(self, signature: Any, compiled: Any) -> None:
        with contextlib.suppress(OSError):  # a full disk, say: this process goes on with what it has compiled
            super().save_overload(signature, compiled)


@cache
def _digest(files: tuple[Path, ...]) -> str:
    """The digest of what is in files: a checkout gives the same text another time."""
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def jit(sources: tuple[Path, ...] = SOURCES, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """As ``numba.njit(cache=True, **options)``, for processes that compile at the same time.

    Args:
        sources: files, beside a function's own, that have what is compiled into it: it is compiled anew if they change.
    """
    def compiled(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(**options)(function)
        dispatcher._cache = _Cache(function, sources)
        return dispatcher

    return compiled
