"""Sphinx: python -m sphinx -b html docs outputs/docs"""

import re

project = "mindspeed_rl"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "index"
exclude_patterns = ["_build"]
html_theme = "alabaster"
html_theme_options = {"page_width": "1180px", "sidebar_width": "240px"}
html_title = "mindspeed_rl"
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
smartquotes = False  # flags in tables are copied: two dashes stay two dashes
suppress_warnings = ["misc.highlighting_failure"]

# Pages point at files of the repository, which are no pages: they are shown as paths.
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)]+)\)")


def name_files(app, page, source):
    """[text](../mindspeed_rl/x) -> text (`mindspeed_rl/x`)"""
    source[0] = OUTSIDE.sub(r"\1 (`\2`)", source[0])


def setup(app):
    """Called by Sphinx."""
    app.connect("source-read", name_files)
