"""What a save tells objects of a store apart by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardferry.format.oldfiles import Naming
from shardferry.storage.objecttarget import ObjectTarget

if TYPE_CHECKING:
    from tests.tools.azure import Container


def test_an_old_object_of_azure_is_not_taken_for_a_completed_upload(container: Container) -> None:
    """Its ETag is listed without quotes, and told with them by all other answers."""
    name = "model-00001-of-00002.safetensors"
    container.put(f"ckpt/{name}", b"old")
    target = ObjectTarget(f"az://{container.name}/ckpt", Naming(), 60.0)
    before = target.look().etags[name]

    assert not target.tag_if_completed(name, 3, before)
    container.put(f"ckpt/{name}", b"new")
    assert target.tag_if_completed(name, 3, before)
