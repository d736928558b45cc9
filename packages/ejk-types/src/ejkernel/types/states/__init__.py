"""A sequence that devices share by passing states on: recurrences, convolutions and means.

Each device computes its own tokens with the kernel of one device. What it needs of the tokens
before them fits into a state, whose size does not depend on their number, and states are what
devices send each other.

* ``line``         the devices in the order in which states pass, and the packed sequences on each
* ``saved``        states along the tokens, for a backward pass in a program of its own
* ``recurrence``   linear attention and the gated delta rule
* ``convolution``  the short causal convolution
* ``pooling``      means
"""
