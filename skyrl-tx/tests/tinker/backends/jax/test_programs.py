import os
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive

from tx.tinker.backends.jax.programs import evict_programs, programs


def test_unused_programs_are_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not matter if they cannot be deleted."""
    for number in range(4):
        path = tmp_path / f"{number}-cache"
        path.write_bytes(bytes(10))
        os.utime(path, (100 - number, 0))
    (tmp_path / "other").write_bytes(bytes(100))
    evict_programs(tmp_path, max_bytes=25)
    assert {path.name for path in tmp_path.iterdir()} == {"0-cache", "1-cache", "other"}
    evict_programs(tmp_path / "not there yet")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    evict_programs(tmp_path, max_bytes=1)
    assert f"failed to delete unused programs in {tmp_path}: [Errno 13] Permission denied" in caplog.text


def test_other_threads_see_that_a_program_is_compiled() -> None:
    seen: set[bool] = set()
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.001):
            seen.add(programs().is_compiling)

    def program(x: jax.Array) -> jax.Array:
        for number in range(40):
            x = jnp.sin(x * number) @ x
        return x

    programs()
    watcher = threading.Thread(target=watch)
    watcher.start()
    jax.jit(program)(jnp.eye(8)).block_until_ready()
    is_over.set()
    watcher.join()
    assert seen == {False, True}
    assert not programs().is_compiling


def test_a_program_that_cannot_be_lowered_or_compiled_is_not_compiling() -> None:
    primitive = Primitive("without_a_rule_for_any_platform")
    primitive.def_abstract_eval(lambda x: x)
    programs()
    with pytest.raises(NotImplementedError):
        jax.jit(primitive.bind)(jnp.ones(3))
    assert not programs().is_compiling

    with pytest.raises(Exception, match="no_such_option"):
        jax.jit(jnp.sin, compiler_options={"no_such_option": 1})(jnp.ones(3))
    assert not programs().is_compiling
