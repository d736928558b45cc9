"""The repository's commands, each complete on a machine that has only Python 3.11+ and pip.

    python3 tools/dev.py demo              train a small model on real text, then decode with it
    python3 tools/dev.py test [ARGS]       run the test suite (ARGS go to pytest)
    python3 tools/dev.py help              the other commands

The first run makes a local environment with hatch under ``.venv/`` (about 2 GB, once) and hands
over to it; ``python3 tools/dev.py clean`` removes it. Standard library only, and it must parse on
old Pythons, so that they get a sentence and not a syntax error.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys

OLDEST = (3, 11)
HATCH = "hatch>=1.18.2,<2"
DISK_GB = 2.0
MOST_PROGRAMS = 60_000  # about 0.4 GB; then the tests' compiled programs are forgotten
TESTS = ("test", "cov", "readme", "isolate")
ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("types", "ops", "kernels-xla", "kernels-triton", "kernels-pallas", "modules")

COMMANDS = {
    "demo": "train a small model on real text with packed attention, then decode with it",
    "test": "run the test suite; arguments go to pytest, such as -k mask",
    "bench": "time an operation against its bound and its peers: bench flash_attention",
    "lint": "ruff check, ruff format --check, the layering contracts and the words",
    "fix": "let ruff repair what it can",
    "types": "type check",
    "cov": "run the test suite with coverage",
    "readme": "run the examples in the READMEs",
    "docs": "build the site into .venv/site; --serve shows it on a local address",
    "isolate": "run one package's tests with only its declared dependencies: isolate types",
    "release": "check, build and import one package, then print its tag: release ejk-ops",
    "wheels": "build all wheels, try ejk-modules and a plug-in in a clean environment",
    "rehearse": "rehearse a release: install every package from a local index, upgrade, refuse",
    "run": "any hatch script or program in the environment: run python",
    "clean": "remove .venv/",
}


class SetupError(Exception):
    """The environment could not be made; the message says why and what helps."""


def usage():
    text = ["usage: python3 tools/dev.py COMMAND [ARGS]", ""]
    text += [f"  {name:<8} {text}" for name, text in COMMANDS.items()]
    return "\n".join(text)


def works(name):
    """Returns whether a program of this name starts (a version manager's shim may not)."""
    if shutil.which(name) is None:
        return False
    command = [name, "-c", "pass"]
    return subprocess.call(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0


def too_old(version):
    """The message for a Python that is too old, or None."""
    if tuple(version[:2]) >= OLDEST:
        return None
    newer = [name for name in ("python3.13", "python3.12", "python3.11") if works(name)]
    if newer:
        advice = f"{newer[0]} is installed: use it in place of python3"
    else:
        advice = "install Python 3.11, 3.12 or 3.13"
    return f"ejkernel needs Python 3.11 or newer, this is {version[0]}.{version[1]}; {advice}."


def paths():
    """Returns the folder of this interpreter's tools, its python and its hatch."""
    home = ROOT / ".venv" / "py{}.{}".format(*sys.version_info[:2])
    scripts = "Scripts" if os.name == "nt" else "bin"
    suffix = ".exe" if os.name == "nt" else ""
    return home, home / "hatch" / scripts / ("python" + suffix), home / "hatch" / scripts / "hatch"


def environment(home):
    """The environment hatch runs in: nothing of the caller's Python set-up, data in .venv/."""
    env = dict(os.environ)
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "HATCH_ENV", "HATCH_ENV_ACTIVE"):
        env.pop(name, None)
    env["PIP_USER"] = "0"
    # without bytecode every process a test starts would compile JAX's sources again (1.4 s)
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    env.setdefault("PYTHONPYCACHEPREFIX", str(home / "bytecode"))
    env["HATCH_DATA_DIR"] = str(home / "data")
    env["HATCH_PYTHON"] = sys.executable
    with contextlib.suppress(OSError, ValueError):
        for name, value in json.loads((home / "index.json").read_text()).items():
            env.setdefault(name, value)
    return env


def index_settings(env):
    """pip's indexes and certificates as uv's variables: a machine set up for pip is set up."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ).stdout
    options = {}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        options[name.rpartition(".")[2]] = value.strip("'\"").replace("\\n", " ").split()
    settings = {}
    if options.get("index-url"):
        settings["UV_DEFAULT_INDEX"] = options["index-url"][0]
    if options.get("extra-index-url"):
        settings["UV_INDEX"] = " ".join(options["extra-index-url"])
        settings["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    if options.get("find-links"):
        settings["UV_FIND_LINKS"] = ",".join(options["find-links"])
    if options.get("cert"):
        settings["SSL_CERT_FILE"] = options["cert"][0]
    return settings


def test_environment(home):
    """The environment of the test commands: programs compiled once serve every process and run.

    Most of the suite's time is XLA's compiler at work on thousands of small programs.
    """
    programs = home / "compiled"
    if programs.is_dir() and sum(1 for _ in programs.iterdir()) > MOST_PROGRAMS:
        shutil.rmtree(str(programs), ignore_errors=True)
    env = environment(home)
    env.setdefault("JAX_COMPILATION_CACHE_DIR", str(programs))
    env.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    env.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    return env


def make_tool_environment(home, python, env):
    """A virtual environment that holds hatch, with or without ensurepip."""
    target = home / "hatch"
    if importlib.util.find_spec("venv") is None:
        raise SetupError("this Python has no venv module; install python3-venv (Debian, Ubuntu)")
    plain = [sys.executable, "-m", "venv", "--clear", str(target)]
    has_pip = importlib.util.find_spec("ensurepip") is not None
    made = has_pip and not run_command(plain, env, quiet=True)
    if made:
        install = [str(python), "-m", "pip"]
    else:
        # Debian keeps ensurepip in a package of its own; pip >= 22.3 can fill another environment
        if run_command([*plain[:-1], "--without-pip", str(target)], env):
            raise SetupError(f"python3 -m venv failed in {target} (see above)")
        if run_command([sys.executable, "-m", "pip", "--version"], env, quiet=True):
            raise SetupError(
                "this Python has neither ensurepip nor pip; install python3-venv or python3-pip"
            )
        install = [sys.executable, "-m", "pip", "--python", str(python)]
    if run_command([*install, "install", "-qq", "--disable-pip-version-check", HATCH], env):
        raise SetupError(
            "pip could not install hatch (see above). It needs the network, or an index that pip "
            "is configured for (PIP_INDEX_URL); behind a proxy set HTTPS_PROXY. "
            "Without ensurepip, pip must be 22.3 or newer."
        )


def whose():
    """Returns the identity of an environment: a moved clone or another Python needs a new one."""
    return f"{HATCH} {sys.executable} {ROOT}"


def fingerprint():
    """Changes when a dependency, an entry point or a version of the workspace changes."""
    digest = hashlib.sha256(whose().encode())
    for pattern in ("pyproject.toml", "packages/*/pyproject.toml", "packages/*/src/**/_version.py"):
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def locked(home):
    """One set-up at a time; the second waits and finds everything made."""
    home.mkdir(parents=True, exist_ok=True)
    with open(str(home / "lock"), "w") as handle:
        with contextlib.suppress(ImportError):
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def prepare(home, python, hatch, env):
    """Make or refresh the environment; does nothing when it is up to date."""
    stamp = home / "ready"
    requested = fingerprint()
    if stamp.is_file() and stamp.read_text() == requested:
        return
    (ROOT / ".venv").mkdir(exist_ok=True)
    with locked(home):
        have = stamp.read_text() if stamp.is_file() else None
        if have == requested:
            return
        if have is None:
            free = shutil.disk_usage(str(home)).free / 1e9
            if free < DISK_GB:
                raise SetupError(f"{free:.1f} GB free in {ROOT}, about {DISK_GB:.0f} GB are needed")
        # removed first, so that an interrupted set-up starts again from nothing
        with contextlib.suppress(FileNotFoundError):
            stamp.unlink()
        tool, identity = home / "tool", whose()
        if not tool.is_file() or tool.read_text() != identity:
            say(f"[1/2] installing hatch into {home.relative_to(ROOT)}")
            make_tool_environment(home, python, env)
            tool.write_text(identity)
        (home / "index.json").write_text(json.dumps(index_settings(env)))
        env = environment(home)
        if run_command([str(python), "tools/release.py", "--all", "--ranges"], env):
            raise SetupError("packages of the workspace exclude each other's versions (see above)")
        say("[2/2] building the environment (JAX, Triton, test tools; about 2 GB on first use)")
        shutil.rmtree(str(home / "data" / "env"), ignore_errors=True)
        if run_command([str(hatch), "env", "create", "default"], env):
            raise SetupError(
                "the environment could not be built (see above). Usual causes: no network or an "
                "index that uv does not know (UV_DEFAULT_INDEX), or a full disk."
            )
        stamp.write_text(requested)


def say(text):
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def run_command(command, env, quiet=False):
    """Exit status of command, run in the repository root; waits for it also when interrupted."""
    sink = subprocess.DEVNULL if quiet else None
    process = subprocess.Popen(command, cwd=str(ROOT), env=env, stdout=sink, stderr=sink)
    try:
        return process.wait()
    except KeyboardInterrupt:
        # the terminal has sent the child the same signal: let it clean up, then leave
        try:
            process.wait(timeout=20)
        except (KeyboardInterrupt, subprocess.TimeoutExpired):
            process.kill()
            process.wait()
        raise


def hatch_arguments(command, args):
    """Returns arguments for ``hatch run``; braces would be read as hatch's own fields."""
    if command == "run":
        target = []
        if not args:
            raise SetupError("run needs a hatch script or a program: dev.py run python")
    elif command == "isolate":
        names = [a[4:] if a.startswith("ejk-") else a for a in args[:1] if not a.startswith("-")]
        if names and names[0] not in PACKAGES:
            raise SetupError(f"no package {args[0]!r}; there are: {', '.join(PACKAGES)}")
        target = [*("+package=" + name for name in names), "isolate:test"]
        args = args[len(names) :]
    elif command == "docs":
        target = ["docs:build"]
    else:
        target = [command]
    return target + [a.replace("{", "{{").replace("}", "}}") for a in args]


def main(argv):
    message = too_old(sys.version_info)
    if message:
        say(message)
        return 2
    if not argv or argv[0] in ("help", "-h", "--help"):
        print(usage())
        return 0 if argv else 2
    command, args = argv[0], argv[1:]
    if command not in COMMANDS:
        say(f"unknown command {command!r}\n\n{usage()}")
        return 2
    if command == "clean":
        shutil.rmtree(str(ROOT / ".venv"), ignore_errors=True)
        return 0
    home, python, hatch = paths()
    env = environment(home)
    try:
        arguments = hatch_arguments(command, args)
        prepare(home, python, hatch, env)
        env = test_environment(home) if command in TESTS else environment(home)
        return run_command([str(hatch), "run", *arguments], env)
    except SetupError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
