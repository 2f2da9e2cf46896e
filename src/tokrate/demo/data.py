"""Real question/answer text that every machine has: Python's own signatures and docstrings.

Files are parsed with `ast`; nothing is imported or executed.
"""

from __future__ import annotations

import ast
import random
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokrate.errors import ConfigError

MAX_SLOTS = 560
"""Longest document, in slots; answers are cut there. Chosen so that lengths vary as much as in
instruction data: in a padded batch of 16, 58 % of the slots are padding (measured)."""
MAX_PROMPT_BYTES = 256
"""Signatures longer than this (a handful) are left out, so that every answer keeps some room."""
HELD_OUT = 64
"""Documents kept for the evaluation loss."""
EOS_ID = 256
"""Token that ends an answer; tokens 0 to 255 are bytes."""
PAD_ID = 257
"""Token in slots that hold no text."""
VOCABULARY = 258
"""Number of different tokens."""

# Tests and vendored packages are not the library's documentation, and differ between installs.
_SKIPPED = frozenset(
    {"test", "tests", "idlelib", "site-packages", "dist-packages", "lib2to3", "turtledemo"}
)
_FEWEST_PAIRS = 500


@dataclass(frozen=True, slots=True)
class Pair:
    """One question and its answer."""

    module: str
    """File of the standard library, such as `json/decoder.py`."""
    signature: str
    """The function's head, such as `def JSONDecoder.decode(self, s):`."""
    docstring: str
    """What the function's author says it does."""

    @property
    def prompt(self) -> str:
        """The question as the model reads it."""
        return f"# {self.module}\n{self.signature}\n"


@dataclass(frozen=True, slots=True)
class Document:
    """One pair as tokens; a slot holds a token, and its target is the token after it."""

    tokens: tuple[int, ...]
    """Prompt, answer, end token: one more than the document has slots."""
    prompt_tokens: int
    """How many of the tokens are the prompt."""

    @property
    def slots(self) -> int:
        """Slots that the document takes in a batch (its last token is only ever a target)."""
        return len(self.tokens) - 1


def harvest_pairs(library: Path | None = None) -> list[Pair]:
    """Every documented public function of the standard library, in a fixed order.

    A docstring that occurs twice is taken once: it would leak from training to evaluation.

    Args:
        library: Folder of Python sources; default: this Python's standard library.

    Raises:
        ConfigError: The folder holds too few documented functions to train on.
    """
    root = library or Path(sysconfig.get_path("stdlib"))
    unique: dict[str, Pair] = {}
    for file in _source_files(root):
        for pair in _pairs_of(file, file.relative_to(root).as_posix()):
            unique.setdefault(pair.docstring, pair)
    if len(unique) < _FEWEST_PAIRS:
        raise ConfigError(
            f"found {len(unique)} documented functions under {root}, expected at least "
            f"{_FEWEST_PAIRS}; use a Python that ships its library as source files"
        )
    return list(unique.values())


def encode(pair: Pair) -> Document:
    """The pair as byte tokens, its answer cut to `MAX_SLOTS`."""
    prompt = pair.prompt.encode()
    # The end token has no slot of its own, so a document of MAX_SLOTS slots has one token more.
    text = (prompt + pair.docstring.encode())[:MAX_SLOTS]
    return Document(tokens=(*text, EOS_ID), prompt_tokens=len(prompt))


def load_documents(seed: int = 0) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents from this Python's library.

    Raises:
        ConfigError: This Python does not ship its library as source files.
    """
    return split_documents(harvest_pairs(), seed)


def split_documents(pairs: Sequence[Pair], seed: int = 0) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents, shuffled the same way for the same seed."""
    documents = [encode(pair) for pair in pairs]
    random.Random(seed).shuffle(documents)  # noqa: S311 - an order, no secret
    return documents[HELD_OUT:], documents[:HELD_OUT]


def _source_files(root: Path) -> list[Path]:
    files = (f for f in root.rglob("*.py") if not _SKIPPED.intersection(f.relative_to(root).parts))
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def _pairs_of(file: Path, module: str) -> Iterator[Pair]:
    try:
        with warnings.catch_warnings(action="ignore"):  # the library's own odd escapes
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # templates and deliberately broken sources
        return
    for name, function in _functions(tree.body):
        docstring = ast.get_docstring(function)
        pair = Pair(module, f"def {name}({ast.unparse(function.args)}):", docstring or "")
        if docstring and len(pair.prompt.encode()) <= MAX_PROMPT_BYTES:
            yield pair


def _functions(
    body: Sequence[ast.stmt], owner: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Public functions and methods with their dotted names, in the order of the source."""
    for node in body:
        if isinstance(node, ast.ClassDef) and _is_public(node.name):
            yield from _functions(node.body, f"{owner}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_public(node.name):
            yield f"{owner}{node.name}", node
        elif isinstance(node, ast.If | ast.Try):
            yield from _functions(node.body, owner)


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name.endswith("__")
