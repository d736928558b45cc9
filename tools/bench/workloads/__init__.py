"""One module an operation: ``cases(device) -> list[Case]``, or ``main(args)``."""
