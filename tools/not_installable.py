"""The build backend of the repository's root, which is no package: it says what to install."""

MESSAGE = """
The root of this repository is no package. Install the packages in it:

    pip install ./packages/ejk-types ./packages/ejk-ops ./packages/ejk-kernels-xla \\
        ./packages/ejk-kernels-pallas ./packages/ejk-modules

README.md, "Install", has the extras for accelerators. To develop: python3 tools/dev.py help
"""


def _refuse(*args, **kwargs):
    raise SystemExit(MESSAGE)


prepare_metadata_for_build_wheel = prepare_metadata_for_build_editable = _refuse
build_wheel = build_sdist = build_editable = _refuse
