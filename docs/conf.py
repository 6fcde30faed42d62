"""Settings of the site: ``make docs`` builds it into ``docs/_build``."""

import sys
from pathlib import Path

from marl_pool.version import __version__

sys.path.insert(0, str(Path(__file__).parent))  # of the extension `reference`

project = "marl_pool"
author = "The marl_pool authors"
version = release = __version__
copyright = author

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",  # a copy of MathJax: readers need no network
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "reference",
]
exclude_patterns = ["_build"]
# Pages that link to a file of the checkout offer it as a download.
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 4

# Docstrings write names between single backticks; not all of them are public.
default_role = "py:obj"
autodoc_typehints = "signature"
autodoc_inherit_docstrings = False
python_maximum_signature_line_length = 88
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
napoleon_use_ivar = True

html_theme = "furo"
html_title = "marl_pool"
html_show_copyright = False
pygments_style = "friendly"
