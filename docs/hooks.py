"""What mkdocs has made for it: the page of all commands, out of the commands themselves, the pages of the
files in the root, and the entries of the page of the API.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import click
from mkdocs.structure.files import File

from fleetrun.envs.settings.options import ACTIONS, OPTIONS, SHORTHANDS, Group
from fleetrun.verbs import VERBS

ROOT = Path(__file__).resolve().parents[1]


def on_files(files: Any, config: Any) -> Any:
    files.append(File.generated(config, "reference/commands.md", content=commands_page()))
    for name, page in ROOT_FILES.items():
        text = (ROOT / name).read_text().replace("](docs/", "](")
        for other, its_page in ROOT_FILES.items():
            text = text.replace(f"]({other})", f"]({its_page})")
        files.append(File.generated(config, page, content=text))
    return files


ROOT_FILES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security-policy.md",  # security.md is the guide
}


ENTRY = re.compile(r"^::: (\S+) = (\S+)(?: \(([\w, ]*)\))?$", re.MULTILINE)
"""Of the page of the API: the name that is written in scripts, where it is defined, and which members are for
users, if not all that are public.
"""


GIVEN = {
    *("fleet.metrics", "fleet.util", "trainers.inference.InferenceModel"),
    *(f"fleetrun.{name}" for name in ("Job", "JobError", "LaunchError", "Result", "UsageError")),
}
"""Objects that a script gets, and does not make."""


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    if page.file.src_uri != "reference/api.md":
        return markdown
    return ENTRY.sub(_entry, markdown)


def _entry(found: re.Match[str]) -> str:
    name, home, members = found.groups()
    options = [f"heading: {name}", f"toc_label: {name}"]
    if name in GIVEN:
        options.append("merge_init_into_class: false")
    if members is not None:
        options.append(f"members: [{members}]" if members else "members: false")
    return "\n      ".join([f"::: {home}\n    options:", *options]) + "\n"


def commands_page() -> str:
    """Every option of a launch as a table, every other command as its `--help`."""
    parts = ["# Commands and options\n", "## fleetrun [OPTIONS] SCRIPT [ARGUMENTS]\n"]
    parts.append("Every option can be written with `_` or `-`, and its value after a space or `=`.\n")
    for group in Group:
        options = [
            each
            for each in (*OPTIONS.values(), *SHORTHANDS.values(), *ACTIONS.values())
            if each.group is group
        ]
        parts.append(f"### {group}\n\n| option | |\n|---|---|")
        parts += [_row(option) for option in options]
        parts.append("")
    for verb, summary in VERBS.items():
        if verb == "run":
            continue
        parts.append(f"## fleetrun {verb}\n\n{summary}\n\n```text\n{_help(verb)}\n```\n")
    return "\n".join(parts)


def _row(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in filter(None, [option.short, option.flag]))
    also = ", ".join(f"`--{alias}`{{ .name }}" for alias in option.spellings[1:])
    choices = f" One of {', '.join(f'`{each}`' for each in option.choices)}." if option.choices else ""
    metavar = option.metavar.replace("|", "\\|")
    notes = [
        f"Default: {option.default_text}." if option.metavar else "",
        f"Also {also}." if also else "",
        f"Variable: {', '.join(f'`{name}`{{ .name }}' for name in option.env)}." if option.env else "",
    ]
    told = [option.help.replace("|", "\\|") + choices, " ".join(filter(None, notes))]
    return f"| {names} {metavar} | {'<br>'.join(filter(None, told))} |"


def _help(verb: str) -> str:
    command: click.Command = importlib.import_module(f"fleetrun.commands.{verb}").command
    settings = {**command.context_settings, "max_content_width": 80}
    return command.get_help(click.Context(command, info_name=f"fleetrun {verb}", **settings)).strip()
