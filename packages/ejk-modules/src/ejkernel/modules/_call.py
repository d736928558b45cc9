"""From a public function to the executor."""

from __future__ import annotations

from typing import Any

from ejkernel.modules._executor import get_default_executor
from ejkernel.modules._op import Operation


def call(operation: type[Operation], **arguments: Any) -> Any:
    """Run an operation with all arguments of its public function.

    Only what differs from its default is carried on, which keeps the eager path short. The
    executor takes the parameters of the common tail, whose defaults are None.
    """
    default = operation.spec.boundary.defaults.get
    carried = {name: value for name, value in arguments.items() if value is not default(name)}
    return get_default_executor()(operation.shared(), **carried)
