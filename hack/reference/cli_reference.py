"""The page about the command line: every command of `rtj` with its arguments, from the parser that runs them."""

import argparse

from trainer_sidecar.cli import build_parser


def page() -> str:
    """One section for each command, with a table of its arguments."""
    parser = build_parser()
    parts = [
        "# Commands",
        "",
        "Generated from the parser by `make generate`. `kubectl rtj` is the same command as `rtj`.",
        "",
    ]
    for words, command, text in _commands(parser, "rtj", ""):
        parts += _section(words, command, text)
    return "\n".join(parts)


def _commands(
    parser: argparse.ArgumentParser, words: str, text: str
) -> list[tuple[str, argparse.ArgumentParser, str]]:
    """(words, parser, help) of every command that does something, in the order in which they are declared."""
    groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not groups:
        return [(words, parser, text)]
    helps = {action.dest: action.help or "" for action in groups[0]._choices_actions}
    return [
        found
        for name, below in groups[0].choices.items()
        for found in _commands(below, f"{words} {name}", helps.get(name, ""))
    ]


def _section(words: str, command: argparse.ArgumentParser, text: str) -> list[str]:
    told = (command.description or text).strip()
    told = told[:1].upper() + told[1:] + ("" if told.endswith((".", "]")) else ".")
    rows = [
        f"| {_name(action)} | {_cell(action.help or _default(action))} |"
        for action in command._actions
        if not isinstance(action, argparse._HelpAction)
    ]
    table = ["| argument | what it is |", "| --- | --- |", *rows, ""] if rows else []
    return [f"## `{words}`", "", told, "", *table]


def _name(action: argparse.Action) -> str:
    choices = "\\|".join(map(str, action.choices)) if action.choices is not None else ""
    value = choices or str(action.metavar or action.dest.upper())
    if not action.option_strings:
        return f"`{value}`" if action.nargs not in ("?", "*") else f"`[{value}]`"
    value = f" {value}" if action.nargs != 0 else ""
    return (
        ", ".join(f"`{option}`" for option in action.option_strings[:-1])
        + (", " if len(action.option_strings) > 1 else "")
        + f"`{action.option_strings[-1]}{value}`"
    )


def _default(action: argparse.Action) -> str:
    return f"default: {action.default}" if action.choices is not None and action.default else ""


def _cell(text: str) -> str:
    return " ".join(text.replace("%%", "%").replace("|", "\\|").split())
