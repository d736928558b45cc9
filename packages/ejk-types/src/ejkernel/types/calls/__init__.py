"""What a call means: the words of signatures, their check, and what is settled before a kernel.

Importing :mod:`ejkernel.types` alone does not import this.
"""
