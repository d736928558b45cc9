"""One module per operation: the public function and its Kernel class.

The body of a public function is one call of the executor with ``flatten(locals())``, all parameters
by name: a local variable in front of it would be passed on as an argument.
"""
