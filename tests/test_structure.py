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
from tests.structure import MODULES, ROOT, SOURCES, imported, module_name

Trees = dict[Path, list[ast.AST]]

FUNCTION_MAX, FILE_MAX = 60, 500  # lines, of functions those of the body
KERNEL_MAX = 80  # of a Triton kernel: a pass over memory is one function
TREE_MAX = 8 * 2**20  # bytes that git tracks
# A module may import from its own layer and from those below it.
LAYERS = (
    {"app", "app.errors", "app.choices", "app.config", "app.collectives", "app.torch_versions"},
    {"app.kernels"},
    {"app.plan"},
    {"app.rules"},
    {"app.advice"},
    {"app.model", "app.moe", "app.optim"},  # tensors
    {  # processes
        "app.moe.dispatch",
        "app.moe.clones",
        "app.optim.grad_buckets",
        "app.optim.param_gather",
        "app.optim.distributed",
        "app.data",
        "app.hf",
    },
    {"app.engine"},
    {"app.cli"},
)


@pytest.fixture(scope="module")
def trees() -> Trees:
    """The nodes of every file of app/."""
    return {path: [*ast.walk(ast.parse(path.read_text()))] for path in SOURCES}


def layer_of(module: str) -> int:
    """Index of the longest layer entry that the module belongs to."""
    matches = [
        (len(name), level)
        for level, names in enumerate(LAYERS)
        for name in names
        if f"{module}.".startswith(f"{name}.")
    ]
    return max(matches)[1]


def test_every_public_class_has_a_name_of_its_own(trees: Trees):
    named = Counter(
        node.name
        for module, *_ in trees.values()
        for node in ast.iter_child_nodes(module)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert len(named) > 200
    assert [name for name, times in named.items() if times > 1] == []


def functions(path: Path, nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            yield f"{path.name}:{node.name}", (node.end_lineno or 0) - node.body[0].lineno + 1


def test_imports_point_down(trees: Trees):
    wrong = []
    for path, nodes in trees.items():
        here, names = module_name(path), [*imported(nodes)]
        ours = [name for name in names if name.split(".")[0] == "app"]
        wrong += [(here, name) for name in ours if layer_of(name) > layer_of(here)]
        if here.startswith("app.plan"):
            heavy = [name for name in names if name.split(".")[0] in ("torch", "numpy")]
            wrong += [(here, name) for name in heavy]
    assert wrong == []


def test_the_import_rule_can_fail():
    assert layer_of("app.moe.dispatch") > layer_of("app.moe.router") and layer_of(
        "app.engine.build"
    ) < layer_of("app.cli.options.compose")


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
    page = (ROOT / "docs/architecture.md").read_text()
    block = page.partition("## Code layout")[2].partition("```")[2].partition("```")[0]
    named = re.findall(r"^(app/(?:\w+/)*) {2,}\S", block, re.MULTILINE)
    folders = {f"{path.parent.relative_to(ROOT)}/" for path in SOURCES}
    assert sorted(named) == sorted(folders)


def test_planning_does_not_load_torch():
    code = (
        "import pkgutil, sys, app.plan\n"
        "for m in pkgutil.walk_packages(app.plan.__path__, 'app.plan.'): __import__(m.name)\n"
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
    files = {module_name(path): len(path.read_text().splitlines()) for path in SOURCES}
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
    seams = ("model", "moe", "optim", "engine/capture", "engine/pipeline")
    sources = [path for seam in seams for path in sorted((ROOT / "app" / seam).rglob("*.py"))]
    assert len(sources) > 30
    found = {str(path): list(untyped(trees[path])) for path in sources}
    assert not {path: lines for path, lines in found.items() if lines}
    example = ast.parse("def f(ctx: Any, x: Any) -> dict[str, Any]: ...")
    assert list(untyped([*ast.walk(example)])) == [1, 1]


def test_only_programs_that_launchers_start_read_the_environment():
    readers = [
        module_name(path)
        for path in SOURCES
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
