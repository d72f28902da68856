"""What is known of the signatures that calls came with, so that later ones need not find out."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, ClassVar, Generic, TypeVar

KEPT = 4096  # of one function: a server meets thousands of lengths; a plan takes about 1 kB
Plan = TypeVar("Plan")


class Plans(OrderedDict[Any, Plan], Generic[Plan]):
    """Plans of one function by signature, the latest of them."""

    made: ClassVar[list[Plans[Any]]] = []

    def __init__(self) -> None:
        super().__init__()
        Plans.made.append(self)

    def keep(self, signature: Any, plan: Plan) -> None:
        """Add one, at the cost of the oldest if there are too many."""
        self[signature] = plan
        if len(self) > KEPT:
            self.popitem(last=False)


def forget() -> None:
    """Drop the plans of every function."""
    for plans in Plans.made:
        plans.clear()
