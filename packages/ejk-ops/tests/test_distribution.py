from ejktest.portion import check_portion, check_silent_import


def test_version_and_typing():
    check_portion("ejkernel.ops", "ejk-ops")


def test_import_changes_nothing(tmp_path):
    check_silent_import("ejkernel.ops", tmp_path, may_import=())
