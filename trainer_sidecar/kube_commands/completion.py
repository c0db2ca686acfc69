"""Shell completion: `rtj completion SHELL` prints a script that asks `rtj __complete` what may come next.

The answers come from the parser itself, so a new option is completed as soon as it exists; names of jobs come from the
cluster. kubectl asks `kubectl_complete-rtj` on the PATH in the same way.
"""

import argparse
import sys
from collections.abc import Sequence

from trainer_sidecar.kube_commands.cluster import ClusterError, connect

ASK = "__complete"
_NO_FILES = ":4"
"""ShellCompDirectiveNoFileComp of kubectl's protocol."""
_SCRIPTS = {
    "bash": """# rtj completion bash > /etc/bash_completion.d/rtj, or: source <(rtj completion bash)
_rtj() {
    local IFS=$'\\n'
    COMPREPLY=($(rtj __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _rtj rtj
""",
    "zsh": """#compdef rtj
# rtj completion zsh > "${fpath[1]}/_rtj", or: source <(rtj completion zsh)
_rtj() {
    local -a found
    found=("${(@f)$(rtj __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if (( ${#found[1]} )); then compadd -- "${found[@]}"; else _files; fi
}
compdef _rtj rtj
""",
    "fish": """# rtj completion fish > ~/.config/fish/completions/rtj.fish
function __rtj_complete
    set -l words (commandline -opc) (commandline -ct)
    rtj __complete $words[2..-1] 2>/dev/null
end
complete -c rtj -a '(__rtj_complete)'
""",
}


def add(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand."""
    parser = subcommands.add_parser(
        "completion",
        help="print a script for the shell that completes rtj's commands, options and job names",
        description="Print a completion script: source <(rtj completion bash). For `kubectl rtj`, kubectl finds "
        "kubectl_complete-rtj on the PATH, which is installed beside kubectl-rtj.",
    )
    parser.add_argument("shell", choices=sorted(_SCRIPTS))
    parser.set_defaults(handler=_completion)


def _completion(args: argparse.Namespace) -> int:
    sys.stdout.write(_SCRIPTS[args.shell])
    return 0


def answer(parser: argparse.ArgumentParser, words: Sequence[str], *, for_kubectl: bool = False) -> int:
    """Print what may stand in place of the last of `words`, a line each."""
    found = candidates(parser, list(words) or [""])
    print("\n".join([*found, *([_NO_FILES] if for_kubectl else [])]))
    return 0


def candidates(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """What may stand in place of the last word; empty where only the user, or the file system, knows."""
    *before, last = words
    pending: argparse.Action | None = None
    positionals: list[argparse.Action] = _positionals(parser)
    for word in before:
        if pending is not None:
            pending = None
        elif word == "--":
            return []
        elif word.startswith("-"):
            pending = _takes_value(parser, word)
        elif positionals:
            action = positionals.pop(0)
            if isinstance(action, argparse._SubParsersAction) and word in action.choices:
                parser = action.choices[word]
                positionals = _positionals(parser)
    if pending is None and last.startswith("-"):
        found = [option for action in parser._actions for option in action.option_strings]
        return sorted(option for option in found if option.startswith(last) and option.startswith("--"))
    wanted = ([pending] if pending is not None else positionals)[:1]
    return [value for action in wanted for value in _values(action, before) if value.startswith(last)]


def _positionals(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if not action.option_strings]


def _takes_value(parser: argparse.ArgumentParser, word: str) -> argparse.Action | None:
    """The option, if its value is the next word."""
    action = next((a for a in parser._actions if word in a.option_strings), None)
    return action if action is not None and action.nargs != 0 else None


def _values(action: argparse.Action, before: list[str]) -> list[str]:
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    if action.dest in ("job", "job_name"):
        return _job_names(before)
    return []


def _job_names(before: list[str]) -> list[str]:
    """Names of the jobs in the namespace that the line names; none when the cluster does not answer."""
    given = {
        option: before[index + 1]
        for index, option in enumerate(before[:-1])
        if option in ("-n", "--namespace", "--context", "--kubeconfig")
    }
    namespace = given.get("-n") or given.get("--namespace")
    try:
        jobs = connect(given.get("--kubeconfig"), given.get("--context"), namespace).jobs()
    except ClusterError:
        return []  # a shell has no place for an error here
    return [str(job["metadata"]["name"]) for job in jobs]
