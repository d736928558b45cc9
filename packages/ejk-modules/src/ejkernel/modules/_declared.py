"""Declaration of the types that files may name: operations, their configs and argument types.

``ejkernel.ops`` loads this module when a file names one of them.
"""

from __future__ import annotations

import functools

from ejkernel.modules import _configs  # noqa: F401 (an OpConfig is declared by its definition)
from ejkernel.modules._table import OPERATIONS, home, load
from ejkernel.ops import allow_in_files
from ejkernel.ops.utils.allowed import offer
from ejkernel.types import MaskInfo

for _name, _kernel in OPERATIONS.items():
    offer(f"{home(_name)}:{_kernel}", functools.partial(load, home(_name), _kernel))

allow_in_files(MaskInfo)
