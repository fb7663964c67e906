"""The command line.

Exit status: 0, the command succeeded. 1, a result was wrong, or the doctor found something missing. 2, the user made a mistake:
standard error has one line that begins with "weft: error:". 3, a rank failed while it ran. 130, interrupted. 141, the reader of
the output closed it. 143, terminated (SIGTERM).

Commands import what they need when they run: --help, machines, schedules, and plan of a shipped model never load PyTorch, and
the doctor needs nothing but typer and rich.
"""

from __future__ import annotations

import errno
import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from weft.cli import listings, machine, plan, run, simulate
from weft.core import __version__
from weft.core.errors import WeftError


class _Commands(TyperGroup):
    """The commands of weft. `weft simulate STUDY` is the command of an installed study."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if name == "simulate" and rest and (study := simulate.installed_studies().get(rest[0])):
            command = typer.main.get_command(study.load())
        return name, command, rest


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Hides communication behind computation on several GPUs, finer than the shard.",
    epilog="Start with: weft run llama3-8b. It needs no GPU.",
)
app.command("run")(run.command)
app.command("plan")(plan.command)
app.command("simulate")(simulate.command)
app.command("schedules")(listings.schedules)
app.command("machines")(listings.machines)
app.command("calibrate")(machine.calibrate)
app.command("doctor")(machine.doctor)

UsageError: type[typer.BadParameter] = typer.BadParameter.__bases__[0]
"""The error that typer raises for any misuse of options. It has no public name that all versions of typer share."""


class Terminated(BaseException):
    """The process received SIGTERM."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line with `arguments` (default: the process's), and return the exit status."""
    _open_outputs()
    try:
        with _ended_by_sigterm(), _collected_rarely():
            return _run(arguments)
    except Terminated:
        return _fail("terminated", 143)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the command as Ctrl-C does, so that ranks end and temporary folders are removed.

    Only the first SIGTERM counts, so that the cleanup is not interrupted. This does nothing if the parent process ignores
    SIGTERM, or outside the main thread, because only the main thread may set handlers."""
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before is not signal.SIG_DFL:
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _collected_rarely() -> Iterator[None]:
    """Let the garbage collector run less often. Imports and simulations make many objects that stay: looking through all of
    them again and again takes a quarter of the time of weft simulate ficco, and a tenth of that of weft plan config.json."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        status = app(args=arguments, prog_name="weft", standalone_mode=False) or 0
        sys.stdout.flush()
        return status
    except UsageError as error:
        command = error.ctx.command_path if error.ctx else "weft"
        return _fail(f"{error.format_message()} (see {command} --help)", 2)
    except WeftError as error:  # comes first, because a mismatch of ranks is also a ValueError
        return _fail(str(error), 3)
    except ValueError as error:
        return _fail(" ".join(str(error).split()), 2)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", 130)
    except (BrokenPipeError, SystemExit):
        # typer and rich raise SystemExit for a broken pipe.
        _write_no_more()
        return 141
    except OSError as error:
        _write_no_more()
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
            return _fail(str(error), 2)
        return _fail(f"cannot write {error.filename or 'the output'}: {error.strerror or error}", 2)


def _open_outputs() -> None:
    """Let standard output and error take any text: they may be closed, or their encoding may lack letters of a name."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - the process uses it until it ends
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _write_no_more() -> None:
    """Discard what is still buffered, because writing it when the process ends would fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(text: str, status: int) -> int:
    print(f"weft: error: {text}", file=sys.stderr)
    return status


def _print_version(asked: bool) -> None:
    if asked:
        print(f"weft {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
