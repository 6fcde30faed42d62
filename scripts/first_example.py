"""Run the first Python block of README.md with the installed package, and time it.

    python scripts/first_example.py [--kernel native|torch]

The installed wheel is tried, not this checkout. With ``--kernel`` it also has to use
the compiled kernel, or torch alone.
"""

import argparse
import re
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def first_block(page: str) -> str:
    """Return the first Python block of a Markdown page."""
    block = re.search(r"^```python\n(.*?)^```$", page, re.M | re.S)
    assert block, "README.md has no Python block"
    return block[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernel", choices=("native", "torch"))
    expected = parser.parse_args().kernel
    start = time.perf_counter()
    names: dict[str, Any] = {}
    exec(first_block((ROOT / "README.md").read_text(encoding="utf-8")), names)
    seconds = time.perf_counter() - start
    import marl_pool
    from marl_pool.compiled.choice import describe_kernels

    folder = Path(marl_pool.__file__).parent
    assert not folder.is_relative_to(ROOT / "marl_pool"), f"the checkout: {folder}"
    kernel = describe_kernels()
    print(f"a vector of {tuple(names['vector'].shape)} after {seconds:.1f} s; {kernel}")
    if expected and not kernel.startswith(expected):
        raise SystemExit(f"expected {expected} kernels, got {kernel}")


if __name__ == "__main__":
    main()
