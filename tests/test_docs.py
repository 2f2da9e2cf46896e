"""The documentation is true: its code runs, its output is what comes out, its tables are complete.

What can stand directly before a block, as an HTML comment that readers do not see:

    <!-- output -->                  ```text block: what the Python block before it prints
    <!-- output: numbers vary -->    the same, each number standing for any number
    <!-- help: demo -->              ```text block: what `tokrate demo --help` prints
    <!-- file: NAME -->              block of any kind: is written to a file of that name first
    <!-- not run: REASON -->         ```python block that cannot run here

What a page takes as given (a model, its data) is in `tests/stages/<page>.py` and runs before it.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from omegaconf import OmegaConf

import tokrate
from tokrate import errors, names, record
from tokrate.backends.registry import BUILT_INS, check_options, find_backend
from tokrate.cli import cli
from tokrate.config import parse_logger
from tokrate.steady import STEADY

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
STAGES = Path(__file__).parent / "stages"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("benchmarks/*.md")])

FENCE = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*?) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S
)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^#+ (?P<title>.+)$", re.M)
NUMBER = re.compile(r"\d[\d,.]*(e[-+]?\d+)?")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str
    mark: str
    """The comment directly before it, without its brackets."""
    line: int
    """Line of the page on which its text begins."""


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            language=found["language"],
            text=found["text"],
            mark=found["mark"] or "",
            line=text.count("\n", 0, found.start("text")) + 1,
        )
        for found in FENCE.finditer(text)
    ]


def blocks_of(*languages: str) -> list[Any]:
    """A test parameter for each block in one of the languages, named by page and line."""
    return [
        pytest.param(block, id=f"{page.relative_to(ROOT)}:{block.line}")
        for page in PAGES
        for block in blocks(page)
        if block.language in languages
    ]


def page_id(page: Path) -> str:
    """The page's path in the repository, as tests are called by it."""
    return str(page.relative_to(ROOT))


def table(page: Path, heading: str) -> list[list[str]]:
    """The rows of the first table under a heading, cells without backticks."""
    text = page.read_text(encoding="utf-8")
    below = text.split(f"\n{heading}\n", 1)[1]
    rows = re.search(r"(^\|.*\|\n)+", below, re.M)
    assert rows, f"no table under {heading!r}"
    cells = [
        [cell.strip().replace("`", "").replace(r"\|", "|") for cell in CELL.split(line)[1:-1]]
        for line in rows[0].splitlines()
    ]
    return cells[2:]


CELL = re.compile(r"(?<!\\)\|")


# --- code ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_python_blocks_run_and_print_what_the_page_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every Python block of a page runs, in one namespace and an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    stage = STAGES / f"{page.stem.lower().replace('-', '_')}.py"
    if stage.exists():
        exec(compile(stage.read_text(encoding="utf-8"), str(stage), "exec"), namespace)
    printed = ""
    for block in blocks(page):
        if block.mark.startswith("file: "):
            (tmp_path / block.mark.removeprefix("file: ")).write_text(block.text)
        elif block.mark.startswith("output"):
            assert as_shown(printed, block) == as_shown(block.text, block), (
                f"{page_id(page)}:{block.line}: this was printed:\n{printed}"
            )
        elif block.language == "python" and not not_run(block):
            printed = run(block, page, namespace)


def run(block: Block, page: Path, namespace: dict[str, Any]) -> str:
    """Run a block; what it printed, its standard error included."""
    source = "\n" * (block.line - 1) + block.text  # so that a traceback shows the page's line
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        exec(compile(source, str(page), "exec"), namespace)
    return out.getvalue()


def not_run(block: Block) -> bool:
    """Whether the block says that it cannot run, and why."""
    if not block.mark.startswith("not run"):
        return False
    assert len(block.mark.removeprefix("not run:").strip()) > 5, "say why the block is not run"
    return True


def as_shown(text: str, block: Block) -> str:
    """The text as it is compared: to the letter, or with each number replaced."""
    lines = [line.rstrip() for line in text.strip().splitlines()]
    if block.mark == "output":
        return "\n".join(lines)
    return "\n".join(" ".join(NUMBER.sub("N", line).split()) for line in lines)


def test_a_false_output_is_found() -> None:
    """The comparison can fail: another word, another line, or another number where it counts."""
    exact, varies = (Block("text", "", mark, 1) for mark in ("output", "output: numbers vary"))
    assert as_shown("a 1.5", varies) == as_shown("a  2,000", varies)
    assert as_shown("a 1.5", varies) != as_shown("b 1.5", varies)
    assert as_shown("a 1.5", exact) != as_shown("a 1.6", exact)


@pytest.mark.parametrize("block", blocks_of("yaml"))
def test_logger_keys_are_understood(block: Block) -> None:
    """Every `logger` key in the documentation is taken as OmegaConf and as plain YAML load it."""
    spec = OmegaConf.create(block.text).get("logger", "none")
    choice = parse_logger(spec)
    assert choice == parse_logger(OmegaConf.to_container(OmegaConf.create({"key": spec}))["key"])
    for backend in choice.backends:
        if backend.name in BUILT_INS:
            check_options(backend.name, find_backend(backend.name), backend.options)


@pytest.mark.parametrize("block", blocks_of("toml", "json", "jsonl"))
def test_data_blocks_are_well_formed(block: Block) -> None:
    """TOML and JSON blocks can be parsed."""
    if block.language == "toml":
        assert tomllib.loads(block.text)
    else:
        lines = [block.text] if block.language == "json" else block.text.splitlines()
        assert [json.loads(line) for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_help_is_quoted_as_it_is(page: Path) -> None:
    """What the pages show of `--help` is what the command prints."""
    for block in blocks(page):
        if block.mark.startswith("help"):
            command = block.mark.removeprefix("help").strip(": ").split()
            shown = CliRunner().invoke(cli, [*command, "--help"], prog_name="tokrate").output
            assert block.text.strip() == shown.strip(), f"{page_id(page)}:{block.line}"


def test_the_backend_of_the_how_to_passes_the_suite(tmp_path: Path) -> None:
    """A reader who copies the files of `add-a-backend.md` gets a backend that passes."""
    for block in blocks(DOCS / "how-to" / "add-a-backend.md"):
        if block.mark.startswith("file: "):
            (tmp_path / block.mark.removeprefix("file: ")).write_text(block.text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


# --- links ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links name a file that is there, and anchors a heading in it."""
    for target in prose_links(page):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page_id(page)} links to {target}, which is not there"
        assert not anchor or anchor in anchors(file), f"{page_id(page)}: no heading for {target}"


def prose_links(page: Path) -> Iterator[str]:
    """Targets of the links outside of code."""
    text = re.sub(
        r"^```.*?^```$|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.M | re.S
    )
    return (found["target"] for found in LINK.finditer(text))


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in a link."""
    titles = (found["title"] for found in HEADING.finditer(page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_every_page_is_in_the_index() -> None:
    """The index names every page of `docs/`."""
    linked = {
        (DOCS / target.partition("#")[0]).resolve() for target in prose_links(DOCS / "index.md")
    }
    assert not {page.resolve() for page in DOCS.rglob("*.md")} - linked - {DOCS / "index.md"}


# --- reference -----------------------------------------------------------------------------------


def field_sentences(owner: type) -> dict[str, str]:
    """Name of each field, or property, to the string under it."""
    tree = ast.parse(inspect.getsource(sys.modules[owner.__module__]))
    body = next(
        n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == owner.__name__
    )
    found: dict[str, str] = {}
    for node, behind in pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(behind, ast.Expr):
            assert isinstance(behind.value, ast.Constant)
            found[ast.unparse(node.target)] = inspect.cleandoc(str(behind.value.value))
    return {name: " ".join(sentence.split()) for name, sentence in found.items()}


UNITS: Mapping[str, str] = {
    "_tps": "tokens/s",
    "_tps_per_device": "tokens/s/device",
    "_frac": "0–1",
    "_tokens": "tokens",
    "_s": "s",
    "_unix_ms": "ms",
}
"""The unit is the suffix of the name."""


def test_record_page_has_every_field() -> None:
    """`record.md` lists the fields in order, with the unit of the name and the code's sentence."""
    rows = table(DOCS / "reference" / "record.md", "## Fields")
    sentences = field_sentences(record.ThroughputRecord)
    assert [name for name, *_ in rows] == list(record.FIELD_NAMES)
    for name, unit, sentence in rows:
        assert sentence == sentences[name].replace("`", ""), name
        suffix = max((s for s in UNITS if name.endswith(s)), key=len, default=None)
        assert unit == UNITS[suffix] if suffix else unit, f"{name} is shown in {unit}"


def test_record_page_shows_the_golden_record() -> None:
    """The example of `record.md` has the fields of a record, and satisfies its identity."""
    page = DOCS / "reference" / "record.md"
    shown = next(json.loads(block.text) for block in blocks(page) if block.language == "json")
    assert list(shown) == list(record.FIELD_NAMES)
    found = record.ThroughputRecord.from_dict(shown)
    assert found.active_tps == pytest.approx(
        found.raw_tps * (1 - found.padded_frac - found.masked_frac)
    )


def test_names_page_has_every_key() -> None:
    """`names.md` lists every key that is sent, and which of them by default."""
    rows = dict(table(DOCS / "reference" / "names.md", "## Keys"))
    rest = [name for name in names.ALL if name not in names.STANDARD]
    assert list(rows) == [f"throughput/{name}" for name in (*names.STANDARD, *rest)]
    for key, sent in rows.items():
        standard = key.removeprefix("throughput/") in names.STANDARD
        assert sent == ("standard" if standard else "all"), key


def test_names_page_has_every_steady_value() -> None:
    """`names.md` lists what a run has as a whole."""
    rows = dict(table(DOCS / "reference" / "names.md", "## Steady values"))
    assert list(rows) == [f"throughput/{name}" for name in STEADY]


def test_names_page_has_every_alias() -> None:
    """`names.md` lists the alias tables as the code has them."""
    rows = table(DOCS / "reference" / "names.md", "## Aliases")
    assert [tuple(row[:3]) for row in rows] == [
        (framework, alias, attribute)
        for framework, aliases in names.ALIASES.items()
        for alias, attribute in aliases.items()
    ]


def test_names_page_shows_the_gate_at_work() -> None:
    """The renamings that `names.md` shows are those that happen."""
    for outside, written, *_ in table(DOCS / "reference" / "names.md", "## Names from outside"):
        assert names.NameGate().admit(outside) == written


def test_errors_page_has_the_tree() -> None:
    """`errors.md` shows the tree of the module, and explains each error."""
    page = DOCS / "reference" / "errors.md"
    tree = inspect.cleandoc(errors.__doc__ or "").split("\n\n")[1]
    drawn = next(block.text for block in blocks(page) if block.language == "text")
    assert drawn.strip() == inspect.cleandoc(tree).strip()
    listed = {name for name, *_ in table(page, "## What to do")}
    public = {n for n, value in vars(errors).items() if inspect.isclass(value)}
    assert listed == public - {"annotations"}


def test_logger_key_page_has_every_option() -> None:
    """`logger-key.md` lists the options of every backend with their defaults."""
    page = DOCS / "reference" / "logger-key.md"
    for name in BUILT_INS:
        signature = inspect.signature(find_backend(name))
        expected = {p.name: p.default for p in list(signature.parameters.values())[1:]}
        rows = {option: default for option, default, *_ in table(page, f"### {name}")}
        assert rows == {option: as_yaml(default) for option, default in expected.items()}, name


def test_logger_key_page_has_every_argument() -> None:
    """`logger-key.md` lists the arguments of `open_logger` with their defaults."""
    rows = table(DOCS / "reference" / "logger-key.md", "## open_logger")
    parameters = inspect.signature(tokrate.open_logger).parameters.values()
    assert [row[0] for row in rows] == [parameter.name for parameter in parameters]


def as_yaml(value: Any) -> str:
    """A default as a YAML file writes it; "–" for an option that has none."""
    return "–" if value is inspect.Parameter.empty else json.dumps(value).strip('"')


def test_modules_are_all_in_the_picture() -> None:
    """`architecture.md` has a row for every module of the package."""
    package = Path(tokrate.__file__).parent
    there = {path.stem for path in package.glob("*.py")} - {"__init__"}
    there |= {path.parent.name for path in package.glob("*/__init__.py")}
    rows = table(DOCS / "explanation" / "architecture.md", "## Modules")
    assert {name for name, _ in rows} == there


def test_dependencies_page_has_every_package() -> None:
    """`dependencies.md` gives a reason for each package that `pyproject.toml` names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *(package for name, packages in extras.items() if name != "all" for package in packages),
        *project["dependency-groups"]["dev"],
    ]
    named = {re.split(r"[<>=~!\[ ]", package, maxsplit=1)[0] for package in wanted}
    text = (DOCS / "explanation" / "dependencies.md").read_text()
    listed = set(re.findall(r"^\| `([\w-]+)` \|", text, re.M))
    assert listed == named
