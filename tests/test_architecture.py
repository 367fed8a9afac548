"""Imports point one way, and what may be used where is kept.

`MAY_IMPORT` is the table: which rooms of the package a room may import, lowest first, each through
its front door. docs/architecture.md shows the same table to readers.
"""

import ast
import io
import json
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

MAY_IMPORT = {
    "distributed": "",
    "files": "",
    "schedule": "",
    "device": "schedule",
    "model": "device files",
    "parameter_server": "device distributed model schedule",
    "checkpoint": "device distributed files model parameter_server",
    "hugging_face": "files model parameter_server",
    "proof": "device files model parameter_server",
    "run": "device model parameter_server schedule",
    "trial": "device model parameter_server run",
    "planner": "device distributed files model parameter_server run schedule trial",
    "engine": (
        "checkpoint device distributed hugging_face model parameter_server planner proof run "
        "schedule trial"
    ),
    "loops": "engine parameter_server run",
    "bench": "device engine hugging_face parameter_server planner",
    "train": (
        "checkpoint device distributed engine files hugging_face model parameter_server planner run"
    ),
    "page": "device planner",
    "cli": (
        "bench checkpoint device distributed files hugging_face page parameter_server planner train"
    ),
}

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "l2l"
DOCUMENT = ROOT / "docs" / "architecture.md"
SOURCES = sorted(PACKAGE.rglob("*.py"))
REQUIRED = {"torch", "safetensors", "typing_extensions"}  # the last is required by torch
OPTIONAL = {
    "transformers",
    "peft",
    "trl",
    "accelerate",
    "lightning",
    "datasets",
    "pydantic",
    "rich",
    "matplotlib",
    "plotly",
    "tensorboard",
    "deepspeed",
    "roundpipe",
    "torchao",
    "bitsandbytes",
}
LOOKS_FOR_OPTIONAL = {  # by name, inside functions
    "__init__",  # for rooms of its own, when they are asked for
    "bench",
    "cli",  # for its verbs, when they are asked for
    "hugging_face",
    "loops",
    "model",  # for formats of weights
    "page",
    "train",
}
IMPORTS_OPTIONAL = {  # source -> the one library that it is written for
    "bench/plot.py": "matplotlib",  # inside functions, and for types
    "train/live_display.py": "rich",
    "train/settings/reading.py": "pydantic",
    "train/settings/sections.py": "pydantic",
}
NEEDS_PYDANTIC = {"train", "export", "report", "watch"}  # verbs of the command line
IMPORTS_TRAIN = {"train", "export", "report", "run_page"}  # modules there
KNOWS_CUDA = {
    PACKAGE / "device" / "cuda.py",
    PACKAGE / "device" / "cuda_streams.py",
    PACKAGE / "bench" / "workload.py",
}  # the latter times others
GOLDEN = ROOT / "tests" / "schedules" / "tied_table_on_the_host_clipped.txt"
EMPTY_WORDS = {"utils", "helpers", "common", "misc", "base", "manager"}

every_source = pytest.mark.parametrize(
    "source", SOURCES, ids=lambda source: source.relative_to(PACKAGE).as_posix()
)


@cache
def tree_of(source: Path) -> ast.Module:
    """The code of a file; many tests look at it."""
    return ast.parse(source.read_text())


def module_of(source: Path) -> str:
    return source.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(source: Path) -> Iterator[str]:
    """Dotted names of all that a file imports, also inside functions."""
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source.name}:{node.lineno}: a relative import"
            assert node.module
            if node.module == "l2l":
                yield from (f"l2l.{alias.name}" for alias in node.names)
            else:
                yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def own_imports(source: Path) -> set[str]:
    """The package's modules that a file imports, without its own."""
    own = {name.split(".")[1] for name in imports(source) if name.startswith("l2l.")}
    return own - {module_of(source)}


def test_the_table_lists_the_package() -> None:
    assert set(MAY_IMPORT) == {module_of(source) for source in SOURCES} - {"__init__", "__main__"}


def test_a_module_may_import_only_what_is_listed_above_it() -> None:
    above: set[str] = set()
    for module, allowed in MAY_IMPORT.items():
        assert set(allowed.split()) <= above, module
        above.add(module)


@every_source
def test_imports_follow_the_table(source: Path) -> None:
    module = module_of(source)
    if module == "__init__":
        shown = {
            *("checkpoint", "device", "engine", "hugging_face", "model", "parameter_server"),
            "planner",
            "run",
        }
        assert own_imports(source) == shown
    elif module == "__main__":
        assert own_imports(source) == {"cli"}
    else:
        strays = own_imports(source) - set(MAY_IMPORT[module].split())
        assert not strays, f"{module} may not import {sorted(strays)}"


@every_source
def test_other_rooms_are_entered_by_their_front_door(source: Path) -> None:
    theirs = [name for name in imports(source) if name.startswith("l2l.")]
    deep = {n for n in theirs if n.count(".") > 1 and n.split(".")[1] != module_of(source)}
    assert not deep


def test_the_table_allows_nothing_that_is_not_used() -> None:
    used: dict[str, set[str]] = {module: set() for module in MAY_IMPORT}
    for source in SOURCES:
        if module_of(source) in used:
            used[module_of(source)] |= own_imports(source)
    assert used == {module: set(allowed.split()) for module, allowed in MAY_IMPORT.items()}


def test_the_table_in_the_documentation_is_this_one() -> None:
    """Rows below `| room | may import |`, names parted by commas."""
    lines = iter(DOCUMENT.read_text().splitlines())
    assert "| room | may import |" in lines, "no such header"
    next(lines)
    documented: dict[str, set[str]] = {}
    for line in lines:
        if not line.startswith("|"):
            break
        _, module, allowed, _ = (cell.replace("`", "").strip() for cell in line.split("|"))
        assert module not in documented
        documented[module] = set(allowed.replace(",", " ").split())
    assert documented == {module: set(allowed.split()) for module, allowed in MAY_IMPORT.items()}


def test_the_schedule_in_the_documentation_is_a_golden_file() -> None:
    """The block after the file's name, without what is said on the right; waits are left out."""
    _, _, after = DOCUMENT.read_text().partition(GOLDEN.name)
    block = after.split("```")[1]
    shown = [line.partition("  ")[0] for line in block.splitlines() if line]
    actions = [line for line in GOLDEN.read_text().splitlines() if " waits " not in line]
    assert shown == actions


@every_source
def test_third_parties_are_only_those_required(source: Path) -> None:
    tops = {name.split(".")[0].removesuffix("_core") for name in imports(source)}
    own = IMPORTS_OPTIONAL.get(source.relative_to(PACKAGE).as_posix())
    third = tops - REQUIRED - {"l2l"} - sys.stdlib_module_names
    assert third == ({own} if own else set())


def test_the_schedule_needs_the_standard_library_only() -> None:
    own = {f"l2l.schedule.{source.stem}" for source in (PACKAGE / "schedule").glob("*.py")}
    for source in (PACKAGE / "schedule").glob("*.py"):
        allowed = sys.stdlib_module_names | {"collections.abc"} | own
        assert set(imports(source)) <= allowed, source


@every_source
def test_what_is_optional_is_looked_for_when_it_is_asked_for(source: Path) -> None:
    tree = tree_of(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            assert module_of(source) in LOOKS_FOR_OPTIONAL
            assert id(node) in inside, f"line {node.lineno}: on import of the module"
            if isinstance(node.args[0], ast.Constant):
                assert str(node.args[0].value).split(".")[0] in OPTIONAL


def without_optional(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program where nothing optional is installed."""
    forbid = f"""
import sys

class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(f"no module named {{name!r}}", name=name)

sys.meta_path.insert(0, Forbid())
"""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", forbid + program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_package_imports_without_what_is_optional() -> None:
    done = without_optional(f"""
import importlib
import l2l
for name in l2l.__all__:
    getattr(l2l, name)
for room in {sorted(set(MAY_IMPORT) - {"train"})!r}:
    importlib.import_module(f"l2l.{{room}}")
assert not {OPTIONAL!r} & set(sys.modules)
""")
    assert done.returncode == 0, done.stderr


VERBS = ("bench", "export", "plan", "report", "train", "watch")


@pytest.fixture(scope="module")
def help_of_verbs() -> dict[str, dict[str, Any]]:
    """What each verb has said; one process asks all of them, and nothing optional is there."""
    done = without_optional(f"""
import contextlib, io, json
from l2l import cli

found = {{}}
for verb in {VERBS!r}:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli.main([verb, "--help"])
        except SystemExit as left:
            status = left.code or 0
    found[verb] = {{"status": status, "out": out.getvalue(), "err": err.getvalue()}}
print(json.dumps(found))
""")
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_that_needs_more_says_what_to_install(
    verb: str, help_of_verbs: dict[str, dict[str, Any]]
) -> None:
    said = help_of_verbs[verb]
    if verb in NEEDS_PYDANTIC:
        assert said["status"] == 1
        assert said["err"] == (
            f"l2l {verb} needs pydantic, which is not installed. Install it with: pip install "
            "'l2l[train]'\n"
        )
    else:
        assert said["status"] == 0, said["err"]
        assert said["out"].startswith(f"usage: l2l {verb}")


def test_only_the_command_line_imports_what_needs_pydantic() -> None:
    users = {source for source in SOURCES if "train" in own_imports(source)}
    assert users == {PACKAGE / "cli" / f"{name}.py" for name in IMPORTS_TRAIN}


def test_the_live_display_is_imported_when_it_is_asked_for() -> None:
    for source in SOURCES:
        top = [node for node in tree_of(source).body if isinstance(node, ast.ImportFrom)]
        assert "l2l.train.live_display" not in {node.module for node in top}, source


@every_source
def test_modules_and_classes_stay_small(source: Path) -> None:
    text = source.read_text()
    assert len(text.splitlines()) <= 600
    kinds = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    long = {one.name for one in kinds if (one.end_lineno or 0) - one.lineno >= 400}
    assert not long


def num_code_lines(source: Path) -> int:
    """Lines that are not blank, a comment or a docstring."""
    text = source.read_text()
    without = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in without:
            lines |= set(range(token.start[0], token.end[0] + 1))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def test_the_house_stays_small() -> None:
    """Whoever adds a room says so here."""
    by_room = dict.fromkeys(map(module_of, SOURCES), 0)
    for source in SOURCES:
        by_room[module_of(source)] += num_code_lines(source)
    assert by_room["schedule"] + by_room["run"] <= 5_250  # what a newcomer reads first
    assert sum(by_room.values()) <= 37_500


@every_source
def test_files_are_named_for_what_they_hold(source: Path) -> None:
    parts = source.relative_to(PACKAGE).with_suffix("").parts
    words = {word for part in parts for word in part.split("_")}
    assert not words & EMPTY_WORDS


def attributes(source: Path) -> set[str]:
    """Dotted names that a file uses or imports, such as `torch.cuda.Stream`."""
    found: set[str] = set()
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@every_source
def test_only_the_device_knows_cuda(source: Path) -> None:
    names = {name for name in attributes(source) if name.startswith("torch.cuda")}
    assert bool(names) == (source in KNOWS_CUDA), names


ENVIRONMENT = {"distributed.py", "model/compiling.py"}
"""What torchrun says is read; torch is told where to keep compiled programs."""


@every_source
def test_the_environment_is_not_read(source: Path) -> None:
    names = attributes(source)
    found = {n for n in names if n.startswith(("os.environ", "os.getenv", "os.putenv"))}
    assert bool(found) == (str(source.relative_to(PACKAGE)) in ENVIRONMENT), found
