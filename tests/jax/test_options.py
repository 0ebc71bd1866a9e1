"""What calls cannot be given is refused by its name, with what it may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import pytest

import shardferry.jax as sf
from shardferry.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ALWAYS: list[tuple[str, object, str]] = [
    ("path", None, "path is None; it must be a path or a URL"),
    ("names", 5, "names is 5; it must be a mapping or a function of key paths, or None"),
    ("conversions", "auto", "conversions is 'auto'; it must be a sequence of rules of shardferry.conversions$"),
    ("timeout_s", "x", "timeout_s is 'x'; it must be a positive number of seconds"),
    ("on_progress", 5, "on_progress is 5; it must be a function, or None"),
]
TO_LOAD: list[tuple[str, object, str]] = [
    ("strict", None, "strict is None; it must be False or True"),
    ("cast", "ints", "cast is 'ints'; it must be False, True or 'integers'"),
    ("node_of_rank", 0, "node_of_rank is 0; it must be a sequence"),
    ("exchange_bytes", "1GB", "exchange_bytes is '1GB'; it must be a number of bytes, at least 1048576"),
    ("on_report", [], "on_report is .*; it must be a function, or None"),
]
TO_SAVE: list[tuple[str, object, str]] = [
    ("dtype", "bfloat", "dtype is 'bfloat'; it must be a dtype, or None"),
    ("budget_bytes", "256MiB", "budget_bytes is '256MiB'; it must be a number of bytes, at least 8388608"),
    ("metadata", None, "metadata is None; it must be a mapping of text to text"),
    ("on_existing", "keep", "on_existing is 'keep'; it must be 'refuse' or 'replace'"),
]
TREE = {"w": jnp.ones(3)}


def refuse(call: Callable[..., object], words: str, given: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError, match=words):
        call(**given)


@pytest.mark.parametrize(("name", "value", "words"), [*ALWAYS, *TO_LOAD])
def test_a_load_names_what_it_cannot_be_given(tmp_path: Path, name: str, value: object, words: str) -> None:
    refuse(sf.load, words, {"path": tmp_path, "target": TREE, name: value})
    refuse(sf.plan_load, words, {"path": tmp_path, "target": TREE, name: value})


@pytest.mark.parametrize(("name", "value", "words"), [*ALWAYS, *TO_SAVE])
def test_a_save_names_what_it_cannot_be_given(tmp_path: Path, name: str, value: object, words: str) -> None:
    refuse(sf.save, words, {"path": tmp_path / "out", "tree": TREE, name: value})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "value", "words"), [*ALWAYS, ("when_short", 5, "when_short is 5; it must be 'shrink'")]
)
def test_a_warm_up_names_what_it_cannot_be_given(tmp_path: Path, name: str, value: object, words: str) -> None:
    refuse(sf.warm, words, {"path": tmp_path, "target": TREE, name: value})


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, jnp.dtype("float16"), jax.numpy.float32, "float32"])
def test_a_dtype_may_be_given_in_any_way(tmp_path: Path, dtype: object) -> None:
    sf.save(tmp_path / "out", TREE, dtype=dtype)  # type: ignore[arg-type]  # a name too
