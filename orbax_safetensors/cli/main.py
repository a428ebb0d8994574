"""The `orbax-safetensors` command: which command runs, and exit statuses."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module

from orbax_safetensors import RuleError, SafetensorsError, __version__
from orbax_safetensors.cli.arguments import UsageError
from orbax_safetensors.cli.commands import COMMANDS
from orbax_safetensors.cli.messages import Messages
from orbax_safetensors.cli.parser import SHELLS, Completion, Parser
from orbax_safetensors.errors import UnusedArgumentError, printable

# What a shell reports for a program that was ended by the signal.
_INTERRUPTED = 130
_BROKEN_PIPE = 141

# argparse leaves these texts as they are.
_DESCRIPTION = """\
Inspects .safetensors checkpoints, plans what restoring them as sharded JAX
arrays costs, links them to Orbax, converts them to Orbax and back, and
publishes what changed between two of them.

A PATH is a .safetensors file, a directory with such files, or a checkpoint of
Orbax; on disk, at a URL (gs://, s3://, az://, https://), or on the Hugging
Face Hub (hf://owner/name[@revision][/path]). Tables are drawn on a terminal;
in a pipe they are tab-separated lines with exact numbers.
"""

_EXIT = """\
exit status:
  0  all is well
  1  something is wrong with the checkpoint, or could not be read or written
  2  something is wrong with the command line
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; mistakes in `argv` raise `SystemExit(2)`, as argparse does."""
    words = sys.argv[1:] if argv is None else argv
    root = parser()
    root.check_spelling(words)
    args = root.parse_args(words)
    command: argparse.ArgumentParser = vars(args).pop("parser")
    for stream in (sys.stdout, sys.stderr):
        # Names of files and tensors may be beyond what the locale can encode.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        with Messages(partial(print, file=sys.stderr)):
            # Not for help, which answers without JAX.
            from orbax_safetensors.cli.tables import Printer

            run = import_module(f"orbax_safetensors.cli.{args.command}").run
            status: int = run(args, Printer(sys.stdout))
        sys.stdout.flush()
        return status
    except UsageError as error:
        command.error(printable(str(error)))
    except (RuleError, UnusedArgumentError) as error:  # which begin with the name of the argument
        argument, space, reason = str(error).partition(" ")
        command.error(printable(f"--{argument.replace('_', '-')}{space}{reason}"))
    except BrokenPipeError:
        # The reader has all it wanted. What is still buffered must not fail again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (SafetensorsError, OSError) as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 1


def parser() -> Parser:
    """Return the parser of the whole command line."""
    root = Parser("orbax-safetensors", description=_DESCRIPTION, epilog=_EXIT)
    root.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    root.add_argument(
        "--completion",
        action=Completion,
        choices=SHELLS,
        metavar="SHELL",
        help="print what makes bash, zsh or tcsh complete commands and names",
    )
    subparsers = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, add_command in COMMANDS.items():
        root.commands[name] = add_command(subparsers.add_parser)
        root.commands[name].set_defaults(parser=root.commands[name])
    return root


if __name__ == "__main__":
    sys.exit(main())
