"""The README's code runs, and prints what the README shows.

Python blocks run in order, in one namespace; a text block right after one is what it prints. After a
wanted change, run with UPDATE_GOLDEN=1 and read the difference.
"""

import os
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from pdp_fx.cli import main

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, where its text lies in the README."""

    language: str
    text: str
    start: int
    end: int


def blocks() -> list[Block]:
    found = BLOCK.finditer(README.read_text())
    return [Block(match[1], match[2], match.start(2), match.end(2)) for match in found]


def runs() -> Iterator[tuple[Block, str]]:
    """Every Python block with what it prints."""
    namespace: dict[str, Any] = {"__name__": "example"}
    for block in blocks():
        if block.language == "python":
            printed = StringIO()
            with redirect_stdout(printed):
                exec(compile(block.text, "example.py", "exec"), namespace)
            yield block, printed.getvalue()


def test_the_examples_run_and_print_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown, text = blocks(), README.read_text()
    for block, printed in reversed(list(runs())):
        place = shown.index(block) + 1
        after = shown[place] if place < len(shown) and shown[place].language == "text" else None
        if after is not None:
            text = text[: after.start] + printed + text[after.end :]
        else:
            assert printed == ""
    if os.environ.get("UPDATE_GOLDEN"):
        README.write_text(text)
    assert text == README.read_text()


def test_every_text_block_follows_the_code_that_prints_it() -> None:
    languages = [block.language for block in blocks()]
    assert all(languages[place - 1] == "python" for place, name in enumerate(languages) if name == "text")


def test_the_first_example_is_short() -> None:
    code = next(block.text for block in blocks() if block.language == "python")
    loop = code[code.index("train = ") :]
    assert len(loop.splitlines()) <= 20


def test_the_commands_that_are_shown_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for block in blocks() if block.language == "sh" for line in block.text.splitlines()]
    shown = [line.split()[3:] for line in lines if line.startswith("python -m pdp_fx ")]
    targets = [line.split()[1] for line in lines if line.startswith("make ")]
    assert targets == ["demo", "test"]
    assert all(f"\n{target}:" in (ROOT / "Makefile").read_text() for target in targets)
    for arguments in shown:
        small = ["1x3x32x32" if word == "1x3x224x224" else word for word in arguments]
        written = [str(tmp_path / word) if word.startswith("channels.") else word for word in small]
        assert main(written) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["channels.png", "channels.svg"]


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "benchmarks/README.md", "docs/limits.md"])
def test_links_to_files_lead_somewhere(page: str) -> None:
    text = BLOCK.sub("", (ROOT / page).read_text())
    assert [name for name in LINK.findall(text) if not (ROOT / page).parent.joinpath(name).exists()] == []


def test_every_benchmark_is_in_the_index() -> None:
    index = (ROOT / "benchmarks" / "README.md").read_text()
    scripts = [path.name for path in (ROOT / "benchmarks").glob("*.py")]
    assert [name for name in scripts if name not in index and not name.startswith("zoo_")] == []
