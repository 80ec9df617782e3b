from gym_kit.processes import run_python


def test_without_file_descriptors_it_raises_at_once() -> None:
    code = """
import os, resource, threading
from skyrl_gym.adapters.background_loop import BackgroundLoop
first_free = os.dup(0)
os.close(first_free)
resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, first_free))
try:
    BackgroundLoop("test")
except OSError as error:
    print(error, threading.active_count())
"""
    assert run_python(code).stdout == "[Errno 24] Too many open files 1\n"
