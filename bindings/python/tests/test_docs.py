"""What the documentation shows runs."""

import pathlib
import re
import runpy

import pytest

DOCS = pathlib.Path(__file__).resolve().parents[3] / "docs"


@pytest.mark.parametrize("page", ["python.md", "course/2-python.md"])
def test_the_examples_run(page, tmp_path):
    text = (DOCS / page).read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S))
    assert len(blocks) > 5
    # Lines keep their numbers, so that an error names that of the page.
    lines = [""] * (text.count("\n") + 1)
    for block in blocks:
        first = text.count("\n", 0, block.start()) + 1
        for at, line in enumerate(block.group(1).splitlines()):
            lines[first + at] = line
    program = tmp_path / (pathlib.Path(page).name + ".py")
    program.write_text("\n".join(lines))
    runpy.run_path(str(program))
