"""Install a wheel beside torch alone, and run README's first example in it.

    python scripts/try_wheel.py dist/marl_pool-0.1.0-py3-none-any.whl

The new environment has torch and its requirements, linked from the one that runs this
script because they are large; everything else comes from pip's index. No program is on
the path, so that nothing can be compiled.
"""

import argparse
import os
import re
import subprocess
import sysconfig
import tempfile
import time
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

EXAMPLE = Path(__file__).with_name("first_example.py")


def required_by(name: str, visited: set[str]) -> Iterator[Distribution]:
    """Yield the installed distribution of a name, and all that it requires."""
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key in visited:
        return
    visited.add(key)
    try:
        package = distribution(name)
    except PackageNotFoundError:  # for another platform, or of an extra
        return
    yield package
    for requirement in package.requires or ():
        if "extra ==" not in requirement:
            yield from required_by(re.split(r"[^\w.-]", requirement)[0], visited)


def link(package: Distribution, site: Path) -> None:
    """Link the top folders and files of a distribution into another environment."""
    for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
        if not (site / top).exists():
            (site / top).symlink_to(Path(str(package.locate_file(top))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel
    kernel = "torch" if wheel.name.endswith("-any.whl") else "native"
    with tempfile.TemporaryDirectory() as scratch:
        venv.create(scratch, with_pip=True)
        site = Path(
            sysconfig.get_path("purelib", vars={"base": scratch, "platbase": scratch})
        )
        for package in required_by("torch", set()):
            link(package, site)
        python, start = Path(scratch, "bin", "python"), time.perf_counter()
        clean = {key: os.environ[key] for key in os.environ if key != "PYTHONPATH"}
        pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([python, *pip, wheel], check=True, env=clean)
        installed = time.perf_counter() - start
        alone = {**clean, "PATH": str(Path(scratch, "empty"))}
        command: list[str | Path] = [python, EXAMPLE, "--kernel", kernel]
        subprocess.run(command, check=True, env=alone, cwd=scratch)
        total = time.perf_counter() - start
    print(f"{wheel.name}: installed in {installed:.1f} s, a vector after {total:.1f} s")


if __name__ == "__main__":
    main()
