"""The pages of the site that are not in docs/, links between all pages, and mathematics without scripts."""

from __future__ import annotations

import html
import os
import re
import textwrap
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

import evorl
from evorl.commands.command import COMMANDS, parser_of
from evorl.config import model_of
from evorl.config.algorithms import SETTINGS
from evorl.config.docs import Setting, settings_of
from evorl.config.fields import AlgorithmSettings

ROOT = Path(__file__).parents[2]
MOVED = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
CSS = """
.md-typeset td code { white-space: nowrap; word-break: normal }
div.arithmatex { margin: 1em 0; overflow-x: auto }
"""
HEAD = """# Configuration

Every key of a configuration: what it takes, its default, and what it is for. `evorl config
ALGORITHM` prints a whole configuration with the same sentences, `evorl config --explain KEY` one
key. A file holds only what differs from the defaults; on the command line a key is given as
`training.max_steps=200000`, in Python as `evorl.train(training={"max_steps": 200_000})`. The
shipped files in `configs/training` replace some of the defaults.
"""
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")
MATHS = re.compile(r'(?<=class="arithmatex">)\\([(\[])(.*?)\\[)\]](?=</)', re.DOTALL)
SHIM = '<script src="https://unpkg.com/iframe-worker/shim"></script>'


def on_files(files: Files, config: Any) -> None:
    """Add pages of the root, generated references, and each file that a page links to."""
    texts = {name: (ROOT / name).read_text() for name in MOVED}
    pages = {MOVED[name]: text for name, text in texts.items()}
    pages |= {"settings.md": _settings(), "commands.md": _commands(), "reference.md": _reference()}
    texts |= {f"docs/{file.src_uri}": file.content_string for file in files if file.src_uri.endswith(".md")}
    for name in sorted({_target(name, link) for name, text in texts.items() for link in LINK.findall(text)}):
        if not (path := ROOT / name).is_file() or name in texts or name.startswith("docs/"):
            continue  # The site has it, or nothing, which is then a broken link.
        if path.suffix in (".py", ".yaml"):
            pages[_on_site(name)] = f"# {name}\n\n``````{path.suffix[1:]}\n{path.read_text()}``````\n"
        else:
            files.append(File.generated(config, _on_site(name), abs_src_path=str(path)))
    for name, text in (pages | {"extra.css": CSS}).items():
        files.append(File.generated(config, name, content=text))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point relative links of the repository at the pages of the site, and indent nested lists by four."""
    here = page.file.src_uri
    source = next((name for name, site in MOVED.items() if site == here), f"docs/{here}")
    markdown = re.sub(r"^   (?=- )", "    ", markdown, flags=re.MULTILINE)
    return LINK.sub(lambda link: os.path.relpath(_on_site(_target(source, link[1])), Path(here).parent), markdown)


def on_page_content(html_text: str, **_: Any) -> str:
    """Write formulas as MathML, which browsers render themselves."""
    display = {"(": "inline", "[": "block"}
    return MATHS.sub(lambda maths: convert(html.unescape(maths[2]), display[maths[1]]), html_text)


def on_post_page(output: str, **_: Any) -> str:
    """Search without the theme's script from a CDN, and refuse any other."""
    output = output.replace(SHIM, f"<script>{Path(__file__).with_name('search.js').read_text()}</script>")
    if loaded := re.search(r"<(?:script|img|iframe)[^>]* src=.?(?:https?:)?//[^ >]*", output):
        raise PluginError(f"a page would load from the network: {loaded[0]}")
    return output


def _target(source: str, link: str) -> str:
    """The file of the repository that a link in another one leads to."""
    return os.path.relpath((ROOT / source).parent / link, ROOT)


def _on_site(name: str) -> str:
    """The file of the site that shows a file of the repository."""
    if name in MOVED or name.startswith("docs/"):
        return MOVED.get(name, name.removeprefix("docs/"))
    return f"source/{name}.md" if name.endswith((".py", ".yaml")) else f"source/{name}"


def _commands() -> str:
    os.environ["COLUMNS"] = "100"
    return "# Commands\n\n" + "\n".join(
        f"## evorl {name}\n\n```text\n{parser_of(name).format_help()}```\n" for name in COMMANDS
    )


def _reference() -> str:
    """The public names of evorl; those of sections of a configuration only as a list."""
    names = {name: f"{module}.{name}" for name, module in reversed(evorl._MODULES.items())}
    sections = [name for name, path in names.items() if path.startswith(("evorl.config", "evorl.algorithms"))]
    names |= {name: f"evorl.types.outcomes.{name}" for name in ("UserError", "RunFailed")}
    texts = ["# Python reference", *(f"::: {path}" for name, path in names.items() if name not in sections)]
    texts.append("## Sections of a configuration\n\nTheir fields are [settings](settings.md).")
    return "\n\n".join([*texts, ", ".join(f"`evorl.{name}`" for name in sorted(sections)) + "."])


def _settings() -> str:
    """The page of all keys of a configuration, as tables."""
    parts = [HEAD]
    everything = settings_of(model_of(AlgorithmSettings))
    others = [setting for setting in everything if not setting.path.startswith("algorithm.")]
    for section, group in groupby(others, key=lambda setting: setting.path.split(".")[0]):
        first, *rest = group
        parts.append(f"## {section}\n\n{_cell(first.sentence)}\n")
        if section == "algorithm":
            parts += [_algorithm(name, model) for name, model in SETTINGS.items()]
        else:
            parts.append(_table(rest or [first]))
    return "\n".join(parts)


def _algorithm(name: str, model: type[AlgorithmSettings]) -> str:
    changeable = ", ".join(f"`{name}`" for name in model.hyperparameters)
    rows = [setting for setting in settings_of(model, "algorithm.") if setting.path != "algorithm.name"]
    sentence = textwrap.fill(f"Evolution may perturb {changeable}.", 100, break_on_hyphens=False)
    return f"### {name}\n\n{sentence}\n\n{_table(rows)}"


def _table(settings: Sequence[Setting]) -> str:
    lines = ["| key | takes | default | |", "|---|---|---|---|"]
    for setting in settings:
        default = f"`{_cell(setting.default)}`" if setting.default else ""
        lines.append(f"| `{setting.path}` | {_cell(setting.kind)} | {default} | {_cell(setting.sentence)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
