"""The house rules that a reader relies on, held by walking the source."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.cases import each
from tests.structure import INTERFACE, MODULES, ROOT, SOURCES, imported, module_name

Trees = dict[Path, list[ast.AST]]

FUNCTION_MAX, FILE_MAX = 60, 500  # lines, of functions those of the body
KERNEL_MAX = 80  # of a Triton kernel: a pass over memory is one function
TREE_MAX = 8 * 2**20  # bytes that git tracks
PURE = ("plan", "rules", "planner", "advice")  # folders of app that load neither torch nor numpy


def folders_in_order() -> list[str]:
    """Modules' folders as listed under "Code layout": each imports only from those before it."""
    page = (ROOT / "docs/architecture.md").read_text()
    block = page.partition("## Code layout")[2].partition("```")[2].partition("```")[0]
    named = re.findall(r"^(app/(?:\w+/)*) {2,}\S", block, re.MULTILINE)
    return [name.strip("/").replace("/", ".") for name in named]


FOLDERS = folders_in_order()


@pytest.fixture(scope="module")
def trees() -> Trees:
    """The nodes of every file of app/ and graphfold/."""
    return {path: [*ast.walk(ast.parse(path.read_text()))] for path in (*SOURCES, *INTERFACE)}


def folder_of(module: str) -> str:
    """The folder of a module, dotted."""
    return module if module in FOLDERS else module.rpartition(".")[0]


def imports_up(module: str, names: Iterable[str]) -> list[tuple[str, str]]:
    """The names that lie in a folder below the module's in the list."""
    place = {folder: index for index, folder in enumerate(FOLDERS)}
    ours = [name for name in names if name.split(".")[0] == "app"]
    here = place[folder_of(module)]
    return [(module, name) for name in ours if place[folder_of(name)] > here]


def test_every_public_class_has_a_name_of_its_own(trees: Trees):
    named = Counter(
        node.name
        for module, *_ in map(trees.__getitem__, SOURCES)
        for node in ast.iter_child_nodes(module)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert len(named) > 200
    assert [name for name, times in named.items() if times > 1] == []


def functions(path: Path, nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            yield f"{path.name}:{node.name}", (node.end_lineno or 0) - node.body[0].lineno + 1


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_point_up_the_list(folder: str, trees: Trees):
    inside = {
        path: nodes for path, nodes in trees.items() if folder_of(module_name(path)) == folder
    }
    wrong = []
    for path, nodes in inside.items():
        here, names = module_name(path), [*imported(nodes)]
        wrong += imports_up(here, names)
        if folder.split(".")[1:2] and folder.split(".")[1] in PURE:
            wrong += [(here, name) for name in names if name.split(".")[0] in ("torch", "numpy")]
    assert inside
    assert wrong == []


def test_the_import_rule_can_fail():
    up = ["app.moe.dispatch.static", "app.engine.build"]
    assert imports_up("app.moe.router", [*up, "app.kernels.rows", "app.choices", "torch"]) == [
        ("app.moe.router", name) for name in up
    ]


def test_no_circles(trees: Trees):
    arrows = {module_name(path): set(imported(nodes)) & MODULES for path, nodes in trees.items()}
    TopologicalSorter(arrows).prepare()  # raises CycleError with the circle


def test_the_rule_on_circles_can_fail():
    with pytest.raises(CycleError):
        TopologicalSorter({"report": {"page"}, "page": {"report"}}).prepare()


def test_each_names_the_case_that_fails():
    seen = []

    @each((1, square) for square in range(3))
    def through(one: int, square: int, tmp_path: Path):
        seen.append((one, square, tmp_path))
        assert square < 2

    with pytest.raises(AssertionError) as failed:
        through(tmp_path=ROOT)
    assert seen == [(1, 0, ROOT), (1, 1, ROOT), (1, 2, ROOT)]
    assert failed.value.__notes__ == ["case: (1, 2)"]
    assert [*inspect.signature(through).parameters] == ["tmp_path"]


def test_code_layout_names_every_folder():
    assert sorted(FOLDERS) == sorted({module_name(path.parent) for path in SOURCES})


def test_planning_does_not_load_torch():
    code = (
        "import importlib, pkgutil, sys\n"
        f"for name in {PURE}:\n"
        "    folder = importlib.import_module(f'app.{name}')\n"
        "    for found in pkgutil.walk_packages(folder.__path__, f'app.{name}.'):\n"
        "        importlib.import_module(found.name)\n"
    )
    subprocess.run(
        [
            sys.executable,
            "-c",
            code + "assert 'torch' not in sys.modules and 'numpy' not in sys.modules",
        ],
        cwd=ROOT,
        check=True,
    )


def test_sizes(trees: Trees):
    lengths = dict(found for each in trees.items() for found in functions(*each))
    kernels = dict(
        found
        for path, nodes in trees.items()
        if "kernels" in path.parts
        for found in functions(path, nodes)
    )
    assert {name: length for name, length in kernels.items() if length > KERNEL_MAX} == {}
    others = {name: length for name, length in lengths.items() if name not in kernels}
    assert {name: length for name, length in others.items() if length > FUNCTION_MAX} == {}
    files = {module_name(path): len(path.read_text().splitlines()) for path in trees}
    assert {name: length for name, length in files.items() if length > FILE_MAX} == {}
    assert files["app.cli.train"] <= 60


def test_text_files_are_utf_8_in_every_locale(trees: Trees):
    """`open` would take the locale's encoding, which may lack what is written."""
    for path, nodes in trees.items():
        for node in nodes:
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
                given = {word.arg for word in node.keywords}
                if name in ("read_text", "write_text"):
                    assert "encoding" in given, f"{path}:{node.lineno}"


def test_dataclass_attributes_are_fields(trees: Trees):
    """An attribute without annotation is silently no field."""
    for path, nodes in trees.items():
        for node in nodes:
            if isinstance(node, ast.ClassDef) and any(
                "dataclass" in ast.unparse(mark) for mark in node.decorator_list
            ):
                bare = [ast.unparse(item) for item in node.body if isinstance(item, ast.Assign)]
                assert bare == [], f"{path.name}:{node.name}"


def test_every_argument_is_annotated(trees: Trees):
    autograd = {"forward", "backward"}  # of autograd functions, whose `ctx` torch does not type
    for path, nodes in trees.items():
        for node in nodes:
            if isinstance(node, ast.FunctionDef) and node.name not in autograd:
                arguments = [
                    a
                    for a in (*node.args.args, *node.args.kwonlyargs)
                    if a.arg not in ("self", "cls")
                ]
                assert [a.arg for a in arguments if a.annotation is None] == [], (
                    f"{path.name}:{node.name}"
                )


def untyped(nodes: Sequence[ast.AST]) -> Iterator[int]:
    """Lines that say Any, but for autograd's context, to which its functions give attributes."""
    arguments = [node for node in nodes if isinstance(node, ast.arg) and node.annotation]
    contexts = {id(each.annotation) for each in arguments if each.arg == "ctx"}
    for node in nodes:
        if isinstance(node, ast.Name) and node.id == "Any" and id(node) not in contexts:
            yield node.lineno


def test_values_between_layers_of_the_engine_have_types(trees: Trees):
    seams = ("model", "moe", "optim", "engine/capture", "engine/step")
    sources = [path for seam in seams for path in sorted((ROOT / "app" / seam).rglob("*.py"))]
    assert len(sources) > 30
    found = {str(path): list(untyped(trees[path])) for path in sources}
    assert not {path: lines for path, lines in found.items() if lines}
    example = ast.parse("def f(ctx: Any, x: Any) -> dict[str, Any]: ...")
    assert list(untyped([*ast.walk(example)])) == [1, 1]


def test_only_programs_that_launchers_start_read_the_environment():
    readers = [
        module_name(path)
        for path in (*SOURCES, *INTERFACE)
        if any(word in path.read_text() for word in ("os.environ", "getenv"))
    ]
    assert readers == ["app.cli.processes.environment", "app.cli.train"]


def test_no_globals_and_no_instantiation_by_name(trees: Trees):
    assert [
        path.name
        for path, nodes in trees.items()
        if any(isinstance(node, ast.Global) for node in nodes)
    ] == []
    assert [
        path.name for path in (ROOT / "conf").rglob("*.yaml") if "_target_" in path.read_text()
    ] == []


def test_the_tracked_tree_is_small():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert sum(file.stat().st_size for file in files if file.is_file()) < TREE_MAX


# Writers elsewhere than in folders of runs, sweeps and plans: of a path that the user names, of
# temporary files, of /dev/null.
OTHER_WRITERS = {
    "app/own_files.py",
    "app/cli/chat_terminal.py",
    "app/cli/processes/output.py",
    "app/cli/host_checks/nodes.py",
    "app/engine/files/attempt.py",
    "app/engine/report/lasting.py",
}
WRITERS = ("write_text", "write_bytes", "touch", "symlink_to", "hardlink_to", "save_file")
COPIES = ("copy", "copy2", "copyfile", "copytree", "move", "replace", "link")  # of os and shutil


def writes(node: ast.AST) -> bool:
    """Whether this writes a file by its name, other than by `app.own_files`."""
    match node:
        case ast.Call(ast.Name("open") | ast.Attribute(attr="open")):
            texts = (each.value for each in ast.walk(node) if isinstance(each, ast.Constant))
            modes = [each for each in texts if isinstance(each, str) and len(each) < 4]
            return any(set(mode) & set("wax+") for mode in modes)
        case ast.Call(ast.Attribute(attr="savefig"), [to, *_]):
            return ast.unparse(to) not in ("svg", "temporary")  # memory, or what `replaced` yields
        case ast.Call(ast.Attribute(ast.Name("shutil" | "os"), name)):
            return name in COPIES
        case ast.Call(ast.Attribute(ast.Name("torch"), "save")):
            return True
        case ast.Call(ast.Attribute(attr=name) | ast.Name(name)):
            return name in WRITERS
        case ast.Attribute(ast.Name("os"), name):
            return name in ("O_WRONLY", "O_RDWR")
    return False


def test_writers_of_run_folders_follow_no_links(trees: Trees):
    """Those of app/data write the cache of prepared data."""
    found = {
        path.relative_to(ROOT).as_posix()
        for path, nodes in trees.items()
        if any(writes(node) for node in nodes)
    }
    assert {name for name in found if not name.startswith("app/data/")} == OTHER_WRITERS
