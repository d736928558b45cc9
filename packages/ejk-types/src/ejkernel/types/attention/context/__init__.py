"""Context parallelism: attention over a sequence that is sharded over the devices of a mesh axis.

A strategy around kernels that compute a part of softmax attention (``mixins.SoftmaxKernel.part``),
never a kernel of its own.
"""
