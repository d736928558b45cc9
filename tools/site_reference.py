"""Sphinx extension: the reference, made of the docstrings of all public names."""


def setup(app):
    return {"parallel_read_safe": True, "parallel_write_safe": True}
