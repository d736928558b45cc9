from ejktest.portion import check_portion, check_silent_import


def test_version_and_typing():
    check_portion("ejkernel.types", "ejk-types")


def test_import_changes_nothing(tmp_path):
    check_silent_import("ejkernel.types", tmp_path, may_import=())
