"""How a save publishes: the decision, apart from any filesystem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from shardferry.errors import CheckpointExistsError, InvalidInputError, StorageError
from shardferry.plan.publish import check_existing, choose_protocol

if TYPE_CHECKING:
    from shardferry.format.oldfiles import Content


@dataclass
class Target:
    content: Content = "checkpoint"
    movable: bool = True
    path: str = "/out"
    checkpoint_files: tuple[str, ...] = ("model.safetensors",)


@dataclass
class Able:
    exchange: bool = True
    hard_links: bool = True
    rename_directories: bool = True
    rename_files: bool = True
    write_anywhere: bool = True


NOTHING = Able(exchange=False, hard_links=False, rename_directories=False, rename_files=False)


@pytest.mark.parametrize("content", ["absent", "empty"])
def test_where_nothing_is_the_staged_directory_takes_the_name(content: Content) -> None:
    assert choose_protocol(Target(content), Able(exchange=False, hard_links=False)) == "rename"


@pytest.mark.parametrize("content", ["foreign", "checkpoint"])
def test_what_is_there_is_exchanged_where_its_files_can_be_linked(content: Content) -> None:
    assert choose_protocol(Target(content), Able()) == "exchange"


@pytest.mark.parametrize("able", [Able(exchange=False), Able(hard_links=False)])
def test_without_exchange_or_links_the_directories_are_swapped(able: Able) -> None:
    assert choose_protocol(Target(), able) == "swap"


@pytest.mark.parametrize("content", ["empty", "foreign", "checkpoint"])
def test_a_mount_point_takes_the_file_protocol(content: Content) -> None:
    assert choose_protocol(Target(content, movable=False), Able()) == "files"


@pytest.mark.parametrize("content", ["absent", "empty", "foreign", "checkpoint"])
def test_where_directories_cannot_be_renamed_files_are(content: Content) -> None:
    assert choose_protocol(Target(content), Able(rename_directories=False)) == "files"


@pytest.mark.parametrize("content", ["absent", "empty", "foreign"])
def test_where_nothing_can_be_renamed_a_fresh_save_writes_in_place(content: Content) -> None:
    assert choose_protocol(Target(content), NOTHING) == "in place"


def test_where_nothing_can_be_renamed_replacing_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="/out holds a checkpoint, and nothing can be renamed"):
        choose_protocol(Target(), NOTHING)


def test_where_files_can_only_be_appended_to_saving_is_refused() -> None:
    with pytest.raises(StorageError, match="only be appended to"):
        choose_protocol(Target("absent"), Able(write_anywhere=False))


def test_refuse_names_what_is_there() -> None:
    with pytest.raises(CheckpointExistsError, match=r"/out already holds a checkpoint \(model.safetensors\)"):
        check_existing(Target(), "refuse")


@pytest.mark.parametrize("content", ["absent", "empty", "foreign"])
def test_refuse_is_not_about_other_content(content: Content) -> None:
    check_existing(Target(content), "refuse")


def test_replace_accepts_a_checkpoint() -> None:
    check_existing(Target(), "replace")
