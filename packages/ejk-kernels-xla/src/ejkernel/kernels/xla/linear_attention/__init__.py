"""Gated linear attention, shared by recurrent, gla and lightning attention.

    H_t = diag(exp(a_t)) H_{t-1} diag(exp(b_t)) + k_t v_t^T          o_t = q_t H_t

Every gate is one of three log decays: ``a`` per key channel, ``b`` per value channel, or one
number per head, kept apart because a whole chunk then needs a single score matmul.

* ``inputs``         brings a call into this form
* ``layout``         rows to chunks of equal length, packed sequences included
* ``chunk``          what happens inside a chunk: matrix products with bounded exponents
* ``core``           the scan over chunk states and its gradient
* ``step``           the recurrence itself, for a few tokens
* ``implementation`` chooses between the two, for each of the three operations
"""
