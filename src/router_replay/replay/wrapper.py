"""Wrapper replaces one method of one module, and is absent from copies of the module.

It is stored in the module's own `__dict__`, where it hides the method of the class. A deepcopy or a pickle of the
module (torch.save, mp.spawn) holds the plain method instead, so the copy routes live and loads without this package.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from router_replay.errors import ReplayError


def call(target: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `target`, a Wrapper or the method that a copy of the module has in its place.

    A bound method of this function can be installed in place of the Wrapper itself: torch.compile guards on the
    function, which all modules share, and not on the object. So the layers of a model share one compiled graph.
    """
    return target(*args, **kwargs)


call.__name__ = "__call__"  # pickle stores a bound method as an attribute of its object, by this name


def _behind(found: Any) -> Any:
    """Return the Wrapper behind a bound method of `call`; anything else is returned as it is."""
    return found.__self__ if isinstance(found, types.MethodType) and found.__func__ is call else found


class Wrapper:
    """Replaces `module.method`. A subclass implements `__call__` and calls `self.original`.

    `name` is the module's name in the model, for error messages.
    """

    def __init__(self, name: str, module: nn.Module, method: str = "forward") -> None:
        self.name = name
        self.module = module
        self.method = method
        self.previous: Any = None  # a callable that other code had set on the instance before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run in place of the method; a subclass implements this."""
        raise NotImplementedError

    def install(self) -> None:
        """Replace the method. Raises ReplayError if it is already wrapped."""
        self.refuse_second()
        self.previous = self.module.__dict__.get(self.method)
        setattr(self.module, self.method, self.installed())

    def installed(self) -> Callable[..., Any]:
        """Return what takes the place of the method."""
        return self

    def uninstall(self) -> None:
        """Restore the method as it was before `install`."""
        del self.module.__dict__[self.method]
        if self.previous is not None:
            setattr(self.module, self.method, self.previous)

    def refuse_second(self) -> None:
        """Raise ReplayError if the method is already wrapped: two replayers would override each other's routes."""
        if isinstance(_behind(self.module.__dict__.get(self.method)), Wrapper):
            raise ReplayError(
                f"{self.name} already belongs to a RouterReplay: use that one, or call its detach() first"
            )

    def refuse_covered(self) -> None:
        """Raise ReplayError if other code replaced this wrapper: removing it would also remove the replacement."""
        now = self.module.__dict__.get(self.method)
        if _behind(now) is not self:
            raise ReplayError(
                f"{self.name}.{self.method} was replaced by {now!r:.80} after RouterReplay was made: restore it before "
                "detach()"
            )

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method without this wrapper. It is looked up in each call, since FSDP2 changes the class."""
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return self.of_class()(self.module, *args, **kwargs)

    def of_class(self) -> Any:
        """Return the method that the class of the module has now."""
        return getattr(type(self.module), self.method)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The wrapped method, for inspect.signature: transformers reads the argument names of `forward`."""
        return self._plain(self.module) if self.previous is None else self.previous

    def _plain(self, module: nn.Module) -> Callable[..., Any]:
        return types.MethodType(getattr(type(module), self.method), module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.previous is not None:
            return copy.deepcopy(self.previous, memo)
        return self._plain(copy.deepcopy(self.module, memo))

    def __reduce__(self) -> Any:
        # While the copy is loaded its own __dict__ is still empty, so getattr finds the method of its class.
        return (copy.copy, (self.previous,)) if self.previous is not None else (getattr, (self.module, self.method))
