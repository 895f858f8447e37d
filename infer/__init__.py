"""Holds the programs that run models: `python -m infer.<name> [--config FILE] ...`. Not installed."""

import signal
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
"""The checkout whose programs these are."""

# Importing JAX takes seconds, in which some C code drops a KeyboardInterrupt: until `infer.common.programs.run`, Ctrl-C
# simply ends the process. Only under `python -m infer.name`, and not where a shell has the signal ignored.
if sys.argv[0] == "-m" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
