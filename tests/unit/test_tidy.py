"""The shape of the source tree: sizes of files and functions, layers of includes and imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES = 499
MAX_C_FUNCTION_LINES = 69

# core.h's order of layers, lowest first.  A file may call what core.h declares for lower layers and
# for its own; files that share a layer share its declarations.
LAYERS = (
    ("region", "errors", "hash", "hash_avx2"),
    ("fds",),
    ("lock",),
    ("slots",),
    ("events",),
    ("evict",),
    ("tree",),
    ("side",),
    ("clients", "attach"),
    ("index", "allocate", "insert", "stats", "snapshot", "forest", "check"),
)
STANDALONE = {"copy"}  # flexkv_radix's own extension
# Upward calls that are wanted: the lock counts its timeouts, and clients leave by way of the verbs' batches.
UPWARD_CALLS = {
    ("lock", "rs_count"),
    ("attach", "rs_verb_begin"),
    ("attach", "rs_verb_end"),
    ("attach", "rs_drain_all"),
    ("clients", "rs_drain_all"),
}
# Headers of csrc that a C file may include, beside those that these include themselves.
HEADERS = {
    "radixshm.h": set(),
    "layout.h": {"radixshm.h"},
    "plant.h": set(),
    "core.h": {"layout.h", "plant.h"},
    "snapshot.h": {"core.h"},
    "copy.h": set(),
    "xxh64.h": set(),
}


def tracked(*patterns: str) -> list[Path]:
    """Source files, without what was generated or built."""
    files = [path for pattern in patterns for path in ROOT.glob(pattern)]
    return sorted(path for path in files if "_pb2" not in path.name)


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


C_FILES = tracked("csrc/*.c", "csrc/*.h")
PYTHON_FILES = tracked(
    *(f"{top}/**/*.py" for top in ("radixshmem", "flexkv_radix", "tests", "examples", "benchmarks"))
)


def test_the_tree_was_found() -> None:
    assert len(C_FILES) > 10
    assert len(PYTHON_FILES) > 30


@pytest.mark.parametrize(
    "path", C_FILES + tracked("csrc/tests/*.[ch]") + PYTHON_FILES, ids=lambda p: str(p.relative_to(ROOT))
)
def test_files_are_short(path: Path) -> None:
    num_lines = len(path.read_text().splitlines())
    assert num_lines <= MAX_FILE_LINES, f"{path.name} has {num_lines} lines, more than {MAX_FILE_LINES}"


def c_functions(text: str) -> Iterator[tuple[str, int]]:
    """(name, lines from the opening brace to the closing one) of each function, by indentation."""
    start, name = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if line == "{":
            start = number
        elif line == "}" and start:
            yield name, number - start + 1
            start = 0
        elif not start and (match := re.match(r"(?:[A-Za-z].*?\b)?(\w+)\(", line)):
            name = match[1]


def test_c_functions_are_seen() -> None:
    text = "int f(int x)\n{\n    return x;\n}\n\nstatic void\ng(void)\n{\n" + "    f(1);\n" * 80 + "}\n"
    assert dict(c_functions(text)) == {"f": 3, "g": 82}


@pytest.mark.parametrize(
    "path", tracked("csrc/*.c", "csrc/tests/*.c"), ids=lambda p: str(p.relative_to(ROOT))
)
def test_c_functions_are_short(path: Path) -> None:
    long = {name: lines for name, lines in c_functions(path.read_text()) if lines > MAX_C_FUNCTION_LINES}
    assert not long, f"functions of {path.name} with more than {MAX_C_FUNCTION_LINES} lines"


# -- layers of the core ------------------------------------------------------------------------------


def layer_of(stem: str) -> int:
    return next(level for level, files in enumerate(LAYERS) if stem in files)


def declared_functions() -> dict[str, str]:
    """Function -> file (without .c) whose section of core.h declares it."""
    section, where = "", {}
    for line in (ROOT / "csrc/core.h").read_text().splitlines():
        if match := re.match(r"/\* -- (\w+)\.c", line):
            section = match[1]
        elif section and (match := re.match(r"RS_HIDDEN .*?(rs_\w+)\(", line)):
            where[match[1]] = section
    return where


def defined_in(stem: str) -> set[str]:
    text = (ROOT / f"csrc/{stem}.c").read_text()
    return set(re.findall(r"^[a-z][\w \*]*?(rs_\w+)\(", text, re.MULTILINE))


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def test_every_c_file_has_a_layer() -> None:
    stems = {path.stem for path in tracked("csrc/*.c")} - STANDALONE
    assert stems == {stem for layer in LAYERS for stem in layer}


def test_core_h_declares_lower_layers_first() -> None:
    sections = re.findall(r"^/\* -- (\w+)\.c", (ROOT / "csrc/core.h").read_text(), re.MULTILINE)
    levels = [layer_of(section) for section in sections]
    assert len(levels) > 5
    assert levels == sorted(levels)


@pytest.mark.parametrize("stem", sorted({stem for layer in LAYERS for stem in layer}))
def test_calls_go_down(stem: str) -> None:
    text = without_comments((ROOT / f"csrc/{stem}.c").read_text())
    called = set(re.findall(r"\b(rs_\w+)\(", text)) - defined_in(stem)
    where = declared_functions()
    upward = {
        name
        for name in called
        if name in where and layer_of(where[name]) > layer_of(stem) and (stem, name) not in UPWARD_CALLS
    }
    assert not upward, f"{stem}.c calls functions of higher layers"


@pytest.mark.parametrize("path", C_FILES, ids=lambda p: p.name)
def test_includes_go_down(path: Path) -> None:
    included = set(re.findall(r'^#include "(.*)"', path.read_text(), re.MULTILINE))
    assert included <= set(HEADERS)
    if path.name in HEADERS:
        assert included <= HEADERS[path.name]


# -- layers of the packages ---------------------------------------------------------------------------


def imported_modules(path: Path) -> set[str]:
    """Every module that ``path`` imports anywhere, also inside functions; ``from a import b`` gives both."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def imports_package(path: Path, package: str) -> bool:
    return any(module == package or module.startswith(package + ".") for module in imported_modules(path))


def test_radixshmem_knows_nothing_above_it() -> None:
    files = tracked("radixshmem/**/*.py")
    assert not names([path for path in files if imports_package(path, "flexkv_radix")])
    with_torch = names([path for path in files if imports_package(path, "torch")])
    assert with_torch == ["radixshmem/torch.py"]
    assert not names([path for path in files if imports_package(path, "radixshmem.torch")])


def test_only_the_binding_imports_the_extension() -> None:
    importers = [
        path
        for path in tracked("radixshmem/**/*.py", "flexkv_radix/**/*.py")
        if imports_package(path, "radixshmem._radixshm")
    ]
    assert names(importers) == ["radixshmem/_native.py"]


def test_clients_run_without_the_server() -> None:
    """What an engine imports pulls in neither the server nor the command line."""
    client_side = [path for path in tracked("radixshmem/*.py") if path.name != "__init__.py"]
    above = [
        path
        for path in client_side
        if imports_package(path, "radixshmem.server") or imports_package(path, "radixshmem.cli")
    ]
    assert not names(above)
