"""What every test run from this repository shares.

Eight CPU devices, so that sharded calls are tested everywhere; hypothesis without a deadline,
because the first example compiles; the Python blocks of the READMEs and guides as tests; programs
for the CPU that XLA compiles quickly, not well; the options below. A machine lent for its GPU may
have pytest alone: then what needs hypothesis or sybil is left out. Packages that are not installed
are taken from this checkout.
"""

import gc
import importlib.metadata
import importlib.util
import os
import pathlib
import signal
import sys

import pytest

try:
    from hypothesis import settings
except ImportError:
    settings = None
try:
    from sybil import Sybil
    from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser
except ImportError:
    Sybil = None


def add_xla_flag(name, value):
    """For this process and those that tests start, unless the caller says otherwise."""
    given = os.environ.get("XLA_FLAGS", "")
    if name not in given:
        os.environ["XLA_FLAGS"] = f"{given} {name}={value}".strip()


add_xla_flag("--xla_force_host_platform_device_count", 8)

if importlib.util.find_spec("ejkernel") is None:
    sys.path += map(str, sorted(pathlib.Path(__file__).parent.glob("packages/*/src")))

if settings is not None:
    settings.register_profile("full", deadline=None, print_blob=True)
    settings.register_profile("one-each", settings.get_profile("full"), max_examples=10)

if Sybil is not None:
    pytest_collect_file = Sybil(
        parsers=[PythonCodeBlockParser(), SkipParser()],
        # pages of docs/operations have a test of their own
        patterns=["README.md", "docs/*.md", "docs/guides/*.md"],
    ).pytest()


def pytest_addoption(parser):
    parser.addoption(
        "--one-each",
        action="store_true",
        help="run each test function once, with its first parameters: a quick look at every path",
    )

    parser.addoption(
        "--strict-promotion",
        action="store_true",
        help="let JAX refuse implicit promotion of ranks and dtypes, as a strict caller does",
    )

    parser.addoption(
        "--optimized",
        action="store_true",
        help="let XLA compile as it does for users: tests then take twice the time",
    )

    parser.addoption("--note-passed", metavar="FILE", help="append the names of tests that pass")

    parser.addoption(
        "--leave-out", metavar="FILE", help="do not run again what --note-passed wrote there"
    )


def compile_quickly():
    """Most of the suite's time is XLA's compiler, at work on thousands of small programs."""
    add_xla_flag("--xla_backend_optimization_level", 0)
    add_xla_flag("--xla_cpu_parallel_codegen_split_count", 1)  # the workers keep all cores busy
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        add_xla_flag("--xla_cpu_use_fusion_emitters", "false")  # later ones have no other emitters


def keep_programs_of_one_device():
    """XLA's CPU programs for several devices must not be kept: once read from the disk, a device
    no longer waits for the order of collectives, and they deadlock or mix their arrays."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    from jax._src import compilation_cache as cache

    write = cache.put_executable_and_time

    def write_of_one_device(key, module, executable, *others):
        if len(executable.local_devices()) == 1:
            write(key, module, executable, *others)

    cache.put_executable_and_time = write_of_one_device


def pytest_configure(config):
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # a shell starts what runs in its background so, and tests of Ctrl-C would wait for ever
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "not gpu" in config.option.markexpr and not config.getoption("--optimized"):
        compile_quickly()
    if config.getoption("--strict-promotion"):
        # read by JAX when it is imported, in this process and in those that tests start
        os.environ.update(JAX_NUMPY_RANK_PROMOTION="raise", JAX_NUMPY_DTYPE_PROMOTION="strict")
    keep_programs_of_one_device()
    if config.getoption("--note-passed") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(NotePassed(config.getoption("--note-passed")))
    if settings is not None:
        settings.load_profile("one-each" if config.getoption("--one-each") else "full")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    selected, dropped, seen = [], [], set()
    one_each, done = config.getoption("--one-each"), config.getoption("--leave-out")
    names = set(pathlib.Path(done).read_text().splitlines()) if done else ()
    for item in items:
        function = getattr(item, "originalname", None)
        key = (item.path, getattr(item, "cls", None), function)
        again = one_each and function and key in seen
        (dropped if again or item.nodeid in names else selected).append(item)
        seen.add(key)
    items[:] = selected
    config.hook.pytest_deselected(items=dropped)


class NotePassed:
    """Writes the names of passed tests to a file, in the process that hears of all of them."""

    def __init__(self, path):
        self.path = pathlib.Path(path)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            with self.path.open("a") as file:
                file.write(report.nodeid + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Turns the garbage collector off meanwhile: imported modules stay, it would find nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish():
    """Collecting garbage leaves out what is imported by now, which it would look at in every file.

    Tracing and interpreting make many objects, few of them in cycles: at Python's own thresholds
    the collector takes a tenth of the time of the tests.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_unconfigure():
    gc.unfreeze()


@pytest.fixture(autouse=True)
def usual_promotion(request):
    """Tests whose own arithmetic promotes run as JAX comes also under ``--strict-promotion``."""
    if not request.node.get_closest_marker("promotes"):
        yield
        return
    jax = __import__("jax")
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(autouse=True)
def same_draws(request):
    """Resets a file's ``RNG`` before each test: draws do not depend on the tests before it."""
    random = getattr(request.module, "RNG", None) if hasattr(request, "module") else None
    if random is not None:
        random.bit_generator.state = type(random.bit_generator)(0).state


@pytest.fixture(autouse=True, scope="module")
def release_programs():
    """Compiled programs of a finished file are of no use to the next: free their memory."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """A test for a card needs one. An example in a document builds on those above it, which another
    worker may have run."""
    if item.get_closest_marker("gpu") and __import__("jax").default_backend() != "gpu":
        pytest.skip("needs a GPU")
    example = getattr(item, "example", None)
    if example is None:
        return
    done = example.namespace.setdefault("__examples_done__", set())
    for other in example.document.examples():
        start = other.region.start
        if start < example.region.start and start not in done:
            done.add(start)
            other.evaluate()
    done.add(example.region.start)
