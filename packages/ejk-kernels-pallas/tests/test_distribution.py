from importlib.metadata import entry_points

from ejktest.portion import check_portion, check_silent_import

MODULE = "ejkernel.kernels.pallas"
SIBLINGS = ("ejkernel.types", "ejkernel.ops")


def test_version_and_typing():
    check_portion(MODULE, "ejk-kernels-pallas")


def test_import_and_registration_change_nothing(tmp_path):
    """Nor do they import Triton where it is installed, so that they need it nowhere."""
    check_silent_import(MODULE, tmp_path, may_import=SIBLINGS)


def test_is_discovered_as_a_kernel_package():
    (entry,) = entry_points(group="ejkernel.kernels", name="pallas")
    assert entry.value == f"{MODULE}:register"
    assert callable(entry.load())
