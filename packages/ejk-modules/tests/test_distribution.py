from ejktest.portion import check_portion, check_silent_import


def test_version_and_typing():
    check_portion("ejkernel.modules", "ejk-modules")


def test_import_changes_nothing(tmp_path):
    check_silent_import("ejkernel.modules", tmp_path, may_import=("ejkernel.types", "ejkernel.ops"))
