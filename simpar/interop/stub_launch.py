"""What a launch script would have started: it runs on this machine with stand-ins for launchers, interpreters and tools.

Off unless asked for (`simpar import --run`). The script sees an empty environment and a PATH of stand-ins: launchers and
interpreters write down their words and start nothing, tools that only read or print (sed, date, seq) are the machine's, every other
command does nothing. What bash itself does is done: redirections, and commands named by their whole path.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from simpar.errors import InputError, Violation

LAUNCHERS: Final = (
    "torchrun", "python", "python3", "srun", "mpirun", "mpiexec", "deepspeed", "accelerate", "torchx", "sbatch", "ray", "nemo",
    "uv", "numactl", "nohup", "timeout", "nsys", "ncu", "singularity", "apptainer", "docker", "enroot", "pdsh", "ssh", "nice",
    "stdbuf", "taskset", "horovodrun", "jsrun", "aprun", "ibrun", "flux", "primus-cli", "axolotl", "llamafactory-cli", "swift",
    "tune", "trl",
)  # fmt: skip
_TOOLS: Final = (
    "cat", "echo", "printf", "dirname", "basename", "date", "hostname", "head", "tail", "grep", "egrep", "sed", "awk", "cut", "tr",
    "wc", "expr", "seq", "sort", "uniq", "realpath", "readlink", "bc", "true", "false", "test", "[", "uname", "nproc", "paste",
    "rev",    "tac", "ls", "stat", "getopt", "jq", "xargs", "env", "bash", "sh",
)  # fmt: skip
_SECONDS: Final = 30
_MOST_BYTES: Final = 2**24
_MOST_SHOWN: Final = 300
_END: Final = b"\0\n\0"


@dataclass(frozen=True, slots=True)
class Started:
    """What a script would have started.

    Attributes:
        commands: words of each, in order.
        missing: commands that have no stand-in and did nothing.
        last: the last line that it printed.
    """

    commands: tuple[tuple[str, ...], ...]
    missing: tuple[str, ...]
    last: str = ""

    def training(self) -> list[str]:
        """The command with the most flags; its launchers' words before it are kept."""
        best = max(self.commands, key=lambda words: sum(w.startswith("--") for w in words), default=())
        found: list[str] = []
        for word in best:  # bash -c "torchrun ... --flags", as srun takes it
            found += shlex.split(word) if word.count(" --") > 1 else [word]
        return found


def run_script(path: Path, arguments: Sequence[str] = (), variables: Mapping[str, str] | None = None) -> Started:
    """The commands that the script at `path` would have started.

    Args:
        arguments: of the script.
        variables: the only ones that it sees.

    Raises:
        InputError: no such script, no bash, or it neither ends nor starts anything within half a minute.
    """
    bash = shutil.which("bash")
    if bash is None:
        raise InputError(f"{path}: bash is needed to run it, and this machine has none")
    if not path.is_file():
        raise InputError(f"{path}: no such file; expected a launch script")
    with tempfile.TemporaryDirectory(prefix="simpar-run-") as folder:
        record = Path(folder) / "record"
        record.touch()
        tools = _stand_ins(Path(folder) / "bin", record, bash)
        missing = Path(folder) / "missing"
        prelude = Path(folder) / "prelude"
        prelude.write_text(f'command_not_found_handle() {{ printf "%s\\n" "$1" >> {shlex.quote(str(missing))}; return 0; }}\n')
        environment = {"PATH": str(tools), "HOME": folder, "BASH_ENV": str(prelude), **(variables or {})}
        printed = Path(folder) / "printed"
        _wait([bash, str(path), *arguments], environment, printed, path)
        lines = [line for line in printed.read_bytes()[-_MOST_SHOWN:].decode("utf-8", "replace").splitlines() if line.strip()]
        said = record.read_bytes()[:_MOST_BYTES]
        skipped = missing.read_text(errors="replace").splitlines() if missing.exists() else []
    entries = [e for e in said.split(_END) if e]
    commands = tuple(tuple(w.decode("utf-8", "replace") for w in e.split(b"\0")) for e in entries)
    return Started(commands, tuple(dict.fromkeys(skipped)), lines[-1].strip() if lines else "")


def _wait(command: list[str], environment: dict[str, str], printed: Path, path: Path) -> None:
    """Run it in a process group of its own, which ends with it; what it prints goes to the file `printed`."""
    with printed.open("wb") as out:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        process.wait(_SECONDS)
    except subprocess.TimeoutExpired:
        raise InputError(
            f"{path}: still running after {_SECONDS} s without its launchers; expected a script that starts training"
        ) from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _stand_ins(folder: Path, record: Path, bash: str) -> Path:
    """A folder with the stand-ins, and links to the tools."""
    folder.mkdir()
    inner = "|".join((*LAUNCHERS, "bash", "sh", "env", "python3.*"))
    text = f"""#!{bash}
printf '%s\\0' "${{0##*/}}" "$@" >> {shlex.quote(str(record))}
printf '\\n\\0' >> {shlex.quote(str(record))}
# A launcher starts what it is given: the first word that is a command of its own.
while [ $# -gt 0 ]; do
    case "${{1##*/}}" in ({inner}) command -v "${{1##*/}}" > /dev/null && exec "${{1##*/}}" "${{@:2}}" ;; esac
    case "$1" in (*.sh) [ -f "$1" ] && exec {shlex.quote(bash)} "$@" ;; esac
    shift
done
# A job without a script of its own comes on the input: sbatch <<EOF
[ "${{0##*/}}" = sbatch ] && exec {shlex.quote(bash)}
exit 0
"""
    for name in LAUNCHERS:
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    for name in ("sleep", "clear"):
        (folder / name).write_text("#!/bin/sh\nexit 0\n")
        (folder / name).chmod(0o755)
    for name in _TOOLS:
        if (real := shutil.which(name)) is not None and not (folder / name).exists():
            (folder / name).symlink_to(real)
    return folder


def flags_words(started: Started, path: Path) -> list[str]:
    """The words of the training command.

    Raises:
        InputError: the script starts none.
    """
    words = started.training()
    if not any(w.startswith("--") for w in words):
        known = ", ".join(LAUNCHERS[:8])
        rule = f"starts none of {known}, ... with flags"
        skipped = f"; commands that did nothing: {', '.join(started.missing[:8])}" if started.missing else ""
        skipped += f"; the last that it printed: {started.last}" if started.last else ""
        raise InputError(
            [Violation("--run", str(path), rule, f"a script that starts training{skipped}; --var NAME=VALUE sets what it reads")]
        )
    return words
