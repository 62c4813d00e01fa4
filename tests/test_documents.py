"""What the documents show must run."""

import os
from pathlib import Path

import pytest
from sybil import Document
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_python_block_runs(path, tmp_path, monkeypatch):
    """The Python blocks of a document run in order, as one program, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    document = Document.parse(os.fspath(path), PythonCodeBlockParser(), SkipParser())
    examples = list(document.examples())
    assert examples or "```python" not in path.read_text()
    for example in examples:
        example.evaluate()
