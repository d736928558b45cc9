"""Completion of commands, options and operations in a shell; a script on standard output.

eval "$(ejk completion bash)"      in ~/.bashrc
eval "$(ejk completion zsh)"       in ~/.zshrc, after compinit
source (ejk completion fish | psub)   in config.fish
"""

from __future__ import annotations

import argparse

from ejkernel.modules.cli.output import Output, print_line

SHELLS = ("bash", "zsh", "fish")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS)


def run_command(args: argparse.Namespace, out: Output) -> int:
    script = fish() if args.shell == "fish" else bash(zsh=args.shell == "zsh")
    out.data({"script": script})
    if not out.json:
        print_line(script)  # a terminal's width breaks none of its lines
    return 0


def words() -> dict[str, list[str]]:
    """Returns the words that may follow each command: options, actions and operations."""
    from ejkernel.modules._table import OPERATIONS
    from ejkernel.modules.cli.app import build_parser

    following_words = {}
    (commands,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    for name, sub in commands.choices.items():
        following: list[str] = []
        for action in sub._actions:
            following += [option for option in action.option_strings if option.startswith("--")]
            following += map(str, action.choices or ())
            following += OPERATIONS if action.metavar == "OP" else ()
        following_words[name] = following
    return following_words


def bash(*, zsh: bool = False) -> str:
    """The script for bash; with ``zsh`` also for zsh."""
    commands = words()
    cases = "\n".join(f'    {name}) words="{" ".join(w)}" ;;' for name, w in commands.items())
    start = "autoload -U +X bashcompinit && bashcompinit\n" if zsh else ""
    return f"""{start}_ejk() {{
  local words
  case "${{COMP_WORDS[1]}}" in
{cases}
    *) words="{" ".join(commands)}" ;;
  esac
  [ "$COMP_CWORD" -eq 1 ] && words="{" ".join(commands)}"
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _ejk ejk"""


def fish() -> str:
    """The script for fish."""
    commands = words()
    first = f"complete -c ejk -n __fish_use_subcommand -a '{' '.join(commands)}'"
    others = (f"complete -c ejk -n '__fish_seen_subcommand_from {name}' -a '{' '.join(w)}'"
            for name, w in commands.items())  # fmt: skip
    return "\n".join((first, *others))
