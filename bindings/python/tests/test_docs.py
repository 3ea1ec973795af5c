"""What the documentation shows runs."""

import pathlib
import re
import runpy

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs" / "python.md"


def test_the_examples_run(tmp_path):
    text = PAGE.read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S))
    assert len(blocks) > 5
    # Lines keep their numbers, so that an error names that of the page.
    lines = [""] * (text.count("\n") + 1)
    for block in blocks:
        first = text.count("\n", 0, block.start()) + 1
        for at, line in enumerate(block.group(1).splitlines()):
            lines[first + at] = line
    program = tmp_path / "python.md.py"
    program.write_text("\n".join(lines))
    runpy.run_path(str(program))
