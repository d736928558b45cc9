"""cuDNN's attention through ``jax.nn.dot_product_attention``, for the calls it can do exactly.

Registered as platform "cuda" under the algorithms' own names; everything else is refused with a
reason, so that another implementation takes the call.
"""

from ejkernel.ops.packages import Entry, KernelPackage

ALGORITHMS = ("flash_attention", "scaled_dot_product_attention")

PACKAGE = KernelPackage(
    __name__,
    "cuda",
    tuple(
        Entry(name, f"implementation:{name}", priority=50, hooks=("supports",), config_fields=())
        for name in ALGORITHMS
    ),
)
register = PACKAGE.register
PACKAGE.export()
