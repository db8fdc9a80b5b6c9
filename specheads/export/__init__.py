"""Heads in the layouts of serving engines, on the Hub, and inside other people's engines."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """A package that is a function as well."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Export a head: see `specheads.commands._library.export`."""
        public = import_module(__name__.partition(".")[0])
        return public._export(*args, **kwargs)


# importing any module below puts this package into specheads.export, where the public function
# has its name; what composes settings stands above this floor, so it is asked of the top
sys.modules[__name__].__class__ = _Callable
