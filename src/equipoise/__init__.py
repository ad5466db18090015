"""The public names of Equipoise, each loaded when it is first used.

Enters: nothing. Leaves: the frozen list below, resolved by PEP 562's module `__getattr__`. Importing this
package has no side effect and does not import torch; `__init__.pyi` tells type checkers the same names.
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "LossScaler": "step.scaler",
    "Plan": "policy",
    "Policy": "policy",
    "Session": "session",
    "Task": "task",
    "compare": "comparison",
    "probe": "plan.machine",
}
"""Public name -> the module, relative to this package, that defines it."""

__all__ = ["LossScaler", "Plan", "Policy", "Session", "Task", "__version__", "compare", "probe"]


def __getattr__(name: str) -> object:
    """Load a public name from its home and keep it, so that the next access is a plain lookup."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value: object = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return list(__all__)
