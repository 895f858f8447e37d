"""Trains targets and heads. Not installed: run one by `python -m train.<name> [--config FILE] ...`."""

import signal
import sys

# As in infer/__init__.py: until `infer.common.programs.run`, Ctrl-C simply ends the process.
if sys.argv[0] == "-m" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
