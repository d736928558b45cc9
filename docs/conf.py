"""Configuration of the site; `python3 tools/dev.py docs` builds it."""

import os

from ejkernel.modules import __version__

project = "ejkernel"
author = "the ejkernel authors"
project_copyright = author
release = version = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "site_links",
    "site_reference",
]
root_doc = "index"
exclude_patterns = ["examples/**/src", "**/.*"]

# a name of ejkernel that a docstring refers to has an entry; names of other libraries need none
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!ejkernel\.)\w+(\.\w+)+")]

# pages
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
myst_links_external_new_tab = False
nb_execution_mode = "cache"  # of notebooks and pages with a kernel in their header
nb_execution_raise_on_error = True
nb_execution_timeout = 120

# docstrings
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # types stand in the descriptions of parameters
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_attr_annotations = False
toc_object_entries_show_parents = "hide"

# Names of other libraries link to their sites where the builder asks for their inventories, because
# these are downloaded; every other build works without a network, and such names are plain text.
intersphinx_mapping = {}
if os.environ.get("EJKERNEL_DOCS_INVENTORIES") == "1":
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "jax": ("https://docs.jax.dev/en/latest", None),
        "flax": ("https://flax.readthedocs.io/en/latest", None),
        "equinox": ("https://docs.kidger.site/equinox", None),
    }

# look
html_theme = "furo"
html_title = "ejkernel"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"
copybutton_exclude = ".linenos, .gp, .go"
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
