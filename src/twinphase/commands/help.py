"""The command line's help: groups of commands and options, examples, and hints.

It does not use rich, whose import takes as long as the prefill of a short prompt.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from twinphase import __version__
from twinphase.errors import InvalidRequestError, TwinphaseError

ASK = "Ask"
SERVE = "Serve"
MODELS = "Models"
MEASURE = "Measure and explain"
CLUSTER = "Cluster and devices"
OTHER = "Help"
GROUPS = (ASK, SERVE, MODELS, MEASURE, CLUSTER, OTHER)
# Names that other tools use for commands are accepted too.
ALIASES = {"ls": "list"}
# Hints for words that are commands in other tools.
HINTS = {
    "chat": "`twinphase run` without a prompt starts a chat.",
    **dict.fromkeys(("ask", "generate", "prompt"), "Use `twinphase run MODEL PROMPT`."),
    **dict.fromkeys(("download", "fetch", "get", "install"), "Use `twinphase pull MODEL`."),
    **dict.fromkeys(("remove", "delete", "rmi", "uninstall"), "Use `twinphase rm MODEL`."),
    **dict.fromkeys(("info", "inspect"), "Use `twinphase show MODEL`."),
    **dict.fromkeys(("models", "images"), "Use `twinphase list`."),
    **dict.fromkeys(("start", "server", "up"), "Use `twinphase serve MODEL`."),
    **dict.fromkeys(("kill", "down", "shutdown"), "Use `twinphase stop`."),
    **dict.fromkeys(("benchmark", "perf"), "Use `twinphase bench MODEL`."),
    "logs": "A server writes its log to the terminal where it was started.",
}
SHELLS = ("bash", "zsh", "fish")
# Typer's own script would fail at names with a colon, where bash by default ends a word.
BASH_COMPLETION = r"""
_twinphase_completion() {
    local line="${COMP_LINE:0:COMP_POINT}" word prefix=""
    local -a words
    read -ra words <<<"$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    word="${words[-1]}"
    [[ $COMP_WORDBREAKS == *:* ]] && prefix="${word%"${word##*:}"}"
    mapfile -t COMPREPLY < <(COMP_WORDS="$line" COMP_CWORD=$((${#words[@]} - 1)) \
        _TWINPHASE_COMPLETE=complete_bash "$1")
    COMPREPLY=("${COMPREPLY[@]#"$prefix"}")
}

complete -o default -F _twinphase_completion twinphase
"""


class Command(TyperCommand):
    """A command whose options are shown in groups, followed by its examples."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
                group = getattr(parameter, "rich_help_panel", None) or usual
                groups.setdefault(group, []).append(record)
        _write_groups(formatter, groups)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if self.epilog:
            with formatter.section("Examples"):
                for line in self.epilog.strip().splitlines():
                    formatter.write(f"  {line}\n")


class Commands(TyperGroup):
    """The commands in groups, with other tools' names as aliases."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, ALIASES.get(cmd_name, cmd_name))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in HINTS and args[0] not in self.commands:
            ctx.fail(f"There is no command {args[0]!r}. {HINTS[args[0]]}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        for name, command in self.commands.items():
            if not command.hidden:
                group = getattr(command, "rich_help_panel", None)
                groups[group if group in groups else OTHER].append(
                    (name, command.short_help or command.help or "")
                )
        _write_groups(formatter, groups)


def _write_groups(formatter: Any, groups: dict[str, list[tuple[str, str]]]) -> None:
    for group, rows in groups.items():
        if rows:
            with formatter.section(group):
                formatter.write_dl(rows)


def usage_error(error: Any) -> TwinphaseError:
    """The error to show for arguments that typer refused."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "twinphase"
    help_ = f"See `{command} --help`."
    if near := getattr(error, "possibilities", None):
        help_ = f"Did you mean {' or '.join(sorted(near))}? {help_}"
        cause = error.message
    else:
        cause = error.format_message()
    cause = " ".join(cause.split())
    return TwinphaseError(cause if cause.endswith((".", "?", "!")) else f"{cause}.", help_)


def help_(
    context: typer.Context,
    command: str = typer.Argument(None, help="The command to explain."),
) -> None:
    """Show the help of a command, or of all commands."""
    group: Any = context.parent
    if command is None:
        print(group.get_help())
        return
    name, found, _ = group.command.resolve_command(group, [command])
    with found.make_context(name, [], parent=group, resilient_parsing=True) as inner:
        print(found.get_help(inner))


def version() -> None:
    """Print the version."""
    print(f"twinphase {__version__}")


def completion(
    shell: str = typer.Argument(..., help="bash, zsh or fish."),
) -> None:
    """Print a shell's completion script.

    For bash, add `eval "$(twinphase completion bash)"` to ~/.bashrc; for zsh, the same with zsh to
    ~/.zshrc; for fish, write the output to ~/.config/fish/completions/twinphase.fish.
    """
    if shell not in SHELLS:
        raise InvalidRequestError(
            f"There is no completion for {shell!r}.", f"Use one of: {', '.join(SHELLS)}."
        )
    if shell == "bash":
        print(BASH_COMPLETION.strip())
        return
    from typer import completion as scripts

    names = {"prog_name": "twinphase", "complete_var": "_TWINPHASE_COMPLETE", "shell": shell}
    print(vars(scripts)["get_completion_script"](**names))
