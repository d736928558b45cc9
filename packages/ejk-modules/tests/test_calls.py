"""Public functions and what ejk-types says of their calls are the same thing said twice."""

import inspect

import pytest

from ejkernel.modules._table import OPERATIONS, operation_class
from ejkernel.types.calls.signature import TAIL
from ejkernel.types.calls.words import forms


def facts(function):
    annotations = inspect.get_annotations(function)
    return [
        (p.name, p.kind, p.default, forms(annotations[p.name]))
        for p in inspect.signature(function).parameters.values()
        if p.name not in TAIL
    ]


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_public_function_has_the_signature_of_its_call(name):
    operation = operation_class(name)
    public = inspect.signature(operation.function).parameters.values()
    assert facts(operation.function) == facts(operation.spec.signature)
    assert [p.name for p in public if p.name in TAIL] == list(TAIL)
    assert operation.spec.name == operation.function.__name__ == name


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_public_function_hands_on_every_argument(name, monkeypatch):
    operation = operation_class(name)
    module = inspect.getmodule(operation.function)
    handed = {}

    def executor(kernel, **arguments):
        handed[type(kernel)] = arguments

    monkeypatch.setattr(module, "get_default_executor", lambda: executor)
    given = {p: object() for p in inspect.signature(operation.function).parameters}
    operation.function(**given)
    assert handed == {operation: given}
