"""Imports point one way, and what may be used where is kept.

`MAY_IMPORT` is the table: which modules of the package a module may import, lowest first.
docs/architecture.md shows the same table to readers.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

MAY_IMPORT = {
    "layout": "",
    "trace": "",
    "precision": "",
    "schedule": "",
    "batch": "",
    "layer_list": "",
    "carving": "layer_list",
    "planner": "",
    "loss": "batch",
    "device": "schedule trace",
    "host_memory": "device planner",
    "parameter_server": "device host_memory layout precision schedule",
    "stash": "device host_memory layout",
    "transfer": "device host_memory parameter_server schedule",
    "layer_pass": "carving",
    "relay": (
        "batch carving device layer_pass loss parameter_server precision schedule stash transfer"
    ),
    "report": "relay",
    "rehearsal": ("batch carving device layer_list loss parameter_server relay schedule transfer"),
    "engine": (
        "batch carving device host_memory loss parameter_server planner precision "
        "rehearsal relay report schedule stash trace transfer"
    ),
    "benchmark": "device parameter_server",
    "cli": "benchmark parameter_server",
}

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "l2l"
DOCUMENT = ROOT / "docs" / "architecture.md"
SOURCES = sorted(PACKAGE.rglob("*.py"))
REQUIRED = {"torch", "safetensors", "typing_extensions"}  # the last is required by torch
OPTIONAL = {"transformers", "peft", "datasets", "rich", "tensorboard"}
EMPTY_WORDS = {"utils", "helpers", "common", "misc", "base", "manager"}

every_source = pytest.mark.parametrize(
    "source", SOURCES, ids=lambda source: source.relative_to(PACKAGE).as_posix()
)


def module_of(source: Path) -> str:
    return source.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(source: Path) -> Iterator[str]:
    """Dotted names of all that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(source.read_text())):
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
        assert own_imports(source) == {"engine", "parameter_server", "report"}
    elif module == "__main__":
        assert own_imports(source) == {"cli"}
    else:
        strays = own_imports(source) - set(MAY_IMPORT[module].split())
        assert not strays, f"{module} may not import {sorted(strays)}"


def test_the_table_allows_nothing_that_is_not_used() -> None:
    used: dict[str, set[str]] = {module: set() for module in MAY_IMPORT}
    for source in SOURCES:
        if module_of(source) in used:
            used[module_of(source)] |= own_imports(source)
    assert used == {module: set(allowed.split()) for module, allowed in MAY_IMPORT.items()}


def test_the_table_in_the_documentation_is_this_one() -> None:
    """Rows below `| module | may import |`, names parted by commas."""
    lines = iter(DOCUMENT.read_text().splitlines())
    assert "| module | may import |" in lines, "no such header"
    next(lines)
    documented: dict[str, set[str]] = {}
    for line in lines:
        if not line.startswith("|"):
            break
        _, module, allowed, _ = (cell.replace("`", "").strip() for cell in line.split("|"))
        assert module not in documented
        documented[module] = set(allowed.replace(",", " ").split())
    assert documented == {module: set(allowed.split()) for module, allowed in MAY_IMPORT.items()}


@every_source
def test_third_parties_are_only_those_required(source: Path) -> None:
    tops = {name.split(".")[0] for name in imports(source)}
    assert tops <= REQUIRED | {"l2l"} | sys.stdlib_module_names


def test_the_schedule_needs_the_standard_library_only() -> None:
    own = {f"l2l.schedule.{source.stem}" for source in (PACKAGE / "schedule").glob("*.py")}
    for source in (PACKAGE / "schedule").glob("*.py"):
        allowed = sys.stdlib_module_names | {"collections.abc"} | own
        assert set(imports(source)) <= allowed, source


def test_the_package_imports_without_what_is_optional() -> None:
    program = f"""
import sys

class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(f"no module named {{name!r}}", name=name)

sys.meta_path.insert(0, Forbid())
import l2l
assert set(l2l.__all__) <= set(vars(l2l))
assert not {OPTIONAL!r} & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@every_source
def test_files_are_named_for_what_they_hold(source: Path) -> None:
    parts = source.relative_to(PACKAGE).with_suffix("").parts
    words = {word for part in parts for word in part.split("_")}
    assert not words & EMPTY_WORDS


def attributes(source: Path) -> set[str]:
    """Dotted names that a file uses or imports, such as `torch.cuda.Stream`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text())):
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
    assert bool(names) == (source == PACKAGE / "device" / "cuda.py"), names


@every_source
def test_the_environment_is_not_read(source: Path) -> None:
    names = attributes(source)
    assert not {n for n in names if n.startswith(("os.environ", "os.getenv", "os.putenv"))}
