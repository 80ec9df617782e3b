"""Hostile programs, and the ways in which they may end."""

from __future__ import annotations

HOSTILE: dict[str, tuple[str, set[str]]] = {
    "loops": ("while True: pass", {"time"}),
    "sleeps": ("import time; time.sleep(1000)", {"time"}),
    "ignores signals": (
        "import signal, time\n"
        "for s in range(1, 65):\n"
        "    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "while True: time.sleep(1)",
        {"time"},
    ),
    "multiplies": ("import os\nwhile True: os.fork()", {"processes", "time", "exit"}),
    "eats memory": ("x = []\nwhile True: x.append(bytearray(1 << 24))", {"exit", "memory", "time"}),
    "eats memory in many": (
        "import os, time\nfor _ in range(12):\n    if os.fork() == 0: x = bytearray(60 << 20); time.sleep(100)\n"
        "time.sleep(100)",
        {"memory", "time"},  # on a busy machine, the time limit comes first
    ),
    "floods its output": ("while True: print('x' * 10000)", {"output"}),
    "floods its errors": ("import sys\nwhile True: sys.stderr.write('x' * 10000)", {"output"}),
    "fills the disk": ("f = open('big', 'wb')\nwhile True: f.write(b'x' * (1 << 20)); f.flush()", {"exit"}),
    "leaves at once": ("import os; os._exit(0)", {"exit"}),
    "kills its group": ("import os, signal; os.killpg(0, signal.SIGKILL)", {"exit"}),
    "kills its parent": (
        "import os, signal, time; os.kill(os.getppid(), signal.SIGKILL); time.sleep(9)",
        {"time", "exit"},
    ),
    "kills everybody": ("import os, signal, time; os.kill(-1, signal.SIGTERM); time.sleep(9)", {"time", "exit"}),
    "leaves a daemon": (
        "import os, sys, time\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid()\n"
        "if os.fork(): os._exit(0)\n"
        "os.closerange(0, 100)\n"
        "time.sleep(1000)",
        {"exit"},
    ),
    "leaves a program": ("import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)", {"exit"}),
    "closes everything": ("import os; os.closerange(0, 1000)", {"exit"}),
    "overflows the stack": (
        "import sys; sys.setrecursionlimit(10**9)\ndef f(): return [f()]\nf()",
        {"exit", "memory", "time"},
    ),
    "opens too many files": ("fs = [open('/dev/null') for _ in range(10000)]", {"exit"}),
    "starts too many threads": (
        "import threading, time\nfor _ in range(10000): threading.Thread(target=time.sleep, args=(99,)).start()",
        {"exit", "time", "memory", "processes"},
    ),
    "crashes": ("import ctypes; ctypes.string_at(0)", {"exit"}),
}
"""By name: the source, and the allowed ends of a run. Except for those in `HARMLESS`, none may succeed."""

HARMLESS = {"leaves at once", "leaves a daemon", "leaves a program", "closes everything"}
"""Programs whose exit status may be 0."""
