"""What files may name of ours: the operations, their configs, and the types of their arguments.

``ejkernel.ops`` loads this module when a file names one of them.
"""

from __future__ import annotations

import functools

from ejkernel.modules import _configs  # noqa: F401 (an OpConfig is declared by its definition)
from ejkernel.modules._table import OPERATIONS, load
from ejkernel.ops import allow_in_files
from ejkernel.ops.utils.known import offer
from ejkernel.types import MaskInfo

for _module, (_, _kernel, _others) in OPERATIONS.items():
    _path = f"ejkernel.modules.operations.{_module}"
    offer(f"{_path}:{_kernel}", functools.partial(load, _path, _kernel))

allow_in_files(MaskInfo)
