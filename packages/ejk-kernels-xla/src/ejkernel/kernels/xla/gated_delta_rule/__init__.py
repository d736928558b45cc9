"""The gated delta rule: linear attention that replaces what a key reads.

    S = exp(g_t) S_{t-1}        u_t = beta_t (v_t - k_t S)        S_t = S + k_t^T u_t
    o_t = q_t S_t

The gate is one log decay per head, or one per key channel. The layout of chunks and the decays
inside them come from ``linear_attention``.

* ``chunk``           a chunk as matmuls and one triangular system
* ``solve``           the triangular system
* ``core``            the scan over chunk states and its gradient
* ``step``            one token
* ``implementation``  the kernel
"""
