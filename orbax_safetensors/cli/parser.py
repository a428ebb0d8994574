"""argparse's parser, which also says what a misspelt command or option may have been, and what a shell completes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

from orbax_safetensors.cli.arguments import UsageError

SHELLS = ("bash", "zsh", "tcsh")
# What the values of such arguments are: paths.
_PATHS = {"PATH", "SOURCE", "DESTINATION", "MODEL", "FILE", "A", "B"}


class Parser(argparse.ArgumentParser):
    """A parser that knows its arguments.

    Attributes:
      arguments: all of them, in their order.
      commands: the parser of each command, by name; none if it is that of a command.
    """

    def __init__(self, prog: str | None = None, **options: Any) -> None:
        self.arguments: list[argparse.Action] = []
        self.commands: dict[str, Parser] = {}
        layout = partial(argparse.RawDescriptionHelpFormatter, max_help_position=27)
        super().__init__(prog, **options | {"formatter_class": layout, "allow_abbrev": False})

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Add an argument, as argparse does."""
        self.arguments.append(super().add_argument(*names, **options))
        return self.arguments[-1]

    def check_spelling(self, words: Sequence[str]) -> None:
        """Exit as for any mistake, with the most similar name, if `words` have a command or option that is none."""
        if not words or words[0].startswith("-"):
            return
        command = words[0]
        if (parser := self.commands.get(command)) is None:
            from orbax_safetensors.format.names import hint  # imports NumPy, which help need not wait for

            self.error(f"there is no command {command!r}{hint(command, self.commands)}")
        options = [option.lstrip("-") for argument in parser.arguments for option in argument.option_strings]
        for word in words[: words.index("--") if "--" in words else None]:
            option = word.partition("=")[0].removeprefix("--")
            if word.startswith("--") and " " not in option and option not in options:
                from orbax_safetensors.format.names import nearest

                similar = nearest(option, options)
                parser.error(f"there is no option --{option}" + (f" (nearest: --{similar})" if similar else ""))

    def completions(self, shell: str) -> str:
        """Return the script for a shell that completes commands, options, names of families, and paths.

        Raises `UsageError` without `shtab`, which makes it.
        """
        try:
            import shtab
        except ImportError:
            raise UsageError("--completion needs shtab: pip install shtab") from None
        from orbax_safetensors.mapping import registry

        names = [family.name for family in registry.known()]
        for parser in self.commands.values():
            for argument in parser.arguments:
                if argument.dest == "family":
                    argument.choices = sorted({*names, *(name.partition(".")[0] for name in names)})
                elif argument.metavar in _PATHS:
                    vars(argument)["complete"] = shtab.FILE
        return str(shtab.complete(self, shell))


class Completion(argparse.Action):
    """Prints the script that completes command lines in a shell, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, value: Any, option: str | None = None) -> None:
        """Print the script for the shell `value`."""
        assert isinstance(parser, Parser)  # the only kind that has this action
        try:
            print(parser.completions(value))
        except UsageError as error:
            parser.error(str(error))
        parser.exit()
