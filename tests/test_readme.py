"""The Python of README and of pages for users runs as it stands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/loops.md", "docs/optimizers.md")
BLOCKS = {
    page: re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    for page in PAGES
}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_code(page: str):
    assert BLOCKS[page]


@pytest.mark.parametrize("block", [block for blocks in BLOCKS.values() for block in blocks])
def test_a_block_runs(
    block: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(block, "a page", "exec"), names)
    assert capsys.readouterr().out
