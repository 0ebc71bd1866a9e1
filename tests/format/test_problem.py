"""What problems mean for somebody who opens a checkpoint."""

from __future__ import annotations

from shardferry.errors import CheckpointError, CheckpointNotFoundError
from shardferry.format.problem import MAX_LINES, Findings, Problem, refusal, remarks

MISSING, FATAL, STRICT, CHECK, ODD = (
    Problem(f"{severity}!", "f", severity) for severity in ("missing", "fatal", "strict", "verify", "warning")
)


def test_only_absent_files_make_a_not_found_error() -> None:
    assert type(refusal([MISSING, ODD], "here", strict=True)) is CheckpointNotFoundError
    assert type(refusal([MISSING, FATAL], "here", strict=True)) is CheckpointError


def test_without_strictness_only_what_cannot_be_read_refuses() -> None:
    assert refusal([STRICT, CHECK, ODD], "here", strict=True) is not None
    assert refusal([STRICT, CHECK, ODD], "here", strict=False) is None


def test_what_does_not_refuse_is_remarked_on() -> None:
    assert remarks([CHECK, ODD, STRICT]) == ("verify!", "warning!", "strict!")


def test_an_error_lists_everything_up_to_a_limit() -> None:
    assert str(refusal([FATAL, MISSING], "here", strict=True)) == "here cannot be opened:\n  fatal!\n  missing!"
    many = str(refusal([FATAL] * (MAX_LINES + 7), "here", strict=True))
    assert "and 7 more; `shardferry verify`" in many


def test_a_choice_that_only_strictness_forbids_is_stated() -> None:
    findings = Findings("a.safetensors")
    findings.strict("odd", "it is ignored")
    assert findings.problems[0].message == "a.safetensors: odd; with strict=False (--no-strict) it is ignored"
