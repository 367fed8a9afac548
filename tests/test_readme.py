"""The Python of README and of pages for users runs as it stands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/loops.md", "docs/memory.md", "docs/optimizers.md", "docs/python.md")
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


def test_the_first_page_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 200


@pytest.mark.parametrize(
    "page", ["README.md", *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))]
)
def test_links_lead_somewhere(page: str):
    text = (ROOT / page).read_text()
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    own = [link for link in links if not link.startswith(("http:", "https:"))]
    missing = [link for link in own if not ((ROOT / page).parent / link).exists()]
    assert not missing
