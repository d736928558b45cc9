"""Named calls with the shapes of real models, for benchmarks, tuning, shipped tables and tests.

``shapes`` holds the cases, ``families`` the meaning of their fields, ``find`` looks a name up,
and ``call_of`` turns a case into the arguments of an operation, abstract or concrete.
"""

from ejkernel.modules.workloads.call import Call, call_of

__all__ = ["Call", "call_of"]
