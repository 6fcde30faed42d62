"""Code and commands in the pages of the documentation."""

import re
import shlex


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks in that language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def commands(text: str, program: str) -> list[list[str]]:
    """The distinct commands of a program, in code blocks and between backticks."""
    lines = [
        line
        for block in blocks(text, "bash")
        for line in block.replace("\\\n", " ").splitlines()
    ]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    # A line of prose may break within backticks, one of a table does not.
    quoted = re.findall(r"`([^`]+)`", prose)
    lines += [line for line in quoted if line.startswith(f"{program} ")]
    split = dict.fromkeys(tuple(shlex.split(line, comments=True)) for line in lines)
    return [[*words[1:]] for words in split if words[:1] == (program,)]
